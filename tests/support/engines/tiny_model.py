"""A model of a few lines that attends for real: enough for the engine, with nothing to download or train."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec


class TextModel:
    """What models of a few lines share: logits from the embeddings, and the tokens without a cache to compare with."""

    vocab_size = 50
    embed: Tensor
    attention_specs: list[AttentionSpec]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(hidden @ self.embed.T, 0.2, out=out)  # flat enough for sampling to show

    def dense(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a layer over a whole text."""
        spec = self.attention_specs[layer]
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        ages = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (ages < 0) | (ages >= (spec.sliding_window or len(q)))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The tokens, from the whole text at every step and without a cache."""
        text = list(prompt)
        for _ in range(max_tokens):
            hidden = self(torch.tensor(text), torch.arange(len(text)), self.dense)  # type: ignore[operator]
            text.append(int(self.compute_logits(hidden[-1:]).argmax()))
        return text[len(prompt) :]


class TinyModel(TextModel):
    """Two attention layers over random embeddings; every token depends on all before it."""

    max_position_embeddings = 128

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.attention_specs = [AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)] * 2
        self.embed = torch.randn(self.vocab_size, 32, generator=generator)
        self.places = torch.randn(self.max_position_embeddings, 32, generator=generator)
        self.qkv = torch.randn(2, 32, 64, generator=generator) * 0.3

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embed[input_ids] + self.places[positions]
        for layer in range(2):
            q, k, v = (x @ self.qkv[layer]).view(-1, 8, 8).split([4, 2, 2], dim=1)
            x = x + attention(layer, q, k, v).flatten(1)
        return x
