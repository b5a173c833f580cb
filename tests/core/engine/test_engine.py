"""The engine: what comes out does not depend on how the work was cut, and a fault leaks nothing."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from headway.backends.sdpa import SDPA
from headway.core.contract.errors import ConfigError, PromptError, UnsupportedError
from headway.core.contract.model import Attention
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.step import Sampled
from headway.core.engine.execution.host_rows import Launched
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry
from tiny_engine import TinyModel, Told, Written, drain, generate, made_engine, registering, tokens_of

PROMPTS = [[1, 2, 3], list(range(20)), [7], list(range(20, 45)), [5] * 11]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SMALL = EngineConfig(block_size=8, kv_cache_memory=2**20)


def run(engine: EngineLoop, params: SamplingParams | list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return tokens_of(generate(engine, prompts, params))


def one(engine: EngineLoop, prompt: list[int], params: SamplingParams) -> Written:
    (written,) = generate(engine, [prompt], params)
    return written


@pytest.mark.sampled(2)
@pytest.mark.parametrize("overlapped", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0, max_tokens=20), SamplingParams(seed=3, max_tokens=20)], ids=str)
def test_batching_chunking_and_preemption_change_no_token(registry: Registry, params: SamplingParams, overlapped: bool) -> None:
    alone = [run(made_engine(TinyModel(), registry, SMALL), params, [prompt])[0] for prompt in PROMPTS]
    together = run(made_engine(TinyModel(), registry, SMALL), params)
    overlap = replace(SMALL, async_scheduling=overlapped)
    chunked = replace(overlap, max_num_batched_tokens=6)
    tight = replace(overlap, max_model_len=64, kv_cache_memory=9 * 8 * 512, max_num_batched_tokens=16)
    engine = made_engine(TinyModel(), registry, tight)
    assert run(made_engine(TinyModel(), registry, overlap), params) == alone
    assert together == alone
    assert run(made_engine(TinyModel(), registry, chunked), params) == alone
    assert run(engine, params) == alone
    assert engine.stats.num_preemptions > 0


def test_without_seeds_the_engine_seed_decides_and_requests_differ(registry: Registry) -> None:
    def engine(seed: int) -> EngineLoop:
        return made_engine(TinyModel(), registry, EngineConfig(block_size=8, kv_cache_memory=2**20, seed=seed))

    params = SamplingParams(temperature=2.0, max_tokens=20)
    first, again, other = (run(engine(seed), params, [[1, 2, 3]] * 3) for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(tokens) for tokens in first}) == 3


def test_the_completions_of_neighbouring_seeds_differ(registry: Registry) -> None:
    def completions(seed: int, n: int) -> list[tuple[int, ...]]:
        engine = made_engine(TinyModel(), registry, SMALL)
        engine.add_request("r", engine.limits.checked([1, 2, 3], SamplingParams(n=n, seed=seed, temperature=2.0, max_tokens=12)))
        return [tuple(each.token_ids) for _, each in sorted(drain(engine).items())]

    of_each = {seed: completions(seed, 3) for seed in (-3, -2, 5, 6, 7)}
    assert len({each for found in of_each.values() for each in found}) == 15
    assert all(completions(seed, 1) == found[:1] for seed, found in of_each.items())


def test_stop_tokens_and_lengths_end_sequences(registry: Registry) -> None:
    greedy = GREEDY
    (tokens,) = run(made_engine(TinyModel(), registry, SMALL), greedy, [[1, 2, 3]])
    at = next(n for n, token in enumerate(tokens) if token not in tokens[:n] and n > 2)

    def ended(params: SamplingParams, eos: frozenset[int] = frozenset(), config: EngineConfig = SMALL) -> tuple[int, str | None]:
        written = one(made_engine(TinyModel(), registry, config, eos_token_ids=eos), [1, 2, 3], params)
        return len(written.token_ids), written.finish_reason

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
    engine = made_engine(TinyModel(), registry, SMALL)
    with pytest.raises(PromptError, match=words):
        engine.add_request("r", engine.limits.checked(prompt, SamplingParams()))
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
        made_engine(TinyModel(), registry, EngineConfig(**options))


class Failing(SDPA):
    name = "failing"

    def decode(self, *args: object) -> None:
        raise RuntimeError("illegal memory access")


@pytest.mark.parametrize("overlapped", [False, True], ids=["one by one", "overlapped"])
def test_a_backend_that_raises_ends_its_step_and_the_engine_goes_on(overlapped: bool) -> None:
    registry = registering(failing=Failing)
    engine = made_engine(TinyModel(), registry, replace(SMALL, attn_backend="failing", async_scheduling=overlapped))
    message = r"backend failing failed in decode \(layer 0, q \[5, 4, 8\].*illegal memory access"
    for doomed in generate(engine, PROMPTS, SamplingParams(temperature=0, max_tokens=4)):
        assert doomed.finish_reason == "error"
        assert re.search(message, doomed.error or "")
        assert len(doomed.token_ids) == 1, "the prompt's own step was good"
    good = one(engine, PROMPTS[1], SamplingParams(temperature=0, max_tokens=1))
    assert good.finish_reason == "length"
    assert good.num_cached_tokens == 0


def test_an_interrupt_while_the_host_waits_loses_no_token(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = run(made_engine(TinyModel(), registry, SMALL), GREEDY, [[1, 2, 3]])
    engine = made_engine(TinyModel(), registry, replace(SMALL, async_scheduling=True))
    engine.add_request("r", engine.limits.checked([1, 2, 3], GREEDY))
    wait, calls = Launched.wait, []

    def interrupted(launched: Launched) -> Sampled:
        calls.append(launched)
        if len(calls) in (3, 4, 9):
            raise KeyboardInterrupt
        return wait(launched)

    monkeypatch.setattr(Launched, "wait", interrupted)
    written: dict[tuple[str, int], Written] = {}
    while engine.has_unfinished:
        with contextlib.suppress(KeyboardInterrupt):
            drain(engine, written)
    assert len(calls) > 9
    assert written["r", 0].token_ids == expected


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
def test_out_of_memory_makes_steps_smaller_and_ends_no_request(registry: Registry, overlapped: bool) -> None:
    expected = run(made_engine(TinyModel(), registry, SMALL), GREEDY)
    model = Greedy()
    model.largest = 3
    engine = made_engine(model, registry, replace(SMALL, async_scheduling=overlapped))
    assert run(engine, GREEDY) == expected
    assert engine.scheduler.max_num_batched_tokens <= 3


def test_a_single_token_without_memory_is_an_error(registry: Registry) -> None:
    model = Greedy()
    model.largest = 0
    seq = one(made_engine(model, registry, SMALL), [1, 2, 3], GREEDY)
    assert seq.finish_reason == "error"
    assert "out of memory" in (seq.error or "")


@pytest.mark.parametrize("debug", ["0", "1"])
def test_nan_logits_end_that_request_only(registry: Registry, debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_DEBUG", debug)
    model = Greedy()
    model.nan_for = 7
    sick, well = generate(made_engine(model, registry, SMALL), [[7], [1, 2, 3]], GREEDY)
    assert (sick.finish_reason, sick.token_ids) == ("error", [])
    assert "hold a NaN" in (sick.error or "")
    if 7 not in well.token_ids:
        assert well.finish_reason == "length"


class Sick(SDPA):
    name = "sick"

    def decode(self, q: torch.Tensor, cache: object, plan: object, out: torch.Tensor) -> None:
        out.fill_(math.nan)


def test_the_layer_that_made_the_first_nan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_DEBUG", "1")
    engine = made_engine(TinyModel(), registering(sick=Sick), replace(SMALL, attn_backend="sick"))
    seq = one(engine, [1, 2, 3], GREEDY)
    assert seq.error is not None
    assert "the first came from sick, in attention layer 0" in seq.error


def test_the_attention_op_is_opaque_to_the_compiler(registry: Registry) -> None:
    """Shape inference runs the op without touching cache or data, as torch.compile and graph capture need."""
    engine = made_engine(TinyModel(), registry, SMALL)
    attention, caches = engine.executor.attention, engine.executor.caches
    with torch._subclasses.FakeTensorMode():
        q, kv = torch.empty(3, 4, 8), torch.empty(3, 2, 8)
        out = attention(0, q, kv, kv)
    assert out.shape == (3, 4, 8)
    assert math.isfinite(float(caches[0].key.sum()))
    assert not caches[0].key.any(), "nothing was written"


def test_an_fp8_cache_halves_the_memory_and_keeps_the_tokens_near(registry: Registry) -> None:
    """In the engine, through chunks, preemption and prefix copies; the pool obeys the type that was asked for."""
    half = replace(SMALL, kv_cache_dtype="fp8_e4m3")
    plain, small = (made_engine(TinyModel(), registry, SMALL), made_engine(TinyModel(), registry, half))
    assert {cache.key.dtype for cache in small.executor.caches} == {torch.float8_e4m3fn}
    assert small.capacity.pool.num_pages == 4 * plain.capacity.pool.num_pages
    expected, whole = run(plain, GREEDY), run(small, GREEDY)
    same = sum(a == b for wide, narrow in zip(expected, whole, strict=True) for a, b in zip(wide, narrow, strict=True))
    assert same > 20, "the first tokens of most prompts"
    tight = replace(half, max_model_len=64, kv_cache_memory=18 * 8 * 64, max_num_batched_tokens=16)
    engine = made_engine(TinyModel(), registry, tight)
    assert run(engine, GREEDY) == whole
    assert engine.stats.num_preemptions > 0


class Half(SDPA):
    name = "half"
    capabilities = replace(SDPA.capabilities, kv_dtypes=())


def test_a_cache_type_that_a_backend_does_not_read_is_refused_with_the_reason() -> None:
    registry = registering(half=Half)
    with pytest.raises(UnsupportedError, match="kv_cache_dtype: needs the layer's dtype, got fp8_e4m3"):
        made_engine(TinyModel(), registry, replace(SMALL, attn_backend="half", kv_cache_dtype="fp8_e4m3"))
    int8 = replace(SMALL, attn_backend="half", kv_cache_dtype="int8_per_token_head")
    with pytest.raises(UnsupportedError, match="kv_cache_dtype: needs the layer's dtype, got int8_per_token_head") as caught:
        made_engine(TinyModel(), registry, int8)
    assert "--attn-backend auto --kv-layout nhd_int8" in str(caught.value)
    plain = replace(int8, attn_backend="sdpa", kv_layout="hnd")
    with pytest.raises(UnsupportedError, match="with a scale for each token and head, got hnd"):
        made_engine(TinyModel(), registry, plain)


@pytest.mark.parametrize("overlapped", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0, max_tokens=20), SamplingParams(seed=3, max_tokens=20)], ids=str)
def test_drafts_change_no_token_and_spare_steps(registry: Registry, params: SamplingParams, overlapped: bool) -> None:
    config = replace(SMALL, async_scheduling=overlapped)
    plain = made_engine(TinyModel(), registry, config)
    expected = run(plain, params)
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)]

    def propose(token_ids: list[int]) -> list[int]:
        """What will come, with a mistake now and then."""
        (text,) = (text for text in texts if text[: len(token_ids)] == token_ids)
        guesses = text[len(token_ids) : len(token_ids) + 3]
        return guesses[:1] + [(guess + (len(token_ids) % 4 == 0)) % 50 for guess in guesses[1:]]

    engine = made_engine(TinyModel(), registry, config, proposer=Told(propose), measured=False)
    assert run(engine, params) == expected
    assert engine.stats.num_steps < plain.stats.num_steps / 2
    assert run(made_engine(TinyModel(), registry, config, proposer=Told(lambda _: [1, 2]), measured=False), params) == expected
    tight = replace(config, max_model_len=48, kv_cache_memory=12 * 8 * 256)
    engine = made_engine(TinyModel(), registry, tight, proposer=Told(propose), measured=False)
    assert run(engine, params) == expected
    assert engine.stats.num_preemptions > 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("layout", "kv_cache_dtype"), [("nhd", "fp8_e4m3"), ("hnd", "auto"), ("vllm_5d", "auto"), ("nhd_int8", "int8_per_token_head")]
)
def test_prefix_hit_of_part_of_a_block_changes_no_token(registry: Registry, layout: str, kv_cache_dtype: str) -> None:
    """Prompts that share beginnings of all lengths, of finished and of running sequences, in a pool that is short."""
    random = Random(0)
    texts = [[random.randrange(50) for _ in range(60)] for _ in range(3)]
    prompts = [[*random.choice(texts)[: random.randint(1, 60)], random.randrange(50)] for _ in range(40)]
    config = replace(
        SMALL, block_size=32, kv_layout=layout, kv_cache_dtype=kv_cache_dtype, max_num_seqs=5, max_num_batched_tokens=64
    )
    whole = made_engine(TinyModel(), registry, replace(config, enable_prefix_caching=False))
    short = 8 * 32 * {"auto": 256, "fp8_e4m3": 64, "int8_per_token_head": 96}[kv_cache_dtype]
    engine = made_engine(TinyModel(), registry, replace(config, kv_cache_memory=short, max_model_len=128))
    params = SamplingParams(temperature=0, max_tokens=12)
    written = generate(engine, prompts, params)
    assert tokens_of(written) == run(whole, params, prompts)
    assert engine.stats.num_preemptions > 0
    assert any(each.num_cached_tokens % 32 for each in written)


def test_prefix_hits_count_by_the_token_at_any_block_size(registry: Registry) -> None:
    shared = [token % 50 for token in range(100)]
    for block_size in (8, 64, 128):
        engine = made_engine(TinyModel(), registry, replace(SMALL, block_size=block_size))
        params = SamplingParams(temperature=0, max_tokens=4)
        first, again, longer = (one(engine, prompt, params) for prompt in (shared, shared, [*shared, 7, 7]))
        assert (first.num_cached_tokens, again.num_cached_tokens, longer.num_cached_tokens) == (0, 99, 100), block_size
        assert again.token_ids == first.token_ids
        nine = SamplingParams(temperature=0, max_tokens=9)
        engine.add_request("running", engine.limits.checked([*shared[:50], *[3] * 20], nine))
        engine.step()  # a running sequence's block is shared as far as it is filled
        engine.add_request("beside", engine.limits.checked([*shared[:50], *[3] * 15], params))
        assert drain(engine)["beside", 0].num_cached_tokens == 64


def test_requests_are_added_and_aborted_by_id(registry: Registry) -> None:
    engine = made_engine(TinyModel(), registry, replace(SMALL, async_scheduling=True))
    expected = run(engine, GREEDY, PROMPTS[:2])
    for name in ("left", "stays", "half"):
        engine.add_request(name, engine.limits.checked(PROMPTS[name == "stays"], replace(GREEDY, n=2)))
    with pytest.raises(ConfigError, match="request_id: needs an id not in use, got 'left'"):
        engine.add_request("left", engine.limits.checked([1], GREEDY))
    early = engine.step() + engine.step()
    engine.abort("left")
    engine.abort("half", 1)
    engine.abort("nobody")
    written = drain(engine)
    assert sorted(written) == [("half", 0), ("stays", 0), ("stays", 1)], "an aborted completion is heard of no more"
    first = {(delta.request_id, delta.completion): delta.new_token_ids for delta in early}
    for number, key in enumerate([("half", 0), ("stays", 0), ("stays", 1)]):
        assert [*first.get(key, ()), *written[key].token_ids] == expected[min(number, 1)]
    engine.add_request("left", engine.limits.checked([1], GREEDY))  # the id is free again
    engine.abort_all()
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("size", "expected"),
    [("2GiB", 2 * 1024**3), ("512MB", 512 * 10**6), ("1.5G", 1_500_000_000), ("64kib", 65536), ("1000", 1000), (77, 77)],
)
def test_a_size_is_a_number_or_a_text(size: str | int, expected: int) -> None:
    assert EngineConfig(kv_cache_memory=size).pool_bytes == expected


@pytest.mark.parametrize("size", ["", "0", "-1GiB", "many", "1 lot", "nan", "1 2", 0, -5, 1.5, True, [1]], ids=repr)
def test_any_other_size_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="^kv_cache_memory: needs a positive number of bytes such as 2GiB or 512MiB, got"):
        EngineConfig(kv_cache_memory=size)
