"""Attention over heads of keys and values, with its surroundings in a layer: norms, projections, RoPE, residual."""

from __future__ import annotations

from torch import Tensor

from headway.core.contract.model import Attention
from headway.models.attention_specs import cached_spec
from headway.models.config import DecoderConfig
from headway.models.layers.tensors import LayerTensors
from headway.models.linear import Linear
from headway.models.operations import Heads, Norm, Operations, Rope
from headway.models.rope import rotary_order


class SelfAttention:
    """Multi-head, grouped-query or multi-query attention."""

    def __init__(self, config: DecoderConfig, index: int, tensors: LayerTensors, batch_invariant: bool) -> None:
        """batch_invariant: what the layer asks of its backend."""
        self._index, names, layer = index, config.names, config.layers[index]
        hidden, dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        order = None if layer.rope is None else _order(config, config.ropes[layer.rope].rotary_dim)
        sizes = {names.qkv[0]: q_size + 2 * kv_size}
        if len(names.qkv) > 1:
            sizes = dict(zip(names.qkv, (q_size, kv_size, kv_size), strict=True))
        self.norm = tensors.norm_if_any(names.attention_norm, hidden)
        self.qkv_proj = tensors.linear(sizes, hidden, config.qkv_bias, _rows(config, order))
        self.heads = Heads(config.num_heads, config.num_kv_heads, dim, *_head_norms(config, tensors))
        self.o_proj = tensors.linear({names.o: hidden}, q_size, config.o_bias, scale=config.residual_scale)
        self.post_norm = tensors.norm_if_any(names.attention_post_norm, hidden)
        self._can_absorb = layer.rope is not None and not self.heads.whole_norm
        sinks = tuple(tensors.take(names.sinks, config.num_heads).tolist()) if config.sinks else None
        place = tensors.weights.dtype, tensors.weights.device
        self.spec = cached_spec(config, index, *place, sinks=sinks, batch_invariant=batch_invariant)

    @property
    def linears(self) -> list[Linear]:
        """Products of the layer."""
        return [self.qkv_proj, self.o_proj]

    def absorb_norms(self, ops: Operations) -> None:
        """Let the operations prepare the layer's norm and the product after the norm."""
        if self.norm is not None and self._can_absorb:
            self.norm, self.qkv_proj = ops.absorb(self.norm, self.qkv_proj)

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream, used up; rope: of `Operations.embed`."""
        out = attention(self._index, *ops.norm_qkv(x, self.norm, self.qkv_proj, self.heads, rope)).flatten(1)
        if self.post_norm is None:
            return ops.add_product(x, out, self.o_proj)
        return ops.add_norm(x, ops.product(out, self.o_proj), self.post_norm)


def _order(config: DecoderConfig, rotary_dim: int) -> list[int] | None:
    """The order of a head's elements; None: the checkpoint's."""
    return None if rotary_dim == config.head_dim else rotary_order(config.head_dim, rotary_dim)


def _rows(config: DecoderConfig, order: list[int] | None) -> list[int] | None:
    """The rows of the merged product whose heads of q and k are in `order`."""
    if order is None:
        return None
    dim, turned = config.head_dim, config.num_heads + config.num_kv_heads
    heads = [head * dim + element for head in range(turned) for element in order]
    return [*heads, *range(turned * dim, (turned + config.num_kv_heads) * dim)]


def _head_norms(config: DecoderConfig, tensors: LayerTensors) -> tuple[Norm | None, Norm | None]:
    """Return the norms of q and of k."""
    if config.qk_norm is None:
        return None, None
    counts = (1, 1) if config.qk_norm == "head" else (config.num_heads, config.num_kv_heads)
    modules = config.names.q_norm, config.names.k_norm
    q_norm, k_norm = (tensors.norm(module, count * config.head_dim) for module, count in zip(modules, counts, strict=True))
    return q_norm, k_norm
