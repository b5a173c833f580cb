"""Several ranks on a CPU, over gloo: the tokens of one rank, whatever requests want and however the work is cut."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy
import psutil
import pytest
import torch

from graph_backend import Again, Wide
from headway.core.contract.ranks import Ranks
from headway.core.contract.text_plugins import Proposer
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.executor import ExecutorLostError
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.data.step import NEWEST, NewPages, PageCopy, StartedRow, StepInput
from headway.core.engine.loop import EngineLoop
from headway.core.engine.ranks.rank_messages import decode, encode
from headway.core.engine.ranks.rank_processes import RankProcesses
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps
from headway.core.sampling.structured import StructuredOutputsParams
from ranked_model import RankedModel, assert_ended, make_rank, pids_of, ranked_engine
from sample_tokens import DRAWS_INSIDE, FILTERS_INSIDE
from thread_ranks import on_ranks
from tiny_engine import Told, Written, drain, generate, made_engine, registering, tokens_of, told_of


def tight(size: int) -> EngineConfig:
    """Room for fewer sequences than are asked for, and steps too small for a prompt: chunks, preemption. A rank with fewer heads
    has as many pages in less memory."""
    return EngineConfig(
        block_size=8,
        kv_cache_memory=16 * 8192 // size,
        max_model_len=96,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        async_scheduling=True,
    )


def next_is_odd(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Odd after even, even after odd: rank 0 alone calls it."""
    logits[(output[-1] if output else 0) % 2 :: 2] = -torch.inf
    return logits


WISHES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "logprobs": 2},
    {"logit_bias": {3: 2.0, 9: -100.0}, "bad_words_token_ids": [[4], [2, 3]]},
    {"logits_processors": [next_is_odd], "repetition_penalty": 1.2, "logprobs": 0},
    {"min_tokens": 9, "stop_token_ids": list(range(0, 512, 2))},
    {"prompt_logprobs": 3, "logprobs": 4},
    {"n": 3, "temperature": 0.7},
]


def write_all(engine: EngineLoop) -> dict[tuple[str, int], Written]:
    """What requests of all kinds write whose prompts begin alike, some of them after others have ended."""
    draw, written = Random(0), dict[tuple[str, int], Written]()
    prompts = [[7] * 16 + [draw.randrange(512) for _ in range(draw.randrange(1, 40))] for _ in WISHES]
    for round_number in range(2):
        for number, (prompt, wish) in enumerate(zip(prompts, WISHES, strict=True)):
            params = SamplingParams(max_tokens=draw.randint(3, 20), seed=number, ignore_eos=True, **wish)
            engine.add_request(f"{round_number}.{number}", engine.limits.checked(prompt, params))
        drain(engine, written)
    return written


def compare(one: dict[tuple[str, int], Written], several: dict[tuple[str, int], Written]) -> None:
    assert several.keys() == one.keys()
    for key, expected in one.items():
        found = several[key]
        assert found.token_ids == expected.token_ids, key
        assert (found.finish_reason, found.error) == (expected.finish_reason, expected.error)
        assert found.num_cached_tokens == expected.num_cached_tokens
        for mine, theirs in zip(found.logprobs, expected.logprobs, strict=True):
            assert mine.token_ids == theirs.token_ids
            numpy.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)


@pytest.fixture
def engines() -> Iterator[list[EngineLoop]]:
    """Engines whose ranks are ended with the test."""
    made: list[EngineLoop] = []
    yield made
    for engine in made:
        engine.executor.shutdown()


def test_two_ranks_write_what_one_writes_and_a_killed_one_ends_the_engine(engines: list[EngineLoop]) -> None:
    alone = ranked_engine(1, tight(1))
    expected = write_all(alone)
    assert alone.stats.num_preemptions > 0
    engine = ranked_engine(2, tight(2))
    engines.append(engine)
    compare(expected, write_all(engine))
    assert engine.stats.num_preemptions > 0
    assert engine.stats.rows_of_candidates > 0
    assert set(engine.stats.rows_gathered_for) == {"penalties", "logit_bias", "bad_words", "min_tokens", "logits_processors"}
    assert not alone.stats.rows_gathered
    pids = pids_of(engine)
    psutil.Process(pids[0]).kill()
    began = time.monotonic()
    with pytest.raises(ExecutorLostError, match=r"^rank 1 of 2 failed (after|in) step \d+: its process \d+ was killed by SIG"):
        write_all(engine)
    assert time.monotonic() - began < 10
    engine.abort_all()
    with pytest.raises(ExecutorLostError, match="was killed by SIGKILL"):
        generate(engine, [[1, 2, 3]], SamplingParams(temperature=0))
    assert_ended(pids)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_guesses_forms_and_more_ranks_change_no_token(size: int, tmp_path: Path, engines: list[EngineLoop]) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'headway[structured]'")
    from transformers import AutoTokenizer

    from headway.core.sampling.grammar import GrammarCompiler
    from sandbox import save_tiny_model

    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path))
    grammars = GrammarCompiler(tokenizer, RankedModel.vocab_size, [tokenizer.eos_token_id])
    proposer = told_of([[*prompt, *range(60)] for prompt in ([5, 6], [9])], wrong_every=7)
    for engine_size in (1, size):
        engines.append(ranked_engine(engine_size, tight(engine_size), proposer=proposer, grammars=grammars))
    form = StructuredOutputsParams(regex="(yes|no|perhaps)+")
    wishes = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=1, seed=3, max_tokens=12, structured_outputs=form, repetition_penalty=1.1),
        SamplingParams(temperature=1, top_p=0.9, seed=4, max_tokens=12, structured_outputs=form),
        SamplingParams(temperature=0, max_tokens=30),
    ]
    prompts = [[5, 6], [5, 6], [9], [9]]
    one, several = (tokens_of(generate(engine, prompts, wishes)) for engine in engines)
    assert several == one
    first, second = engines
    compare(write_all(first), write_all(second))
    assert second.stats.num_accepted_tokens == first.stats.num_accepted_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("kill", r"in step \d+: its process \d+ was killed by SIGKILL"),
        ("raise", r"in step \d+: RuntimeError: a kernel of this rank has failed"),
        ("stop", r"in step \d+: process \d+ has given no sign of life for 6 s"),
        ("loop", r"in step \d+: it has stood still for 6 s while rank 0 waits for it in step \d+"),
    ],
)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_rank_that_fails_in_a_step_ends_the_engine(fault: str, text: str, size: int, engines: list[EngineLoop]) -> None:
    engine = ranked_engine(size, EngineConfig(block_size=8, kv_cache_memory=2**20), fault=fault)
    engines.append(engine)
    pids = pids_of(engine)
    generate(engine, [[1, 2, 3]], SamplingParams(temperature=0))
    began = time.monotonic()
    with pytest.raises(ExecutorLostError, match=rf"^rank {size - 1} of {size} failed {text}.*; all ranks have been ended"):
        generate(engine, [[1] * 13], SamplingParams(temperature=0))
    assert time.monotonic() - began < 10
    assert_ended(pids)


@pytest.mark.slow
def test_a_warm_up_runs_on_all_ranks_and_rank_0_shows_the_logits_of_the_whole_vocabulary(engines: list[EngineLoop]) -> None:
    found: list[list[torch.Tensor]] = []
    for size in (1, 2):
        engine = ranked_engine(size, tight(size), compile_ahead=nullcontext)
        engines.append(engine)
        found.append([])
        engine.executor.observe(lambda rows, logits: found[-1].append(logits.clone()))
        generate(engine, [[1, 2, 3], [4, 5]], SamplingParams(temperature=0))
    one, two = (torch.cat(logits) for logits in found)
    assert two.shape == (32, RankedModel.vocab_size)
    torch.testing.assert_close(two, one, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
def test_a_step_that_fails_on_rank_0_is_the_last(engines: list[EngineLoop]) -> None:
    def fail(output: Sequence[int], logits: torch.Tensor) -> None:
        raise KeyboardInterrupt  # the second Ctrl-C, which no step holds back

    engine = ranked_engine(2, EngineConfig(block_size=8, kv_cache_memory=2**20))
    engines.append(engine)
    pids = pids_of(engine)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, [[1, 2, 3]], SamplingParams(logits_processors=[fail]))
    assert_ended(pids)
    engine.abort_all()
    with pytest.raises(ExecutorLostError, match=r"^rank 0 of 2 failed in step 1: KeyboardInterrupt"):
        generate(engine, [[1, 2, 3]], SamplingParams())


@pytest.mark.slow
def test_a_rank_that_dies_before_it_meets_the_others_fails_the_start_at_once() -> None:
    """gloo itself would wait for a minute, and NCCL for ever."""
    processes = RankProcesses(2, "rank_that_leaves", ["cpu"] * 2, num_threads=1)
    began = time.monotonic()
    with pytest.raises(ExecutorLostError, match=r"^rank 1 of 2 failed at its start: its process \d+ was killed by SIGKILL"):
        processes.join(partial(make_rank, config=EngineConfig(), max_decode_len=1))
    assert time.monotonic() - began < 10
    processes.end()


@pytest.mark.slow
def test_ranks_end_with_their_engine_and_leave_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    engine = ranked_engine(2, EngineConfig(block_size=8, kv_cache_memory=2**20))
    generate(engine, [[1, 2, 3]], SamplingParams(temperature=0))
    pids, descriptors = pids_of(engine), len(os.listdir("/proc/self/fd"))
    del engine
    gc.collect()
    assert_ended(pids)
    assert len(os.listdir("/proc/self/fd")) < descriptors
    assert set(os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else ()) <= before


REGISTRY = registering(wide=Wide)
PROMPTS = [[7] * 9 + [number] for number in range(8)]
GRAPH_WISHES: dict[str, list[dict[str, Any]]] = {
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
@pytest.mark.parametrize("kind", GRAPH_WISHES)
@pytest.mark.parametrize("guesses", [False, True], ids=["decode", "verify"])
def test_tokens_are_those_of_one_rank(sampling: SamplingOps, kind: str, guesses: bool) -> None:
    given = GRAPH_WISHES[kind]
    wishes = [SamplingParams(max_tokens=9, seed=n, ignore_eos=True, **given[n % len(given)]) for n in range(len(PROMPTS))]
    ((expected, alone),) = on_ranks(1, lambda ranks: write(ranks, TORCH_SAMPLING, wishes))
    assert not alone.rows_gathered
    texts = [[*prompt, *each.token_ids] for prompt, each in zip(PROMPTS, expected, strict=True)]
    results = on_ranks(2, lambda ranks: write(ranks, sampling, wishes, guessing(texts) if guesses else None))
    for found, stats in results:
        compare_graphs(found, expected)
        assert stats.num_graph_steps > 0
        assert bool(stats.num_accepted_tokens) == guesses
        check_gathers(stats, kind, inside=sampling is FILTERS_INSIDE)


def guessing(texts: list[list[int]]) -> Told:
    """Guesses what follows in one of these texts, with a mistake in every fifth place."""

    def propose(token_ids: list[int]) -> list[int]:
        text = next((text for text in texts if text[: len(token_ids)] == token_ids), [])
        return [token ^ (place % 5 == 0) for place, token in enumerate(text)][len(token_ids) : len(token_ids) + 4]

    return Told(propose)


def compare_graphs(found: list[Written], expected: list[Written]) -> None:
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


def decode_step(count: int, **more: object) -> StepInput:
    draw = numpy.random.default_rng(count)
    return StepInput(
        rows=draw.permutation(count).astype(numpy.int32),
        query_lens=numpy.ones(count, dtype=numpy.int32),
        context_lens=draw.integers(1, 2**20, count, dtype=numpy.int32),
        num_draft_tokens=numpy.zeros(count, dtype=numpy.int32),
        samples=numpy.ones(count, dtype=numpy.bool_),
        token_ids=numpy.full(count, NEWEST),
        continues=True,
        **more,  # type: ignore[arg-type]
    )


def test_logits_processors_stay_on_rank_0() -> None:
    params = SamplingParams(logits_processors=[lambda output, logits: logits], extra_args={"lock": object()}, top_k=3)
    (found,) = decode(encode(decode_step(2, started=(StartedRow(1, params, 5),)))).started
    assert (found.row, found.seed, found.params.top_k, found.params.extra_args) == (1, 5, 3, None)
    assert len(found.params.logits_processors or ()) == 1


def assert_same(found: StepInput, step: StepInput) -> None:
    for field in fields(StepInput):
        mine, theirs = getattr(found, field.name), getattr(step, field.name)
        if isinstance(theirs, numpy.ndarray):
            assert mine.dtype == theirs.dtype, field.name
            numpy.testing.assert_array_equal(mine, theirs)
        else:
            assert mine == theirs, field.name


PAGES = (NewPages(3, 0, [5, 900_000], 1), NewPages(0, 17, [], 0), NewPages(1, 2, [4], 0))


@pytest.mark.parametrize("count", [1, 7, 64])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"new_pages": PAGES},
        {"state_indices": True, "new_pages": PAGES},
        {"copies": (PageCopy(0, 1, 2, 3),)},
        {"restored": ((1, 2),), "checkpoints": numpy.ones((2, 3), dtype=numpy.int32)},
        {"started": (StartedRow(0, SamplingParams(logprobs=2, stop="x"), 2**63 - 1, (1, 2), 2, (0,)),)},
    ],
    ids=str,
)
def test_a_step_comes_back_as_it_was(count: int, more: dict[str, object]) -> None:
    more = {**more, "state_indices": numpy.arange(count, dtype=numpy.int32)} if "state_indices" in more else more
    step = decode_step(count, **more)
    assert_same(decode(encode(step)), step)
