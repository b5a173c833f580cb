"""The most likely tokens by our C, beside torch's: ties, NaN, infinities and rows apart from one another."""

from __future__ import annotations

import pytest
import torch

from headway.backends.native.library import functions, native_support
from headway.backends.native.sampling import NativeGreedy
from headway.backends.sampling.choice import fastest_sampling
from headway.core.sampling.sampler import NOT_A_TOKEN, greedy

pytestmark = pytest.mark.skipif(functions() is None, reason=f"our C is not built here: {native_support()}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 7, 64, 1003])
def test_the_first_of_the_largest_logits_is_found(dtype: torch.dtype, size: int) -> None:
    chosen = fastest_sampling(torch.device("cpu"), size).greedy
    assert isinstance(chosen, NativeGreedy)
    for rows in (0, 1, 5):
        wide = torch.randn(rows, size + 9).to(dtype)
        wide[:, size:] = 100  # behind the logits, larger than all of them
        logits = wide[:, :size]
        assert torch.equal(chosen(logits), greedy(logits))
        tied = (logits * 2).round()  # many a largest one
        first = (tied == tied.amax(dim=-1, keepdim=True)).int().argmax(dim=-1) if rows else greedy(tied)
        assert torch.equal(chosen(tied), first)


def test_rows_with_a_nan_have_no_token_and_infinities_count() -> None:
    found = functions()
    assert found is not None
    logits = torch.randn(6, 75)
    logits[0, 74] = logits[1, 3] = logits[2, 40] = torch.nan
    logits[2, 41] = logits[3, 70] = torch.inf
    logits[4, :] = -torch.inf
    logits[5, :74] = -torch.inf
    assert NativeGreedy(found)(logits).tolist() == [NOT_A_TOKEN] * 3 + [70, 0, 74]
