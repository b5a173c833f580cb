"""The kernels of linear layers on a GPU. All run inside CUDA graphs: the number of rows alone decides which one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Final

import torch
import triton
from torch import Tensor

from headway.core.contract.linear import LinearCapabilities, LinearSpec
from headway.core.contract.support import YES, Support
from headway.core.contract.weights import FORMATS, Float8Weight, Int4Weight, Weight
from headway.kernels.linear.choice import DEQUANTIZED, FEW, FLOAT8, GEMV, KERNEL, SCALED, SHARED, TILES
from headway.kernels.linear.cuda_products import CudaProducts, Float8Products, computes
from headway.kernels.linear.cuda_products import operand as cuda_operand
from headway.kernels.linear.cuda_variant import (
    FLOAT8_COLUMNS,
    MOST_FEW_ROWS,
    MOST_FLOAT8_ROWS,
    MOST_SHARED_ROWS,
    PART_ROWS,
    CudaCutRule,
    few_rows_cut,
    float8_cut,
    float8_cut_narrow,
    shared_rows_cut,
    shared_rows_cut_narrow,
)
from headway.kernels.linear.forms import Operand, QuantizedWeight, format_of, tensors_of, weight_bytes, without_elements
from headway.kernels.linear.fused_kernel import FusedKernel
from headway.kernels.linear.product_kernels import FewRows
from headway.kernels.linear.quantized import QuantizedCut, QuantizedProducts, operand, quantized_cut
from headway.kernels.linear.tile_kernels import TiledProducts
from headway.kernels.linear.unpack_kernels import dequantize_rows, quantize_rows
from headway.kernels.runtime.nvrtc.compiler import find_compiler
from headway.kernels.runtime.probe import HALF_DTYPES, capability, has_gpu
from headway.kernels.runtime.triton_launch import INTERPRETED, Launchers, can_launch
from headway.kernels.step.operations import Heads, Norm

DEVICES: Final = ("cuda", "cpu") if INTERPRETED else ("cuda",)
QUANTIZED: Final = frozenset(FORMATS) - {"plain"}
ALL: Final = frozenset(("norm", "bias", "activation", "gated", "residual", "rotary"))


class ProductsKernel(FusedKernel):
    """A kernel of ours, whose launches one object holds: `compute` is that object, so that a step calls nothing in between."""

    launches: Callable[[torch.device], Any]
    """Makes what computes products of an `Operand`, with what is fused."""

    def __init__(self, spec: LinearSpec, variant: str = "", products: Any = None) -> None:
        super().__init__(spec, variant)
        self.products = self.compute = products or type(self).launches(spec.device)

    @classmethod
    def available(cls) -> Support:
        """Return whether Triton runs here."""
        return can_launch()

    def rotates(self, rows: int, weight: Any, heads: Heads) -> bool:
        """Return whether the launch applies RoPE to these heads, too."""
        return "rotary" in self.capabilities.fused and bool(self.products.rotates(rows, weight, heads))


class Gemv(ProductsKernel):
    """Our GEMV and skinny GEMM over plain weights, up to 16 rows."""

    name = GEMV
    capabilities = LinearCapabilities(frozenset({"plain"}), devices=DEVICES, fused=ALL)
    arrangement = "plain"
    launches = FewRows

    def runs(self, rows: int) -> bool:
        """Return whether the weight is small enough for this number of rows."""
        return bool(self.products.runs(rows, (self.spec.out_features, self.spec.in_features)))


class Tiles(ProductsKernel):
    """Our tiled split-K GEMM over plain weights, up to 128 rows."""

    name = TILES
    capabilities = LinearCapabilities(frozenset({"plain"}), devices=DEVICES, fused=ALL - {"norm", "rotary"})
    arrangement = "plain"
    launches = TiledProducts

    def runs(self, rows: int) -> bool:
        """Return whether there are tiles for the weight and this number of rows."""
        return bool(self.products.runs(rows, (self.spec.out_features, self.spec.in_features), self.spec.gated))


Change = Callable[[QuantizedCut], QuantizedCut]
MOST_ROWS: Final = 64
"""Rows up to which changes are measured: beyond, kernels multiply more than they read."""
CHANGES: Final[Mapping[str, Change]] = {
    "n64": lambda cut: replace(cut, block_n=64),
    "n128": lambda cut: replace(cut, block_n=128),
    "splits x2": lambda cut: replace(cut, splits=2 * cut.splits),
}


class TritonKernel(ProductsKernel):
    """Our GEMM over quantised weights in Triton; its variants are other tiles."""

    name = KERNEL
    capabilities = LinearCapabilities(QUANTIZED, devices=DEVICES, order=True, fused=ALL)
    variants = tuple(CHANGES)

    def __init__(self, spec: LinearSpec, variant: str = "") -> None:
        change = CHANGES.get(variant)
        rule = quantized_cut if change is None else lambda *product: change(quantized_cut(*product))
        super().__init__(spec, variant, QuantizedProducts(spec.device, rule))

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the weight has groups of at least 16 columns that fill a row, and x a type with room for its scales."""
        support = cls.capabilities.check(spec)
        if not support:
            return support
        if weight_bytes(_sample(spec)) is None:
            support &= Support.no("scales", "groups of at least 16 columns that fill a row", spec.weight)
        if spec.weight.name == "mxfp4" and spec.dtype != torch.bfloat16:
            support &= Support.no("dtype", "bfloat16, which has room for the scales", spec.dtype)
        return support

    def runs(self, rows: int) -> bool:
        """Return whether a variant is worth a measurement: up to 64 rows."""
        return not self.variant or rows <= MOST_ROWS

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> Operand:
        """Return how the weight's bytes lie, and its tensors."""
        return operand(_quantized(weight), bias)


class CudaKernel(ProductsKernel):
    """Kernels of ours in CUDA C++, which NVRTC compiles, over weights whose scales lie in another order."""

    arrangement = "cuda"
    cuts: ClassVar[Mapping[str, CudaCutRule]]
    """Rules of tiles by variant."""
    cuda: ClassVar[type[CudaProducts]] = CudaProducts

    def __init__(self, spec: LinearSpec, variant: str = "") -> None:
        super().__init__(spec, variant, self.cuda(spec.device, self.cuts[variant]))

    @classmethod
    def available(cls) -> Support:
        """Return whether there is a GPU, and NVRTC is found."""
        return has_gpu() & find_compiler()[1]

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the kernels read the weight, on this device."""
        support = cls.capabilities.check(spec)
        return support & computes(spec.dtype, _sample(spec)) if support else support

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> Operand:
        """Return the weight with its scales in the kernels' order, some percent of the weight."""
        return cuda_operand(_quantized(weight), bias)


def _capability(device: torch.device) -> tuple[int, int]:
    """The capability of a device, which need not be there for kernels to be compiled."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _on_hopper(found: tuple[int, int] | None) -> Support:
    if found == (9, 0):
        return YES
    got = "none" if found is None else "{}.{}".format(*found)
    return Support.no("compute capability", "9.0, whose matrix units it multiplies by", got)


class FewRowsKernel(CudaKernel):
    """Our GEMV over quantised weights."""

    name = FEW
    capabilities = LinearCapabilities(QUANTIZED, order=True, max_rows=MOST_FEW_ROWS, fused=ALL)
    cuts: ClassVar[Mapping[str, CudaCutRule]] = {"": few_rows_cut}

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the kernel reads the weight, on compute capability 8.0 or newer."""
        support, found = super().supports(spec), _capability(spec.device)
        return support if found >= (8, 0) else support & Support.no("compute capability", "8.0 or newer", "{}.{}".format(*found))


class SharedRowsKernel(CudaKernel):
    """Our split-K GEMM over quantised weights, whose thread blocks form clusters."""

    name = SHARED
    capabilities = LinearCapabilities(QUANTIZED, order=True, max_rows=MOST_SHARED_ROWS, fused=ALL)
    variants = ("narrow",)
    cuts: ClassVar[Mapping[str, CudaCutRule]] = {"": shared_rows_cut, "narrow": shared_rows_cut_narrow}

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the kernel reads the weight, on compute capability 9.0."""
        return super().supports(spec) & _on_hopper(_capability(spec.device))


class W8A8Kernel(CudaKernel):
    """Our GEMM of rows that are rounded to FP8 by FP8 weights."""

    name = FLOAT8
    capabilities = LinearCapabilities(frozenset({"fp8"}), devices=DEVICES, max_rows=MOST_FLOAT8_ROWS, fused=ALL)
    rounds_input = True
    variants = ("narrow",)
    cuts: ClassVar[Mapping[str, CudaCutRule]] = {"": float8_cut, "narrow": float8_cut_narrow}
    cuda = Float8Products

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the weight has a scale for each row or block of 128 x 128, on compute capability 9.0."""
        support = cls.capabilities.check(spec)
        if spec.weight.name == "fp8":
            support &= float8_scales(spec, whole=False)
        rows, columns = spec.out_features, spec.in_features
        if rows % (2 * PART_ROWS) or columns % FLOAT8_COLUMNS:
            support &= Support.no("shape", f"multiples of {2 * PART_ROWS} x {FLOAT8_COLUMNS}", f"{rows} x {columns}")
        return support & _on_hopper(capability(spec.device))


BLOCK = 128
"""Rows and columns of the blocks that products of FP8 take."""


class RowRounding:
    """Rounds rows to FP8, normed first, in one launch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers = Launchers(device)

    def __call__(self, x: Tensor, group: int, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """x in FP8, a multiple of four rows, and its scales, which multiply: [rows, columns / group]."""
        rows, columns = x.shape
        padded = -(-rows // 4) * 4
        y = torch.empty(padded, columns, dtype=torch.float8_e4m3fn, device=self._device)
        scales = torch.empty(columns // group, padded, device=self._device)
        block = triton.next_power_of_2(columns)
        constants = {"K": columns, "BLOCK": block, "GROUP": group, "NORM": norm is not None}
        launch = self._launchers.get(quantize_rows, 4 if block <= 2048 else 8, constants)
        weight, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
        launch((rows, 1, 1), x_ptr=x, norm_ptr=weight, y_ptr=y, scales_ptr=scales, eps=eps, stride=padded)
        return y, scales.t()


def float8_scales(spec: LinearSpec, whole: bool = True) -> Support:
    """Return whether an FP8 weight has the scales that products of FP8 take: by rows, or by blocks. whole: of blocks only."""
    rows, columns, block = spec.out_features, spec.in_features, spec.weight.block
    support = YES
    if rows % 16 or columns % 16:
        support &= Support.no("shape", "multiples of 16", f"{rows} x {columns}")
    if block == (BLOCK, BLOCK):
        if whole and (rows % BLOCK or columns % BLOCK):
            support &= Support.no("shape", f"multiples of {BLOCK} for blocks", f"{rows} x {columns}")
    elif block is not None:
        need = f"one a row, one, or blocks of {BLOCK} x {BLOCK}"
        support &= Support.no("scales", need, "{} x {}".format(*block))
    return support


def row_scales(weight: Float8Weight) -> Tensor:
    """float32 [1, N], for a weight whose rows or all of it share a scale."""
    return weight.scales.view(-1).expand(weight.shape[0]).contiguous()[None]


class Float8Operand:
    """What products of FP8 by FP8 read of a layer."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        assert isinstance(weight, Float8Weight)
        self.weight = weight
        self.bias = bias
        self.blocks = weight.block == (BLOCK, BLOCK)
        self.scales = weight.scales.t() if self.blocks else row_scales(weight)
        """[K / 128, N / 128] with neighbours along K, or [1, N] of scales a row."""
        self.group = BLOCK if self.blocks else weight.shape[1]
        """Columns of x that share a scale."""


class ScaledMM(FusedKernel):
    """`torch._scaled_mm`, for which x is rounded to FP8: a scale for each row, or for each 128 columns of it."""

    name = SCALED
    capabilities = LinearCapabilities(frozenset({"fp8"}), (torch.bfloat16,), fused=frozenset({"norm", "bias"}))
    rounds_input = True

    @cached_property
    def _rounding(self) -> RowRounding:
        return RowRounding(self.spec.device)

    @classmethod
    def available(cls) -> Support:
        """Return whether there is a GPU."""
        return has_gpu()

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the weight has a scale for each row, or (Hopper) for each block."""
        support = cls.capabilities.check(spec)
        if spec.weight.name == "fp8":
            support &= float8_scales(spec)
        blocks, found = spec.weight.block == (BLOCK, BLOCK), capability(spec.device) or (0, 0)
        if (blocks and found != (9, 0)) or found < (8, 9):
            support &= Support.no("compute capability", "9.0 for blocks" if blocks else "8.9 or newer", "{}.{}".format(*found))
        return support

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> Float8Operand:
        """Return the weight with its scales as torch reads them."""
        return Float8Operand(weight, bias)

    def compute(self, x: Tensor, weight: Float8Operand, norm: Norm | None = None, out: Tensor | None = None) -> Tensor:
        """A launch for x, one for the product, and one for a bias."""
        rows = x.shape[0]
        y, x_scales = self._rounding(x, weight.group, norm)
        x_scales = x_scales if weight.blocks else x_scales.contiguous()
        product: Tensor = torch._scaled_mm(y, weight.weight.values.t(), x_scales, weight.scales, out_dtype=x.dtype)
        product = product[:rows]
        product = product if weight.bias is None else product.add_(weight.bias)
        return product if out is None else out.copy_(product)


class Dequantizer:
    """Expands weights in one launch, or in some of torch's for rare groups."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers = Launchers(device)

    def __call__(self, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        """Return the weight in half precision [N, K], its columns in their own order."""
        described = weight_bytes(weight)
        if described is None or dtype not in HALF_DTYPES:
            y = weight.dequantized(dtype)
            return y[:, weight.order.long()] if isinstance(weight, Int4Weight) and weight.order is not None else y
        (rows, columns), block_n = weight.shape, 16
        span = max(described.span & -described.span, 16)
        constants = {
            "ROW": described.row,
            "HALF": described.half,
            "SCALES": described.scales,
            "SCALE_SPAN": described.scale_span,
            "SCALE_ROWS": described.scale_rows,
            "SPAN": span,
            "BLOCK_N": block_n,
            "N": rows,
            "K": columns,
            "WEIGHT": described.kind,
            "ZEROS": described.zeros,
            "ASSEMBLY": False,
        }
        launch = self._launchers.get(dequantize_rows, 4, constants)
        y = torch.empty(rows, columns, dtype=dtype, device=self._device)
        grid, (codes, scales, zeros) = (triton.cdiv(rows, block_n), described.row // span, 1), tensors_of(weight)
        launch(grid, weight_ptr=codes, scales_ptr=scales, zeros_ptr=zeros, y_ptr=y)
        return y


class Dequantize(FusedKernel):
    """The weight dequantised for each product of cuBLAS: for many rows, and where nothing else reads a format."""

    name = DEQUANTIZED
    capabilities = LinearCapabilities(QUANTIZED, devices=DEVICES, order=True, fused=frozenset({"bias"}))

    @classmethod
    def available(cls) -> Support:
        """Return whether Triton runs here."""
        return can_launch()

    @cached_property
    def _dequantizer(self) -> Dequantizer:
        return Dequantizer(self.spec.device)

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the weight is quantised: x may have any type."""
        return cls.capabilities.check(dataclasses.replace(spec, dtype=torch.bfloat16))

    def compute(self, x: Tensor, weight: Operand, out: Tensor | None = None) -> Tensor:
        """A launch that dequantises the weight, and one for the product."""
        x = x if weight.order is None else x.index_select(1, weight.order)
        dense = self._dequantizer(weight.weight, x.dtype).t()
        return torch.mm(x, dense, out=out) if weight.bias is None else torch.addmm(weight.bias, x, dense, out=out)


def _sample(spec: LinearSpec) -> QuantizedWeight:
    return without_elements(spec.weight, spec.out_features, spec.in_features)


def _quantized(weight: Weight) -> QuantizedWeight:
    assert not isinstance(weight, Tensor)
    return weight


def spec_of(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> LinearSpec:
    """Return a layer over a quantised weight, without anything around the product. dtype: of x."""
    rows, columns = weight.shape
    return LinearSpec(columns, rows, dtype, device, format_of(weight))
