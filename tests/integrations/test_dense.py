"""Blocks that overlap: sequences anywhere in dense memory, at block sizes that do not fit it, against float64."""

from __future__ import annotations

import numpy
import pytest
import torch

from headway.core.contract.spec import AttentionSpec
from headway.core.select.selector import Selector
from headway.integrations.dense import Sequences, attend, cache_over, plan_parts, slots_of
from headway.testing.oracle import attend as exact
from registering import registering

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
# Of each sequence: its row of the batch, its first key there, its keys, its new tokens.
CASES = {
    "padded decodes": [(0, 5, 32, 1), (1, 0, 37, 1), (2, 36, 1, 1)],
    "chunks": [(0, 3, 20, 6), (1, 0, 37, 7), (2, 1, 16, 16)],
    "both": [(0, 0, 9, 9), (1, 2, 30, 1), (2, 20, 17, 4)],
}


@pytest.mark.parametrize("order", ["heads first", "tokens first", "a part of longer rows"])
@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("name", CASES)
def test_sequences_are_read_where_they_lie(name: str, size: int, order: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = {"heads first": (3, 2, 37, 8), "tokens first": (3, 37, 2, 8), "a part of longer rows": (3, 2, 64, 8)}[order]
    key, value = (torch.randn(shape, generator=generator) for _ in "kv")
    if order == "tokens first":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    key, value = key[:, :, :37], value[:, :, :37]
    rows, firsts, kv_lens, query_lens = (numpy.array(each) for each in zip(*CASES[name], strict=True))
    selector = Selector(registering(), [SPEC], "sdpa.math", "nhd", size)
    keys, values, slots = slots_of(key, value, rows, firsts, kv_lens, size)
    copied = keys.tensor.data_ptr() != key.data_ptr()
    ends_behind = name != "chunks" and order != "a part of longer rows"  # the last block of the last row, as does the memory
    assert copied == (size == 16 and ends_behind)
    cache = cache_over(keys, values, SPEC, size)
    starts = numpy.cumsum([0, *query_lens])[:-1]
    parts = plan_parts(Sequences(starts, query_lens, slots, kv_lens), selector, SPEC, cache.geometry.num_blocks, False)
    q = torch.randn(int(query_lens.sum()), 4, 8, generator=generator)
    spans = [(row, first, end, count) for row, first, end, count in CASES[name]]
    new = [
        torch.cat([t[row, :, first + end - count : first + end].transpose(0, 1) for row, first, end, count in spans])
        for t in (key, value)
    ]
    out = torch.full_like(q, torch.nan)
    attend(parts, SPEC, q, *new, cache, out)
    for start, (row, first, end, count) in zip(starts.tolist(), spans, strict=True):
        k, v = (t[row, :, first : first + end].transpose(0, 1).double() for t in (key, value))
        expected = exact(SPEC, q[start : start + count], k, v, end - count)[0]
        torch.testing.assert_close(out[start : start + count].double(), expected, rtol=1e-5, atol=1e-6)
