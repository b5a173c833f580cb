"""A model of a few lines that attends for real, of any attention spec: random weights, nothing to download."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.testing.oracle import attend

HIDDEN = 64
LAYERS = 2


class TinyDecoder:
    """Two attention layers over random embeddings; every token depends on all before it, so greedy tokens show a wrong one."""

    vocab_size = 97
    max_position_embeddings = 512

    def __init__(self, spec: AttentionSpec) -> None:
        generator = torch.Generator().manual_seed(0)
        self.spec = spec
        self.attention_specs = [spec] * LAYERS
        self._sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.v_head_dim]

        def weights(*shape: int, scale: float) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

        self._weights = {
            "embed": weights(self.vocab_size, HIDDEN, scale=1.0),
            "places": weights(self.max_position_embeddings, HIDDEN, scale=0.5),
            "head": weights(self.vocab_size, HIDDEN, scale=HIDDEN**-0.5),
        }
        for layer in range(LAYERS):
            self._weights[f"qkv{layer}"] = weights(HIDDEN, sum(self._sizes), scale=HIDDEN**-0.5)
            self._weights[f"out{layer}"] = weights(spec.num_heads * spec.v_head_dim, HIDDEN, scale=4 * self._sizes[0] ** -0.5)
        self._cast = {name: tensor.to(spec.device, spec.dtype) for name, tensor in self._weights.items()}

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """input_ids, positions: int64 [num_tokens]. Returns hidden states [num_tokens, HIDDEN]."""
        return self._forward(self._cast, input_ids, positions, attention)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [rows, HIDDEN]. Returns [rows, vocab_size]."""
        return torch.matmul(hidden, self._cast["head"].T, out=out)

    def reference_logits(self, token_ids: list[int]) -> Tensor:
        """float64 [num_tokens, vocab_size]: one sequence as a whole, attended to by the kit's own reference."""

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(self.spec, q, k, v, 0)[0]

        ids = torch.tensor(token_ids)
        return self._forward(self._weights, ids, torch.arange(len(ids)), attention) @ self._weights["head"].T

    def _forward(self, weights: dict[str, Tensor], ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        spec = self.spec
        x = weights["embed"][ids] + weights["places"][positions]
        for layer in range(LAYERS):
            q, k, v = (x @ weights[f"qkv{layer}"]).split(self._sizes, dim=-1)  # type: ignore[no-untyped-call]
            q, k, v = (part.unflatten(-1, (heads, -1)) for part, heads in zip((q, k, v), _heads(spec), strict=True))
            v = k[..., : spec.v_head_dim] if spec.value_in_key else v
            x = x + attention(layer, q, k, v).flatten(1) @ weights[f"out{layer}"]
            x = x / x.pow(2).mean(-1, keepdim=True).sqrt()
        return x


def _heads(spec: AttentionSpec) -> tuple[int, int, int]:
    return spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
