"""Operations of a decoder between attentions, computed by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding, layer_norm, rms_norm, silu

from headway.core.contract.errors import ModelError
from headway.core.contract.experts import ExpertsConfig, ExpertsKernel, ExpertsSpec
from headway.core.contract.model import LatentLayer
from headway.core.contract.spec import AttentionSpec
from headway.kernels.experts.bound import BoundExperts, ExpertsLayers, ExpertsOptions, is_own
from headway.kernels.experts.plain import TorchExperts, front_of
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.linear.choice import LinearChoice
from headway.kernels.linear.linear import Linear
from headway.kernels.step.binding import RowScale, bound
from headway.kernels.step.config import ACTIVATE, Activation, GateActivation, LatentConfig, ropes_of
from headway.kernels.step.operations import Embedding, Gate, Heads, Norm, Operations, Rope

GATES: dict[GateActivation, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": torch.sigmoid, "none": lambda by: by}


def norm_by_length(x: Tensor, weight: Tensor, least: Tensor) -> Tensor:
    """Return the RMSNorm over the last axis of x (float32). weight, least: values of `Norm.by_length`."""
    return torch.div(x, torch.linalg.vector_norm(x, 2, -1, True).hypot_(least)).mul_(weight)


def norm_heads(ops: Operations, q: Tensor, k: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Return normed q and k, each [rows, size of its norm]. A norm covers one head, or all heads of a token, possibly across
    ranks."""
    assert heads.q_norm is not None and heads.k_norm is not None  # noqa: PT018
    share = heads.q_norm.share
    if share is None:
        return ops.norm(q, heads.q_norm), ops.norm(k, heads.k_norm)
    whole_q, whole_k = share.normed(heads.q_norm.eps, q.float(), k.float())
    return (whole_q * heads.q_norm.weight.float()).to(q.dtype), (whole_k * heads.k_norm.weight.float()).to(k.dtype)


def norm_values(ops: Operations, v: Tensor, heads: Heads) -> Tensor:
    """Return v [num_tokens, num_kv_heads or more, head_dim] with its heads normed, if the layer norms them."""
    if heads.v_norm is None:
        return v
    values, more = v.tensor_split([heads.num_kv_heads], dim=1)
    return torch.cat([ops.norm(values.reshape(-1, heads.head_dim), heads.v_norm).view_as(values), more], dim=1)


def apply_gate(x: Tensor, by: Tensor, gate: Gate) -> Tensor:
    """Return x times the activation of `by` with the gate's norm, computed in float32 and rounded once."""
    y, factor = x.float(), GATES[gate.activation](by.float())
    if gate.norm is None:
        return (y * factor).to(x.dtype)
    if gate.gate_first:
        y = y * factor
    y = y.reshape(len(y), y.shape[1] // gate.size, gate.size)
    if gate.norm.by_length is not None and len(gate.norm.weight) == gate.size:
        factors, least = gate.norm.by_length
        y = norm_by_length(y, factors, least).flatten(1)
    else:
        weight, eps, share = gate.norm.weight.float(), gate.norm.eps, gate.norm.share
        y = rms_norm(y, (gate.size,), eps=eps) if share is None else share.normed(eps, y.flatten(1))[0].view_as(y)
        y = (y * (weight if len(weight) == gate.size else weight.view(-1, gate.size))).flatten(1)
    return (y if gate.gate_first else y * factor).to(x.dtype)


class PlainLatentLayer:
    """Latent layer (MLA) that absorbs queries, expands latents and projects attention results. All three use one weight, which is
    stored once."""

    def __init__(self, expanded: AttentionSpec, config: LatentConfig, kv_b: Tensor) -> None:
        """Prepare the layer. kv_b: see Operations.latent_layer."""
        self.expanded = expanded
        self._nope_dim = config.qk_nope_head_dim
        self._rank = config.kv_lora_rank
        of_heads = kv_b.view(expanded.num_heads, -1, self._rank)
        self._to_key = of_heads[:, : self._nope_dim]
        """[num_heads, nope_dim, rank]: maps latents to keys."""
        self._to_value = of_heads[:, self._nope_dim :].transpose(1, 2)
        """[num_heads, rank, v_head_dim]: maps latents to values."""
        self._both = Linear(kv_b)

    def absorb(self, q: Tensor) -> Tensor:
        still, rotary = q[..., : self._nope_dim], q[..., self._nope_dim :]
        out = q.new_empty((*q.shape[:2], self._rank + rotary.shape[-1]))
        torch.bmm(still.transpose(0, 1), self._to_key, out=out[..., : self._rank].transpose(0, 1))
        out[..., self._rank :] = rotary
        return out

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Expand latents to k and v. v is a view of the GEMM's output."""
        rows, rotary = latent[:, 0, : self._rank], latent[..., self._rank :]
        both = self._both(rows).view(latent.shape[0], self.expanded.num_heads, self._nope_dim + self.expanded.v_head_dim)
        still, v = both[..., : self._nope_dim], both[..., self._nope_dim :]
        return torch.cat([still, rotary.expand((*still.shape[:2], -1))], dim=-1), v

    def project(self, attended: Tensor, out: Tensor) -> None:
        torch.bmm(attended.transpose(0, 1), self._to_value, out=out.transpose(0, 1))


class TorchOperations(Operations):
    """Operations that call torch's functions, for CPUs and as a reference for the fused kernels."""

    def __init__(
        self, inv_freq: Tensor, factors: Tensor, experts: ExpertsOptions | None = None, halves: Sequence[int] = ()
    ) -> None:
        """inv_freq, factors: float32 [ropes, head_dim / 2]; see `rope.rope_tables`. experts: options for MoE layers. None means
        Headway's own kernels. halves: see `ropes_of`."""
        self._ropes = ropes_of(inv_freq, factors, halves)
        self._experts = experts_by(self, experts or ExpertsOptions())

    def embed(self, input_ids: Tensor, positions: Tensor, embed: Embedding) -> tuple[Tensor, tuple[Rope, ...]]:
        """Return the residual stream, and cos and sin of each RoPE. cos contains its elements twice, and the first half of sin is
        negated. RoPE is therefore x * cos + swap_halves(x) * sin (three operations)."""
        ropes, dtype = [], embed.table.dtype
        for inv_freq, factors in self._ropes:
            angles = positions[:, None, None] * inv_freq  # float32 [num_tokens, 1, head_dim / 2]
            cos, sin = angles.cos() * factors, angles.sin() * factors
            ropes.append((torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)))
        x = embedding(input_ids, embed.table)
        if embed.scale != 1.0:
            x = x * embed.scale
        if embed.positions is not None:
            x = x + embedding(positions, embed.positions)
        return x, tuple(ropes)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if norm.by_length is not None:
            factors, least = norm.by_length
            return norm_by_length(x.float(), factors, least).to(x.dtype)
        weight = norm.weight
        exact = x.to(weight.dtype)  # unchanged, unless the weight is float32
        if norm.bias is not None:
            return layer_norm(exact, weight.shape, weight, norm.bias, norm.eps).to(x.dtype)
        return rms_norm(exact, weight.shape, weight, norm.eps).to(x.dtype)

    def add_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        return residual + self.norm(x, norm)

    def linear_choices(self, products: Iterable[tuple[Linear, bool]]) -> list[LinearChoice]:
        """Return the choices that have a third-party kernel as a candidate. A rule makes all other choices."""
        choices = [linear.choice for linear, _ in products]
        return list(dict.fromkeys(choice for choice in choices if choice is not None and choice.is_open))

    def choice_for(self, linear: Linear, gated: bool) -> LinearChoice:
        """Return the kernel choice of a layer, for `bound`."""
        assert linear.choice is not None
        return linear.choice

    def gated(self, both: Tensor, activation: Activation, scaled_by: RowScale | None) -> Tensor:
        """Return the activation of the first half of `both` times its second half, for `Surrounded`. scaled_by: not used."""
        return self.activated(both, activation, gated=True)

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        return linear(x, out)

    def norm_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation | None) -> Tensor:
        if linear.fuses_more:
            return bound(self, linear, len(x))(x, norm=norm, activation=activation)
        y = linear(x if norm is None else self.norm(x, norm))
        return y if activation is None else self.activated(y, activation, gated=False)

    def norm_gated_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation) -> Tensor:
        if linear.fuses_more:
            return bound(self, linear, len(x), gated=True)(x, norm=norm, gated=True, activation=activation)
        return self.activated(linear(x if norm is None else self.norm(x, norm)), activation, gated=True)

    def activated(self, y: Tensor, activation: Activation, gated: bool) -> Tensor:
        if not gated:
            return ACTIVATE[activation](y)
        gate, up = y.chunk(2, dim=1)
        return ACTIVATE[activation](gate) * up

    def norm_qkv(
        self, x: Tensor, norm: Norm | None, linear: Linear, heads: Heads, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if linear.fuses_more:
            return self.rotate_heads(bound(self, linear, len(x))(x, norm=norm), heads, rope)
        return self.rotate_heads(linear(x if norm is None else self.norm(x, norm)), heads, rope)

    def rotate_heads(self, qkv: Tensor, heads: Heads, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Apply norms and RoPE (Su et al. 2021). Elements are rotated in pairs from the two halves of a head, as in
        transformers."""
        num_heads, rotated = heads.num_heads, heads.num_heads + heads.num_kv_heads
        qkv = qkv.view(len(qkv), qkv.shape[1] // heads.head_dim, heads.head_dim)
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if heads.q_norm is not None and heads.k_norm is not None:
            q, k = qk[:, :num_heads], qk[:, num_heads:]
            if heads.whole_norm:
                normed = norm_heads(self, q.flatten(1), k.flatten(1), heads)
                q, k = normed[0].view_as(q), normed[1].view_as(k)
            else:
                q, k = self.norm(q, heads.q_norm), self.norm(k, heads.k_norm)
            qk = torch.cat([q, k], dim=1)
        if rope is not None:
            qk = apply_rope(qk, rope)
        return qk[:, :num_heads], qk[:, num_heads:], norm_values(self, v, heads)

    def rotate_latent(
        self, q: Tensor, latent: Tensor, config: LatentConfig, norm: Norm, rope: Rope | None
    ) -> tuple[Tensor, Tensor]:
        q = q.view(q.shape[0], q.shape[1] // config.q_dim, config.q_dim)
        rows, key = latent[:, None].tensor_split([config.kv_lora_rank], dim=-1)
        rows = self.norm(rows, norm)
        if rope is None:
            return q, torch.cat([rows, key], dim=-1)
        still, rotary = q.tensor_split([config.qk_nope_head_dim], dim=-1)
        return torch.cat([still, apply_rope(rotary, rope)], dim=-1), torch.cat([rows, apply_rope(key, rope)], dim=-1)

    def latent_layer(self, expanded: AttentionSpec, config: LatentConfig, kv_b: Tensor) -> LatentLayer:
        return PlainLatentLayer(expanded, config, kv_b)

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        return bound(self, linear, len(x))(x, add_to=residual) if linear.fuses_more else linear.add_to(residual, x)

    def gate(self, x: Tensor, by: Tensor, gate: Gate) -> Tensor:
        return apply_gate(x, by, gate)

    def experts(self, config: ExpertsConfig, weights: RoutedWeights, norm: Norm) -> BoundExperts:
        """Bind a layer of experts. Without a third-party kernel, experts run one after another.

        :raises ModelError: if the device is a GPU, where the host would have to wait for the device in every layer.
        """
        if weights.router.is_cuda:
            raise ModelError("experts: need Triton on a GPU, got none: pip install 'headway[triton]'")
        return self._experts.bind(config, weights, norm)


def experts_by(ops: Operations, options: ExpertsOptions, gate: Callable[[Tensor], Tensor] = silu) -> ExpertsLayers:
    """Return a factory for MoE layers whose norm, router and built-in kernel use torch's operations.

    gate: function that computes the SiLU of a matrix.
    """

    def make(kernel: type[ExpertsKernel], spec: ExpertsSpec, shared: object) -> ExpertsKernel | None:
        if issubclass(kernel, TorchExperts):
            return kernel(spec, ops.product, gate)
        return None if is_own(kernel) else kernel(spec)

    return ExpertsLayers(options, partial(front_of, ops.norm, ops.product), make)


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the halves of each head. x: [num_tokens, heads, dim]. rope: cos and sin from `TorchOperations.embed`."""
    cos, sin = rope
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)
