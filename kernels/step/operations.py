"""Interface for the operations of a decoder between attentions, which devices may fuse, and its implementation with torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, relu, rms_norm, silu

from headway.core.contract.errors import ModelError
from headway.core.contract.experts import ExpertsConfig, ExpertsKernel, ExpertsSpec
from headway.core.contract.linear import FUSED, LinearKernel
from headway.core.contract.model import LatentLayer
from headway.core.contract.ranks import Ranks
from headway.core.contract.spec import AttentionSpec
from headway.kernels.experts.bound import BoundExperts, Experts, ExpertsLayers, ExpertsOptions, is_own
from headway.kernels.experts.plain import TorchExperts, front_of
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.linear.choice import NUM_BUCKETS, LinearChoice
from headway.kernels.linear.linear import Linear
from headway.kernels.step.config import ACTIVATIONS, Activation, GateActivation, LatentConfig, ropes_of


@dataclass(frozen=True, slots=True)
class NormShare:
    """One rank's shard of rows that are normed across ranks. The shard is an equal part of one group of elements."""

    ranks: Ranks
    groups: int = 1
    """Number of groups of elements that are normed separately. Each one is divided among an equal number of consecutive ranks."""

    def normed(self, eps: float, *parts: Tensor) -> list[Tensor]:
        """Return the RMSNorm, without a weight, of each of `parts`. One all-reduce handles all of them.

        parts: float32 [rows, size] each, the rank's elements.
        """
        group = self.ranks.rank * self.groups // self.ranks.size
        squares = parts[0].new_zeros(parts[0].shape[0], self.groups, len(parts))
        squares[:, group] = torch.stack([part.square().sum(dim=1) for part in parts], dim=1)
        sums = self.ranks.all_reduce(squares)[:, group]
        share = self.groups / self.ranks.size
        return [part * torch.rsqrt(sums[:, place, None] * (share / part.shape[1]) + eps) for place, part in enumerate(parts)]


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


ACTIVATE: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
}


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm (Zhang and Sennrich 2019) or, if there is a bias, LayerNorm (Ba et al. 2016)."""

    weight: Tensor
    """[size], in the model's dtype or float32."""
    eps: float
    bias: Tensor | None = None
    """[size]: bias of a LayerNorm. None means RMSNorm."""
    absorbed: bool = False
    """True if the weight is folded into the next linear layer and is now all ones. Only the factor per row remains to be
    applied."""
    share: NormShare | None = None
    """Shard of this rank if the elements of an RMSNorm are divided among ranks. None means that the rank has all elements."""
    by_length: tuple[Tensor, Tensor] | None = field(init=False, repr=False, compare=False, default=None)
    """float32 factors of an RMSNorm on a CPU: weight * sqrt(size) and sqrt(size * eps).

    With these factors a and b and the Euclidean length |x|, the norm is x / hypot(|x|, b) * a, which takes four operations
    instead of seven. The overhead of a torch operation exceeds the time for its arithmetic.
    """

    def __post_init__(self) -> None:
        if self.bias is None and self.share is None and self.weight.device.type == "cpu":
            size = self.weight.shape[0]
            object.__setattr__(self, "by_length", (self.weight.float() * size**0.5, torch.tensor((size * self.eps) ** 0.5)))


@dataclass(frozen=True, slots=True)
class Embedding:
    """Tables and factor of the token embedding."""

    table: Tensor
    """[vocab_size, hidden_size]: one row per token of the vocabulary."""
    scale: float = 1.0
    """Factor by which a token's row is multiplied."""
    positions: Tensor | None = None
    """[positions, hidden_size]: learned position embeddings, added to each token. None if the model has none."""
    tokens: range | None = None
    """Token IDs in this rank's shard of the table. The shard's last row is all zeros and represents all other tokens. None means
    that the rank has all tokens."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads in a row of the merged qkv linear layer's output, and the norms of q and k."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Norm | None = None
    """RMSNorm of q before RoPE. It covers each head (Qwen3), or all heads together if the weight has that size. Set if and only
    if `k_norm` is set."""
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    """RMSNorm of each head of v, with a weight of ones (Gemma 4)."""

    @property
    def whole_norm(self) -> bool:
        """Return whether all heads of q are normed as one row, and likewise all heads of k."""
        if self.q_norm is None:
            return False
        return self.q_norm.share is not None or self.q_norm.weight.shape[0] == self.num_heads * self.head_dim != self.head_dim


@dataclass(frozen=True, slots=True)
class Gate:
    """Gate that multiplies the output of attention or of a recurrence before the output projection, and its norm."""

    activation: GateActivation
    """Activation that is applied to the gate's input."""
    norm: Norm | None = None
    """RMSNorm of the gated tensor, in groups of `size` elements. The weight has `size` elements, or one per element of a row."""
    size: int = 0
    gate_first: bool = False
    """True if the gate is applied before the norm (Mamba 2) instead of after."""


Rope = tuple[Tensor, Tensor]
"""cos and sin of the rotary embedding at a step's positions."""


class Operations(Protocol):
    """Operations of one model. Each treats rows independently.

    Methods with a body are defaults for devices without a faster implementation.
    """

    def absorb(self, norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
        """Prepare a norm and the next linear layer. This is called once, before any step. The returned pair gives the same
        results as the arguments.

        The pair may only be used in `norm_qkv` with a rotary embedding, in `norm_gated_product`, and in `norm` before `product`.
        """
        return norm, linear

    def linear_choices(self, products: Iterable[tuple[Linear, bool]]) -> list[LinearChoice]:
        """Return the choices for linear layers whose kernel is selected by measured times.

        products: (linear layer, True if it is gated) for all linear layers.
        """
        return []

    def embed(self, input_ids: Tensor, positions: Tensor, embed: Embedding) -> tuple[Tensor, tuple[Rope, ...]]:
        """Return the residual stream [num_tokens, hidden_size], and cos and sin of each rotary embedding, for `norm_qkv`.

        input_ids, positions: int32 or int64 [num_tokens].
        """

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the norm of each row of x [rows, size]."""

    def add_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """Return residual + norm of x [rows, size]. Both arguments may be overwritten."""

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """Return a linear layer's output for x [rows, in_features]: [rows, out_features], in `out` (contiguous) if given."""
        return bound(self, linear, x.shape[0])(x, out=out)

    def norm_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation | None) -> Tensor:
        """Apply a norm (if any), a linear layer, and an activation (if any). x: [rows, in_features], rows may be strided.

        Returns [rows, out_features].
        """

    def norm_gated_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation) -> Tensor:
        """Apply a norm (if any) and a linear layer, and multiply the activation of the output's first half by its second half.

        Returns [rows, out_features / 2].
        """

    def norm_qkv(
        self, x: Tensor, norm: Norm | None, linear: Linear, heads: Heads, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply a norm (if any) and the merged qkv linear layer, then norm the heads, and rotate those of q and k (RoPE).

        x: [num_tokens, hidden_size]. linear: has (num_heads + 2 num_kv_heads) head_dim outputs, and may have further heads
            after v. rope: result of `embed`; None means no rotation.
        Returns q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim]; rows may be strided.
        """

    def rotate_heads(self, qkv: Tensor, heads: Heads, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the part of `norm_qkv` after the linear layer. qkv: [num_tokens, elements of all heads], contiguous; may be
        overwritten.
        """

    def activated(self, y: Tensor, activation: Activation, gated: bool) -> Tensor:
        """Apply the part of `norm_product` or (if gated) `norm_gated_product` after the linear layer.

        y: contiguous; may be overwritten.
        """

    def rotate_latent(
        self, q: Tensor, latent: Tensor, config: LatentConfig, norm: Norm, rope: Rope | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate the last elements of each query head, norm the latents, and rotate the key elements after them (RoPE).

        q: [num_tokens, num_heads q_dim]. latent: [num_tokens, kv_dim]. Rows may be strided, and both may be overwritten.
            norm: has kv_lora_rank elements. rope: result of `embed`; None means no rotation.
        Returns q [num_tokens, num_heads, q_dim] and latents [num_tokens, 1, kv_dim].
        """

    def latent_layer(self, expanded: AttentionSpec, config: LatentConfig, kv_b: Tensor) -> LatentLayer:
        """Return the linear layers before and after latent attention. This is called once, before any step.

        kv_b: [num_heads (qk_nope_head_dim + v_head_dim), kv_lora_rank], maps a latent to each head's key and value.
        """

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """Return residual + linear layer of x [rows, in_features]. residual: [rows, out_features]; may be overwritten."""

    def add_products(self, residual: Tensor, terms: Sequence[tuple[Tensor, Linear]]) -> Tensor:
        """Return residual + the sum of several linear layers' outputs. terms: (x, linear layer) for each layer, as in
        `add_product`."""
        return add_one_by_one(self, residual, terms)

    def gate(self, x: Tensor, by: Tensor, gate: Gate) -> Tensor:
        """Return x times the activation of `by`, with the gate's norm. x, by: [num_tokens, size]; rows may be strided."""

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        """Return cap * tanh(logits / cap), in place (Gemma 2)."""
        return softcap(logits, cap)

    def experts(self, config: ExpertsConfig, weights: RoutedWeights, norm: Norm) -> Experts:
        """Return a layer of experts and its norm, bound to kernels. This is called once, before any step."""


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), in place."""
    return logits.div_(cap).tanh_().mul_(cap)


GATES: dict[GateActivation, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": torch.sigmoid, "none": lambda by: by}


def add_one_by_one(ops: Operations, residual: Tensor, terms: Sequence[tuple[Tensor, Linear]]) -> Tensor:
    """Return the residual plus outputs of linear layers, which are added one after another. This is an implementation of
    `Operations.add_products`."""
    for x, linear in terms:
        residual = ops.add_product(residual, x, linear)
    return residual


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


RowScale = tuple[Tensor, float]
"""x [rows, size] and epsilon of an RMSNorm whose factor per row is still to be applied."""


Step = Callable[..., Tensor]
"""A layer bound to a kernel. Its arguments are x [rows, in_features] and keyword arguments for fused operations: see
`FusedKernel.compute`."""


def bound(ops: Any, linear: Linear, rows: int, gated: bool = False, heads: Heads | None = None) -> Step:
    """Return a layer bound to its kernel for this number of rows. ops: the device's operations. heads: heads that the step
    rotates (RoPE)."""
    steps: BoundSteps | None = linear.gated_steps if gated else linear.steps
    if steps is None or steps.ops is not ops or (heads is not None and steps.heads is not heads):
        steps = BoundSteps(ops, linear, ops.choice_for(linear, gated), gated, heads)
        if gated:
            linear.gated_steps = steps
        else:
            linear.steps = steps
    return steps[(rows - 1).bit_length() if rows else -1]


class BoundSteps(list[Step]):
    """Steps of a layer, each bound to a kernel, for all buckets of row counts. The last item is for steps without rows."""

    borrows = True
    """Marker for `held_tensors`: all tensors that this object references belong to other objects."""

    def __init__(self, ops: Any, linear: Linear, choice: LinearChoice, gated: bool, heads: Heads | None) -> None:
        self.ops = ops
        self.heads = heads
        buckets = [partial(self._bind, linear, choice, heads, bucket) for bucket in range(NUM_BUCKETS)]
        super().__init__([*buckets, partial(self._nothing, linear)])

    def _bind(self, linear: Linear, choice: LinearChoice, heads: Heads | None, bucket: int, x: Tensor, **around: Any) -> Tensor:
        """Bind the layer for a bucket of row counts at the bucket's first step, and run that step."""
        step = self[bucket] = bound_step(self.ops, linear, choice.kernel_of(bucket), heads, 1 << bucket)
        return step(**{"x": x, **around})

    def _nothing(self, linear: Linear, x: Tensor, **around: Any) -> Tensor:
        """Return the result of a step without rows."""
        given = around.get("add_to") if around.get("out") is None else around["out"]
        columns = linear.out_features // 2 if around.get("gated") else linear.out_features
        return x.new_empty(0, columns) if given is None else given


def bound_step(ops: Any, linear: Linear, kernel: LinearKernel, heads: Heads | None, rows: int) -> Step:
    """Return a layer bound to a kernel, with extra launches for operations that it does not fuse. rows: maximum of the bucket."""

    def again(other: LinearKernel) -> Step:
        return bound_step(ops, linear, other, heads, rows)

    compute, fused = linear.bound_to(kernel, again), linear.fused_by(kernel)
    if heads is not None and "rotary" in fused:
        ours: Any = kernel
        if heads.v_norm is not None or not ours.rotates(rows, linear.prepared_for(kernel), heads):
            fused = fused - {"rotary"}
    around = frozenset(FUSED) - {"bias"}
    activations = ACTIVATIONS if hasattr(kernel, "compute") else kernel.capabilities.activations
    return compute if fused >= around else Surrounded(ops, compute, fused, activations)


class Surrounded:
    """A bound kernel, with launches for operations before and after the GEMM that the kernel does not fuse."""

    def __init__(self, ops: Any, compute: Step, fused: frozenset[str], activations: Collection[str]) -> None:
        """Wrap `compute`. fused: operations that the kernel fuses. activations: activations that the kernel can fuse."""
        self._ops = ops
        self._compute = compute
        self._norms = "norm" in fused
        self._gates = activations if "gated" in fused else ()
        self._activates = activations if "activation" in fused else ()
        self._adds = "residual" in fused
        self._rotates = "rotary" in fused

    def __call__(
        self,
        x: Tensor,
        norm: Norm | None = None,
        gated: bool = False,
        activation: Activation | None = None,
        add_to: Tensor | None = None,
        rotated: tuple[Heads, Rope] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer; see `FusedKernel.compute`."""
        ops, scaled_by = self._ops, None
        gates, activates = activation in self._gates, activation in self._activates
        inner: dict[str, Any] = {}
        if norm is not None:
            if self._norms and norm.bias is None:
                inner["norm"] = norm
            elif norm.absorbed and ((gated and not gates) or (rotated is not None and not self._rotates)):
                scaled_by = (x, norm.eps)  # the launch after the GEMM applies the norm's factor
            else:
                x = ops.norm(x, norm)
        if gated and gates:
            inner |= {"gated": True, "activation": activation}
        elif not gated and activation is not None and activates:
            inner["activation"] = activation
        if add_to is not None and self._adds:
            inner["add_to"] = add_to
        if rotated is not None and self._rotates:
            inner["rotated"] = rotated
        if out is not None:
            inner["out"] = out
        inner["x"] = x
        y = self._compute(**inner)
        if gated and not gates:
            assert activation is not None
            y = ops.gated(y, activation, scaled_by)
        elif not gated and activation is not None and not activates:
            y = ACTIVATE[activation](y)
        if rotated is not None and not self._rotates:
            heads, rope = rotated
            ops.rotate(y, heads, rope, scaled_by)
        return y if add_to is None or self._adds else add_to.add_(y)


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
