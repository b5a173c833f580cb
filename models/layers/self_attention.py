"""The two parts of a decoder layer: attention over heads of keys and values, and the MLP, each with its norm and residual."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from headway.core.contract.model import Attention
from headway.kernels.experts.plain import Experts
from headway.kernels.experts.weights import ExpertWeights, each_expert
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.forms import num_bytes
from headway.kernels.linear.linear import Linear
from headway.kernels.step.operations import Gate, Heads, Norm, NormShare, Operations, Rope
from headway.models.checkpoints.expert_weights import take_experts
from headway.models.config import DecoderConfig, LayerConfig, cached_spec
from headway.models.families.rope import rotary_order
from headway.models.layers.tensors import LayerTensors

if TYPE_CHECKING:
    from headway.kernels.experts.fused import FusedExperts


class MLP:
    """Up, activation, down; gated (SwiGLU and its kin, Shazeer 2020) or plain."""

    def __init__(self, config: DecoderConfig, tensors: LayerTensors) -> None:
        names, hidden, inner = config.names, config.hidden_size, tensors.cut.inner
        self._gated = config.gated
        self._activation = config.activation
        rows = inner + inner if config.gated and len(names.up) == 1 else inner
        self.norm = tensors.norm_if_any(names.mlp_norm, hidden)
        by = config.multipliers
        scales = [by.gate] * inner.size + [1.0] * inner.size if by.gate != 1.0 else 1.0
        self.up_proj = tensors.linear(dict.fromkeys(names.up, rows), hidden, config.mlp_bias, scale=scales)
        scale = config.residual_scale * by.mlp
        self.down_proj = tensors.linear({names.down: hidden}, inner, config.mlp_bias, scale=scale)
        self.post_norm = tensors.norm_if_any(names.mlp_post_norm, hidden)

    @property
    def linears(self) -> list[Linear]:
        """Products of the layer."""
        return [self.up_proj, self.down_proj]

    @property
    def gated_product(self) -> Linear | None:
        """The product whose first half is activated and multiplies the second."""
        return self.up_proj if self._gated else None

    def absorb_norms(self, ops: Operations) -> None:
        """Let the operations prepare the layer's norm and the product after the norm."""
        if self.norm is not None and self._gated:
            norm, up_proj = ops.absorb(self.norm, self.up_proj)
            self.norm = norm
            self.up_proj = up_proj

    def __call__(self, x: Tensor, ops: Operations) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream, used up."""
        compute = ops.norm_gated_product if self._gated else ops.norm_product
        inner = compute(x, self.norm, self.up_proj, self._activation)
        if self.post_norm is None:
            return ops.add_product(x, inner, self.down_proj)
        return ops.add_norm(x, ops.product(inner, self.down_proj), self.post_norm)


class ExpertsMLP:
    """Routing, the experts' products, and their sum."""

    def __init__(self, config: DecoderConfig, tensors: LayerTensors, kept: float | None = None) -> None:
        """kept: of the normed stream, which is added to instead; see LayerConfig."""
        assert config.experts is not None
        assert config.activation == config.experts.activation
        names = config.names
        self.norm = tensors.norm(names.mlp_norm or "", config.hidden_size)
        self._kept = None if kept is None else replace(self.norm, weight=self.norm.weight * kept)
        self._config = config.experts
        self._weights: ExpertWeights | None = take_experts(
            tensors.cut.experts,
            names.experts,
            config.hidden_size,
            tensors.weights,
            tensors.prefix,
            config.residual_scale * config.multipliers.mlp,
        )
        routed = (self._weights.gate_up, self._weights.down)
        self.num_elements = sum(math.prod(each.shape) for each in routed)
        """How many numbers the routed experts' weights are."""
        self.held_bytes = sum(each.nbytes if isinstance(each, Tensor) else num_bytes(each) for each in routed)
        """Bytes that they take, scales included."""
        self.compute: Experts | None = None
        """What computes the layer, once `absorb_norms` has told."""

    @property
    def linears(self) -> list[Linear]:
        """One of each kind of its products, while the weights are as the checkpoint has them."""
        weights, config = self._weights, self._config
        if weights is None:
            return []
        count = config.num_held + config.num_shared
        firsts = [each_expert(stacked, count)[0] for stacked in (weights.gate_up, weights.down)]
        return [Linear(weights.router), *(Linear(first, dtype=weights.router.dtype) for first in firsts)]

    @property
    def kind(self) -> FusedExperts | None:
        """What chooses among ways of computing the layer; None where there is one."""
        return getattr(self.compute, "kind", None)

    def absorb_norms(self, ops: Operations) -> None:
        """Hand the weights to what computes the layer, which may keep them in another form."""
        if self._weights is not None:
            self.compute = ops.experts(self._config, self._weights, self.norm)
            self._weights = None

    def __call__(self, x: Tensor, ops: Operations) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream, used up."""
        assert self.compute is not None
        return self.compute(x, None if self._kept is None else ops.norm(x, self._kept))


class SelfAttention:
    """Multi-head, grouped-query or multi-query attention."""

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, place: int, tensors: LayerTensors, batch_invariant: bool
    ) -> None:
        """place: index among the model's layers of attention; batch_invariant: what the layer asks of its backend."""
        self._place = place
        names = config.names
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = tensors.cut.heads, tensors.cut.kv_heads
        q, kv = heads * (2 * dim if config.output_gate else dim), kv_heads * dim
        order = None if layer.rope is None else _order(config, config.ropes[layer.rope].rotary_dim)
        sizes = {names.qkv[0]: q + kv + kv} if len(names.qkv) == 1 else dict(zip(names.qkv, (q, kv, kv), strict=True))
        self.norm = tensors.norm_if_any(names.attention_norm, hidden)
        self.qkv_proj = tensors.linear(sizes, hidden, config.qkv_bias, _rows(config, order), _scales(config))
        q_norm, k_norm = _head_norms(config, tensors, order)
        self.heads = Heads(config.num_heads, config.num_kv_heads, dim, q_norm, k_norm)
        scale = config.residual_scale * config.multipliers.attention
        self.out_proj = tensors.linear({names.o: hidden}, heads * dim, config.o_bias, scale=scale)
        self.post_norm = tensors.norm_if_any(names.attention_post_norm, hidden)
        self.gate = Gate("sigmoid") if config.output_gate else None
        self._can_absorb = layer.rope is not None and not self.heads.whole_norm
        sinks = tuple(tensors.take(names.sinks, heads).tolist()) if config.sinks else None
        weights = tensors.weights
        self.spec = cached_spec(config, layer, weights.dtype, weights.device, sinks=sinks, batch_invariant=batch_invariant)

    @property
    def linears(self) -> list[Linear]:
        """Products of the layer."""
        return [self.qkv_proj, self.out_proj]

    def absorb_norms(self, ops: Operations) -> None:
        """Let the operations prepare the layer's norm and the product after the norm."""
        if self.norm is not None and self._can_absorb:
            norm, qkv_proj = ops.absorb(self.norm, self.qkv_proj)
            self.norm = norm
            self.qkv_proj = qkv_proj

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream, used up; rope: of `Operations.embed`."""
        return self.add(x, self.mix(x, rope, ops, attention), ops)

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """As `StatePart`."""
        q, k, v = ops.norm_qkv(x, self.norm, self.qkv_proj, self.heads, rope)
        if self.gate is None:
            return attention(self._place, q, k, v).flatten(1)
        v, by = v.tensor_split([self.heads.num_kv_heads], dim=1)
        return ops.gate(attention(self._place, q, k, v).flatten(1), by.flatten(1), self.gate)

    def add(self, x: Tensor, mixed: Tensor, ops: Operations) -> Tensor:
        """As `StatePart`."""
        if self.post_norm is None:
            return ops.add_product(x, mixed, self.out_proj)
        return ops.add_norm(x, ops.product(mixed, self.out_proj), self.post_norm)


def _order(config: DecoderConfig, rotary_dim: int) -> list[int] | None:
    """The order of a head's elements; None: the checkpoint's."""
    return None if rotary_dim == config.head_dim else rotary_order(config.head_dim, rotary_dim)


def _rows(config: DecoderConfig, order: list[int] | None) -> list[int] | None:
    """The rows of the merged product: heads of q and k in `order`, then v, then the heads' gates."""
    if order is None and not config.output_gate:
        return None
    dim, order = config.head_dim, order or [*range(config.head_dim)]
    stride = 2 * dim if config.output_gate else dim  # a head's query, and its gate behind it
    first_kv = config.num_heads * stride
    queries = [head * stride + element for head in range(config.num_heads) for element in order]
    keys = [first_kv + head * dim + element for head in range(config.num_kv_heads) for element in order]
    values = range(first_kv + config.num_kv_heads * dim, first_kv + 2 * config.num_kv_heads * dim)
    gates = [head * stride + row for head in range(config.num_heads) for row in range(dim, stride)]
    return [*queries, *keys, *values, *gates]


def _scales(config: DecoderConfig) -> float | list[float]:
    """The factors of the merged product's rows."""
    q, k, v = config.multipliers.qkv
    if q == k == v == 1.0:
        return 1.0
    kv_size = config.num_kv_heads * config.head_dim
    return [q] * (config.num_heads * config.head_dim) + [k] * kv_size + [v] * kv_size


def _head_norms(config: DecoderConfig, tensors: LayerTensors, order: list[int] | None) -> tuple[Norm | None, Norm | None]:
    """Return the norms of q and of k, whose heads' elements are in `order`."""
    if config.qk_norm is None:
        return None, None
    of_all = config.qk_norm == "whole"
    counts = (tensors.cut.heads, tensors.cut.kv_heads) if of_all else (Axis.all(1), Axis.all(1))
    share = None if all(count.is_whole for count in counts) else NormShare(tensors.ranks)
    modules = config.names.q_norm, config.names.k_norm
    norms = [tensors.norm(module, count * config.head_dim) for module, count in zip(modules, counts, strict=True)]
    q_norm, k_norm = (
        replace(norm, weight=_ordered(norm.weight, count.size, order), share=share)
        for norm, count in zip(norms, counts, strict=True)
    )
    return q_norm, k_norm


def _ordered(weight: Tensor, count: int, order: list[int] | None) -> Tensor:
    """A norm's weight with the elements of each of its heads in `order`."""
    return weight if order is None else weight.view(count, -1)[:, order].flatten()
