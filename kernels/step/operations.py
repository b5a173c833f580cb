"""What a decoder computes between its attentions, as steps that a device may fuse; and torch's operations for all of them."""

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
from headway.kernels.step.config import ACTIVATIONS, Activation, GateActivation, LatentConfig


@dataclass(frozen=True, slots=True)
class NormShare:
    """One rank's share of rows whose elements are normed together: a part of one group of them, as long as every other's."""

    ranks: Ranks
    groups: int = 1
    """Groups of elements, each normed by itself and held by equally many ranks that follow one another."""

    def normed(self, eps: float, *parts: Tensor) -> list[Tensor]:
        """RMSNorm without a weight, of each part by itself, with one sum over ranks.

        parts: float32 [rows, size], the rank's elements.
        """
        group = self.ranks.rank * self.groups // self.ranks.size
        squares = parts[0].new_zeros(parts[0].shape[0], self.groups, len(parts))
        squares[:, group] = torch.stack([part.square().sum(dim=1) for part in parts], dim=1)
        sums = self.ranks.all_reduce(squares)[:, group]
        share = self.groups / self.ranks.size
        return [part * torch.rsqrt(sums[:, place, None] * (share / part.shape[1]) + eps) for place, part in enumerate(parts)]


class PlainLatentLayer:
    """Absorbs queries, expands latents, projects what was attended; one weight serves all three, read as it lies."""

    def __init__(self, expanded: AttentionSpec, config: LatentConfig, kv_b: Tensor) -> None:
        """kv_b: see Operations.latent_layer."""
        self.expanded = expanded
        self._nope_dim = config.qk_nope_head_dim
        self._rank = config.kv_lora_rank
        of_heads = kv_b.view(expanded.num_heads, -1, self._rank)
        self._to_key = of_heads[:, : self._nope_dim]
        """[num_heads, nope_dim, rank]"""
        self._to_value = of_heads[:, self._nope_dim :].transpose(1, 2)
        """[num_heads, rank, v_head_dim]"""
        self._both = Linear(kv_b)

    def absorb(self, q: Tensor) -> Tensor:
        still, turned = q[..., : self._nope_dim], q[..., self._nope_dim :]
        out = q.new_empty((*q.shape[:2], self._rank + turned.shape[-1]))
        torch.bmm(still.transpose(0, 1), self._to_key, out=out[..., : self._rank].transpose(0, 1))
        out[..., self._rank :] = turned
        return out

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """See LatentLayer. v is a view of the product."""
        rows, turned = latent[:, 0, : self._rank], latent[..., self._rank :]
        both = self._both(rows).view(latent.shape[0], self.expanded.num_heads, self._nope_dim + self.expanded.v_head_dim)
        still, v = both[..., : self._nope_dim], both[..., self._nope_dim :]
        return torch.cat([still, turned.expand((*still.shape[:2], -1))], dim=-1), v

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
    """RMSNorm (Zhang and Sennrich 2019); with a bias, LayerNorm (Ba et al. 2016)."""

    weight: Tensor
    """[size], in the model's dtype or float32."""
    eps: float
    bias: Tensor | None = None
    """[size]"""
    absorbed: bool = False
    """Whether the weight, now all ones, is part of the product that follows: only a factor for each row is left of the norm."""
    share: NormShare | None = None
    """What ranks share, where the elements of an RMSNorm lie on several of them; None: they are all here."""
    by_length: tuple[Tensor, Tensor] | None = field(init=False, repr=False, compare=False, default=None)
    """What an RMSNorm on a CPU takes, where a torch operation costs more than what it computes: weight * sqrt(size) and
    sqrt(size * eps), float32. x / hypot(|x|, the latter) * the former is the norm, in four operations instead of seven."""

    def __post_init__(self) -> None:
        if self.bias is None and self.share is None and self.weight.device.type == "cpu":
            size = self.weight.shape[0]
            object.__setattr__(self, "by_length", (self.weight.float() * size**0.5, torch.tensor((size * self.eps) ** 0.5)))


@dataclass(frozen=True, slots=True)
class Embedding:
    """What the first residual stream is made of."""

    table: Tensor
    """[vocab_size, hidden_size]"""
    scale: float = 1.0
    """Multiplies a token's row."""
    positions: Tensor | None = None
    """[positions, hidden_size], learned: the row of its position is added to each token."""
    tokens: range | None = None
    """Ids of the tokens whose rows the table has, where other ranks have the others': its last row, zeros, stands for these."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How a row of the merged q, k, v product divides, and how its q and k are normed."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Norm | None = None
    """RMSNorm before RoPE, both or neither: over each head (Qwen3), or over all heads together where the weight is that long."""
    k_norm: Norm | None = None

    @property
    def whole_norm(self) -> bool:
        """Whether all heads of q are normed as one, and all of k."""
        if self.q_norm is None:
            return False
        return self.q_norm.share is not None or self.q_norm.weight.shape[0] == self.num_heads * self.head_dim != self.head_dim


@dataclass(frozen=True, slots=True)
class Gate:
    """What multiplies the output of attention or of a recurrence before its last product, and the norm that goes with it."""

    activation: GateActivation
    """The activation of the gate."""
    norm: Norm | None = None
    """RMSNorm of the output, over as many elements as `size`. Its weight is as long, or as long as a whole row."""
    size: int = 0
    gate_first: bool = False
    """Whether the output is multiplied before it is normed (Mamba 2) instead of after."""


Rope = tuple[Tensor, Tensor]
"""cos and sin of a step's positions."""


class Operations(Protocol):
    """The steps of one model. Rows are independent of each other in every one of them.

    Those with a body are what a device does that has nothing better; who subclasses inherits them.
    """

    def absorb(self, norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
        """Prepare a norm and the next product once, before any step: the two returned compute together what the two given do.

        For products of `norm_qkv` with a rotary embedding and of `norm_gated_product` alone.
        """
        return norm, linear

    def linear_choices(self, products: Iterable[tuple[Linear, bool]]) -> list[LinearChoice]:
        """Return the kinds of a model's linear layers whose kernel is chosen by times. products: all of them, and which are
        gated."""
        return []

    def embed(self, input_ids: Tensor, positions: Tensor, embed: Embedding) -> tuple[Tensor, tuple[Rope, ...]]:
        """Residual stream [num_tokens, hidden_size], and cos and sin of each of the model's rotary embeddings, for `norm_qkv`.

        input_ids, positions: int32 or int64 [num_tokens].
        """

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Norm over the rows of x [rows, size]."""

    def add_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """residual + norm of x [rows, size]; both are used up."""

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """Multiply x [rows, in_features] by a linear layer: [rows, out_features], in `out`, contiguous, if it is given."""
        return bound(self, linear, x.shape[0])(x, out=out)

    def norm_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation | None) -> Tensor:
        """Norm, product and activation, the first and the last if any: x [rows, in_features], rows perhaps strided, to
        [rows, out_features]."""

    def norm_gated_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation) -> Tensor:
        """Norm, if any, the product, activation of its first half times the second: to [rows, out_features / 2]."""

    def norm_qkv(
        self, x: Tensor, norm: Norm | None, linear: Linear, heads: Heads, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, if any, the merged product, then norm and rotation of q and k's heads.

        x: [num_tokens, hidden_size]; linear: to (num_heads + 2 num_kv_heads) head_dim, and perhaps to further heads, which come
        behind those of v; rope: of `embed`; None: no rotation.
        Returns q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim], rows perhaps strided.
        """

    def turn_heads(self, qkv: Tensor, heads: Heads, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """The part of `norm_qkv` after its product. qkv: [num_tokens, all heads' elements], contiguous, used up."""

    def activated(self, y: Tensor, activation: Activation, gated: bool) -> Tensor:
        """The part of `norm_product`, or (gated) of `norm_gated_product`, after its product y, contiguous and used up."""

    def rotate_latent(
        self, q: Tensor, latent: Tensor, config: LatentConfig, norm: Norm, rope: Rope | None
    ) -> tuple[Tensor, Tensor]:
        """Rotation of each query head's last elements; norm of the latents, and rotation of the key's elements behind them.

        q: [num_tokens, num_heads q_dim]; latent: [num_tokens, kv_dim]; rows perhaps strided, used up. norm: of kv_lora_rank
        elements; rope: of `embed`; None: no rotation. Returns q [num_tokens, num_heads, q_dim] and latents
        [num_tokens, 1, kv_dim].
        """

    def latent_layer(self, expanded: AttentionSpec, config: LatentConfig, kv_b: Tensor) -> LatentLayer:
        """What computes the products around latent attention, made once before any step.

        kv_b: [num_heads (qk_nope_head_dim + v_head_dim), kv_lora_rank], from a latent to each head's key and value.
        """

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """residual + product of x [rows, in_features]; residual: [rows, out_features], which is used up."""

    def add_products(self, residual: Tensor, terms: Sequence[tuple[Tensor, Linear]]) -> Tensor:
        """residual + products of several x and their Linear, as `add_product`."""
        return add_one_by_one(self, residual, terms)

    def gate(self, x: Tensor, by: Tensor, gate: Gate) -> Tensor:
        """x times the activation of `by`, both [num_tokens, size], rows perhaps strided, with the gate's norm."""

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        """cap * tanh(logits / cap), in place (Gemma 2)."""
        return softcap(logits, cap)

    def experts(self, config: ExpertsConfig, weights: RoutedWeights, norm: Norm) -> Experts:
        """A layer of experts after its norm, bound to its kernels; made once before any step."""


def softcap(logits: Tensor, cap: float) -> Tensor:
    """See Operations."""
    return logits.div_(cap).tanh_().mul_(cap)


GATES: dict[GateActivation, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": torch.sigmoid, "none": lambda by: by}


def add_one_by_one(ops: Operations, residual: Tensor, terms: Sequence[tuple[Tensor, Linear]]) -> Tensor:
    """Add products to the residual, as `Operations.add_products` says, one after the other."""
    for x, linear in terms:
        residual = ops.add_product(residual, x, linear)
    return residual


def norm_by_length(x: Tensor, weight: Tensor, least: Tensor) -> Tensor:
    """RMSNorm over the last axis of x, float32; the others are of `Norm.by_length`."""
    return torch.div(x, torch.linalg.vector_norm(x, 2, -1, True).hypot_(least)).mul_(weight)


def norm_heads(ops: Operations, q: Tensor, k: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Norm q and k, each [rows, size of its norm]: heads by themselves, or all heads of a token as one, perhaps over ranks."""
    assert heads.q_norm is not None
    assert heads.k_norm is not None
    share = heads.q_norm.share
    if share is None:
        return ops.norm(q, heads.q_norm), ops.norm(k, heads.k_norm)
    whole_q, whole_k = share.normed(heads.q_norm.eps, q.float(), k.float())
    return (whole_q * heads.q_norm.weight.float()).to(q.dtype), (whole_k * heads.k_norm.weight.float()).to(k.dtype)


def apply_gate(x: Tensor, by: Tensor, gate: Gate) -> Tensor:
    """See Operations. Computed in float32 and rounded once."""
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
"""Rows x [rows, size] and epsilon of the RMSNorm whose factor, one for each row, is still to be multiplied by."""


Step = Callable[..., Tensor]
"""A layer bound to a kernel: from x [rows, in_features] and what stands around the product, by name (`FusedKernel.compute`)."""


def bound(ops: Any, linear: Linear, rows: int, gated: bool = False, heads: Heads | None = None) -> Step:
    """Return a layer bound to the kernel for a number of rows. ops: of the device. heads: those to which RoPE is applied."""
    steps: BoundSteps | None = linear.gated_steps if gated else linear.steps
    if steps is None or steps.ops is not ops or (heads is not None and steps.heads is not heads):
        steps = BoundSteps(ops, linear, ops.choice_for(linear, gated), gated, heads)
        if gated:
            linear.gated_steps = steps
        else:
            linear.steps = steps
    return steps[(rows - 1).bit_length() if rows else -1]


class BoundSteps(list[Step]):
    """A layer bound to a kernel for each bucket of rows, and for no rows at the end."""

    borrows = True
    """Whether the tensors that are reached from here are others' (`held_tensors`)."""

    def __init__(self, ops: Any, linear: Linear, choice: LinearChoice, gated: bool, heads: Heads | None) -> None:
        self.ops = ops
        self.heads = heads
        buckets = [partial(self._bind, linear, choice, heads, bucket) for bucket in range(NUM_BUCKETS)]
        super().__init__([*buckets, partial(self._nothing, linear)])

    def _bind(self, linear: Linear, choice: LinearChoice, heads: Heads | None, bucket: int, x: Tensor, **around: Any) -> Tensor:
        """Bind a bucket at its first step, and run that."""
        step = self[bucket] = bound_step(self.ops, linear, choice.kernel_of(bucket), heads, 1 << bucket)
        return step(**{"x": x, **around})

    def _nothing(self, linear: Linear, x: Tensor, **around: Any) -> Tensor:
        """Return the result of a step without rows."""
        given = around.get("add_to") if around.get("out") is None else around["out"]
        columns = linear.out_features // 2 if around.get("gated") else linear.out_features
        return x.new_empty(0, columns) if given is None else given


def bound_step(ops: Any, linear: Linear, kernel: LinearKernel, heads: Heads | None, rows: int) -> Step:
    """Return a layer bound to a kernel, with launches for what the kernel does not fuse. rows: the most of its bucket."""

    def again(other: LinearKernel) -> Step:
        return bound_step(ops, linear, other, heads, rows)

    compute, fused = linear.bound_to(kernel, again), linear.fused_by(kernel)
    if heads is not None and "rotary" in fused:
        ours: Any = kernel
        if not ours.rotates(rows, linear.prepared_for(kernel), heads):
            fused = fused - {"rotary"}
    around = frozenset(FUSED) - {"bias"}
    activations = ACTIVATIONS if hasattr(kernel, "compute") else kernel.capabilities.activations
    return compute if fused >= around else Surrounded(ops, compute, fused, activations)


class Surrounded:
    """A bound kernel, and launches for what stands around its product."""

    def __init__(self, ops: Any, compute: Step, fused: frozenset[str], activations: Collection[str]) -> None:
        """fused: what the kernel computes itself, with one of `activations`."""
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
        """See `FusedKernel.compute`."""
        ops, scaled_by = self._ops, None
        gates, activates = activation in self._gates, activation in self._activates
        inner: dict[str, Any] = {}
        if norm is not None:
            if self._norms and norm.bias is None:
                inner["norm"] = norm
            elif norm.absorbed and ((gated and not gates) or (rotated is not None and not self._rotates)):
                scaled_by = (x, norm.eps)  # the launch after the product multiplies by the norm's factor
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
    """Every operation by torch's own functions: what a CPU runs, and what the fused kernels are tested against."""

    def __init__(self, inv_freq: Tensor, factors: Tensor, experts: ExpertsOptions | None = None) -> None:
        """inv_freq, factors: float32 [ropes, head_dim / 2], see `rope.rope_tables`. experts: kernels for layers of experts; None:
        Headway's own."""
        self._inv_freq = inv_freq
        self._factors = factors
        self._experts = experts_by(self, experts or ExpertsOptions())

    def embed(self, input_ids: Tensor, positions: Tensor, embed: Embedding) -> tuple[Tensor, tuple[Rope, ...]]:
        """cos twice, and sin with its first half negated: x * cos + swap_halves(x) * sin is the rotation, in three operations."""
        ropes, dtype = [], embed.table.dtype
        for inv_freq, factors in zip(self._inv_freq, self._factors, strict=True):
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
        exact = x.to(weight.dtype)  # as it is, unless the weight is kept in float32
        if norm.bias is not None:
            return layer_norm(exact, weight.shape, weight, norm.bias, norm.eps).to(x.dtype)
        return rms_norm(exact, weight.shape, weight, norm.eps).to(x.dtype)

    def add_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        return residual + self.norm(x, norm)

    def linear_choices(self, products: Iterable[tuple[Linear, bool]]) -> list[LinearChoice]:
        """Return the choices in which a third party's kernel takes part: a rule knows the others."""
        choices = [linear.choice for linear, _ in products]
        return list(dict.fromkeys(choice for choice in choices if choice is not None and choice.is_open))

    def choice_for(self, linear: Linear, gated: bool) -> LinearChoice:
        """Return the choice of a layer, for `bound`."""
        assert linear.choice is not None
        return linear.choice

    def gated(self, both: Tensor, activation: Activation, scaled_by: RowScale | None) -> Tensor:
        """Return the activation of the first half times the second, for `Surrounded`; no norm is left to be divided by."""
        return self.activated(both, activation, gated=True)

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        return linear(x, out)

    def norm_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation | None) -> Tensor:
        if linear.hands_over:
            return bound(self, linear, len(x))(x, norm=norm, activation=activation)
        y = linear(x if norm is None else self.norm(x, norm))
        return y if activation is None else self.activated(y, activation, gated=False)

    def norm_gated_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation) -> Tensor:
        if linear.hands_over:
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
        if linear.hands_over:
            return self.turn_heads(bound(self, linear, len(x))(x, norm=norm), heads, rope)
        return self.turn_heads(linear(x if norm is None else self.norm(x, norm)), heads, rope)

    def turn_heads(self, qkv: Tensor, heads: Heads, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """RoPE (Su et al. 2021) in transformers' half-split order."""
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
        return qk[:, :num_heads], qk[:, num_heads:], v

    def rotate_latent(
        self, q: Tensor, latent: Tensor, config: LatentConfig, norm: Norm, rope: Rope | None
    ) -> tuple[Tensor, Tensor]:
        q = q.view(q.shape[0], q.shape[1] // config.q_dim, config.q_dim)
        rows, key = latent[:, None].tensor_split([config.kv_lora_rank], dim=-1)
        rows = self.norm(rows, norm)
        if rope is None:
            return q, torch.cat([rows, key], dim=-1)
        still, turned = q.tensor_split([config.qk_nope_head_dim], dim=-1)
        return torch.cat([still, apply_rope(turned, rope)], dim=-1), torch.cat([rows, apply_rope(key, rope)], dim=-1)

    def latent_layer(self, expanded: AttentionSpec, config: LatentConfig, kv_b: Tensor) -> LatentLayer:
        return PlainLatentLayer(expanded, config, kv_b)

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        return bound(self, linear, len(x))(x, add_to=residual) if linear.hands_over else linear.add_to(residual, x)

    def gate(self, x: Tensor, by: Tensor, gate: Gate) -> Tensor:
        return apply_gate(x, by, gate)

    def experts(self, config: ExpertsConfig, weights: RoutedWeights, norm: Norm) -> BoundExperts:
        """See Operations. Without a third party's kernel, one expert after the other.

        :raises ModelError: on a GPU, where the host would have to wait for the device in every layer.
        """
        if weights.router.is_cuda:
            raise ModelError("experts: need Triton on a GPU, got none: pip install 'headway[triton]'")
        return self._experts.bind(config, weights, norm)


def experts_by(ops: Operations, options: ExpertsOptions, gate: Callable[[Tensor], Tensor] = silu) -> ExpertsLayers:
    """Return what makes layers of experts whose norm, router and built-in kernel are computed by torch's operations.

    gate: SiLU of a matrix.
    """

    def make(kernel: type[ExpertsKernel], spec: ExpertsSpec, shared: object) -> ExpertsKernel | None:
        if issubclass(kernel, TorchExperts):
            return kernel(spec, ops.product, gate)
        return None if is_own(kernel) else kernel(spec)

    return ExpertsLayers(options, partial(front_of, ops.norm, ops.product), make)


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the halves of each head. x: [num_tokens, heads, dim]; rope: cos and sin as `TorchOperations.embed` makes them."""
    cos, sin = rope
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)
