"""Nothing is compiled after the engine is ready: every kind of step has been run before."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.backends.sdpa import SDPAMath
from headway.core.contract.backend import Lengths, StepLimits, fits, lattice
from headway.core.contract.kernel import announce_compilation
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.step import StepInput
from headway.core.engine.execution.host_rows import Launched
from headway.core.engine.execution.model_runner import ModelRunner
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from tiny_engine import TinyModel, drain, made_engine, registering

CONFIG = EngineConfig(
    attn_backend="lazy", block_size=8, kv_cache_memory=2**18, max_model_len=48, max_num_seqs=9, max_num_batched_tokens=40
)


class Lazy(SDPAMath):
    """Compiles at first sight of a kernel, which it chooses by powers of two of all lengths that a plan knows."""

    name = "lazy"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.compiled: set[tuple[object, ...]] = set()

    def variant(self, view: AttentionMetadata) -> tuple[object, ...]:
        context = max(kv - q for q, kv in zip(view.query_lens, view.kv_lens, strict=True))
        large = view.num_seqs > 4 if view.phase is Phase.DECODE else False
        return view.phase, (view.max_query_len - 1).bit_length(), large, context >= 16

    def plan(self, metadata: AttentionMetadata) -> Any:
        variant = self.variant(metadata)
        if variant not in self.compiled:
            self.compiled.add(variant)
            announce_compilation(f"lazy {variant}")
        return super().plan(metadata)


class Odd(Lazy):
    """Chooses at numbers that nobody would guess, and says which."""

    name = "odd"

    def variant(self, view: AttentionMetadata) -> tuple[object, ...]:
        return view.phase, view.max_query_len > 13, view.num_seqs > 6

    def warmup_steps(self, phase: Phase, limits: StepLimits) -> Iterable[list[Lengths]]:
        context = 0 if phase is Phase.PREFILL else 7
        lengths = (1,) if phase is Phase.DECODE else (2, 13, 14)
        return [
            [Lengths(length, context), *[Lengths(min(length, 2), context)] * others] for others in (0, 6) for length in lengths
        ]


def engine_with(backend: type[Lazy], ahead: Any = nullcontext, **options: Any) -> EngineLoop:
    config = replace(CONFIG, attn_backend=backend.name, **options)
    return made_engine(TinyModel(), registering(**{backend.name: backend}), config, compile_ahead=ahead)


def serve(engine: EngineLoop, prompts: list[list[int]], seed: int) -> None:
    draw = random.Random(seed)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=draw.choice((0.0, 0.8)), max_tokens=draw.randint(1, 6), seed=number)
        engine.add_request(str(number), engine.limits.checked(prompt, params))
    drain(engine)


PROMPTS = st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=41), min_size=1, max_size=14)


@pytest.mark.parametrize("backend", [Lazy, Odd])
def test_no_request_compiles(backend: type[Lazy]) -> None:
    engine = engine_with(backend)

    @settings(max_examples=25, deadline=None)
    @given(PROMPTS, st.integers(0, 2**16))
    def check(prompts: list[list[int]], seed: int) -> None:
        serve(engine, prompts, seed)
        assert not engine.stats.compilations

    check()


def test_without_warm_up_requests_do(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the test above would pass for a backend that compiles nothing."""
    engine = engine_with(Lazy, None)
    with caplog.at_level(logging.WARNING, "headway"):
        serve(engine, [[1, 2, 3], [4] * 30], 0)
    assert len(engine.stats.compilations) >= 3
    name = next(iter(engine.stats.compilations))
    assert f"kernels: {name} was compiled after the engine was ready; a step waited for it" in caplog.text


def test_a_first_round_compiles_ahead_and_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    rounds: list[str] = []

    @contextmanager
    def ahead() -> Iterator[None]:
        rounds.append("ahead")
        yield

    with caplog.at_level(logging.INFO, "headway"):
        engine = engine_with(Lazy, ahead)
    assert rounds == ["ahead", "ahead"], "backends and the trial of memory, then every kind of step"
    assert "warm-up: every kind of step ran in" in caplog.text
    assert "0 kernels compiled" in caplog.text
    for cache in engine.executor.attention.caches:
        assert not cache.key.any()
        assert not cache.value.any()
    cold = engine_with(Lazy, None)
    assert one(engine) == one(cold), "warming up changes no token"


def one(engine: EngineLoop) -> list[int]:
    engine.add_request("a", engine.limits.checked([5, 6, 7] * 9, SamplingParams(temperature=0.9, seed=3, max_tokens=12)))
    return drain(engine)["a", 0].token_ids


def test_a_backend_that_fails_in_warm_up_is_named_and_others_serve(caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(Lazy):
        name = "breaks"

        def plan(self, metadata: AttentionMetadata) -> Any:
            if metadata.phase is Phase.EXTEND or metadata.max_query_len == 33:
                raise RuntimeError(f"no {metadata.phase.value} today")
            return super().plan(metadata)

    with caplog.at_level(logging.WARNING, "headway"):
        engine = engine_with(Breaks)
    assert caplog.text.count("no extend today") == 1
    assert caplog.text.count("no prefill today") == 2, "in a whole step, and in attention alone"
    assert "backend breaks failed in extend" in caplog.text
    assert one(engine)


def test_a_kernel_that_never_settles_ends_the_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    class Restless(Lazy):
        name = "restless"

        def plan(self, metadata: AttentionMetadata) -> Any:
            self.compiled.clear()
            return super().plan(metadata)

    with caplog.at_level(logging.WARNING, "headway"):
        engine_with(Restless)
    assert "compiled in every round; requests may wait for compilation" in caplog.text


def test_drafts_are_warmed_where_there_is_a_proposer() -> None:
    steps = list(lattice(Phase.DECODE, StepLimits(64, 8, 128, max_decode_len=8)))
    assert {step[0].query_len for step in steps} == {1, 2, 3, 4, 5, 8}
    assert all(each.num_drafts == each.query_len - 1 for step in steps for each in step)
    assert {step[0].query_len for step in lattice(Phase.DECODE, StepLimits(64, 8, 128))} == {1}


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 300), st.sampled_from(list(Phase)))
def test_steps_stay_within_the_limits(tokens: int, seqs: int, length: int, phase: Phase) -> None:
    limits = StepLimits(tokens, seqs, length, max_decode_len=4)
    steps = list(lattice(phase, limits))
    assert len(steps) == len(set(map(tuple, steps)))
    for step in steps:
        assert fits(step, limits)
        for query_len, context_len, num_drafts in step:
            assert Phase.of(query_len, context_len, num_drafts + 1) is phase
    assert phase is not Phase.PREFILL or [Lengths(min(tokens, length), 0)] in steps


def test_no_more_steps_are_in_flight_than_the_loop_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's inputs go through two buffers: a third step would overwrite what the first has not read yet."""
    launch, wait = ModelRunner.launch, Launched.wait
    unread: list[Launched] = []
    most: list[int] = []

    def launched(self: ModelRunner, step: StepInput) -> Launched:
        unread.append(launch(self, step))
        most.append(len(unread))
        return unread[-1]

    def waited(self: Launched) -> Any:
        unread[:] = [each for each in unread if each is not self]
        return wait(self)

    monkeypatch.setattr(ModelRunner, "launch", launched)
    monkeypatch.setattr(Launched, "wait", waited)
    engine_with(Lazy)
    assert 2 in most
    assert max(most) <= 3, "two, and the last of the round before, which the device has ended"


def test_zeros_have_the_strides_of_the_model() -> None:
    engine = engine_with(Lazy)
    q, k, v = engine.executor.warmup.layer_inputs(1)
    assert q.shape == (40, 4, 8)
    assert k.shape == v.shape == (40, 2, 8)
    assert q.stride() == k.stride() == v.stride() == (64, 8, 1)
    assert k.data_ptr() - q.data_ptr() == 4 * 8 * 4
    assert not torch.cat([q, k, v], 1).any()
