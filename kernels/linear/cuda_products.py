"""CUDA C++ GEMM kernels over quantized weights for few rows: GEMV (few_rows.cu), split-K GEMM (shared_rows.cu), FP8 (w8a8.cu).

This module repacks scales into the kernels' order and launches the kernels. In these kernels (csrc/product.cuh), a thread
multiplies the same bytes that it copied, which Triton cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from struct import Struct
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from headway.core.contract.linear import FUSED, LinearCapabilities, LinearSpec
from headway.core.contract.support import YES, Support
from headway.core.contract.weights import (
    Float4Weight,
    Float8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    Weight,
    WeightFormat,
)
from headway.kernels.linear.choice import FEW, FLOAT8, SHARED
from headway.kernels.linear.cuda_variant import (
    FLOAT8_COLUMNS,
    HALVES,
    KINDS,
    MOST_FEW_ROWS,
    MOST_FLOAT8_ROWS,
    MOST_SHARED_ROWS,
    PART_ROWS,
    SLICE_BYTES,
    CudaTiling,
    CudaTilingRule,
    CudaVariant,
    Float8Variant,
    few_rows_tiling,
    fitted,
    float8_tiling,
    float8_tiling_narrow,
    most_rows_of,
    shared_rows_tiling,
    shared_rows_tiling_narrow,
)
from headway.kernels.linear.forms import Operand, WeightBytes, sample_of, weight_bytes
from headway.kernels.linear.fused_kernel import FusedKernel
from headway.kernels.linear.product_kernels import DEVICES, QUANTIZED, RotationArguments
from headway.kernels.linear.quantized import InOrder
from headway.kernels.runtime.nvrtc.compiler import architecture, find_compiler
from headway.kernels.runtime.nvrtc.launch import MAP_BYTES, Arguments, CompiledKernel, Launch, tensor_map
from headway.kernels.runtime.nvrtc.store import load
from headway.kernels.runtime.probe import capability, has_gpu
from headway.kernels.runtime.triton_launch import shared_memory
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Heads, Norm, Rope

POINTERS = Struct("=12Q")
"""Layout of `struct Pointers` in product.cuh."""
_ARRANGING = 256
"""Number of threads per thread block that permutes a row of x."""


@dataclass(frozen=True, slots=True)
class ProductOperands:
    """Inputs and outputs of one GEMM."""

    x: Tensor
    """[rows, in_features]"""
    weight: ArrangedWeight
    norm: Tensor | None
    eps: float
    bias: Tensor | None
    y: Tensor
    rotation: tuple[Tensor | None, ...]
    """cos, sin, the weights of the norms of q and k, and arrival counters, for the rotary embedding (RoPE)."""
    head_eps: float

    def pointers(self, x: Tensor) -> bytes:
        """Return `struct Pointers`. x: in the layout that the kernel reads."""
        weight = self.weight
        tensors = x, weight.codes, weight.scales, weight.zeros, self.norm, self.bias, self.y, *self.rotation
        return POINTERS.pack(*[0 if tensor is None else tensor.data_ptr() for tensor in tensors])


class FewRowsLauncher:
    """Launcher of few_rows.cu (GEMV), which needs one launch per GEMM."""

    def __init__(self, variant: CudaVariant, device: torch.device, multiprocessors: int) -> None:
        self._kernel: CompiledKernel = load(variant.source, variant.name, device, architecture(device))
        self._kernel.allow_shared(variant.shared_bytes)
        tiles = -(-variant.out_features // variant.tile_rows)
        blocks = min(tiles, multiprocessors * variant.tiling.per_multiprocessor)
        zero = numpy.float32(0)
        self._arguments = Arguments(bytes(POINTERS.size), zero, zero, numpy.int32(0), numpy.int32(tiles))
        early = torch.cuda.get_device_capability(device) >= (9, 0)
        self._launch = Launch((blocks, 1, 1), variant.threads, variant.shared_bytes, overlaps=early)

    def __call__(self, operands: ProductOperands) -> None:
        """Compute y."""
        eps, head_eps = numpy.float32(operands.eps), numpy.float32(operands.head_eps)
        self._arguments.set(operands.pointers(operands.x), eps, head_eps, numpy.int32(len(operands.x)))
        self._kernel(self._launch, self._arguments)


class ClusterLauncher:
    """Launcher of a split-K kernel with thread block clusters, and of the kernel before it that converts x."""

    def __init__(self, variant: CudaVariant, device: torch.device, arranging: str, sharing: int = 1) -> None:
        """Load both kernels. arranging: name of the kernel that converts x. sharing: number of thread blocks of this kernel per
        row."""
        specific, tiling = architecture(device, specific=True), variant.tiling
        self._kernel: CompiledKernel = load(variant.source, variant.name, device, specific)
        self._kernel.allow_shared(variant.shared_bytes)
        self._arrange: CompiledKernel = load(variant.source, arranging, device, specific)
        self._variant = variant
        self._device = device
        tiles, cluster, shared = -(-variant.out_features // variant.tile_rows), (1, tiling.splits, 1), variant.shared_bytes
        launch = partial(Launch, threads=variant.threads, shared_bytes=shared, overlaps=True, cluster=cluster)
        self._launch = cache(lambda blocks: launch((tiles * blocks, tiling.splits, 1)))
        self._arrange_launch = cache(lambda rows: Launch((rows, sharing, 1), _ARRANGING, overlaps=True))

    def _padded(self, rows: int) -> int:
        """Return the number of rows, padded for the thread blocks. Results of padding rows are never stored."""
        return -(-rows // self._variant.most_rows) * self._variant.most_rows

    def _start_arranging(self, rows: int, arguments: Arguments) -> None:
        """Launch the kernel that converts x."""
        self._arrange(self._arrange_launch(rows), arguments)

    def _start(self, rows: int, arguments: Arguments) -> None:
        self._kernel(self._launch(self._padded(rows) // self._variant.most_rows), arguments)


class SharedRowsLauncher(ClusterLauncher):
    """Launcher of shared_rows.cu (split-K GEMM). x is first normed, and permuted into the order in which shared_rows.cu copies
    it."""

    def __init__(self, variant: CudaVariant, device: torch.device) -> None:
        sharing = 1 if variant.norm is not None else -(-variant.in_features // (8 * _ARRANGING))  # a thread permutes 8 columns
        super().__init__(variant, device, "arrange_rows", sharing)
        self._arguments = Arguments(bytes(MAP_BYTES), bytes(POINTERS.size), numpy.int32(0))
        self._arrange_arguments = Arguments(0, 0, 0, numpy.float32(0))

    def __call__(self, operands: ProductOperands) -> None:
        """Compute y."""
        rows, columns = operands.x.shape
        x = operands.x.new_empty(self._padded(rows) * columns)
        norm = 0 if operands.norm is None else operands.norm.data_ptr()
        self._arrange_arguments.set(operands.x.data_ptr(), norm, x.data_ptr(), numpy.float32(operands.eps))
        self._start_arranging(rows, self._arrange_arguments)
        codes = tensor_map(operands.weight.codes, (self._variant.tile_rows, SLICE_BYTES), 0)
        self._arguments.set(codes, operands.pointers(x), numpy.int32(rows))
        self._start(rows, self._arguments)


class Float8Launcher(ClusterLauncher):
    """Launcher of w8a8.cu (FP8 GEMM). x is first normed and rounded to FP8, with a scale per row or per group of columns."""

    def __init__(self, variant: Float8Variant, device: torch.device) -> None:
        super().__init__(variant, device, "round_rows")
        self._groups = variant.groups
        self._arguments = Arguments(bytes(MAP_BYTES), bytes(POINTERS.size), 0, numpy.int32(0))
        self._arrange_arguments = Arguments(0, 0, 0, 0, numpy.float32(0))

    def __call__(self, operands: ProductOperands) -> None:
        """Compute y."""
        rows, columns = operands.x.shape
        padded = self._padded(rows)
        x = torch.empty(padded * columns, dtype=torch.uint8, device=self._device)
        scales = torch.empty(self._groups * padded, dtype=torch.float32, device=self._device)
        norm, eps = 0 if operands.norm is None else operands.norm.data_ptr(), numpy.float32(operands.eps)
        self._arrange_arguments.set(operands.x.data_ptr(), norm, x.data_ptr(), scales.data_ptr(), eps)
        self._start_arranging(rows, self._arrange_arguments)
        codes = tensor_map(operands.weight.codes, (self._variant.tile_rows, FLOAT8_COLUMNS), 128)
        self._arguments.set(codes, operands.pointers(x), scales.data_ptr(), numpy.int32(rows))
        self._start(rows, self._arguments)


_COPY = 16
"""Number of bytes that a thread copies at a time."""
_NARROW_EXPONENT, _NARROW_SCALE = 128, 128.0
"""Largest MXFP4 exponent, and largest FP8 scale, for which the product of the scale and unpacking's exponent correction fits half
precision."""


@dataclass(frozen=True, slots=True)
class ArrangedWeight:
    """A quantized weight in the layout that the CUDA kernels read."""

    described: WeightBytes
    codes: Tensor
    """uint8 [rows, bytes per row]: quantized values."""
    scales: Tensor
    """float32 [N] (per row), [N / rows, K / columns] (per block), or [K / group_size, N] (per group): scales."""
    zeros: Tensor | None = None
    """uint8 [K / group_size, N]: zero points. None if the weight has no zero points."""
    wide: bool = False
    """True if a scale is too large for the kernels' fast unpacking."""


class Arrangements:
    """Cache of weights that are repacked for the CUDA kernels."""

    def __init__(self) -> None:
        self._arranged = cache(arranged)

    def __call__(self, weight: Tensor | QuantizedWeight) -> ArrangedWeight:
        """Return the repacked weight. The first call repacks it."""
        assert not isinstance(weight, Tensor)
        return self._arranged(weight)

    def num_bytes(self, weight: Tensor | QuantizedWeight) -> int:
        """Return the size of the repacked scales and zeros, in bytes."""
        made = self(weight)
        return made.scales.nbytes + (0 if made.zeros is None else made.zeros.nbytes)


def computes(dtype: torch.dtype, weight: QuantizedWeight, rows: int | None = None) -> Support:
    """Return whether the CUDA kernels support a weight, regardless of the GPU. dtype: type of x.

    rows: rows per expert, for weights of several experts (expert_rows.cu). None means one linear layer.
    """
    described, columns = weight_bytes(weight), weight.shape[1]
    if described is None or described.kind not in KINDS or dtype not in HALVES:
        return Support.no(
            str(WeightFormat.of(weight)), "fp8, int8, int4 or mxfp4 in groups that fill a row, and x in half precision", dtype
        )
    support, span, by_row = YES, described.scale_span, described.scale_span >= described.row
    if rows is None and (weight.shape[0] % (2 * PART_ROWS) or described.row % (SLICE_BYTES * (1 if described.half else 2))):
        support &= Support.no("shape", "multiples of 32 x 128", f"{weight.shape[0]} x {columns}")
    if rows is not None and (rows % PART_ROWS or described.row % (SLICE_BYTES if described.half >= SLICE_BYTES else _COPY)):
        support &= Support.no("shape", "experts of multiples of 16 rows of 16 bytes", f"{rows} x {columns}")
    # 4-bit values are scaled individually, unlike bytes
    short = described.half > 0 and SLICE_BYTES % span == 0 and span % 16 == 0
    whole = span % SLICE_BYTES == 0 or short or by_row
    if not whole or (1 < described.scale_rows < weight.shape[0] and described.scale_rows % PART_ROWS and not by_row):
        support &= Support.no("scales", "blocks of multiples of 16 rows and 64 columns", WeightFormat.of(weight))
    if described.zeros and by_row:
        support &= Support.no("zeros", "of groups that are shorter than a row", WeightFormat.of(weight))
    if described.kind == "mxfp4" and dtype != torch.bfloat16:
        support &= Support.no("dtype", "bfloat16, which has place for the scales", dtype)
    return support


def arranged(weight: QuantizedWeight) -> ArrangedWeight:
    """Repack a weight for the CUDA kernels: quantized values are unchanged, and scales of adjacent rows become adjacent."""
    described = weight_bytes(weight)
    assert described is not None
    if isinstance(weight, Float8Weight):
        scales = weight.scales
        if (
            described.scale_span >= described.row
        ):  # one scale per row, or for several rows: expand to one per row, to be applied at the end
            scales = scales.view(-1).repeat_interleave(described.scale_rows)[: weight.shape[0]].contiguous()
            described = replace(described, scale_rows=1)
        elif described.scale_rows == 1:
            scales = scales.t().contiguous()
        return ArrangedWeight(described, weight.values.view(torch.uint8), scales, wide=float(scales.max()) > _NARROW_SCALE)
    if isinstance(weight, Float4Weight):
        wide = int(weight.exponents.max()) > _NARROW_EXPONENT
        return ArrangedWeight(described, weight.packed, weight.exponents.t().contiguous(), wide=wide)
    if isinstance(weight, Int8Weight):
        return ArrangedWeight(described, weight.values.view(torch.uint8), weight.scales)
    assert isinstance(weight, Int4Weight)
    if described.scale_span >= described.row:
        return ArrangedWeight(described, weight.packed, weight.scales.view(-1).float())
    zeros = None if weight.zeros is None else weight.zeros.t().contiguous()
    return ArrangedWeight(described, weight.packed, weight.scales.t().contiguous(), zeros)


class CudaKernel(FusedKernel):
    """Base of the CUDA C++ GEMM kernels, compiled by NVRTC, for x in half precision over quantized weights.

    Sums are float32. The tiling depends on the shape and on the number of rows, which is rounded up to 1 or to a power of two of
    at least 8. A row's result does not depend on the other rows. Not thread-safe.
    """

    arrangement = "cuda"
    tilings: ClassVar[Mapping[str, CudaTilingRule]]
    """Name of each variant -> its tiling rule."""
    compiled: ClassVar[type[CudaVariant]] = CudaVariant
    """Class of the parameters that a kernel is compiled for."""

    def __init__(self, spec: LinearSpec, variant: str = "", tiling: CudaTilingRule | None = None) -> None:
        """Prepare the kernel. tiling: a rule that replaces the variant's tiling rule."""
        super().__init__(spec, variant)
        rule, device = tiling or self.tilings[variant], spec.device
        self._device = device
        room = shared_memory(device)

        def tiling_of(weight: WeightBytes, rows: int, out_features: int, gated: bool) -> CudaTiling:
            found = rule(weight, rows, out_features, gated, self.multiprocessors)
            return found if found.splits else fitted(found, weight, most_rows_of(rows), room)

        self._tiling = cache(tiling_of)  # cached, because every launch asks for it
        self._launcher_of = cache(self._launcher)
        self._in_order = InOrder()
        self._rotation = RotationArguments(device)

    @classmethod
    def available(cls) -> Support:
        """Return whether there is a GPU and NVRTC is installed."""
        return has_gpu() & find_compiler()[1]

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the kernels support the weight on this device."""
        support = cls.capabilities.check(spec)
        return support & computes(spec.dtype, sample_of(spec)) if support else support

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> Operand:
        """Return the weight with repacked scales, which take a few percent of the weight's bytes."""
        assert isinstance(weight, QuantizedWeight)
        return Operand.of(weight, bias, arranged(weight))

    def rotates(self, rows: int, weight: Operand, heads: Heads) -> bool:
        """Return whether the kernel also applies RoPE to the heads."""
        tiling = self._tiling(weight.weight.described, rows, weight.out_features, False)
        return not tiling.splits and heads.head_dim % PART_ROWS == 0

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
        rows, in_features = x.shape
        out_features = weight.out_features // 2 if gated else weight.out_features
        read: ArrangedWeight = weight.weight
        y = add_to if add_to is not None else out if out is not None else x.new_empty(rows, out_features)
        heads = None if rotated is None else rotated[0]
        tiling = self._tiling(read.described, rows, out_features, gated)
        variant = self.compiled(
            dtype=x.dtype,
            weight=read.described,
            scale_dtype=read.scales.dtype,
            wide=read.wide,
            tiling=tiling,
            most_rows=max(most_rows_of(rows), 8) if tiling.splits else most_rows_of(rows),
            in_features=in_features,
            out_features=out_features,
            norm=None if norm is None else norm.weight.dtype,
            gated=gated,
            activation=activation,
            add=add_to is not None,
            bias=weight.bias is not None,
            heads=None if heads is None else (heads.num_heads, heads.num_kv_heads, heads.head_dim),
            head_norm=None if heads is None or heads.q_norm is None else heads.q_norm.weight.dtype,
        )
        launch = self._launcher_of(variant)
        x, norm_weight = self._in_order(x, norm, weight)
        if x.data_ptr() % 16:  # copies need 16-byte alignment
            x = x.clone()
        eps = 0.0 if norm is None else norm.eps
        *rotation, head_eps = self._rotation(rotated, None)
        launch(ProductOperands(x, read, norm_weight, eps, weight.bias, y, tuple(rotation), head_eps))
        return y

    def _launcher(self, variant: CudaVariant) -> Callable[[ProductOperands], None]:
        if variant.tiling.splits:
            return SharedRowsLauncher(variant, self._device)
        return FewRowsLauncher(variant, self._device, self.multiprocessors)


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the device's compute capability, or (0, 0) if the device is not a GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _on_hopper(found: tuple[int, int] | None) -> Support:
    if found == (9, 0):
        return YES
    got = "none" if found is None else "{}.{}".format(*found)
    return Support.no("compute capability", "9.0, whose matrix units it multiplies by", got)


class FewRowsKernel(CudaKernel):
    """Kernel `few_rows`: GEMV over quantized weights."""

    name = FEW
    capabilities = LinearCapabilities(QUANTIZED, order=True, max_rows=MOST_FEW_ROWS, fused=frozenset(FUSED))
    tilings: ClassVar[Mapping[str, CudaTilingRule]] = {"": few_rows_tiling}

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the kernel supports the weight, on compute capability 8.0 or newer."""
        support, found = super().supports(spec), _capability(spec.device)
        return support if found >= (8, 0) else support & Support.no("compute capability", "8.0 or newer", "{}.{}".format(*found))


class SharedRowsKernel(CudaKernel):
    """Kernel `shared_rows`: split-K GEMM over quantized weights by clusters of thread blocks."""

    name = SHARED
    capabilities = LinearCapabilities(QUANTIZED, order=True, max_rows=MOST_SHARED_ROWS, fused=frozenset(FUSED))
    variants = ("narrow",)
    tilings: ClassVar[Mapping[str, CudaTilingRule]] = {"": shared_rows_tiling, "narrow": shared_rows_tiling_narrow}

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the kernel supports the weight, on compute capability 9.0."""
        return super().supports(spec) & _on_hopper(_capability(spec.device))


BLOCK = 128
"""Number of rows, and of columns, per weight block in block FP8."""


def float8_scales(spec: LinearSpec, whole: bool = True) -> Support:
    """Return whether FP8 GEMMs support a weight's scales: per row, or per block. whole: True to require complete blocks."""
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


class W8A8Kernel(CudaKernel):
    """Kernel `w8a8`: FP8 GEMM whose input rows are rounded to FP8."""

    name = FLOAT8
    capabilities = LinearCapabilities(frozenset({"fp8"}), devices=DEVICES, max_rows=MOST_FLOAT8_ROWS, fused=frozenset(FUSED))
    rounds_input = True
    variants = ("narrow",)
    tilings: ClassVar[Mapping[str, CudaTilingRule]] = {"": float8_tiling, "narrow": float8_tiling_narrow}
    compiled = Float8Variant

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the weight has one scale per row or per block of 128 x 128, on compute capability 9.0."""
        support = cls.capabilities.check(spec)
        if spec.weight.name == "fp8":
            support &= float8_scales(spec, whole=False)
        rows, columns = spec.out_features, spec.in_features
        if rows % (2 * PART_ROWS) or columns % FLOAT8_COLUMNS:
            support &= Support.no("shape", f"multiples of {2 * PART_ROWS} x {FLOAT8_COLUMNS}", f"{rows} x {columns}")
        return support & _on_hopper(capability(spec.device))

    def _launcher(self, variant: CudaVariant) -> Callable[[ProductOperands], None]:
        assert isinstance(variant, Float8Variant)
        return Float8Launcher(variant, self._device)
