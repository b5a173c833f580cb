"""Kinds of layers with backends and cache dtypes of their own write the tokens of the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine_logits import observed
from graph_stub import AsItIs
from headway.backends.sdpa import SDPA
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.metadata import Phase
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry
from headway.testing.broken.attention import PlainBackend
from tiny_engine import generate, made_engine, registering, tokens_of
from windowed_model import MODELS

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SHARED = torch.randint(50, (90,), generator=torch.Generator().manual_seed(5)).tolist()
PROMPTS = [[1, 2, 3], SHARED, [*SHARED[:61], 9, 9], [7], [*SHARED, 4], SHARED[::-1]]
CONFIG = EngineConfig(kv_cache_memory=2**20, max_num_batched_tokens=48)


class Far(PlainBackend):
    """Computes layers that see every key, and no others."""

    name = "far"
    graph_level = GraphLevel.UNIFORM
    capabilities = replace(PlainBackend.capabilities, features=frozenset())


class Near(SDPA):
    """Computes layers with a window, and fails in others."""

    name = "near"

    def plan(self, metadata: object) -> object:
        assert self.spec.sliding_window is not None
        return super().plan(metadata)


def rounded(x: Tensor, dtype: str) -> Tensor:
    """Return what a cache gives back for x [tokens, heads, elements]."""
    if dtype == "fp8_e4m3":
        return x.to(torch.float8_e4m3fn).float()
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales).round() * scales


def engine_of(name: str, registry: Registry, **options: object) -> EngineLoop:
    return made_engine(MODELS[name], registry, replace(CONFIG, **options))


@pytest.mark.parametrize("name", ["one of six sees all", "two windows", "other heads"])
def test_kinds_on_backends_of_their_own_write_what_the_reference_writes(name: str) -> None:
    """In chunks, with prefix hits in part and whole, after preemption."""
    registry = registering(far=Far, near=Near)
    options = {"attn_backend": {"window": "near", "full:decode": "far", "full:prefill": "sdpa"}, "block_size": 8}
    engine = engine_of(name, registry, **options)
    assert {kind: part.names[Phase.DECODE] for kind, part in engine.selection.parts.items()} == {"window": "near", "full": "far"}
    expected = [MODELS[name].greedy(prompt, 24) for prompt in PROMPTS]
    assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected
    assert {backend for phase, backend in engine.stats.steps_by_phase if phase == "decode"} <= {"near+far", "far+near"}
    again = generate(engine, PROMPTS, GREEDY)
    assert tokens_of(again) == expected
    assert [each.num_cached_tokens for each in again][1] == 89
    assert sum(usage.num_freed for usage in engine.blocks.usage([])) > 20
    pages = engine.capacity.pool.page_format
    tight = (pages.pages_for(128, 55) + 2) * pages.page_bytes
    short = engine_of(name, registry, **options, kv_cache_memory=tight, max_model_len=128)
    assert tokens_of(generate(short, PROMPTS, GREEDY)) == expected
    assert short.stats.num_preemptions > 0


def test_graphs_hold_the_backends_of_all_kinds() -> None:
    registry = registering(far=Far, plain=type("Plain", (PlainBackend,), {"graph_level": GraphLevel.UNIFORM}))
    engine = engine_of("two windows", registry, attn_backend="window=plain,full=far", max_num_seqs=6, block_size=8)
    engine.executor.capture(AsItIs())
    expected = [MODELS["two windows"].greedy(prompt, 24) for prompt in PROMPTS]
    assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected
    assert engine.stats.num_graph_steps > 20


@pytest.mark.parametrize(("dtype", "layout"), [("int8_per_token_head", "nhd_int8"), ("fp8_e4m3", "nhd")])
def test_full_layers_with_a_cache_of_8_bits_beside_windows_without(registry: Registry, dtype: str, layout: str) -> None:
    options = {"kv_cache_dtype": f"full={dtype},window=auto", "attn_backend": "window=sdpa.math,full=sdpa"}
    engine = engine_of("two windows", registry, **options)
    caches = engine.executor.caches
    assert [cache.layout.name for cache in caches] == ["nhd", layout, "nhd"]
    assert [cache.key.element_size() for cache in caches] == [4, 1, 4]
    model = MODELS["two windows"]

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        is_full = model.attention_specs[layer].sliding_window is None
        return model.dense(layer, q, *((rounded(k, dtype), rounded(v, dtype)) if is_full else (k, v)))

    for _ in range(2):  # the second time from the prefix cache
        for prompt, (tokens, logits, _) in zip(PROMPTS, observed(engine, PROMPTS, 12), strict=True):
            text = torch.tensor([*prompt, *tokens[:-1]])
            right, plain = (
                model.compute_logits(model(text, torch.arange(len(text)), each)[len(prompt) - 1 :])
                for each in (attention, model.dense)
            )
            assert (logits - right).norm() < 0.01 * right.norm() < (plain - right).norm()
    short = [[number, 49 - number] for number in range(6)]
    long = SamplingParams(temperature=0, max_tokens=60)
    expected = tokens_of(generate(engine, short, long))
    pages = engine.capacity.pool.page_format
    tight = (pages.pages_for(128, 55) + 2) * pages.page_bytes
    full = engine_of("two windows", registry, **options, kv_cache_memory=tight, max_model_len=128)
    assert tokens_of(generate(full, short, long)) == expected
    assert full.stats.num_preemptions > 0


def test_a_backend_that_cannot_compute_a_kind_is_refused_for_it_with_a_fix_that_keeps_the_rest() -> None:
    registry = registering(far=Far)
    with pytest.raises(UnsupportedError, match="^window layers: attention backend far .*sliding_window") as refused:
        engine_of("two windows", registry, attn_backend="window=far,full=far")
    assert "nearest fix: --attn-backend full=far,window=auto" in str(refused.value)
    assert (
        engine_of("two windows", registry, attn_backend="full=far,window=auto").selection.parts["full"].names[Phase.DECODE]
        == "far"
    )
