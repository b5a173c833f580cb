"""Our all-reduce in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.all_reduce.one_shot_kernels import NOTHING, OneShotAllReduce, shared_bytes

SIZE = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_to_come_finds_what_all_have_given(dtype: torch.dtype) -> None:
    """One launch after the other cannot wait for later ones, so that all but the last are told not to."""
    shared = [torch.full((shared_bytes(SIZE) // 2,), NOTHING - 2**16, dtype=torch.int16) for _ in range(SIZE)]
    addresses = [each.data_ptr() for each in shared]
    *others, last = (OneShotAllReduce(rank, torch.device("cpu"), addresses, each) for rank, each in enumerate(shared))
    for other in others:
        other.abort()
    for count, adds in ((5000, False), (16, True), (24_000, True), (40, False), (2400, True), (16_000, False), (8, False)):
        parts = [torch.randn(count).to(dtype) for _ in range(SIZE)]
        onto = torch.randn(count).to(dtype) if adds else None
        for part in parts:
            part[:2] = torch.tensor(
                [-0.0, torch.tensor(-0x7FFF8000, dtype=torch.int32).view(torch.float32)]
            )  # what stands for nothing
        expected = sum(part.double() for part in parts) + (0.0 if onto is None else onto.double())
        for other, part in zip(others, parts[:-1], strict=True):
            assert last.takes(part)
            other(part.clone())
        found = last(parts[-1].clone(), onto)
        # The interpreter cuts bits off where a GPU rounds.
        assert (found.double() - expected).abs().max() <= expected.abs().max() * (1e-6 if dtype == torch.float32 else 2**-7)
        assert onto is None or found is onto
