"""A decoder's operations on a GPU: few launches, and products of up to 128 rows by kernels of ours."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig, ExpertsKernel, ExpertsSpec
from headway.core.contract.linear import FUSED, LinearKernel
from headway.core.contract.spec import AttentionSpec
from headway.kernels.experts.bound import BoundExperts, ExpertsLayers, ExpertsOptions, is_own
from headway.kernels.experts.plain import Front, RoutedKernel
from headway.kernels.experts.route_kernels import Router
from headway.kernels.experts.tiles import invariant_kernels
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.linear.choice import NUM_BUCKETS, ON_GPU, LinearChoice, LinearKernels, builtin_kernels
from headway.kernels.linear.linear import Linear
from headway.kernels.runtime.triton_launch import FixedLauncher
from headway.kernels.step.config import Activation, LatentConfig
from headway.kernels.step.latent_kernels import FusedLatentLayer, LatentKernels
from headway.kernels.step.operations import (
    ACTIVATE,
    Embedding,
    Gate,
    Heads,
    Norm,
    Operations,
    Rope,
    apply_gate,
    norm_heads,
)
from headway.kernels.step.step_kernels import activate_and_mul, embed_tokens, gate_rows, norm_and_rotate, norm_rows


class Fused(Operations):
    """Operations of one model, on a GPU or under Triton's interpreter.

    No call synchronises or looks at values, so all of it can be captured in a CUDA graph, and a graph runs the kernels that the
    same number of rows gets without one. The residual stream is kept in the model's dtype, as vLLM keeps it.
    """

    def __init__(
        self, inv_freq: Tensor, factors: Tensor, kernels: LinearKernels | None = None, experts: ExpertsOptions | None = None
    ) -> None:
        """inv_freq, factors: float32 [ropes, head_dim / 2], see `rope.rope_tables`. kernels: for linear layers; experts: for
        layers of experts; None means Headway's own."""
        self.kernels = kernels or builtin_kernels(inv_freq.device, ON_GPU)
        self._inv_freq = inv_freq
        self._factors = factors
        self._device = inv_freq.device
        self._launchers: dict[Hashable, FixedLauncher] = {}
        self._latent = LatentKernels(self._device)
        self._experts = fused_experts(experts or ExpertsOptions(), self._device)

    def _launcher(self, key: Hashable, make: Callable[[], FixedLauncher]) -> FixedLauncher:
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = make()
        return launcher

    def _bound(self, linear: Linear, rows: int, gated: bool = False, heads: Heads | None = None) -> Step:
        """Return a layer bound to the kernel for a number of rows. heads: those to which RoPE is applied."""
        steps: BoundSteps | None = linear.gated_steps if gated else linear.steps
        if steps is None or steps.ops is not self or (heads is not None and steps.heads is not heads):
            steps = self._bind(linear, gated, heads)
        return steps[(rows - 1).bit_length() if rows else -1]

    def _bind(self, linear: Linear, gated: bool, heads: Heads | None) -> BoundSteps:
        steps = BoundSteps(self, linear, self._choice(linear, gated), gated, heads)
        if gated:
            linear.gated_steps = steps
        else:
            linear.steps = steps
        return steps

    def _choice(self, linear: Linear, gated: bool) -> LinearChoice:
        """The choice for a layer, which counts as one of its kind from now on."""
        choice = self.kernels.choice(linear.spec(self._device, gated))
        choice.compute = self._gated_alone if gated else self._alone
        choice.add(linear)
        linear.choice = linear.choice or choice
        return choice

    def linear_choices(self, products: Iterable[tuple[Linear, bool]]) -> list[LinearChoice]:
        """See Operations. Over plain weights a rule chooses, unless a third party's kernel takes part."""
        choices = []
        for linear, gated in products:
            choice = self._choice(linear, gated)
            linear.choice = choice
            if choice.is_open or not isinstance(linear.weight, Tensor):
                choices.append(choice)
        return list(dict.fromkeys(choices))

    def _alone(self, name: str, x: Tensor, linear: Linear) -> Tensor:
        """Return the product by one kernel, as `LinearChoice.compute` says."""
        kernel = self._choice(linear, gated=False).kernels[name]
        return bound_step(self, linear, kernel, None, x.shape[0])(x)

    def _gated_alone(self, name: str, x: Tensor, linear: Linear) -> Tensor:
        """Return a gated product by one kernel, as `LinearChoice.compute` says."""
        kernel = self._choice(linear, gated=True).kernels[name]
        norm = Norm(x.new_ones(x.shape[1]), 1e-6)
        return bound_step(self, linear, kernel, None, x.shape[0])(x, norm=norm, gated=True, activation="silu")

    def absorb(self, norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
        """The norm's weight goes into the product's, whose result a kernel after it scales by row: a launch less from 17 rows on.

        In bfloat16 alone, where a row of any size fits; and for rows so short that each program of that kernel may read them.
        """
        dense = isinstance(linear.weight, Tensor) and linear.weight.dtype == torch.bfloat16
        if not dense or linear.in_features > _SHORT or linear.bias is not None or norm.bias is not None:
            return norm, linear
        assert isinstance(linear.weight, Tensor)
        weight = (linear.weight.float() * norm.weight.float()).to(torch.bfloat16)
        return Norm(torch.ones_like(norm.weight, dtype=torch.bfloat16), norm.eps, absorbed=True), Linear(weight)

    def embed(self, input_ids: Tensor, positions: Tensor, embed: Embedding) -> tuple[Tensor, tuple[Rope, ...]]:
        """One launch. cos and sin: float32 [num_tokens, head_dim / 2]."""
        table, places, (ropes, half) = embed.table, embed.positions, self._inv_freq.shape
        num_tokens, hidden = input_ids.shape[0], table.shape[1]
        x = torch.empty(num_tokens, hidden, dtype=table.dtype, device=self._device)
        cos, sin = torch.empty(2, ropes, num_tokens, half, device=self._device).unbind()
        if num_tokens:

            def make() -> FixedLauncher:
                block, block_half = triton.next_power_of_2(hidden), triton.next_power_of_2(max(ropes * half, 1))
                sizes = {"HIDDEN": hidden, "BLOCK": block, "ROPES": ropes, "HALF": half, "BLOCK_HALF": block_half}
                return FixedLauncher(embed_tokens, 4, self._device, {**sizes, "PLACES": places is not None})

            self._launcher(("embed", hidden, places is None), make)(
                (num_tokens, 1, 1),
                ids_ptr=input_ids,
                positions_ptr=positions,
                table_ptr=table,
                places_ptr=table if places is None else places,
                inv_freq_ptr=self._inv_freq,
                factors_ptr=self._factors,
                scale=embed.scale,
                x_ptr=x,
                cos_ptr=cos,
                sin_ptr=sin,
            )
        return x, tuple(zip(cos.unbind(), sin.unbind(), strict=True))

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """One launch."""
        return self._norm(x, norm, None)

    def add_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """One launch, in place."""
        return self._norm(x, norm, residual)

    def _norm(self, x: Tensor, norm: Norm, residual: Tensor | None) -> Tensor:
        """x: [rows, size], contiguous. The residual, to which the norm is added, or the norm by itself."""
        rows, size = x.shape
        y = torch.empty_like(x) if residual is None else residual
        if rows:
            kind = {"LAYER": norm.bias is not None, "ADD": residual is not None}

            def make() -> FixedLauncher:
                block = triton.next_power_of_2(size)
                return FixedLauncher(norm_rows, 4 if block <= 2048 else 8, self._device, {"SIZE": size, "BLOCK": block, **kind})

            launch = self._launcher(("norm", size, *kind.values()), make)
            bias = norm.weight if norm.bias is None else norm.bias
            launch((rows, 1, 1), x_ptr=x, weight_ptr=norm.weight, bias_ptr=bias, residual_ptr=y, y_ptr=y, eps=norm.eps)
        return y

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """One launch."""
        return self._bound(linear, x.shape[0])(x, out=out)

    def norm_qkv(
        self, x: Tensor, norm: Norm | None, linear: Linear, heads: Heads, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One launch for few rows, else two or three; q, k and v are views of the product.

        Without a rotation, one or two; four more where heads are normed without one, or all as one.
        """
        x, norm = self._before(x, norm)
        alone = heads.q_norm is not None and (rope is None or heads.whole_norm)
        rotated = None if rope is None or alone else (heads, rope)
        step = self._bound(linear, x.shape[0], heads=None if rotated is None else heads)
        return self._turned(step(x, norm=norm, rotated=rotated), heads, rope if alone else None, alone)

    def turn_heads(self, qkv: Tensor, heads: Heads, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """One launch, in place; four more where heads are normed without a rotation, or all as one."""
        return self._turned(qkv, heads, rope, heads.q_norm is not None and (rope is None or heads.whole_norm))

    def _turned(self, qkv: Tensor, heads: Heads, rope: Rope | None, alone: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a product. rope: None: nothing is left to be rotated; alone: heads are normed in launches before."""
        if alone:
            heads = self._norm_heads(qkv, heads)
        if rope is not None:
            self.rotate(qkv, heads, rope, None)
        qkv = qkv.view(qkv.shape[0], qkv.shape[1] // heads.head_dim, heads.head_dim)
        rotated = heads.num_heads + heads.num_kv_heads
        return qkv[:, : heads.num_heads], qkv[:, heads.num_heads : rotated], qkv[:, rotated:]

    def _before(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """What a kernel that norms its input is given: it knows RMSNorm alone, so that LayerNorm goes before it."""
        return (x, norm) if norm is None or norm.bias is None else (self.norm(x, norm), None)

    def _norm_heads(self, qkv: Tensor, heads: Heads) -> Heads:
        """Norm the heads of q and of k by themselves, in place; the heads as they are then."""
        assert heads.q_norm is not None
        assert heads.k_norm is not None
        q_size, k_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        q, k = qkv[:, :q_size], qkv[:, q_size : q_size + k_size]
        q_rows = q.contiguous().view(-1, heads.q_norm.weight.shape[0])
        k_rows = k.contiguous().view(-1, heads.k_norm.weight.shape[0])
        for part, normed in zip((q, k), norm_heads(self, q_rows, k_rows, heads), strict=True):
            part.copy_(normed.view_as(part))
        return Heads(heads.num_heads, heads.num_kv_heads, heads.head_dim)

    def rotate(self, qkv: Tensor, heads: Heads, rope: Rope, scaled_by: _RowScale | None) -> None:
        """One launch, in place. scaled_by: the rows whose norm is still to be divided by, and epsilon."""
        num_tokens, dim = qkv.shape[0], heads.head_dim
        num_heads, all_heads = heads.num_heads, qkv.shape[1] // dim
        touched = heads.num_heads + heads.num_kv_heads if scaled_by is None else all_heads
        normed = heads.q_norm is not None and heads.k_norm is not None
        if num_tokens:
            block_half = triton.next_power_of_2(dim // 2)
            block_h = min(triton.next_power_of_2(touched), max(1, _ROTATED // block_half))
            x, eps = (qkv, 0.0) if scaled_by is None else scaled_by
            size = 0 if scaled_by is None else x.shape[1]

            def make() -> FixedLauncher:
                sizes = {"HEADS": num_heads, "KV_HEADS": heads.num_kv_heads, "ALL_HEADS": all_heads, "HEAD_DIM": dim}
                sizes |= {**_row_sizes(size), "BLOCK_HALF": block_half, "BLOCK_H": block_h, "NORM": normed}
                return FixedLauncher(norm_and_rotate, 2, self._device, sizes)

            q_norm, k_norm = heads.q_norm, heads.k_norm
            self._launcher(("rotate", num_heads, heads.num_kv_heads, all_heads, dim, normed, size), make)(
                (num_tokens, triton.cdiv(touched, block_h), 1),
                qkv_ptr=qkv,
                cos_ptr=rope[0],
                sin_ptr=rope[1],
                q_norm_ptr=q_norm.weight if q_norm and k_norm else qkv,
                k_norm_ptr=k_norm.weight if q_norm and k_norm else qkv,
                x_ptr=x,
                eps=q_norm.eps if q_norm and k_norm else 0.0,
                row_eps=eps,
            )

    def norm_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation | None) -> Tensor:
        """One launch for few rows, two for tiles, else three; one more before it for a LayerNorm, and for strided rows."""
        x, norm = self._before(x.contiguous(), norm)
        return self._bound(linear, x.shape[0])(x, norm=norm, activation=activation)

    def norm_gated_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation) -> Tensor:
        """One launch for few rows, two for tiles, else two or three; one more before it for a LayerNorm."""
        x, norm = self._before(x, norm)
        return self._bound(linear, x.shape[0], gated=True)(x, norm=norm, gated=True, activation=activation)

    def activated(self, y: Tensor, activation: Activation, gated: bool) -> Tensor:
        """One launch where gated, else torch's."""
        return self.gated(y, activation, None) if gated else ACTIVATE[activation](y)

    def gated(self, both: Tensor, activation: Activation, scaled_by: _RowScale | None) -> Tensor:
        """One launch. scaled_by: the rows whose norm is still to be multiplied by, and epsilon."""
        rows, size = both.shape[0], both.shape[1] // 2
        y = torch.empty(rows, size, dtype=both.dtype, device=self._device)
        if rows:
            x, eps = (both, 0.0) if scaled_by is None else scaled_by
            row_size = 0 if scaled_by is None else x.shape[1]

            def make() -> FixedLauncher:
                sizes = {"SIZE": size, "BLOCK": _GATED, **_row_sizes(row_size)}
                return FixedLauncher(activate_and_mul, 4, self._device, {**sizes, "ACTIVATION": activation})

            launch = self._launcher(("gated", activation, size, row_size), make)
            launch((rows, triton.cdiv(size, _GATED), 1), x_ptr=both, y_ptr=y, row_ptr=x, row_eps=eps)
        return y

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """Add the product to the residual in place; the addition is a part of the product where its kernel fuses that."""
        return self._bound(linear, x.shape[0])(x, add_to=residual)

    def rotate_latent(
        self, q: Tensor, latent: Tensor, config: LatentConfig, norm: Norm, rope: Rope | None
    ) -> tuple[Tensor, Tensor]:
        """One launch, in place; two more where nothing is rotated, for a cos and sin that leave all as it is."""
        if rope is None:
            size = q.shape[0], config.qk_rope_head_dim // 2
            rope = torch.ones(size, device=self._device), torch.zeros(size, device=self._device)
        return self._latent.turn(q, latent, config, norm, rope)

    def latent_layer(self, expanded: AttentionSpec, config: LatentConfig, kv_b: Tensor) -> FusedLatentLayer:
        """All layers share launchers."""
        return FusedLatentLayer(expanded, config, kv_b, self._latent)

    def gate(self, x: Tensor, by: Tensor, gate: Gate) -> Tensor:
        """One launch; some of torch's where ranks share the norm, and where one program cannot hold a group."""
        norm, (rows, width) = gate.norm, x.shape
        if norm is not None and (norm.share is not None or gate.size > _LONGEST):
            return apply_gate(x, by, gate)
        size = _GATED if norm is None else gate.size
        x, by = (each if each.stride(1) == 1 else each.contiguous() for each in (x, by))
        y = torch.empty(rows, width, dtype=x.dtype, device=self._device)
        if rows:
            block = triton.next_power_of_2(size)
            groups = max(1, _GATED // block)
            kind = {"ACTIVATION": gate.activation, "NORM": norm is not None, "GATE_FIRST": gate.gate_first}
            sizes = {"STRIDE_X": x.stride(0), "STRIDE_BY": by.stride(0), "WIDTH": width, "SIZE": size}
            kind["WHOLE"] = norm is not None and len(norm.weight) != size

            def make() -> FixedLauncher:
                constants = {**sizes, "BLOCK": block, "BLOCK_G": groups, **kind}
                return FixedLauncher(gate_rows, 4 if block <= 2048 else 8, self._device, constants)

            launch = self._launcher(("gate", *sizes.values(), *kind.values()), make)
            weight, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
            grid = rows, triton.cdiv(triton.cdiv(width, size), groups), 1
            launch(grid, x_ptr=x, by_ptr=by, weight_ptr=weight, y_ptr=y, eps=eps)
        return y

    def experts(self, config: ExpertsConfig, weights: RoutedWeights, norm: Norm) -> BoundExperts:
        """See Operations. Layers of one kind share launchers, counters, and the choice between kernels."""
        return self._experts.bind(config, weights, norm)


def fused_experts(options: ExpertsOptions, device: torch.device, invariant: bool = False) -> ExpertsLayers:
    """Return what makes layers of experts on a GPU: norm, router and choice are one launch.

    invariant: a token's bits do not depend on the other tokens or their number, and third parties' kernels take no part.
    """

    def front(config: ExpertsConfig) -> Front:
        return Router(config, device, invariant).bind

    def make(kernel: type[ExpertsKernel], spec: ExpertsSpec, shared: dict[Any, Any]) -> ExpertsKernel | None:
        if issubclass(kernel, RoutedKernel):
            return kernel(spec, shared)
        return None if is_own(kernel) or invariant else kernel(spec)

    return ExpertsLayers(options, front, make)


def invariant_experts(options: ExpertsOptions, device: torch.device) -> ExpertsLayers:
    """Return `fused_experts` whose layers have one kernel each, the same for any number of tokens."""
    return fused_experts(replace(options, able=lambda _: invariant_kernels()), device, invariant=True)


_ROTATED = 512
"""Elements of half heads that one program of two warps turns: eight a thread, one 16-byte access in half precision."""
_GATED = 1024
"""Likewise for activate-and-multiply, four warps."""
_LONGEST = 8192
"""Elements of a group that one program of eight warps norms."""
_SHORT = 2048
"""Elements of a row that every program of those two may read for the sum of its squares, 4 KB out of L2."""

_RowScale = tuple[Tensor, float]
"""Rows x [rows, size] and epsilon of the RMSNorm whose factor, one for each row, is still to be multiplied by."""


Step = Callable[..., Tensor]
"""A layer bound to a kernel: from x [rows, in_features] and what stands around the product, by name (`FusedKernel.compute`)."""


class BoundSteps(list[Step]):
    """A layer bound to a kernel for each bucket of rows, and for no rows at the end."""

    borrows = True
    """Whether the tensors that are reached from here are others' (`held_tensors`)."""

    def __init__(self, ops: Fused, linear: Linear, choice: LinearChoice, gated: bool, heads: Heads | None) -> None:
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


def bound_step(ops: Fused, linear: Linear, kernel: LinearKernel, heads: Heads | None, rows: int) -> Step:
    """Return a layer bound to a kernel, with launches for what the kernel does not fuse. rows: the most of its bucket."""
    compute, fused = linear.bound_to(kernel), kernel.capabilities.fused
    if heads is not None and "rotary" in fused:
        ours: Any = kernel
        if not ours.rotates(rows, linear.prepared_for(kernel), heads):
            fused = fused - {"rotary"}
    around = frozenset(FUSED) - {"bias"}
    return compute if fused >= around else Surrounded(ops, compute, fused)


class Surrounded:
    """A bound kernel, and launches for what stands around its product."""

    def __init__(self, ops: Fused, compute: Step, fused: frozenset[str]) -> None:
        """fused: what the kernel computes itself."""
        self._ops = ops
        self._compute = compute
        self._norms = "norm" in fused
        self._gates = "gated" in fused
        self._activates = "activation" in fused
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
        inner: dict[str, Any] = {}
        if norm is not None:
            if self._norms:
                inner["norm"] = norm
            elif norm.absorbed and ((gated and not self._gates) or (rotated is not None and not self._rotates)):
                scaled_by = (x, norm.eps)  # the launch after the product multiplies by the norm's factor
            else:
                x = ops.norm(x, norm)
        if gated and self._gates:
            inner |= {"gated": True, "activation": activation}
        elif not gated and activation is not None and self._activates:
            inner["activation"] = activation
        if add_to is not None and self._adds:
            inner["add_to"] = add_to
        if rotated is not None and self._rotates:
            inner["rotated"] = rotated
        if out is not None:
            inner["out"] = out
        inner["x"] = x
        y = self._compute(**inner)
        if gated and not self._gates:
            assert activation is not None
            y = ops.gated(y, activation, scaled_by)
        elif not gated and activation is not None and not self._activates:
            y = ACTIVATE[activation](y)
        if rotated is not None and not self._rotates:
            heads, rope = rotated
            ops.rotate(y, heads, rope, scaled_by)
        return y if add_to is None or self._adds else add_to.add_(y)


def _row_sizes(size: int) -> dict[str, int]:
    """Compile-time constants for the rows of a norm; 0: there is none."""
    return {"ROW": size, "BLOCK_ROW": triton.next_power_of_2(max(size, 1))}
