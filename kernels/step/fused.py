"""Fused operations of a decoder on a GPU, with few launches and with Headway's own GEMV and GEMM kernels for up to 128 rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig, ExpertsKernel, ExpertsSpec
from headway.core.contract.spec import AttentionSpec
from headway.kernels.experts.bound import BoundExperts, ExpertsLayers, ExpertsOptions, is_own
from headway.kernels.experts.plain import Front, RoutedKernel
from headway.kernels.experts.route_kernels import Router
from headway.kernels.experts.tiles import invariant_kernels
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.linear.choice import ON_GPU, LinearChoice, LinearKernels, builtin_kernels
from headway.kernels.linear.linear import Linear
from headway.kernels.runtime.triton_launch import FixedLauncher
from headway.kernels.step.binding import RowScale, bound, bound_step
from headway.kernels.step.config import ACTIVATE, Activation, LatentConfig, ropes_of
from headway.kernels.step.latent_kernels import FusedLatentLayer, LatentKernels
from headway.kernels.step.operations import Embedding, Gate, Heads, Norm, Operations, Rope
from headway.kernels.step.step_kernels import activate_and_mul, embed_tokens, gate_rows, norm_and_rotate, norm_rows
from headway.kernels.step.torch_operations import apply_gate, norm_heads


class Fused(Operations):
    """Operations of one model, on a GPU or under Triton's interpreter.

    No call synchronises or reads values on the host, so all of them can be captured in a CUDA graph. A graph runs the same
    kernels as an eager step with the same number of rows. The residual stream has the model's dtype, as in vLLM.
    """

    def __init__(
        self,
        inv_freq: Tensor,
        factors: Tensor,
        kernels: LinearKernels | None = None,
        experts: ExpertsOptions | None = None,
        halves: Sequence[int] = (),
        invariant: bool = False,
    ) -> None:
        """Prepare the operations.

        inv_freq, factors: float32 [ropes, head_dim / 2], see `rope.rope_tables`. kernels: kernels for linear layers. experts:
        options for MoE layers. For each of them, None means Headway's own kernels. halves: see `ropes_of`. invariant: True if a
        token's result must not depend on the other tokens; this concerns only MoE layers.
        """
        self.kernels = kernels or builtin_kernels(inv_freq.device, ON_GPU)
        self._device = inv_freq.device
        ropes = ropes_of(inv_freq, factors, halves)
        self._halves = [len(row) for row, _ in ropes]
        self._inv_freq = torch.cat([inv_freq.new_empty(0), *(row for row, _ in ropes)])
        self._factors = torch.cat([factors.new_empty(0), *(row for _, row in ropes)])
        firsts = [sum(self._halves[:number]) for number in range(len(ropes))]
        sizes = torch.tensor([firsts, self._halves], dtype=torch.int32)
        self._places = sizes.repeat_interleave(sizes[1], dim=1).to(self._device)
        """int32 [2, frequencies]: for each frequency, the first one of its rotary embedding, and their number."""
        self._launchers: dict[Hashable, FixedLauncher] = {}
        self._latent = LatentKernels(self._device)
        self._experts = (invariant_experts if invariant else fused_experts)(experts or ExpertsOptions(), self._device)

    def _launcher(self, key: Hashable, make: Callable[[], FixedLauncher]) -> FixedLauncher:
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = make()
        return launcher

    def choice_for(self, linear: Linear, gated: bool) -> LinearChoice:
        """Return the kernel choice for a layer, and register the layer with this choice."""
        choice = self.kernels.choice(linear.spec(self._device, gated))
        choice.compute = self._compute_gated if gated else self._compute_one
        choice.add(linear)
        linear.choice = linear.choice or choice
        return choice

    def linear_choices(self, products: Iterable[tuple[Linear, bool]]) -> list[LinearChoice]:
        """Return the choices to measure. A choice for a dense weight is included only if a third-party kernel is a candidate.
        Otherwise, a rule selects the kernel."""
        choices = []
        for linear, gated in products:
            choice = self.choice_for(linear, gated)
            linear.choice = choice
            if choice.is_open or not isinstance(linear.weight, Tensor):
                choices.append(choice)
        return list(dict.fromkeys(choices))

    def _compute_one(self, name: str, x: Tensor, linear: Linear) -> Tensor:
        """Compute a linear layer with the named kernel, for `LinearChoice.compute`."""
        kernel = self.choice_for(linear, gated=False).kernels[name]
        return bound_step(self, linear, kernel, None, x.shape[0])(x)

    def _compute_gated(self, name: str, x: Tensor, linear: Linear) -> Tensor:
        """Compute a gated linear layer with the named kernel, for `LinearChoice.compute`."""
        kernel = self.choice_for(linear, gated=True).kernels[name]
        norm = Norm(x.new_ones(x.shape[1]), 1e-6)
        return bound_step(self, linear, kernel, None, x.shape[0])(x, norm=norm, gated=True, activation="silu")

    def absorb(self, norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
        """Fold the norm's weight into the linear layer. A later kernel scales each row, which saves a launch for 17 or more rows.

        The weight is folded only in bfloat16, whose range suffices for rows that are not normed. Rows must also be short enough
        for each program of the later kernel to read a complete row.
        """
        dense = isinstance(linear.weight, Tensor) and linear.weight.dtype == torch.bfloat16
        if not dense or linear.in_features > _SHORT or linear.bias is not None or norm.bias is not None:
            return norm, linear
        assert isinstance(linear.weight, Tensor)
        weight = (linear.weight.float() * norm.weight.float()).to(torch.bfloat16)
        return Norm(torch.ones_like(norm.weight, dtype=torch.bfloat16), norm.eps, absorbed=True), Linear(weight)

    def embed(self, input_ids: Tensor, positions: Tensor, embed: Embedding) -> tuple[Tensor, tuple[Rope, ...]]:
        """Embed tokens and compute cos and sin, in one launch. cos and sin: float32 [num_tokens, head_dim / 2]."""
        table, places, angles = embed.table, embed.positions, len(self._inv_freq)
        num_tokens, hidden = input_ids.shape[0], table.shape[1]
        x = torch.empty(num_tokens, hidden, dtype=table.dtype, device=self._device)
        cos, sin = torch.empty(2, angles * num_tokens, device=self._device).unbind()
        if num_tokens:

            def make() -> FixedLauncher:
                block, block_angles = triton.next_power_of_2(hidden), triton.next_power_of_2(max(angles, 1))
                sizes = {"HIDDEN": hidden, "BLOCK": block, "ANGLES": angles, "BLOCK_ANGLES": block_angles}
                return FixedLauncher(embed_tokens, 4, self._device, {**sizes, "PLACES": places is not None})

            self._launcher(("embed", hidden, places is None), make)(
                (num_tokens, 1, 1),
                ids_ptr=input_ids,
                positions_ptr=positions,
                table_ptr=table,
                places_ptr=table if places is None else places,
                inv_freq_ptr=self._inv_freq,
                factors_ptr=self._factors,
                rope_ptr=self._places,
                scale=embed.scale,
                x_ptr=x,
                cos_ptr=cos,
                sin_ptr=sin,
            )
        sizes = [half * num_tokens for half in self._halves]
        parts = zip(cos.split(sizes), sin.split(sizes), self._halves, strict=True)
        return x, tuple((cos.view(num_tokens, half), sin.view(num_tokens, half)) for cos, sin, half in parts)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalize rows in one launch."""
        return self._norm(x, norm, None)

    def add_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """Normalize rows and add them to the residual in one launch, in place."""
        return self._norm(x, norm, residual)

    def _norm(self, x: Tensor, norm: Norm, residual: Tensor | None) -> Tensor:
        """Return the norm of x [rows, size] (contiguous), added in place to `residual` if it is given."""
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

    def norm_qkv(
        self, x: Tensor, norm: Norm | None, linear: Linear, heads: Heads, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute q, k and v in one launch for few rows, else in two or three. q, k and v are views of the GEMM's output.

        Without RoPE, there are one or two launches. Four more launches are needed if heads are normed without RoPE, or if one
        norm covers all heads.
        """
        x, norm = self._before(x, norm)
        separate = self._norms_apart(heads, rope)
        rotated = None if rope is None or separate else (heads, rope)
        step = bound(self, linear, x.shape[0], heads=None if rotated is None else heads)
        return self._split_heads(step(x, norm=norm, rotated=rotated), heads, rope if separate else None, separate)

    def rotate_heads(self, qkv: Tensor, heads: Heads, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize and rotate heads in one launch, in place. Four more launches are needed if heads are normed without RoPE, or
        if one norm covers all heads."""
        return self._split_heads(qkv, heads, rope, self._norms_apart(heads, rope))

    @staticmethod
    def _norms_apart(heads: Heads, rope: Rope | None) -> bool:
        """Return whether heads are normed in launches of their own, not in the one that rotates them."""
        return (heads.q_norm is not None or heads.v_norm is not None) and (rope is None or heads.whole_norm)

    def _split_heads(self, qkv: Tensor, heads: Heads, rope: Rope | None, separate: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v as views of `qkv`.

        rope: None means that no rotation remains to be applied. separate: True if heads are normed in separate launches.
        """
        if separate:
            heads = self._norm_heads(qkv, heads)
        if rope is not None:
            self.rotate(qkv, heads, rope, None)
        qkv = qkv.view(qkv.shape[0], qkv.shape[1] // heads.head_dim, heads.head_dim)
        rotated = heads.num_heads + heads.num_kv_heads
        return qkv[:, : heads.num_heads], qkv[:, heads.num_heads : rotated], qkv[:, rotated:]

    def _before(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """Return x and the norm for a kernel that fuses only RMSNorm. If the norm is a LayerNorm, return normed x and None."""
        return (x, norm) if norm is None or norm.bias is None else (self.norm(x, norm), None)

    def _norm_heads(self, qkv: Tensor, heads: Heads) -> Heads:
        """Normalize the heads in place, in separate launches. Return `heads` without its norms."""
        q_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        q, k, v = (part for part in qkv[:, : q_size + 2 * kv_size].split([q_size, kv_size, kv_size], dim=1))
        if heads.q_norm is not None and heads.k_norm is not None:
            q_rows = q.contiguous().view(-1, heads.q_norm.weight.shape[0])
            k_rows = k.contiguous().view(-1, heads.k_norm.weight.shape[0])
            for part, normed in zip((q, k), norm_heads(self, q_rows, k_rows, heads), strict=True):
                part.copy_(normed.view_as(part))
        if heads.v_norm is not None:
            v.copy_(self.norm(v.contiguous().view(-1, heads.head_dim), heads.v_norm).view_as(v))
        return Heads(heads.num_heads, heads.num_kv_heads, heads.head_dim)

    def rotate(self, qkv: Tensor, heads: Heads, rope: Rope, scaled_by: RowScale | None) -> None:
        """Normalize and rotate heads in one launch, in place (RoPE). scaled_by: rows whose RMSNorm factor is still to be applied,
        and their epsilon.
        """
        num_tokens, dim = qkv.shape[0], heads.head_dim
        num_heads, all_heads = heads.num_heads, qkv.shape[1] // dim
        normed, norms_v = heads.q_norm is not None and heads.k_norm is not None, heads.v_norm is not None
        touched = heads.num_heads + heads.num_kv_heads * (2 if norms_v else 1) if scaled_by is None else all_heads
        if num_tokens:
            block_half = triton.next_power_of_2(dim // 2)
            block_h = min(triton.next_power_of_2(touched), max(1, _ROTATED // block_half))
            x, eps = (qkv, 0.0) if scaled_by is None else scaled_by
            size = 0 if scaled_by is None else x.shape[1]

            def make() -> FixedLauncher:
                sizes = {"HEADS": num_heads, "KV_HEADS": heads.num_kv_heads, "ALL_HEADS": all_heads, "HEAD_DIM": dim}
                sizes |= {**_row_sizes(size), "BLOCK_HALF": block_half, "BLOCK_H": block_h, "NORM": normed, "NORM_V": norms_v}
                return FixedLauncher(norm_and_rotate, 2, self._device, sizes)

            q_norm, k_norm = heads.q_norm, heads.k_norm
            self._launcher(("rotate", num_heads, heads.num_kv_heads, all_heads, dim, normed, norms_v, size), make)(
                (num_tokens, triton.cdiv(touched, block_h), 1),
                qkv_ptr=qkv,
                cos_ptr=rope[0],
                sin_ptr=rope[1],
                q_norm_ptr=q_norm.weight if q_norm and k_norm else qkv,
                k_norm_ptr=k_norm.weight if q_norm and k_norm else qkv,
                x_ptr=x,
                eps=q_norm.eps if q_norm and k_norm else heads.v_norm.eps if heads.v_norm else 0.0,
                row_eps=eps,
            )

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        return bound(self, linear, x.shape[0])(x, out=out)

    def norm_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation | None) -> Tensor:
        """Compute the operations in one launch for few rows, in two with the `tiles` kernel, else in three. A LayerNorm and
        strided rows add one launch each."""
        x, norm = self._before(x.contiguous(), norm)
        return bound(self, linear, x.shape[0])(x, norm=norm, activation=activation)

    def norm_gated_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation) -> Tensor:
        """Compute the operations in one launch for few rows, in two with the `tiles` kernel, else in two or three. A LayerNorm
        adds one launch."""
        x, norm = self._before(x, norm)
        return bound(self, linear, x.shape[0], gated=True)(x, norm=norm, gated=True, activation=activation)

    def activated(self, y: Tensor, activation: Activation, gated: bool) -> Tensor:
        """Compute a gated activation in one launch, or another activation by torch's operations."""
        return self.gated(y, activation, None) if gated else ACTIVATE[activation](y)

    def gated(self, both: Tensor, activation: Activation, scaled_by: RowScale | None) -> Tensor:
        """Activate gate and multiply by up, in one launch. scaled_by: rows whose RMSNorm factor is still to be applied, and the
        norm's epsilon."""
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
        """Add the linear layer's output to the residual in place, inside the GEMM if its kernel fuses the addition."""
        return bound(self, linear, x.shape[0])(x, add_to=residual)

    def rotate_latent(
        self, q: Tensor, latent: Tensor, config: LatentConfig, norm: Norm, rope: Rope | None
    ) -> tuple[Tensor, Tensor]:
        """Normalize latents and rotate queries and keys in one launch, in place. Without RoPE, two more launches fill cos with 1
        and sin with 0."""
        if rope is None:
            size = q.shape[0], config.qk_rope_head_dim // 2
            rope = torch.ones(size, device=self._device), torch.zeros(size, device=self._device)
        return self._latent.rotate(q, latent, config, norm, rope)

    def latent_layer(self, expanded: AttentionSpec, config: LatentConfig, kv_b: Tensor) -> FusedLatentLayer:
        """Make the layer. All layers share launchers."""
        return FusedLatentLayer(expanded, config, kv_b, self._latent)

    def gate(self, x: Tensor, by: Tensor, gate: Gate) -> Tensor:
        """Apply the gate in one launch. If ranks share the norm, or a group is too long for one program, torch's operations need
        several launches."""
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
        """Bind a layer of experts. Layers of one kind share launchers, counters and the choice between kernels."""
        return self._experts.bind(config, weights, norm)


def fused_experts(options: ExpertsOptions, device: torch.device, invariant: bool = False) -> ExpertsLayers:
    """Return a factory for MoE layers on a GPU, which run norm, router and top-k in one launch.

    invariant: True if a token's result must not depend on the other tokens or their number.
    """

    def front(config: ExpertsConfig) -> Front:
        return Router(config, device, invariant).bind

    def make(kernel: type[ExpertsKernel], spec: ExpertsSpec, shared: dict[Any, Any]) -> ExpertsKernel | None:
        if issubclass(kernel, RoutedKernel):
            return kernel(spec, shared)
        return None if is_own(kernel) else kernel(spec)

    return ExpertsLayers(options, front, make)


def invariant_experts(options: ExpertsOptions, device: torch.device) -> ExpertsLayers:
    """Return a `fused_experts` factory for deterministic mode. Each of its layers uses one Headway kernel for any number of
    tokens."""

    def able(device_type: str) -> list[type[ExpertsKernel]]:
        return [*invariant_kernels(), *(each for each in options.able(device_type) if not is_own(each))]

    return fused_experts(replace(options, able=able, invariant=True), device, invariant=True)


_ROTATED = 512
"""Number of half-head elements that a program of two warps rotates (RoPE). This is eight per thread, which take 16 bytes in half
precision."""
_GATED = 1024
"""Number of elements that one program of four warps handles in activate-and-multiply."""
_LONGEST = 8192
"""Maximum number of elements in a group that one program of eight warps norms."""
_SHORT = 2048
"""Maximum number of elements in a row whose weight is folded by `absorb`. Each program of the next kernel recomputes the sum of
squares of such a row (4 KB from L2)."""


def _row_sizes(size: int) -> dict[str, int]:
    """Return the compile-time constants for rows whose RMSNorm factor is still to be applied. size: number of elements in a row,
    or 0 if the kernel applies no such factor."""
    return {"ROW": size, "BLOCK_ROW": triton.next_power_of_2(max(size, 1))}
