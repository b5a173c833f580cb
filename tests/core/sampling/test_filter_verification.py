"""Kernels that draw are relied on only where they choose what torch's operations choose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.core.sampling.filtering import torch_filter, verified_filter
from headway.core.sampling.sampler import Filter

CPU = torch.device("cpu")


def of_the_neighbour(logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor) -> Tensor:
    return torch_filter(logits, others, keys, filters.roll(1, 1))


def without_min_p(logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor) -> Tensor:
    changed = filters.clone()
    changed[3] = -torch.inf
    return torch_filter(logits, others, keys, changed)


def failing(logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor) -> Tensor:
    raise RuntimeError("ptxas is missing")


@pytest.mark.parametrize("vocab_size", [1, 300, 50257])
def test_what_is_right_is_relied_on(vocab_size: int) -> None:
    assert verified_filter(torch_filter, vocab_size, CPU) is torch_filter


@pytest.mark.parametrize(
    ("candidate", "why"),
    [(of_the_neighbour, "tokens differ"), (without_min_p, "tokens differ"), (failing, "RuntimeError: ptxas is missing")],
)
def test_what_is_wrong_is_named_and_left(candidate: Filter, why: str, caplog: pytest.LogCaptureFixture) -> None:
    assert verified_filter(candidate, 50257, CPU) is None
    assert why in caplog.text
    assert "torch's operations" in caplog.text
