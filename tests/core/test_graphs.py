"""What a captured decode step is fed: the same numbers that a step's metadata holds, and padding that disturbs nobody."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.attention import PagedAttention
from headway.core.blocks import BlockManager
from headway.core.graphs import DecodeGraphs, capture_sizes
from headway.core.metadata import AttentionMetadata
from headway.core.sampling_params import SamplingParams
from headway.core.scheduler import Scheduled, Scheduler
from headway.core.sequence import Sequence
from tiny import TinyModel

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
ROWS = 8


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (1000, [1, 2, 4, *range(8, 257, 8)])],
)
def test_batch_sizes(max_num_seqs: int, sizes: list[int]) -> None:
    assert capture_sizes(max_num_seqs) == sizes


def graphs() -> DecodeGraphs:
    attention = PagedAttention([], [], lambda *_: None)
    return DecodeGraphs(TinyModel(), attention, torch.zeros(ROWS + 1, dtype=torch.int64), BLOCK_SIZE, MAX_MODEL_LEN)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=6),
    spare=st.integers(0, 6),
    overlapped=st.booleans(),
)
def test_a_replay_is_fed_what_the_metadata_says(prompts: list[list[int]], spare: int, overlapped: bool) -> None:
    """Through admission, growth, preemption and readmission in another row."""
    scheduler = Scheduler(BlockManager(MAX_MODEL_LEN // BLOCK_SIZE + spare, BLOCK_SIZE, False), 64, ROWS)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=15)
        scheduler.add(Sequence(str(number), 0, prompt, params, frozenset(), MAX_MODEL_LEN))
    captured, flying = graphs(), []
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        if step and all(share.num_new_tokens == 1 and share.context_len for share in step):
            check(captured, step)
        scheduler.launched(step)
        read, flying = (flying, step) if overlapped else (step, [])
        for share in read:
            if share.samples:
                share.seq.num_pending -= 1
                if not share.seq.finished:
                    share.seq.append(len(share.seq.token_ids) % 7)
        scheduler.remove_finished()


def check(captured: DecodeGraphs, step: list[Scheduled]) -> None:
    count, width = len(step), captured._width
    fields = numpy.full((5, ROWS), 99, dtype=numpy.int32)
    table = numpy.full((ROWS, width), 99, dtype=numpy.int32)
    captured.fill(fields, table, step)
    known, rows, positions, seq_lens, slots = fields.tolist()
    metadata = AttentionMetadata.build(
        [1] * count, [share.context_len for share in step], [share.seq.blocks for share in step], BLOCK_SIZE
    )
    assert slots == metadata.slot_mapping.tolist() + [-1] * (ROWS - count)
    assert seq_lens == metadata.kv_lens + [0] * (ROWS - count)
    assert positions[:count] == metadata.context_lens.tolist()
    for row, share in enumerate(step):
        used = len(share.seq.blocks)
        assert table[row, :used].tolist() == share.seq.blocks
        assert known[row] == (share.seq.token_ids[share.context_len] if not share.seq.num_pending else -1)
    assert rows[:count] == [share.seq.row for share in step]
    assert set(rows[count:]) <= {ROWS}, "padding writes its token beside everybody's"
    assert not table[count:].any(), "padding points at a block that exists"


def test_only_a_step_of_decodes_within_the_captured_sizes_is_replayed() -> None:
    captured = graphs()
    captured._size_of = [1, 1, 2]
    seq = Sequence("r", 0, [1] * 9, SamplingParams(), frozenset(), MAX_MODEL_LEN)
    decode, prefill, extend = Scheduled(seq, 1, 8, True), Scheduled(seq, 9, 0, True), Scheduled(seq, 3, 6, True)
    assert captured.size_for([decode]) == 1
    assert captured.size_for([decode] * 2) == 2
    assert captured.size_for([decode] * 3) is None
    assert captured.size_for([prefill]) is None
    assert captured.size_for([extend, decode]) is None
    assert captured.size_for([Scheduled(seq, 1, 0, True)]) is None, "a prompt of one token is a prefill"
