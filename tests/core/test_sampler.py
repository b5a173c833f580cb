"""Sampling: the distribution that was asked for, and nothing but the request's own seed decides."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from headway.core.errors import ConfigError
from headway.core.sampler import NOT_A_TOKEN, _keep_top, _keys, greedy, sample
from headway.core.sampling_params import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -50.0])


def take(logits: torch.Tensor, params: list[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    return sample(logits, greedy(logits), params, seeds, positions)


def draws(params: SamplingParams, count: int = 4000) -> torch.Tensor:
    """Shares of the tokens over many draws of one request."""
    tokens = take(LOGITS.repeat(count, 1), [params] * count, [7] * count, range(count))
    return torch.bincount(tokens, minlength=len(LOGITS)) / count


def test_greedy_takes_the_most_likely() -> None:
    logits = torch.randn(7, 50)
    assert torch.equal(take(logits, [SamplingParams(temperature=0)] * 7, [0] * 7, [0] * 7), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_gives_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    torch.testing.assert_close(draws(SamplingParams(temperature=temperature)), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), [0, 1]),
        (SamplingParams(top_k=0), [0, 1, 2, 3, 4]),
        (SamplingParams(top_p=0.5), [0]),  # the first alone has 0.64
        (SamplingParams(top_p=0.7), [0, 1]),
        (SamplingParams(top_p=1e-9), [0]),
        (SamplingParams(top_k=3, top_p=0.95), [0, 1, 2]),
        (SamplingParams(min_p=0.2), [0, 1]),
    ],
    ids=str,
)
def test_what_is_left_out_never_comes_and_the_rest_keeps_its_proportions(params: SamplingParams, kept: list[int]) -> None:
    mask = torch.full_like(LOGITS, -math.inf)
    mask[kept] = 0
    torch.testing.assert_close(draws(params), (LOGITS + mask).softmax(-1), rtol=0, atol=0.03)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9)
    logits = torch.randn(5, 100)
    alone = [int(take(logits[row : row + 1], [params], [row], [row + 3])) for row in range(5)]
    others = [params, SamplingParams(temperature=0), params, SamplingParams(temperature=3, top_k=5), params]
    together = take(logits, others, range(5), range(3, 8)).tolist()
    assert [together[row] for row in (0, 2, 4)] == [alone[row] for row in (0, 2, 4)]
    assert together[1] == int(logits[1].argmax())


def test_seed_and_position_alone_decide_a_draw() -> None:
    logits = torch.zeros(200, 50)
    params = [SamplingParams()] * 200
    first, again = (take(logits, params, [3] * 200, range(200)) for _ in range(2))
    assert torch.equal(first, again)
    other_seed, other_place = take(logits, params, [4] * 200, range(200)), take(logits, params, [3] * 200, range(1, 201))
    assert float((first == other_seed).float().mean()) < 0.1
    assert float((first == other_place).float().mean()) < 0.1
    assert torch.equal(first[1:], other_place[:-1]), "a draw hangs on its own position only"


def test_rare_tokens_come_as_often_as_they_should() -> None:
    """The noise needs a fine grain where it decides: one token in 100,000 of a flat vocabulary."""
    vocab, count = 100_000, 300
    tokens = take(torch.zeros(count, vocab), [SamplingParams()] * count, range(count), [0] * count).double()
    assert abs(float(tokens.mean()) / vocab - 0.5) < 5 * (1 / 12 / count) ** 0.5
    assert len(tokens.unique()) > 0.98 * count


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5, min_p=0.1)], ids=str)
def test_a_row_with_a_nan_has_no_token_and_the_others_do(params: SamplingParams) -> None:
    logits = torch.randn(3, 20)
    logits[1, 4] = math.nan
    tokens = take(logits, [params] * 3, [1, 2, 3], [5, 5, 5]).tolist()
    assert tokens[1] == NOT_A_TOKEN
    assert min(tokens[0], tokens[2]) >= 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("n", 0),
        ("seed", "x"),
        ("stop", ""),
        ("stop_token_ids", ["a"]),
    ],
)
def test_bad_values_are_named_with_what_is_needed(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.reason.what == field
    assert caught.value.reason.need
    assert len(str(caught.value).splitlines()) == 1


def test_keys_are_splitmix64() -> None:
    """The published generator: with seed 0 its first outputs are the hashes of its increments."""
    assert int(_keys([0], [1])[0]) == 0xE220A8397B1DCDAF
    assert int(_keys([0], [2])[0]) == 0x6E789E6AA1B965F4


def test_a_neighbours_top_k_cuts_nothing_from_a_row_without_limits() -> None:
    """The sum of its probabilities rounds up to 1 long before its end."""
    logits = torch.randn(2, 50000, generator=torch.Generator().manual_seed(2)) * 5
    wishes = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=5)]
    likely = logits[0].softmax(-1).sort(descending=True).values
    assert float((likely.cumsum(-1) - likely)[-1]) >= 1
    kept = _keep_top(logits, wishes, torch.ones(2, 1)).isfinite().sum(-1)
    assert kept.tolist() == [50000, 5]


def test_any_seed_that_is_accepted_makes_a_key() -> None:
    keys = _keys([-(2**63), -1, 0, 2**63 - 1], [3] * 4)
    assert len(set(keys.tolist())) == 4
    assert _keys([2**63], [3]) == keys[0], "a seed beyond the last goes round to the first"
