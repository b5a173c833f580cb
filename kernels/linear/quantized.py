"""Triton GEMM over quantized weights: its tiling with split_k, and its launcher. The kernel is in quantized_kernels.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import torch
import triton
from torch import Tensor

from headway.core.contract.linear import FUSED, LinearCapabilities, LinearSpec
from headway.core.contract.support import Support
from headway.core.contract.weights import QuantizedWeight, Weight
from headway.kernels.linear.choice import KERNEL
from headway.kernels.linear.forms import Operand, WeightBytes, sample_of, tensors_of, weight_bytes
from headway.kernels.linear.product_kernels import DEVICES, QUANTIZED, ROTATION, ProductCase, RotationArguments, TritonProducts
from headway.kernels.linear.quantized_kernels import quantized_product
from headway.kernels.runtime.triton_launch import INTERPRETED, FixedLauncher
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Heads, Norm, Rope


@dataclass(frozen=True, slots=True)
class QuantizedTiling:
    """Tiling of one GEMM; see the kernel's constants."""

    block_n: int
    block_m: int
    span: int
    slices: int
    splits: int
    stages: int
    prefetch: int = 4
    num_warps: int = 4
    early: bool = True
    assembly: bool = True


TilingRule = Callable[[WeightBytes, int, int, bool, int], QuantizedTiling]
"""(weight, rows, out_features, gated, number of SMs) -> tiling."""


def quantized_tiling(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> QuantizedTiling:
    """Return the tiling of a GEMM, which depends on the number of rows.

    For up to 16 rows, warps are placed along K, and a chunk covers many columns. For more rows, warps are placed along the
    weight's rows.
    """
    block_m = 8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else 64
    few = block_m <= 16
    span = math.gcd(weight.span, _FEW_SPAN) if few else weight.span
    slices = _FEW_CHUNK // span if few else 1
    block_n = 64 if block_m > 8 and not (few and gated) else 32
    while slices > 1 and weight.row // span <= slices // 2:
        slices //= 2
    chunks = -(-weight.row // (span * slices))
    programs = -(-out_features // block_n) * -(-rows // block_m)
    splits = 1
    while programs * splits < _PROGRAMS * multiprocessors and splits < 8 and chunks // (2 * splits) >= 2:
        splits *= 2
    # Bytes in flight per program: weights, and x in halves of a group or whole.
    num_bytes = slices * span * (block_n * (2 if gated else 1) + 2 * block_m * (2 if weight.half else 1))
    return QuantizedTiling(block_n, block_m, span, slices, splits, max(2, min(_SHARED // num_bytes, 6, chunks)))


class InOrder:
    """Reorders x, and the weight of the norm before a linear layer, into the order of the columns of the layer's weight."""

    def __init__(self) -> None:
        self._norms: dict[Operand, tuple[Tensor, Tensor]] = {}
        """Operand of each layer -> (weight of the norm before the layer, reordered copy of the norm's weight)."""

    def __call__(self, x: Tensor, norm: Norm | None, weight: Operand) -> tuple[Tensor, Tensor | None]:
        """Return x and the norm's weight in the order of the weight's columns. Both are unchanged if this is the order of the
        input features. Otherwise, reordering x takes one launch."""
        order, plain = weight.order, None if norm is None else norm.weight
        if order is None:
            return x, plain
        if plain is None:
            return x.index_select(1, order), None
        known = self._norms.get(weight)
        if known is None or known[0] is not plain:
            known = self._norms[weight] = plain, plain.index_select(0, order)
        return x.index_select(1, order), known[1]


MOST_ROWS: Final = 64
"""Maximum number of rows at which variants are measured. At more rows, kernels are limited by computation."""
CHANGES: Final[Mapping[str, Callable[[QuantizedTiling], QuantizedTiling]]] = {
    "n64": lambda tiling: replace(tiling, block_n=64),
    "n128": lambda tiling: replace(tiling, block_n=128),
    "splits x2": lambda tiling: replace(tiling, splits=2 * tiling.splits),
}


class TritonKernel(TritonProducts):
    """Triton GEMM over quantized weights, for x in half precision, in one launch. Its variants differ in their tiles.

    Only weights are quantized: x keeps its type, and sums are float32. The tiling depends on the shape and the number of rows,
    rounded up. A row's result does not depend on the other rows.
    """

    name = KERNEL
    capabilities = LinearCapabilities(QUANTIZED, devices=DEVICES, order=True, fused=frozenset(FUSED))
    variants = tuple(CHANGES)

    def __init__(self, spec: LinearSpec, variant: str = "", tiling: TilingRule | None = None) -> None:
        """Prepare the kernel. tiling: a rule that replaces the variant's tiling rule."""
        super().__init__(spec, variant)
        change = CHANGES.get(variant)
        changed = quantized_tiling if change is None else lambda *product: change(quantized_tiling(*product))
        self._tiling = tiling or changed
        device = spec.device
        self._in_order = InOrder()
        self._launcher = cache(partial(_launcher, device))
        self._rotation = RotationArguments(device)
        self._arrivals = cache(lambda count: torch.zeros(count, dtype=torch.int32, device=device))
        """Number of counters -> int32 arrival counters, which are zero between launches. They are never freed, since captured
        graphs use their addresses."""
        self._sums = cache(lambda count: torch.empty(count, device=device))
        """Number of sums -> float32 scratch memory for split-K sums. It is never freed, since captured graphs use its address."""

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether groups have at least 16 columns and fill a row, and x's type can represent the scales."""
        support = cls.capabilities.check(spec)
        if not support:
            return support
        if weight_bytes(sample_of(spec)) is None:
            support &= Support.no("scales", "groups of at least 16 columns that fill a row", spec.weight)
        if spec.weight.name == "mxfp4" and spec.dtype != torch.bfloat16:
            support &= Support.no("dtype", "bfloat16, which has room for the scales", spec.dtype)
        return support

    def runs(self, rows: int) -> bool:
        """Return whether the kernel runs this number of rows. Variants run at most MOST_ROWS rows."""
        return not self.variant or rows <= MOST_ROWS

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> Operand:
        """Return the weight's byte layout and its tensors."""
        assert isinstance(weight, QuantizedWeight)
        return Operand.of(weight, bias, (weight_bytes(weight), tensors_of(weight)))

    def rotates(self, rows: int, weight: Operand, heads: Heads) -> bool:
        """Return whether the kernel also applies RoPE to the heads."""
        tiling = self._tiling(weight.weight[0], rows, weight.out_features, False, self.multiprocessors)
        return rows <= tiling.block_m and heads.head_dim % tiling.block_n == 0

    def compute(
        self,
        x: Tensor,
        weight: Operand,
        norm: Norm | None = None,
        gated: bool = False,
        activation: Activation | None = None,
        add_to: Tensor | None = None,
        rotated: tuple[Heads, Rope] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer. See `Gemv.compute` for the arguments."""
        rows, case = x.shape[0], ProductCase.of(x, weight, norm, gated, activation, add_to, rotated)
        (described, tensors), out_features = weight.weight, case.out_features
        y = add_to if add_to is not None else out if out is not None else x.new_empty(rows, out_features)
        tiling = self._tiling(described, rows, out_features, gated, self.multiprocessors)
        launch = self._launcher(case, described, tiling)
        grid = triton.cdiv(out_features, tiling.block_n), tiling.splits, triton.cdiv(rows, tiling.block_m)
        x, norm_weight = self._in_order(x, norm, weight)
        codes, scales, zeros = tensors
        sums, splits = self._workspace(grid, tiling, gated)
        launch(
            grid,
            x_ptr=x,
            weight_ptr=codes,
            scales_ptr=scales,
            zeros_ptr=zeros,
            norm_ptr=x if norm_weight is None else norm_weight,
            bias_ptr=x if weight.bias is None else weight.bias,
            y_ptr=y,
            partial_ptr=sums,
            splits_ptr=splits,
            eps=0.0 if norm is None else norm.eps,
            **dict[str, Any](zip(ROTATION, self._rotation(rotated, x), strict=True)),
            rows=rows,
        )
        return y

    def _workspace(self, grid: tuple[int, int, int], tiling: QuantizedTiling, gated: bool) -> tuple[Tensor, Tensor]:
        """Return scratch memory for split-K sums, and arrival counters."""
        tiles = grid[0] * grid[2] if tiling.splits > 1 else 0
        count = tiles * tiling.splits * (tiling.block_n * (2 if gated else 1) + 1) * tiling.block_m
        return self._sums(count), self._arrivals(tiles)


def _launcher(device: torch.device, case: ProductCase, weight: WeightBytes, tiling: QuantizedTiling) -> FixedLauncher:
    """Return the launcher for a case, a weight's byte layout and a tiling."""
    constants: dict[str, Any] = {
        **case.constants(tiling.block_n),
        **weight.constants,
        "BLOCK_N": tiling.block_n,
        "BLOCK_M": tiling.block_m,
        "SPAN": tiling.span,
        "SLICES": tiling.slices,
        "STAGES": tiling.stages,
        "PREFETCH": 0 if INTERPRETED else tiling.prefetch,
        "SPLITS": tiling.splits,
        "DOT": case.dot,
        "ASSEMBLY": tiling.assembly and not INTERPRETED,
        "EARLY": tiling.early,
    }
    return FixedLauncher(quantized_product, tiling.num_warps, device, constants)


_PROGRAMS = 2
"""Number of programs per SM up to which split-K is increased."""
_FEW_SPAN, _FEW_CHUNK = 64, 256
"""Bytes per slice, and bytes of a row per chunk, for up to 16 rows of x."""
_SHARED = 48 * 1024
"""Approximate maximum number of bytes in flight per program. With this number, the shared memory of an SM is sufficient for four
programs."""
