"""A model whose layers are of two kinds: one block table, and for each group of layers a layout and a writer of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.core.contract.errors import UnsupportedError
from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.engine import EngineParts, make_engine
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry
from run_engine import generate

PROMPTS = [[1, 2, 3], list(range(20)), [7], list(range(20, 45)), [*range(20, 40), 9, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
CONFIG = EngineConfig(block_size=16, kv_cache_memory=2**20, max_num_batched_tokens=24)


class TwoKinds:
    """A layer with keys and values of its own, and one whose values lie in its keys."""

    vocab_size = 50
    max_position_embeddings = 64

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        plain = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
        latent = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, v_head_dim=16, scale=0.2, value_in_key=True)
        self.attention_specs = [plain, replace(latent, v_head_dim=8), plain]
        self.embed = torch.randn(self.vocab_size, 32, generator=generator)
        self.places = torch.randn(self.max_position_embeddings, 32, generator=generator)
        self.qkv = torch.randn(3, 32, 64, generator=generator) * 0.3
        self.out = torch.randn(16, 32, generator=generator) * 0.3

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embed[input_ids] + self.places[positions]
        for layer in (0, 2):
            q, k, v = (x @ self.qkv[layer]).view(-1, 8, 8).split([4, 2, 2], dim=1)
            x = x + attention(layer, q, k, v).flatten(1)
            if layer == 0:
                q, k = (x @ self.qkv[1])[:, :48].view(-1, 3, 16).split([2, 1], dim=1)
                x = x + attention(1, q, k, k[..., :8]).flatten(1) @ self.out
        return x

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(hidden @ self.embed.T, 0.2, out=out)

    def greedy(self, prompt: list[int]) -> list[int]:
        """The tokens, from the whole text at every step and without a cache."""

        def dense(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            spec = self.attention_specs[layer]
            k, v = (each.repeat_interleave(spec.group_size, dim=1) for each in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
            later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
            return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)

        text = list(prompt)
        for _ in range(GREEDY.max_tokens):
            hidden = self(torch.tensor(text), torch.arange(len(text)), dense)
            text.append(int(self.compute_logits(hidden[-1:]).argmax()))
        return text[len(prompt) :]


@pytest.mark.parametrize(
    ("asked", "layouts"), [("auto", ["nhd", "latent", "nhd"]), ("vllm_5d", ["vllm_5d", "latent", "vllm_5d"])]
)
def test_each_group_has_its_layout_and_one_table_serves_all(registry: Registry, asked: str, layouts: list[str]) -> None:
    model = TwoKinds()
    engine = make_engine(EngineParts(model=model, source=registry, config=replace(CONFIG, kv_layout=asked)))
    assert [cache.layout.name for cache in engine.executor.caches] == layouts
    pool = engine.capacity.pool
    assert pool.num_bytes == sum(t.nbytes for cache in engine.executor.caches for t in cache.tensors.values())
    expected = [model.greedy(prompt) for prompt in PROMPTS]
    assert [written.token_ids for written in generate(engine, PROMPTS, GREEDY)] == expected
    again = generate(engine, PROMPTS, GREEDY)  # from the prefix cache, whole blocks and copied parts
    assert [written.token_ids for written in again] == expected
    assert [written.num_cached_tokens for written in again] == [0, 19, 0, 24, 21]
    tight = replace(CONFIG, kv_layout=asked, kv_cache_memory=6 * pool.num_bytes // pool.num_pages, max_model_len=64)
    short = make_engine(EngineParts(model=model, source=registry, config=tight))
    assert [written.token_ids for written in generate(short, PROMPTS, GREEDY)] == expected
    assert short.stats.num_preemptions > 0


def test_layout_that_no_layer_can_use_is_refused(registry: Registry) -> None:
    model = TwoKinds()
    model.attention_specs = model.attention_specs[1:2]
    with pytest.raises(UnsupportedError, match="needs a layout that keeps the value inside the key, got nhd"):
        make_engine(EngineParts(model=model, source=registry, config=replace(CONFIG, kv_layout="nhd")))
