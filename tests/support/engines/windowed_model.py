"""A model of a few lines whose layers have windows: enough for the engine, with the answer to compare with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec


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

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The tokens, from the whole text at every step and without a cache."""

        def dense(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            spec = self.attention_specs[layer]
            k, v = (each.repeat_interleave(spec.group_size, dim=1) for each in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
            ages = torch.arange(len(q))[:, None] - torch.arange(len(q))
            hidden = (ages < 0) | (ages >= (spec.sliding_window or len(q)))
            return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

        text = list(prompt)
        for _ in range(max_tokens):
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
