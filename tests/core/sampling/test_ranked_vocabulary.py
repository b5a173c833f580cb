"""Tokens of several ranks, each of which has a part of the vocabulary: those of one rank, to the token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.core.engine.execution.token_sampler import Chosen
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.ranked_vocabulary import vocabulary_of
from headway.core.sampling.sampler import NOT_A_TOKEN, TORCH_SAMPLING, Gathers, SamplingOps
from sample_tokens import DRAWS_INSIDE, FILTERS_INSIDE, chooser, part_of
from thread_ranks import ThreadRanks, on_ranks

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
    generator = torch.Generator().manual_seed(k)
    logits = 3 * torch.randn(5, VOCAB, generator=generator)
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
