"""Sampling: the distribution that was asked for, by the request's own seed alone, also by ranks with a part of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from headway.core.engine.execution.token_sampler import Chosen
from headway.core.sampling.filtering import NO_FILTER, TokenFilter, keep_above, keep_top, torch_filter, verified_filter
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.ranked_vocabulary import vocabulary_of
from headway.core.sampling.sampler import (
    LANES,
    NOT_A_TOKEN,
    TORCH_SAMPLING,
    Filter,
    Gathers,
    SamplingOps,
    exponential,
    keys_of,
    philox,
    seed_of,
)
from sample_tokens import DRAWS_INSIDE, FILTERS_INSIDE, choose, chooser, part_of, take
from thread_ranks import ThreadRanks, on_ranks

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -50.0])


def draws(params: SamplingParams, count: int = 4000) -> torch.Tensor:
    """Shares of the tokens over many draws of one request."""
    tokens = take(LOGITS.repeat(count, 1), [params] * count, [7] * count, range(count))
    return torch.bincount(tokens, minlength=len(LOGITS)) / count


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


def test_seed_and_position_alone_decide_a_draw() -> None:
    logits = torch.zeros(200, 50)
    params = [SamplingParams()] * 200
    first, again = (take(logits, params, [3] * 200, range(200)) for _ in range(2))
    assert torch.equal(first, again)
    other_seed, other_place = take(logits, params, [4] * 200, range(200)), take(logits, params, [3] * 200, range(1, 201))
    assert float((first == other_seed).float().mean()) < 0.1
    assert float((first == other_place).float().mean()) < 0.1
    assert torch.equal(first[1:], other_place[:-1]), "a draw hangs on its own position only"


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5, min_p=0.1)], ids=str)
def test_a_row_with_a_nan_has_no_token_and_the_others_do(params: SamplingParams) -> None:
    logits = torch.randn(3, 20)
    logits[1, 4] = math.nan
    tokens = take(logits, [params] * 3, [1, 2, 3], [5, 5, 5]).tolist()
    assert tokens[1] == NOT_A_TOKEN
    assert min(tokens[0], tokens[2]) >= 0


def test_keys_are_splitmix64() -> None:
    """The published generator: with seed 0 its first outputs are the hashes of its increments."""
    assert int(keys_of([0], [1])[0]) == 0xE220A8397B1DCDAF
    assert int(keys_of([0], [2])[0]) == 0x6E789E6AA1B965F4


def test_a_neighbours_top_k_cuts_nothing_from_a_row_without_limits() -> None:
    """The sum of its probabilities rounds up to 1 long before its end."""
    logits = torch.randn(2, 50000, generator=torch.Generator().manual_seed(2)) * 5
    likely = logits[0].softmax(-1).sort(descending=True).values
    assert float((likely.cumsum(-1) - likely)[-1]) >= 1
    kept = keep_top(logits, torch.tensor([0.0, 5.0]), torch.ones(2)).isfinite().sum(-1)
    assert kept.tolist() == [50000, 5]


def test_any_seed_that_is_accepted_makes_a_key() -> None:
    keys = keys_of([-(2**63), -1, 0, 2**63 - 1], [3] * 4)
    assert len(set(keys.tolist())) == 4
    assert keys_of([2**63], [3]) == keys[0], "a seed beyond the last goes round to the first"


@pytest.mark.slow
def test_no_completion_of_a_seed_shares_its_seed_with_another() -> None:
    seeds = [-(2**63), *range(-200, 200), 2**62, 2**63 - 1]
    assert [seed_of(seed, 0) for seed in seeds] == seeds, "the first completion has the request's own seed"
    assert len({seed_of(seed, index) % 2**64 for seed in seeds for index in range(100)}) == 100 * len(seeds)


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_the_noise_is_philox(counter: Sequence[int], key: Sequence[int], expected: Sequence[int]) -> None:
    """The known answers that its authors publish with Random123."""
    assert tuple(int(word) for word in philox(words(*counter), words(*key))) == expected  # type: ignore[arg-type]


def uniform(keys: torch.Tensor, count: int) -> torch.Tensor:
    """What the Exp(1) numbers were made of, float64 [rows, count]."""
    return -torch.expm1(-exponential(keys, count).double())


def test_the_uniform_numbers_are_uniform_to_their_tails() -> None:
    count = 2**20
    u = uniform(torch.tensor([0x0123456789ABCDEF]), count)[0]
    assert abs(float(u.mean()) - 1 / 2) < 4 * (1 / 12 / count) ** 0.5
    assert abs(float(u.var()) - 1 / 12) < 4 * (1 / 180 / count) ** 0.5
    # In equal bins, and in the tails, where a share of 2^-16 has 16 numbers.
    bins = torch.bincount((u * 256).long(), minlength=256).double()
    assert chi_square(bins, torch.full_like(bins, count / 256)) < 4
    for tail in (u, 1 - u):
        for bits in (8, 12, 16):
            expected = count * 2.0**-bits
            assert abs(int((tail < 2.0**-bits).sum()) - expected) < 4 * expected**0.5, bits
    assert len(u[u < 2**-8].unique()) > 0.999 * int((u < 2**-8).sum()), "small numbers keep their digits"


def test_the_extreme_bits_have_finite_logarithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 rounds the largest 32 bits up to 2^32."""
    for bits, expected in ((0, 2.0**-33), (0xFFFFFFFF, 24 * math.log(2))):
        monkeypatch.setattr("headway.core.sampling.sampler.philox", lambda *_, bits=bits: (torch.full((1, LANES), bits),) * 4)
        noise = exponential(torch.zeros(1, dtype=torch.int64), 4 * LANES)
        torch.testing.assert_close(noise, torch.full_like(noise, expected))
        assert noise.log().isfinite().all()


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """How many deviations the sum lies above its mean."""
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5)


@pytest.mark.slow
def test_tokens_come_as_often_as_the_softmax_says() -> None:
    """Over seeds, over places, and with a temperature; in a vocabulary that uses all of a counter's numbers and two groups."""
    vocab, count = 4 * LANES + 40, 20_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5))
    expected = (logits / 0.7).double().softmax(-1) * count
    params = [SamplingParams(temperature=0.7)] * 2000
    for over_seeds in (True, False):
        counts = torch.zeros(vocab, dtype=torch.float64)
        for start in range(0, count, len(params)):
            moving, fixed = range(start, start + len(params)), [11] * len(params)
            seeds, positions = (moving, fixed) if over_seeds else (fixed, moving)
            counts += torch.bincount(take(logits.expand(len(params), vocab), params, seeds, positions), minlength=vocab)
        assert chi_square(counts, expected) < 4


@pytest.mark.parametrize("over", ["seeds", "positions", "raw keys", "high halves"])
def test_neighbours_are_uncorrelated(over: str) -> None:
    """Rows of neighbouring keys, and neighbouring columns: any number of a counter, and any counter beside the next."""
    rows, vocab = 64, 4 * LANES * 16
    keys = {
        "seeds": keys_of(range(rows), [9] * rows),
        "positions": keys_of([9] * rows, range(rows)),
        "raw keys": numpy.arange(rows, dtype=numpy.uint64),
        "high halves": numpy.arange(rows, dtype=numpy.uint64) << 32,
    }[over]
    u = uniform(torch.from_numpy(keys.view(numpy.int64)), vocab) - 0.5
    for first, second in [
        (u[1:], u[:-1]),
        (u[:, 1:], u[:, :-1]),
        *((u[:, by:], u[:, :-by]) for by in (2, 4, 32, LANES, 2 * LANES, 3 * LANES, 4 * LANES)),
        (u[1:, LANES:], u[:-1, :-LANES]),
    ]:
        products = first * second
        assert abs(float(products.mean())) < 4 / 12 / products.numel() ** 0.5
    # Correlation of a row with every other, and of the parity of its numbers' highest bits.
    for x in (u * 12**0.5, u.sign()):
        assert float((x @ x.T / vocab**0.5).fill_diagonal_(0).abs().max()) < 5.5


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-30, 1e30, 1e300])
def test_an_extreme_temperature_draws_a_token_all_the_same(temperature: float) -> None:
    logits = torch.tensor([0.0, -math.inf, 3.0, -2.0])
    tokens = take(logits.repeat(400, 1), [SamplingParams(temperature=temperature)] * 400, [1] * 400, range(400))
    assert set(tokens.tolist()) == ({2} if temperature < 1 else {0, 2, 3})


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


VOCAB = 1003
"""Uneven: the last rank has fewer tokens than the others."""
PLAIN: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 3.0}]
TOP_K: list[dict[str, Any]] = [{"top_k": 5}, {"temperature": 2.0, "top_k": 40, "top_p": 0.8}, {"top_k": 40, "min_p": 0.1}]
WHOLE: dict[str, list[dict[str, Any]]] = {
    "top_k or top_p": [{"temperature": 1.5, "top_p": 0.7}, {"top_k": 400}],
    "min_p": [{"temperature": 2.0, "min_p": 0.05}],
    "penalties": [{"temperature": 0, "repetition_penalty": 1.8}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}],
    "logit_bias": [{"temperature": 0, "logit_bias": {3: 4.0, 999: 5.0}}],
    "min_tokens": [{"min_tokens": 9}],
    "allowed_token_ids": [{"allowed_token_ids": [2, 400, 401, 900, 1002]}],
    "bad_words": [{"temperature": 0, "bad_words_token_ids": [[4, 900], [4, 3]]}],
}
EVERYTHING = [*PLAIN, *TOP_K, *(wish for wishes in WHOLE.values() for wish in wishes)]
OPS = pytest.mark.parametrize(
    "ops", [TORCH_SAMPLING, DRAWS_INSIDE, FILTERS_INSIDE], ids=["torch", "draws inside", "filters inside"]
)


def logits_of(rows: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Logits of which many are equal, the largest among them, on different ranks."""
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)).mul(2).round() / 2
    logits[:, 5::7] = -torch.inf
    logits[:, [900, 261, 600]] = 5.0
    return logits.to(dtype)


def chosen_by(
    size: int, logits: torch.Tensor, wishes: list[dict[str, Any]], seed: int, ops: SamplingOps = TORCH_SAMPLING
) -> list[tuple[Chosen, Gathers | None, ThreadRanks]]:
    """What each rank has chosen, and what was gathered for it."""
    count = len(wishes)

    def choose(ranks: Any) -> tuple[Chosen, Gathers | None, ThreadRanks]:
        params = [SamplingParams(**wish) for wish in wishes]
        seeds, before = range(seed, seed + count), [[1, 2, 900, 3, 4]] * count
        chosen, sampler = chooser(logits, params, seeds, [5] * count, before, 3, [900], ops, ranks=ranks)
        return chosen, sampler.vocabulary.take_gathers(), ranks

    return on_ranks(size, choose)


@pytest.mark.sampled(5)
@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_tokens_are_those_of_one_rank(size: int, dtype: torch.dtype, ops: SamplingOps) -> None:
    drawn = set()
    for seed in range(8):
        logits = logits_of(len(EVERYTHING), dtype, seed)
        ((expected, nothing, _),) = chosen_by(1, logits, EVERYTHING, seed, ops)
        assert nothing is None
        for found, _, _ in chosen_by(size, logits, EVERYTHING, seed, ops):
            assert found.tokens.tolist() == expected.tokens.tolist()
        assert int(expected.tokens[0]) == 261, "of equal ones the first"
        drawn |= {*expected.tokens.tolist()}
    assert len(drawn) > 40


@OPS
def test_a_greedy_and_a_drawn_row_cost_a_number_of_each_rank(ops: SamplingOps) -> None:
    for _, gathers, ranks in chosen_by(4, logits_of(6, torch.float32, 0), PLAIN * 2, 1, ops):
        assert gathers == Gathers()
        assert ranks.gathered <= (6 + (ops is TORCH_SAMPLING) * 4) * 8, (
            "bytes of each rank; torch's operations draw by themselves"
        )


@OPS
def test_what_gathers_is_counted_by_what_asks_for_it(ops: SamplingOps) -> None:
    for _, gathers, ranks in chosen_by(2, logits_of(len(EVERYTHING), torch.float32, 0), EVERYTHING, 1, ops):
        assert gathers.candidates == len(TOP_K)
        assert gathers.rows == sum(map(len, WHOLE.values()))
        assert gathers.reasons == {reason: len(wishes) for reason, wishes in WHOLE.items()}
        own = gathers.rows * -(-VOCAB // 2) * 4
        assert own < ranks.gathered < 1.3 * own


@pytest.mark.parametrize("size", [2, 4])
def test_top_k_is_that_of_the_logits_times_the_scale(size: int) -> None:
    """Of which some are equal though the logits are not: then the first tokens stay."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(40)])
    logits = 1.5 + steps * 2.0**-23
    assert (logits * torch.tensor(1 / 1.49))[0].unique().numel() < 0.8 * VOCAB
    wishes: list[dict[str, Any]] = [{"top_k": 1, "temperature": 1.49}] * 40
    ((expected, _, _),) = chosen_by(1, logits, wishes, 0)
    for found, _, _ in chosen_by(size, logits, wishes, 0):
        assert found.tokens.tolist() == expected.tokens.tolist()


def test_the_rank_of_a_token_that_cannot_come_counts_all_tokens() -> None:
    """A logits processor may choose it."""
    logits, tokens = torch.randn(2, VOCAB), torch.tensor([7, 1002])
    logits[:, tokens] = -torch.inf

    def scored(ranks: Any) -> Any:
        return vocabulary_of(TORCH_SAMPLING, VOCAB, ranks).score(part_of(logits, ranks), tokens, 2, "logprobs")

    for found in on_ranks(4, scored):
        assert found.ranks.tolist() == [VOCAB, VOCAB]
        assert found.logprobs[:, 0].tolist() == [-torch.inf] * 2


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("k", [0, 3, 700])
def test_log_probabilities_are_those_of_one_rank(size: int, k: int) -> None:
    logits = 3 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(k))
    wishes = [{**wish, "logprobs": k} for wish in (*PLAIN, TOP_K[0], WHOLE["penalties"][0])]
    ((expected, _, _),) = chosen_by(1, logits, wishes, 3)
    for found, gathers, _ in chosen_by(size, logits, wishes, 3):
        assert found.scored == expected.scored
        assert torch.equal(found.scores.token_ids, expected.scores.token_ids)
        assert torch.equal(found.scores.ranks, expected.scores.ranks)
        torch.testing.assert_close(found.scores.logprobs, expected.scores.logprobs, atol=1e-4, rtol=0)
        assert gathers.reasons["logprobs"] == (5 if k == 700 else 0)


@OPS
@pytest.mark.parametrize("place", [0, 600, 1002])
def test_a_row_with_a_nan_on_one_rank_has_no_token_on_any(place: int, ops: SamplingOps) -> None:
    logits = logits_of(len(EVERYTHING), torch.float32, 0)
    logits[:, place] = -torch.tensor(torch.nan)
    for found, _, _ in chosen_by(4, logits, EVERYTHING, 0, ops):
        assert found.tokens.tolist() == [NOT_A_TOKEN] * len(EVERYTHING)


def test_a_rank_may_have_no_tokens_at_all() -> None:
    logits = torch.tensor([[-3.0, -1.0, -2.0, -1.0, -torch.inf]]).expand(4, -1)
    wishes: list[dict[str, Any]] = [{"temperature": 0, "logprobs": 4}, {"temperature": 9.0}, {"top_k": 1}, {"top_p": 0.9}]
    for seed in range(20):
        ((expected, _, _),) = chosen_by(1, logits, wishes, seed)
        for found, _, _ in chosen_by(4, logits, wishes, seed):
            assert found.tokens.tolist() == expected.tokens.tolist()
            assert found.scores.logprobs[0, 0] == pytest.approx(float(logits[0].log_softmax(-1)[1]), abs=1e-5)
