"""Graphs of several ranks, which are threads here: tokens are chosen inside of them, and are those of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from graph_backend import Again, Wide
from headway.core.contract.ranks import Ranks
from headway.core.contract.sampling_plugins import Proposer
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.stats import EngineStats
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps
from made_engine import made_engine
from proposer_stub import Told
from ranked_model import RankedModel
from registries import registering
from run_engine import Written, generate
from sample_tokens import DRAWS_INSIDE, FILTERS_INSIDE
from thread_ranks import on_ranks

REGISTRY = registering(wide=Wide)
PROMPTS = [[7] * 9 + [number] for number in range(8)]
WISHES: dict[str, list[dict[str, Any]]] = {
    "plain": [{"temperature": 0}, {"temperature": 0.9}],
    "filters": [{"temperature": 0}, {"temperature": 0.9, "top_k": 30, "top_p": 0.9}, {"temperature": 2.0, "min_p": 0.02}],
    "all": [{"temperature": 0.9}, {"top_k": 30}, {"presence_penalty": 1.0}, {"temperature": 0, "logprobs": 2}],
}


def write(ranks: Ranks, sampling: SamplingOps, wishes: list[SamplingParams], proposer: Proposer | None = None) -> Any:
    """What a rank's own engine writes, and its counts. All ranks' engines get the same requests, hence run the same steps."""
    config = EngineConfig(
        attn_backend="wide", block_size=8, max_num_batched_tokens=64, max_model_len=64, max_num_seqs=8, kv_cache_memory=2**20
    )
    model: Any = RankedModel(ranks)
    options: Any = {"proposer": proposer, "measured": False}
    engine = made_engine(model, REGISTRY, config, sampling=sampling, ranks=ranks, **options)
    engine.executor.capture(Again())
    return generate(engine, PROMPTS, wishes), engine.stats


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "sampling", [TORCH_SAMPLING, DRAWS_INSIDE, FILTERS_INSIDE], ids=["chosen after", "drawn inside", "filtered inside"]
)
@pytest.mark.parametrize("kind", WISHES)
@pytest.mark.parametrize("guesses", [False, True], ids=["decode", "verify"])
def test_tokens_are_those_of_one_rank(sampling: SamplingOps, kind: str, guesses: bool) -> None:
    given = WISHES[kind]
    wishes = [SamplingParams(max_tokens=9, seed=n, ignore_eos=True, **given[n % len(given)]) for n in range(len(PROMPTS))]
    ((expected, alone),) = on_ranks(1, lambda ranks: write(ranks, TORCH_SAMPLING, wishes))
    assert not alone.rows_gathered
    texts = [[*prompt, *each.token_ids] for prompt, each in zip(PROMPTS, expected, strict=True)]
    results = on_ranks(2, lambda ranks: write(ranks, sampling, wishes, guessing(texts) if guesses else None))
    for found, stats in results:
        compare(found, expected)
        assert stats.num_graph_steps > 0
        assert bool(stats.num_accepted_tokens) == guesses
        check_gathers(stats, kind, inside=sampling is FILTERS_INSIDE)


def guessing(texts: list[list[int]]) -> Told:
    """Guesses what follows in one of these texts, with a mistake in every fifth place."""

    def propose(token_ids: list[int]) -> list[int]:
        text = next((text for text in texts if text[: len(token_ids)] == token_ids), [])
        return [token ^ (place % 5 == 0) for place, token in enumerate(text)][len(token_ids) : len(token_ids) + 4]

    return Told(propose)


def compare(found: list[Written], expected: list[Written]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def check_gathers(stats: EngineStats, kind: str, inside: bool) -> None:
    if kind == "plain":
        assert (stats.rows_gathered, stats.rows_of_candidates) == (0, 0)
        return
    named = {"top_k or top_p", "min_p"} if kind == "filters" and inside else {"min_p"} if kind == "filters" else {"penalties"}
    if kind == "all" and inside:
        named = {"penalties", "top_k or top_p"}
    assert set(stats.rows_gathered_for) == named
    assert stats.rows_of_candidates > 0
