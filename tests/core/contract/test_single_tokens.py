"""Steps of single tokens are what the general layout makes of them."""

from __future__ import annotations

import dataclasses

import numpy
import pytest
import torch
from torch import Tensor

from headway.core.contract.metadata import AttentionMetadata
from headway.integrations.dense import single_tokens


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
