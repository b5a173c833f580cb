"""What top_k, top_p and min_p keep, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headway.core.sampling.filtering import NO_FILTER, TokenFilter, keep_above, keep_top, torch_filter, verified_filter
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import Filter
from sample_tokens import DRAWS_INSIDE, FILTERS_INSIDE, choose


def kept(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that stay, in float64 and by the definition."""
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    order = order[: top_k or None]
    likely = logits[order].double().softmax(0)
    order = [token for place, token in enumerate(order) if place == 0 or top_p >= 1 or float(likely[:place].sum()) < top_p]
    floor = float(logits.max()) + (math.log(min_p) if min_p else -math.inf)
    return {token for token in order if logits[token] >= floor}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 0.9, 0), (7, 1, 0), (40, 0.7, 0.02), (0, 1e-6, 0), (1, 1, 1), (0, 1, 0.3)]
)
@pytest.mark.parametrize("grain", [0, 0.5], ids=["all unequal", "ties"])
def test_the_set_is_that_of_the_definition(top_k: int, top_p: float, min_p: float, grain: float) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(top_k)) * torch.tensor([[0.1], [1], [3], [8]])
    logits = (logits / grain).round() * grain if grain else logits
    logits[:, 5::7] = -torch.inf
    found = keep_top(logits, torch.full((4,), float(top_k)), torch.full((4,), top_p))
    found = keep_above(found, torch.full((4,), math.log(min_p) if min_p else -math.inf))
    for row, expected in zip(found, logits, strict=True):
        assert set(torch.nonzero(row.isfinite())[:, 0].tolist()) == {
            token for token in kept(expected, top_k, top_p, min_p) if expected[token].isfinite()
        }


def test_of_equal_tokens_the_first_stay() -> None:
    logits = torch.zeros(3, 10)
    found = keep_top(logits, torch.tensor([3.0, 0.0, 1.0]), torch.tensor([1.0, 0.45, 0.5])).isfinite()
    assert [torch.nonzero(row)[:, 0].tolist() for row in found] == [[0, 1, 2], [0, 1, 2, 3, 4], [0]]


def test_a_filter_is_read_off_parameters() -> None:
    assert TokenFilter.of(SamplingParams(top_k=99, min_p=0.5), 2.0, 50) == (2.0, 0.0, 1.0, math.log(0.5))
    assert TokenFilter.of(SamplingParams(), 0.0, 50) == NO_FILTER


def test_once_min_tokens_are_written_a_row_is_drawn_again() -> None:
    """It must not stay as likely as the graph makes it while its logits change."""
    logits, wish = torch.zeros(1, 2000), {"temperature": 1.5, "min_tokens": 3}
    for extra in ({}, {"top_p": 0.99}):
        plain, least = SamplingParams(temperature=1.5, **extra), SamplingParams(**wish, **extra)
        for ops in (DRAWS_INSIDE, FILTERS_INSIDE):
            expected = choose(logits, [plain], [4], [9], ops=ops)
            found = choose(logits, [least], [4], [9], num_prompt_tokens=6, stops=[1], ops=ops)
            assert int(found.tokens) == int(expected.tokens) > 0
            assert found.after_model == expected.after_model == (("top_k or top_p",) if extra and ops is DRAWS_INSIDE else ())


def test_what_is_served_beside_the_draw_is_not_counted_as_done_after_it() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    wishes = [SamplingParams(top_k=5), SamplingParams(min_p=0.1, presence_penalty=1), SamplingParams()]
    found, expected = (choose(logits, wishes, [1, 2, 3], [4, 4, 4], [[7]] * 3, ops=ops) for ops in (FILTERS_INSIDE, DRAWS_INSIDE))
    assert torch.equal(found.tokens, expected.tokens)
    assert found.after_model == ("penalties",)
    assert expected.after_model == ("top_k or top_p", "min_p", "penalties")


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
