"""Windowed layers give back what lies behind their windows: the tokens stay the same, and more sequences fit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from driving import Written, generate
from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.config import EngineConfig
from headway.core.engine.engine import Engine
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry

GREEDY = SamplingParams(temperature=0, max_tokens=40)
CONFIG = EngineConfig(block_size=8, kv_cache_memory=2**20, max_num_batched_tokens=48)


class Windowed:
    """Layers of several windows and numbers of heads; every token depends on all that its layers see."""

    vocab_size = 50
    max_position_embeddings = 256

    def __init__(self, *layers: tuple[int | None, int]) -> None:
        """layers: window and kv heads of each."""
        generator = torch.Generator().manual_seed(0)
        spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)
        self.attention_specs = [replace(spec, sliding_window=window, num_kv_heads=heads) for window, heads in layers]
        self.embed = torch.randn(self.vocab_size, 32, generator=generator)
        self.places = torch.randn(self.max_position_embeddings, 32, generator=generator)
        self.qkv = torch.randn(len(layers), 32, 96, generator=generator) * 0.5

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embed[input_ids] + self.places[positions]
        for layer, spec in enumerate(self.attention_specs):
            heads = [4, spec.num_kv_heads, spec.num_kv_heads]
            q, k, v = (x @ self.qkv[layer])[:, : 8 * sum(heads)].view(-1, sum(heads), 8).split(heads, dim=1)
            x = x + attention(layer, q, k, v).flatten(1)
            x = x / x.norm(dim=-1, keepdim=True) * 6
        return x

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(hidden @ self.embed.T, 0.2, out=out)

    def greedy(self, prompt: list[int]) -> list[int]:
        """The tokens, from the whole text at every step and without a cache."""

        def dense(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            spec = self.attention_specs[layer]
            k, v = (each.repeat_interleave(spec.group_size, dim=1) for each in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
            ages = torch.arange(len(q))[:, None] - torch.arange(len(q))
            hidden = (ages < 0) | (ages >= (spec.sliding_window or len(q)))
            return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

        text = list(prompt)
        for _ in range(GREEDY.max_tokens):
            hidden = self(torch.tensor(text), torch.arange(len(text)), dense)
            text.append(int(self.compute_logits(hidden[-1:]).argmax()))
        return text[len(prompt) :]


MODELS = {
    "one of six sees all": Windowed(*[(12, 2)] * 5, (None, 2)),
    "all windowed": Windowed((20, 2), (20, 2)),
    "two windows": Windowed((9, 2), (None, 2), (30, 2)),
    "other heads": Windowed((12, 1), (None, 4), (12, 1), (12, 1)),
    "a window of one": Windowed((1, 2), (None, 2)),
}
_random = Random(3)
SHARED = [_random.randrange(50) for _ in range(90)]
PROMPTS = [
    [1, 2, 3],
    SHARED,
    [_random.randrange(50) for _ in range(150)],
    [7],
    [*SHARED[:61], 9, 9],
    [*SHARED, 4],
]


def tokens(written: list[Written]) -> list[list[int]]:
    return [each.token_ids for each in written]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["nhd", "vllm_5d"])
def test_tokens_are_those_of_a_cache_that_keeps_all(registry: Registry, name: str, layout: str) -> None:
    """Sequences many times longer than the windows: chunks of prompts, prefix hits in part and whole, and preemption."""
    model = MODELS[name]
    config = replace(CONFIG, kv_layout=layout)
    engine = Engine(model, registry, config)
    expected = [model.greedy(prompt) for prompt in PROMPTS]
    assert tokens(generate(engine, PROMPTS, GREEDY)) == expected
    assert sum(usage.given_back for usage in engine.blocks.usage([])) > 40
    again = generate(engine, PROMPTS, GREEDY)
    assert tokens(again) == expected
    assert [each.num_cached_tokens for each in again] == [0, 89, 149, 0, 62, 90]
    one = engine.capacity.pool.page_format.pages_for(200, 8) + 12
    tight = replace(config, kv_cache_memory=one * engine.capacity.pool.page_format.page_bytes, max_model_len=192)
    short = Engine(model, registry, replace(tight, async_scheduling=True))
    assert tokens(generate(short, PROMPTS, GREEDY)) == expected
    assert short.scheduler.num_preemptions > 0
    kept = Engine(model, registry, replace(config, free_window_blocks=False))
    assert tokens(generate(kept, PROMPTS, GREEDY)) == expected
    assert [usage.given_back for usage in kept.blocks.usage([])] == [0]
