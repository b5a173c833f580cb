"""Attention parts of a layer, with norms, projections, RoPE and the residual sum: self-attention, and latent attention (MLA)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.contract.layer import Invariance
from headway.core.contract.model import Attention, LatentLayer
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.linear import Linear
from headway.kernels.step.config import LatentConfig
from headway.kernels.step.operations import Gate, Heads, Norm, NormShare, Operations, Rope
from headway.models.config import DecoderConfig, LayerConfig, cached_spec, expanded_spec
from headway.models.families.rope import rotary_order
from headway.models.layers.tensors import LayerTensors


class SelfAttention:
    """Multi-head, grouped-query or multi-query attention."""

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, place: int, tensors: LayerTensors, invariance: Invariance
    ) -> None:
        """place: index among the model's attention layers. invariance: level that the attention backend must keep."""
        self._place = place
        weights, names, whole = tensors.weights, config.names, config
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = tensors.shard.heads, tensors.shard.kv_heads
        if layer.shares_kv is not None:  # the layer projects q only
            config, kv_heads = replace(config, num_kv_heads=0), Axis.all(0)
        q, kv = heads * (2 * dim if config.output_gate else dim), kv_heads * dim
        order = None if layer.rope is None else _order(config, config.ropes[layer.rope].rotary_dim)
        count = 1 if layer.shares_kv is not None else 2 if layer.value_is_key else 3
        sizes = (
            {names.qkv[0]: q + kv + kv} if len(names.qkv) == 1 else dict(zip(names.qkv[:count], (q, kv, kv)[:count], strict=True))
        )
        self.norm = tensors.norm_if_any(names.attention_norm, hidden)
        rows = _rows(config, order, layer.value_is_key)
        self.qkv_proj = tensors.linear(sizes, hidden, config.qkv_bias, rows, _scales(config))
        q_norm, k_norm = _head_norms(config, tensors, order)
        v_norm = None
        if config.v_norm and config.num_kv_heads:
            v_norm = Norm(torch.ones(dim, dtype=weights.dtype, device=weights.device), config.norm_eps)
        self.heads = Heads(config.num_heads, config.num_kv_heads, dim, q_norm, k_norm, v_norm)
        scale = config.residual_scale * config.multipliers.attention
        self._difference = HeadDifference(config, place, tensors) if config.differential else None
        out = heads.piece(0, 2) * (2 * dim) if config.differential else heads * dim
        self.out_proj = tensors.linear({names.o: hidden}, out, config.o_bias, scale=scale)
        self.post_norm = tensors.norm_if_any(names.attention_post_norm, hidden)
        self.gate = Gate("sigmoid") if config.output_gate else None
        self._can_absorb = layer.rope is not None and not self.heads.whole_norm
        sinks = None
        if config.sinks:
            held = tensors.take(names.sinks, heads)
            sinks = tuple(([0.0] * heads.size) if held.is_meta else held.tolist())
        self.spec = cached_spec(whole, layer, weights.dtype, weights.device, sinks=sinks, invariance=invariance)
        """Spec of the KV cache that the layer reads, its own or another layer's."""

    @property
    def linears(self) -> list[Linear]:
        """Linear layers of this part, in the order of computation."""
        return [self.qkv_proj, self.out_proj]

    def absorb_norms(self, ops: Operations) -> None:
        """Merge the norm into the linear layer after it, if the operations support merging."""
        if self.norm is not None and self._can_absorb:
            norm, qkv_proj = ops.absorb(self.norm, self.qkv_proj)
            self.norm = norm
            self.qkv_proj = qkv_proj

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """Return the updated residual stream. x: [num_tokens, hidden_size], overwritten. rope: from `Operations.embed`."""
        return self.add(x, self.mix(x, rope, ops, attention), ops)

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """Return the input of the output projection, as `StatePart.mix` does."""
        q, k, v = ops.norm_qkv(x, self.norm, self.qkv_proj, self.heads, rope)
        if self._difference is not None:
            return self._difference(attention(self._place, q, k, self._difference.values(v)), ops)
        if self.gate is None:
            return attention(self._place, q, k, v).flatten(1)
        v, by = v.tensor_split([self.heads.num_kv_heads], dim=1)
        return ops.gate(attention(self._place, q, k, v).flatten(1), by.flatten(1), self.gate)

    def add(self, x: Tensor, mixed: Tensor, ops: Operations) -> Tensor:
        """Return the updated residual stream, as `StatePart.add` does."""
        if self.post_norm is None:
            return ops.add_product(x, mixed, self.out_proj)
        return ops.add_norm(x, ops.product(mixed, self.out_proj), self.post_norm)


class HeadDifference:
    """Differential attention around a backend's attention (`DecoderConfig.differential`)."""

    def __init__(self, config: DecoderConfig, layer: int, tensors: LayerTensors) -> None:
        """layer: index of the layer in the model."""
        names = [config.names.lambdas.format(each) for each in ("q1", "k1", "q2", "k2")]
        q1, k1, q2, k2 = (tensors.take_float(name, config.head_dim) for name in names)
        initial = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self._factor = (q1 @ k1).exp() - (q2 @ k2).exp() + initial
        self._norm = Norm(torch.full((2 * config.head_dim,), 1 - initial, device=q1.device), config.norm_eps)

    def values(self, v: Tensor) -> Tensor:
        """Return the value of each KV head, [num_tokens, num_kv_heads, 2 head_dim]. v: [num_tokens, num_kv_heads, head_dim]."""
        return torch.cat(v.chunk(2, dim=1), dim=-1).repeat(1, 2, 1)

    def __call__(self, attended: Tensor, ops: Operations) -> Tensor:
        """Return the normed differences, [num_tokens, num_heads head_dim]. attended: [num_tokens, num_heads, 2 head_dim]."""
        first, second = attended.chunk(2, dim=1)
        difference = first - self._factor * second
        return ops.norm(difference.flatten(0, 1), self._norm).view_as(difference).flatten(1)


def _order(config: DecoderConfig, rotary_dim: int) -> list[int] | None:
    """Return the order of a head's elements for half-split RoPE; None means the checkpoint's order."""
    return None if rotary_dim == config.head_dim else rotary_order(config.head_dim, rotary_dim)


def _rows(config: DecoderConfig, order: list[int] | None, value_is_key: bool) -> list[int] | None:
    """Return the row order of the merged projection: q and k with heads in `order`, then v, then the gates of the heads.

    value_is_key: True if the rows of k are also those of v, and occur twice.
    """
    if order is None and not config.output_gate and not value_is_key:
        return None
    dim, order = config.head_dim, order or [*range(config.head_dim)]
    stride = 2 * dim if config.output_gate else dim  # a head's query, followed by its gate
    first_kv = config.num_heads * stride
    queries = [head * stride + element for head in range(config.num_heads) for element in order]
    keys = [first_kv + head * dim + element for head in range(config.num_kv_heads) for element in order]
    first_value, kv_size = first_kv if value_is_key else first_kv + config.num_kv_heads * dim, config.num_kv_heads * dim
    values = range(first_value, first_value + kv_size)
    gates = [head * stride + row for head in range(config.num_heads) for row in range(dim, stride)]
    return [*queries, *keys, *values, *gates]


def _scales(config: DecoderConfig) -> float | list[float]:
    """Return the factor of all rows of the merged projection, or one factor per row."""
    q, k, v = config.multipliers.qkv
    if q == k == v == 1.0:
        return 1.0
    kv_size = config.num_kv_heads * config.head_dim
    return [q] * (config.num_heads * config.head_dim) + [k] * kv_size + [v] * kv_size


def _head_norms(config: DecoderConfig, tensors: LayerTensors, order: list[int] | None) -> tuple[Norm | None, Norm | None]:
    """Return the norms of q and k, with weights in `order` within each head; None without QK-norm. A layer without keys has the
    norm of q for both."""
    if config.qk_norm is None:
        return None, None
    of_all = config.qk_norm == "whole"
    counts = (tensors.shard.heads, tensors.shard.kv_heads) if of_all else (Axis.all(1), Axis.all(1))
    share = None if all(count.is_whole for count in counts) else NormShare(tensors.ranks)
    modules = config.names.q_norm, config.names.k_norm if config.num_kv_heads else config.names.q_norm
    norms = [tensors.norm(module, count * config.head_dim) for module, count in zip(modules, counts, strict=True)]
    q_norm, k_norm = (
        replace(norm, weight=_ordered(norm.weight, count.size, order), share=share)
        for norm, count in zip(norms, counts, strict=True)
    )
    return q_norm, k_norm


def _ordered(weight: Tensor, count: int, order: list[int] | None) -> Tensor:
    """Return a norm's weight with the elements of each head in `order`."""
    return weight if order is None else weight.view(count, -1)[:, order].flatten()


_EPS = 1e-6
"""Epsilon of the latents' norms; DeepSeek's code and transformers always use this default."""


class LatentAttention:
    """Attention whose KV cache holds one latent per token, from which the keys and values of all heads are expanded."""

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, place: int, tensors: LayerTensors, invariance: Invariance
    ) -> None:
        """place: index among the model's attention layers.

        :raises ModelError: if invariance is requested, or the configuration has unsupported biases.
        """
        latent, names, hidden = config.latent, config.names.latent, config.hidden_size
        assert latent is not None
        if invariance:
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
        rows += [first.size + row for row in _latent_order(latent, latent.kv_lora_rank)]
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


def _latent_order(latent: LatentConfig, still: int) -> list[int]:
    """Return the order of a head's elements, or of a latent followed by its RoPE key, for half-split RoPE.

    still: number of elements before the rotated elements.
    """
    rotated = range(still, still + latent.qk_rope_head_dim)
    return [*range(still), *([*rotated[::2], *rotated[1::2]] if latent.interleaved else rotated)]


def _query_rows(latent: LatentConfig, num_heads: int) -> list[int]:
    """Return the row order of the query projection, with each head's elements in the order from `_latent_order`."""
    return [head * latent.q_dim + row for head in range(num_heads) for row in _latent_order(latent, latent.qk_nope_head_dim)]
