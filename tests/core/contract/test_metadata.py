"""Step metadata: phases follow from lengths, views are consistent, slots point where the block table says."""

from __future__ import annotations

import dataclasses
from dataclasses import fields
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.contract.kernel import copy_elements
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.oracle.cases import parse_case
from headway.integrations.dense import single_tokens


def test_phase_follows_from_lengths() -> None:
    assert Phase.of(5, 0) is Phase.PREFILL
    assert Phase.of(1, 0) is Phase.PREFILL
    assert Phase.of(5, 3) is Phase.EXTEND
    assert Phase.of(1, 3) is Phase.DECODE
    assert Phase.of(4, 3, decode_query_len=4) is Phase.DECODE


def test_a_mixed_step_and_its_views() -> None:
    metadata = AttentionMetadata.build([3, 2, 1, 1], [0, 5, 8, 1], [[4], [2, 6], [1, 0, 3], [7]], block_size=4)
    assert (metadata.num_prefills, metadata.num_decodes, metadata.num_prefill_tokens, metadata.num_decode_tokens) == (2, 2, 5, 2)
    assert metadata.slot_mapping.tolist() == [16, 17, 18, 6 * 4 + 1, 6 * 4 + 2, 3 * 4 + 0, 7 * 4 + 1]
    assert (metadata.max_query_len, metadata.max_seq_len) == (3, 9)
    prefill, decode = metadata.prefill, metadata.decode
    assert prefill.phase is Phase.EXTEND
    assert decode.phase is Phase.DECODE
    assert prefill.query_start_loc.tolist() == [0, 3, 5]
    assert decode.query_start_loc.tolist() == [0, 1, 2]
    assert (prefill.kv_lens, decode.kv_lens) == ([3, 7], [9, 2])
    assert (prefill.max_query_len, decode.max_query_len, decode.max_seq_len) == (3, 1, 9)
    assert decode.block_table[0, :3].tolist() == [1, 0, 3]
    assert decode.slot_mapping.tolist() == metadata.slot_mapping.tolist()[5:]
    with pytest.raises(AssertionError, match="two phases"):
        _ = metadata.phase


def test_a_step_of_one_kind_is_its_own_view() -> None:
    metadata = AttentionMetadata.build([2, 3], [0, 0], [[0], [1]], block_size=4)
    assert metadata.prefill is metadata
    assert metadata.decode is None
    assert metadata.phase is Phase.PREFILL


def test_padding_rows_have_length_zero_and_no_slot() -> None:
    metadata = AttentionMetadata.build([1, 1, 1], [4, -1, -1], [[0, 2], [], []], block_size=4)
    assert metadata.seq_lens.tolist() == [5, 0, 0]
    assert metadata.context_lens.tolist() == [4, 0, 0]
    assert metadata.slot_mapping.tolist() == [8, -1, -1]
    assert metadata.num_decodes == 3
    verified = AttentionMetadata.build([4, 4], [3, -4], [[0, 2], []], block_size=4, num_draft_tokens=[3, 3])
    assert (verified.num_decodes, verified.seq_lens.tolist()) == (2, [7, 0])


@pytest.mark.parametrize(
    ("step", "words"),
    [
        # A negative context: the first queries would see no key.
        (([70], [-6], [[0, 1, 2, 3]], 16), "sequence 0: needs .* got query_len 70, context_len -6"),
        (([3, 1, 2], [0, 4, -1], [[0], [0, 1], [2]], 4), "sequence 2: needs .* got query_len 2, context_len -1"),
        (([0], [5], [[0, 1]], 4), "sequence 0: needs .* got query_len 0, context_len 5"),
        (([5], [4], [[0, 1]], 4), "sequence 0: needs 3 blocks of 4 for its 9 tokens, got 2"),
        (([5], [4], numpy.zeros((1, 2), dtype=numpy.int32), 4), "sequence 0: needs 3 blocks of 4 for its 9 tokens, got 2"),
        (([2, 1], [0, 4], [[1], [0, -1]], 4), "sequence 1: needs blocks from 0 on, got block -1"),
        (([2, 1], [0, 4], [[1], [0, 8]], 4, "cpu", 1, None, 8), "sequence 1: needs blocks from 0 to 7, got block 8"),
        (([2, 1], [0], [[1], [0, 8]], 4), "needs lists with one entry per sequence, got 2 query_lens, 1 context_lens"),
        (([2], [0], [[1], [0]], 4), "needs lists with one entry per sequence, got 1 query_lens, 1 context_lens, 2 block_tables"),
        (([2], [0], [[1]], 4, "cpu", 1, [0, 0]), "needs lists .* 2 num_draft_tokens"),
        # Padding is a decode: as a prompt, it would see its own keys.
        (([3, 4], [0, -4], [[1], []], 4), "sequence 1: needs padding of at most the longest decode .*, got query_len 4"),
        (([3, 4], [2, -4], [[1, 2], []], 4, "cpu", 1, [2, 2]), "sequence 1: needs padding .*, got query_len 4"),
        (([2], [0], [[1]], 0), "needs a block_size of at least 1, got 0"),
    ],
)
def test_a_sequence_that_no_step_can_have_is_refused_with_its_number(step: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        AttentionMetadata.build(*step)
    assert "\n" not in str(raised.value)


def test_decodes_before_prefills_are_refused() -> None:
    with pytest.raises(ConfigError, match="sequence 0: needs all sequences in DECODE last"):
        AttentionMetadata.build([1, 3], [4, 0], [[0, 1], [2]], block_size=4)


@settings(max_examples=100, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 3, 8]),
    verify=st.integers(1, 4),
)
def test_slots_are_where_the_block_table_puts_each_position(lens: list[tuple[int, int]], block_size: int, verify: int) -> None:
    lens = sorted(lens, key=lambda qc: Phase.of(*qc, verify) is Phase.DECODE)
    tables, used = [], 0
    for query, context in lens:
        count = -(-(query + context) // block_size)
        tables.append(list(range(used, used + count))[::-1])
        used += count
    queries, contexts = [q for q, _ in lens], [c for _, c in lens]
    metadata = AttentionMetadata.build(queries, contexts, tables, block_size, decode_query_len=verify)
    expected = [
        table[p // block_size] * block_size + p % block_size
        for (query, context), table in zip(lens, tables, strict=True)
        for p in range(context, context + query)
    ]
    assert metadata.slot_mapping.tolist() == expected
    parts = [view for view in (metadata.prefill, metadata.decode) if view]
    assert torch.cat([view.slot_mapping for view in parts]).tolist() == expected
    assert [q for view in parts for q in view.query_lens] == queries
    assert sum(view.num_tokens for view in parts) == metadata.num_tokens == len(expected)


def test_the_case_grammar() -> None:
    assert parse_case("8q1s1k") == [(1, 1024)] * 8
    assert parse_case("2q2k_q3s5") == [(2048, 2048), (2048, 2048), (3, 5)]
    assert parse_case("1q1s9_1q4") == [(4, 4), (1, 9)], "decodes come last"


def test_arrays_and_lists_lay_out_the_same_step() -> None:
    lens = [5, 9, 1, 3], [0, 7, 12, 4]
    blocks = [[3], [1, 4], [2, 6], [5]]
    drafts = [0, 0, 0, 2]
    table = numpy.zeros((4, 2), dtype=numpy.int32)
    for row, own in enumerate(blocks):
        table[row, : len(own)] = own
    from_lists = AttentionMetadata.build(*lens, blocks, 8, num_draft_tokens=drafts)
    arrays = (numpy.array(each, dtype=numpy.int32) for each in lens)
    from_arrays = AttentionMetadata.build(*arrays, table, 8, num_draft_tokens=numpy.array(drafts, dtype=numpy.int32))
    for each in fields(AttentionMetadata):
        one, other = getattr(from_lists, each.name), getattr(from_arrays, each.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, each.name
    assert (from_lists.num_prefills, from_lists.num_decodes) == (2, 2)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("kv_lens", [[2], [17, 5, 33], [16] * 8])
def test_they_are_laid_out_as_any_step(kv_lens: list[int], block_size: int) -> None:
    columns = [-(-kv_len // block_size) for kv_len in kv_lens]
    tables = numpy.random.default_rng(0).integers(1, 99, (len(kv_lens), max(columns))).astype(numpy.int32)
    for row, count in enumerate(columns):
        tables[row, count:] = 0
    contexts = [kv_len - 1 for kv_len in kv_lens]
    expected = AttentionMetadata.build([1] * len(kv_lens), contexts, tables, block_size, num_blocks=99)
    slots = expected.slot_mapping.tolist()
    found = single_tokens(kv_lens, slots, tables, block_size, torch.device("cpu"), 99)
    for field in dataclasses.fields(AttentionMetadata):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype, field.name
            assert torch.equal(one, other), field.name
            assert one.data_ptr() % 16 == found.query_start_loc.data_ptr() % 16
        else:
            assert one == other, field.name
    assert found.phase == expected.phase
    assert (found.query_lens, found.kv_lens) == ([1] * len(kv_lens), kv_lens)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float64], ids=str)
def test_elements_are_copied_whatever_the_strides(dtype: torch.dtype) -> None:
    table = torch.arange(24).view(4, 6).to(dtype)
    for source in (table, table.T, table[0, 0], table[:1, 0].expand(1), table[:, :1].expand(4, 3), table[::2, 1::2], table[:0]):
        target = torch.empty(source.shape, dtype=dtype)
        copy_elements(source, target)
        assert torch.equal(target, source)
