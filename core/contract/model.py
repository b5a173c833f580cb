"""What the engine asks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from headway.core.contract.spec import AttentionSpec


class Attention(Protocol):
    """The one function through which a model attends; the engine hands it in."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim and v_head_dim].

        Returns [num_tokens, num_heads, v_head_dim].
        """


class Model(Protocol):
    """A decoder over packed tokens."""

    @property
    def attention_specs(self) -> Sequence[AttentionSpec]:
        """One spec a layer, in the order of `layer`."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def max_position_embeddings(self) -> int:
        """Positions the model was made for."""

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """input_ids, positions: int64 [num_tokens]. Returns hidden states [num_tokens, hidden_size]."""

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden_size]. Returns [rows, vocab_size] in the model's dtype: `out`, where it is given."""
