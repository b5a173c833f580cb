"""Blocks that overlap: sequences anywhere in dense memory, at block sizes that do not fit it, against float64."""

from __future__ import annotations

import numpy
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.oracle import attend as exact
from headway.core.select.request import BackendRequest, LayerSpecs
from headway.core.select.selector import Selector
from headway.integrations.dense import Sequences, Visibility
from headway.integrations.transformers import StepAttention
from tiny_engine import registering

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
# Of each sequence: its row of the batch, its first key there, its keys, its new tokens.
CASES = {
    "padded decodes": [(0, 5, 32, 1), (1, 0, 37, 1), (2, 36, 1, 1), (2, 0, 36, 1)],
    "chunks": [(0, 3, 20, 6), (1, 0, 37, 7), (2, 1, 16, 16)],
    "both": [(0, 0, 9, 9), (1, 2, 30, 1), (2, 20, 17, 4)],
    "prompts": [(0, 0, 9, 9), (2, 20, 17, 17)],
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
    call, starts = planned(name, "sdpa.math", size, key, value)
    copied = call.blocks.room > 0
    # The last block of the last row ends behind the memory, and is read unless all are prompts, which have keys of their own.
    ends_behind = name not in ("chunks", "prompts") and order != "a part of longer rows"
    assert copied == (size == 16 and ends_behind)
    assert copied == (call.blocks.views(key, value)["key"].data_ptr() != key.data_ptr())
    q = torch.randn(1, 4, int(starts[-1]), 8, generator=generator)
    new = [
        torch.cat([t[row, :, first + end - count : first + end].transpose(0, 1) for row, first, end, count in CASES[name]])
        for t in (key, value)
    ]
    cache = call.blocks.cache(key, value, SPEC)
    tokens, out = q[0].transpose(0, 1), torch.full((int(starts[-1]), 4, 8), torch.nan)
    for part in call.parts:
        index = part.tokens if part.tokens is not None else torch.arange(len(tokens))
        result = torch.empty(len(index), 4, 8)
        if part.decodes:
            part.backend.decode(tokens[index], cache, part.plan, result)
        else:
            part.backend.prefill(tokens[index], *(t[index] for t in new), cache, part.plan, result)
        out[index] = result
    for start, (row, first, end, count) in zip(starts[:-1].tolist(), CASES[name], strict=True):
        k, v = (t[row, :, first : first + end].transpose(0, 1).double() for t in (key, value))
        expected = exact(SPEC, tokens[start : start + count], k, v, end - count)[0]
        torch.testing.assert_close(out[start : start + count].double(), expected, rtol=1e-5, atol=1e-6)


def planned(name: str, backend: str, size: int, key: Tensor, value: Tensor) -> tuple[StepAttention, NDArray[numpy.int64]]:
    """A case's call, and where each of its sequences begins among the packed tokens."""
    rows, keys, kv_lens, query_lens = (list(each) for each in zip(*CASES[name], strict=True))
    starts = numpy.cumsum([0, *query_lens])
    visibility = Visibility(1, int(starts[-1]), key.shape[2], 0, 0, None, None)
    visibility.__dict__["rows"] = Sequences(starts[:-1].tolist(), query_lens, keys, kv_lens, rows)
    query = key.new_empty(1, 4, int(starts[-1]), 8)
    asked = BackendRequest.parse(backend)
    selector = Selector(registering(), LayerSpecs([SPEC]), asked, kv_layout="nhd", block_size=size)
    return StepAttention.of(visibility, SPEC, selector, query, key, value), starts
