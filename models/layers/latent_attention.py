"""Latent attention (MLA, DeepSeek-V2) with norms, projections, RoPE and the residual sum."""

from __future__ import annotations

from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.contract.model import Attention, LatentLayer
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.linear import Linear
from headway.kernels.step.config import LatentConfig
from headway.kernels.step.operations import Norm, Operations, Rope
from headway.models.config import DecoderConfig, LayerConfig, cached_spec, expanded_spec
from headway.models.layers.tensors import LayerTensors

_EPS = 1e-6
"""Epsilon of the latents' norms; DeepSeek's code and transformers always use this default."""


class LatentAttention:
    """Attention whose KV cache holds one latent per token, from which the keys and values of all heads are expanded."""

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, place: int, tensors: LayerTensors, batch_invariant: bool
    ) -> None:
        """place: index among the model's attention layers.

        :raises ModelError: if batch_invariant is requested, or the configuration has unsupported biases.
        """
        latent, names, hidden = config.latent, config.names.latent, config.hidden_size
        assert latent is not None
        if batch_invariant:
            raise ModelError("deterministic: the products of latent attention are not batch invariant; use another model")
        if config.qkv_bias and latent.q_lora_rank is None:
            raise ModelError("attention_bias: needs false where q_lora_rank is null, got true")
        self._place = place
        self._latent = latent
        heads = config.num_heads
        rank = latent.q_lora_rank
        q_rows = tensors.shard.heads * latent.q_dim
        name, first = (names.q, q_rows) if rank is None else (names.q_a, Axis.all(rank))
        rows = _query_rows(latent, heads) if rank is None else [*range(rank)]
        rows += [first.size + row for row in _order(latent, latent.kv_lora_rank)]
        self.norm = tensors.norm_if_any(config.names.attention_norm, hidden)
        self.first_proj = tensors.linear({name: first, names.kv_a: latent.kv_dim}, hidden, config.qkv_bias, rows)
        """Merged projection to the queries (or their latents) and to the KV latents."""
        self._first_size = first.size
        self.q_norm = None
        self.q_proj = None
        if rank is not None:
            self.q_norm = Norm(tensors.take(f"{names.q_a_norm}.weight", rank), _EPS)
            self.q_proj = tensors.linear({names.q_b: q_rows}, rank, False, _query_rows(latent, heads))
        self.kv_norm = Norm(tensors.take(f"{names.kv_a_norm}.weight", latent.kv_lora_rank), _EPS)
        expanded = tensors.shard.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        self._kv_b: Tensor | None = tensors.take(f"{names.kv_b}.weight", expanded, latent.kv_lora_rank)
        out = tensors.shard.heads * latent.v_head_dim
        self.out_proj = tensors.linear({config.names.o: hidden}, out, config.o_bias, scale=config.residual_scale)
        self.spec = cached_spec(config, layer, tensors.weights.dtype, tensors.weights.device)
        self._expanded = expanded_spec(config, latent, self.spec)
        self.layer: LatentLayer | None = None
        """Latent layer passed to the engine's attention; None until `absorb_norms` has run."""

    @property
    def linears(self) -> list[Linear]:
        """Linear layers of this part, in the order of computation."""
        return [self.first_proj, *([] if self.q_proj is None else [self.q_proj]), self.out_proj]

    def absorb_norms(self, ops: Operations) -> None:
        """Pass the up-projection from latents to the operations that compute the layer."""
        if self._kv_b is not None:
            self.layer = ops.latent_layer(self._expanded, self._latent, self._kv_b)
            self._kv_b = None

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """Return the updated residual stream. x: [num_tokens, hidden_size], overwritten. rope: from `Operations.embed`."""
        return self.add(x, self.mix(x, rope, ops, attention), ops)

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """Return the input of the output projection, as `StatePart.mix` does."""
        both = ops.norm_product(x, self.norm, self.first_proj, None)
        q, latent = both[:, : self._first_size], both[:, self._first_size :]
        if self.q_proj is not None:
            q = ops.norm_product(q, self.q_norm, self.q_proj, None)
        q, latent = ops.rotate_latent(q, latent, self._latent, self.kv_norm, rope)
        return attention(self._place, q, latent, latent[..., : self.spec.v_head_dim]).flatten(1)

    def add(self, x: Tensor, mixed: Tensor, ops: Operations) -> Tensor:
        """Return the updated residual stream, as `StatePart.add` does."""
        return ops.add_product(x, mixed, self.out_proj)


def _order(latent: LatentConfig, still: int) -> list[int]:
    """Return the order of a head's elements, or of a latent followed by its RoPE key, for half-split RoPE.

    still: number of elements before the rotated elements.
    """
    rotated = range(still, still + latent.qk_rope_head_dim)
    return [*range(still), *([*rotated[::2], *rotated[1::2]] if latent.interleaved else rotated)]


def _query_rows(latent: LatentConfig, num_heads: int) -> list[int]:
    """Return the row order of the query projection, with each head's elements in the order from `_order`."""
    return [head * latent.q_dim + row for head in range(num_heads) for row in _order(latent, latent.qk_nope_head_dim)]
