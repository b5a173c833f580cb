"""A model of a few lines whose layers have windows: enough for the engine, with the answer to compare with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from tiny_engine import TextModel


class Windowed(TextModel):
    """Layers of several windows and numbers of heads; every token depends on all that its layers see."""

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


MODELS = {
    "one of six sees all": Windowed(*[(12, 2)] * 5, (None, 2)),
    "all windowed": Windowed((20, 2), (20, 2)),
    "two windows": Windowed((9, 2), (None, 2), (30, 2)),
    "other heads": Windowed((12, 1), (None, 4), (12, 1), (12, 1)),
    "a window of one": Windowed((1, 2), (None, 2)),
}
