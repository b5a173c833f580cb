"""A model that is pooled: an encoder, or a decoder whose layers get no cache, with its head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.models.encoders.encoder import Encoder
from headway.models.encoders.pooling.heads import PoolingHead
from headway.models.layers.decoder import Decoder


class PooledModel:
    """See `core.pooling.engine.PooledNetwork`."""

    def __init__(self, body: Encoder | Decoder, head: PoolingHead, causal: bool) -> None:
        """causal: whether a query sees no later key; an encoder's sees all."""
        self._body = body
        self.head = head
        self.attention_specs: Sequence[AttentionSpec] = [
            replace(spec, dense=True, causal=causal) for spec in body.attention_specs
        ]

    @property
    def size(self) -> int:
        """Numbers that a text becomes, or each of its tokens."""
        return self.head.size

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._body.config.vocab_size

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention, token_types: Tensor | None = None) -> Tensor:
        """Return hidden states [num_tokens, hidden_size]. input_ids, positions, token_types: int64 [num_tokens]."""
        if isinstance(self._body, Encoder):
            return self._body(input_ids, positions, attention, token_types)
        return self._body(input_ids, positions, attention)

    def pool(self, hidden: Tensor, starts: Tensor, each_token: bool) -> Tensor:
        """Return float32 [texts, size], or [num_tokens, size] where each token gets a row. starts: int64 [texts + 1]."""
        return self.head(hidden, starts, each_token)
