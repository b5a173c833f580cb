"""The engine: what comes out does not depend on how the work was cut, and a fault leaks nothing."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace

import pytest
import torch

from headway.backends.sdpa import SDPA
from headway.core.contract.backend import BackendInfo
from headway.core.contract.errors import ConfigError, PromptError
from headway.core.contract.model import Attention
from headway.core.engine.config import EngineConfig
from headway.core.engine.engine import Engine
from headway.core.engine.runner import Launched
from headway.core.engine.sequence import Sequence
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry, create_registry, hookimpl
from tiny import TinyModel

PROMPTS = [[1, 2, 3], list(range(20)), [7], list(range(20, 45)), [5] * 11]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SMALL = EngineConfig(block_size=8, kv_cache_memory=2**20)


def run(engine: Engine, params: SamplingParams | list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    wishes = params if isinstance(params, list) else [params] * len(prompts)
    seqs = [engine.add_request(str(n), p, wish)[0] for n, (p, wish) in enumerate(zip(prompts, wishes, strict=True))]
    while engine.has_unfinished:
        engine.step()
    engine.blocks.check_integrity([])
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return [seq.output_token_ids for seq in seqs]


def drain(engine: Engine) -> list[Sequence]:
    """Run until nothing is left; everything that `step` returned."""
    changed = []
    while engine.has_unfinished:
        changed += engine.step()
    return changed


@pytest.mark.parametrize("overlapped", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0, max_tokens=20), SamplingParams(seed=3, max_tokens=20)], ids=str)
def test_batching_chunking_and_preemption_change_no_token(registry: Registry, params: SamplingParams, overlapped: bool) -> None:
    alone = [run(Engine(TinyModel(), registry, SMALL), params, [prompt])[0] for prompt in PROMPTS]
    together = run(Engine(TinyModel(), registry, SMALL), params)
    overlap = replace(SMALL, async_scheduling=overlapped)
    chunked = replace(overlap, max_num_batched_tokens=6)
    tight = replace(overlap, max_model_len=64, kv_cache_memory=9 * 8 * 512, max_num_batched_tokens=16)
    engine = Engine(TinyModel(), registry, tight)
    assert run(Engine(TinyModel(), registry, overlap), params) == alone
    assert together == alone
    assert run(Engine(TinyModel(), registry, chunked), params) == alone
    assert run(engine, params) == alone
    assert engine.scheduler.num_preemptions > 0


def test_a_seed_repeats_and_another_differs(registry: Registry) -> None:
    first, again, other = (
        run(Engine(TinyModel(), registry, SMALL), SamplingParams(seed=seed, temperature=2.0, max_tokens=20)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_without_seeds_the_engine_seed_decides_and_requests_differ(registry: Registry) -> None:
    def engine(seed: int) -> Engine:
        return Engine(TinyModel(), registry, EngineConfig(block_size=8, kv_cache_memory=2**20, seed=seed))

    params = SamplingParams(temperature=2.0, max_tokens=20)
    first, again, other = (run(engine(seed), params, [[1, 2, 3]] * 3) for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(tokens) for tokens in first}) == 3


def test_n_gives_n_completions(registry: Registry) -> None:
    engine = Engine(TinyModel(), registry, SMALL)
    seqs = engine.add_request("r", [1, 2, 3], SamplingParams(n=3, seed=2**63 - 1, temperature=2.0, max_tokens=12))
    while engine.has_unfinished:
        engine.step()
    assert [seq.index for seq in seqs] == [0, 1, 2]
    assert len({tuple(seq.output_token_ids) for seq in seqs}) == 3


def test_what_ends_a_sequence(registry: Registry) -> None:
    greedy = GREEDY
    (tokens,) = run(Engine(TinyModel(), registry, SMALL), greedy, [[1, 2, 3]])
    at = next(n for n, token in enumerate(tokens) if token not in tokens[:n] and n > 2)

    def ended(params: SamplingParams, eos: frozenset[int] = frozenset(), config: EngineConfig = SMALL) -> tuple[int, str | None]:
        engine = Engine(TinyModel(), registry, config, eos)
        (seq,) = engine.add_request("r", [1, 2, 3], params)
        while engine.has_unfinished:
            engine.step()
        return len(seq.output_token_ids), seq.finish_reason

    eos = frozenset({tokens[at]})
    assert ended(greedy) == (20, "length")
    assert ended(greedy, eos) == (at + 1, "stop")
    assert ended(SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), eos) == (20, "length")
    assert ended(SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[tokens[at]])) == (at + 1, "stop")
    short = EngineConfig(block_size=8, kv_cache_memory=2**20, max_model_len=10)
    assert ended(greedy, config=short) == (7, "length")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "at least one token"), ([1] * 128, "at most 127 tokens"), ([1, 50], "from 0 to 49, got 50"), ([-1], "got -1")],
)
def test_bad_prompts_are_refused_before_anything_is_queued(registry: Registry, prompt: list[int], words: str) -> None:
    engine = Engine(TinyModel(), registry, SMALL)
    with pytest.raises(PromptError, match=words):
        engine.add_request("r", prompt, SamplingParams())
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 12}, "multiple of 8, got 12"),
        ({"block_size": 0}, "at least 1"),
        ({"max_model_len": 4096}, "at most 128"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"gpu_memory_utilization": 1.5}, "above 0 and at most 1, got 1.5"),
        ({"cudagraph_capture_sizes": ()}, "at least 1"),
        ({"cudagraph_capture_sizes": (4, 0)}, "at least 1"),
        ({"cudagraph_capture_sizes": (400,)}, "at most max_num_seqs=256"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 16, "max_model_len": 64}, "chunked prefill is off"),
        ({"kv_cache_memory": 1}, "kv_cache_memory"),
        ({"kv_layout": "nope"}, "nhd, hnd, vllm_5d"),
        ({"attn_options": {"sdpa": {"x": "1"}}}, "sdpa.x"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(registry: Registry, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(TinyModel(), registry, EngineConfig(**options))


class Failing(SDPA):
    name = "failing"

    def decode(self, *args: object) -> None:
        raise RuntimeError("illegal memory access")


class FailingPlugin:
    @hookimpl
    def headway_register_backends(self) -> list[BackendInfo]:
        return [BackendInfo("failing", "raises in decode", lambda: Failing, api_version=2)]


@pytest.mark.parametrize("overlapped", [False, True], ids=["one by one", "overlapped"])
def test_a_backend_that_raises_ends_its_step_and_the_engine_goes_on(overlapped: bool) -> None:
    registry = create_registry([FailingPlugin()], load_entry_points=False)
    config = replace(SMALL, attn_backend="failing", async_scheduling=overlapped)
    engine = Engine(TinyModel(), registry, config)
    doomed = [
        engine.add_request(str(n), prompt, SamplingParams(temperature=0, max_tokens=4))[0] for n, prompt in enumerate(PROMPTS)
    ]
    changed = drain(engine)
    message = r"backend failing failed in decode \(layer 0, q \[5, 4, 8\].*illegal memory access"
    for seq in doomed:
        assert seq.finish_reason == "error"
        assert re.search(message, seq.error or "")
        assert seq in changed
        assert len(seq.output_token_ids) == 1, "the prompt's own step was good"
    engine.blocks.check_integrity([])
    assert engine.blocks.num_free == engine.blocks.num_blocks
    (good,) = engine.add_request("good", [1, 2, 3], SamplingParams(temperature=0, max_tokens=1))
    drain(engine)
    assert good.finish_reason == "length"
    assert good.num_cached_tokens == 0


def test_an_interrupt_while_the_host_waits_loses_no_token(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = run(Engine(TinyModel(), registry, SMALL), GREEDY, [[1, 2, 3]])
    engine = Engine(TinyModel(), registry, replace(SMALL, async_scheduling=True))
    (seq,) = engine.add_request("r", [1, 2, 3], GREEDY)
    wait, calls = Launched.wait, []

    def interrupted(launched: Launched) -> list[int]:
        calls.append(launched)
        if len(calls) in (3, 4, 9):
            raise KeyboardInterrupt
        return wait(launched)

    monkeypatch.setattr(Launched, "wait", interrupted)
    while engine.has_unfinished:
        with contextlib.suppress(KeyboardInterrupt):
            engine.step()
    assert len(calls) > 9
    assert seq.output_token_ids == expected


class Greedy(TinyModel):
    """Out of memory above `largest` tokens; NaN for one token."""

    largest = 10**9
    nan_for: int | None = None

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        if len(input_ids) > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        x = super().__call__(input_ids, positions, attention)
        if self.nan_for is not None:
            x = x.masked_fill((input_ids == self.nan_for)[:, None], math.nan)
        return x


@pytest.mark.parametrize("overlapped", [False, True], ids=["one by one", "overlapped"])
def test_a_step_without_memory_makes_steps_smaller_and_ends_nobody(registry: Registry, overlapped: bool) -> None:
    expected = run(Engine(TinyModel(), registry, SMALL), GREEDY)
    model = Greedy()
    model.largest = 3
    engine = Engine(model, registry, replace(SMALL, async_scheduling=overlapped))
    assert run(engine, GREEDY) == expected
    assert engine.scheduler.max_num_batched_tokens <= 3


def test_a_single_token_without_memory_is_an_error(registry: Registry) -> None:
    model = Greedy()
    model.largest = 0
    engine = Engine(model, registry, SMALL)
    (seq,) = engine.add_request("r", [1, 2, 3], GREEDY)
    drain(engine)
    assert seq.finish_reason == "error"
    assert "out of memory" in (seq.error or "")


@pytest.mark.parametrize("debug", ["0", "1"])
def test_nan_logits_end_that_request_only(registry: Registry, debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_DEBUG", debug)
    model = Greedy()
    model.nan_for = 7
    engine = Engine(model, registry, SMALL)
    (sick,), (well,) = engine.add_request("sick", [7], GREEDY), engine.add_request("well", [1, 2, 3], GREEDY)
    drain(engine)
    assert (sick.finish_reason, sick.output_token_ids) == ("error", [])
    assert "hold a NaN" in (sick.error or "")
    if 7 not in well.token_ids:
        assert well.finish_reason == "length"


class Sick(SDPA):
    name = "sick"

    def decode(self, q: torch.Tensor, cache: object, plan: object, out: torch.Tensor) -> None:
        out.fill_(math.nan)


class SickPlugin:
    @hookimpl
    def headway_register_backends(self) -> list[BackendInfo]:
        return [BackendInfo("sick", "writes NaN", lambda: Sick, api_version=2)]


def test_the_layer_that_made_the_first_nan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_DEBUG", "1")
    registry = create_registry([SickPlugin()], load_entry_points=False)
    engine = Engine(TinyModel(), registry, replace(SMALL, attn_backend="sick"))
    (seq,) = engine.add_request("r", [1, 2, 3], GREEDY)
    drain(engine)
    assert seq.error is not None
    assert "the first came from sick, in attention layer 0" in seq.error


def test_the_attention_op_is_opaque_to_the_compiler(registry: Registry) -> None:
    """Shape inference runs the op without touching cache or data, as torch.compile and graph capture need."""
    engine = Engine(TinyModel(), registry, SMALL)
    attention = engine._runner._attention
    with torch._subclasses.FakeTensorMode():
        q, kv = torch.empty(3, 4, 8), torch.empty(3, 2, 8)
        out = attention(0, q, kv, kv)
    assert out.shape == (3, 4, 8)
    assert math.isfinite(float(engine.caches[0].key.sum()))
    assert not engine.caches[0].key.any(), "nothing was written"
