"""A model of a few lines that attends for real: enough for the engine, with nothing to download or train."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec


class TinyModel:
    """Two attention layers over random embeddings; every token depends on all before it."""

    vocab_size = 50
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

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(hidden @ self.embed.T, 0.2, out=out)  # flat enough for sampling to show
