"""GPU GEMM kernels that libraries provide: torch's scaled_mm with x rounded to FP8, cuBLAS after dequantizing the weight, and
vLLM's Marlin and CUTLASS over weights of 4 and 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
import triton
from torch import Tensor

from headway.core.contract.linear import LinearCapabilities, LinearSpec
from headway.core.contract.support import YES, Support
from headway.core.contract.weights import MX_GROUP, Float4Weight, Float8Weight, Int4Weight, QuantizedWeight, Weight, unpacked
from headway.kernels.linear.choice import CUTLASS, DEQUANTIZED, MARLIN, SCALED
from headway.kernels.linear.cuda_products import BLOCK, float8_scales
from headway.kernels.linear.forms import Operand, tensors_of, weight_bytes
from headway.kernels.linear.fused_kernel import FusedKernel
from headway.kernels.linear.product_kernels import DEVICES, QUANTIZED, TritonProducts
from headway.kernels.linear.unpack_kernels import dequantize_rows, quantize_rows
from headway.kernels.runtime.compiled_library import BoundOperator
from headway.kernels.runtime.probe import HALF_DTYPES, at_least, capability, has_gpu
from headway.kernels.runtime.triton_launch import Launchers
from headway.kernels.runtime.vllm_library import FLOAT4, FLOAT8, INT4, INT4_LESS_8, bind
from headway.kernels.step.operations import Norm


def round_rows(launchers: Launchers, x: Tensor, group: int, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Norm rows and round them to FP8 in one launch. Return x in FP8, padded to a multiple of four rows, and the scales [rows,
    columns / group] that multiply it."""
    rows, columns = x.shape
    padded = -(-rows // 4) * 4
    y = torch.empty(padded, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(columns // group, padded, device=x.device)
    block = triton.next_power_of_2(columns)
    constants = {"K": columns, "BLOCK": block, "GROUP": group, "NORM": norm is not None}
    launch = launchers.get(quantize_rows, 4 if block <= 2048 else 8, constants)
    weight, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
    launch((rows, 1, 1), x_ptr=x, norm_ptr=weight, y_ptr=y, scales_ptr=scales, eps=eps, stride=padded)
    return y, scales.t()


class Float8Operand:
    """A layer's weight and bias as FP8 GEMMs read them."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        assert isinstance(weight, Float8Weight)
        self.weight = weight
        self.bias = bias
        self.blocks = weight.block == (BLOCK, BLOCK)
        self.scales = weight.scales.t() if self.blocks else weight.scales.view(-1).expand(weight.shape[0]).contiguous()[None]
        """Scales per block, [K / 128, N / 128] with adjacent elements along K, or scales per row, [1, N]."""
        self.group = BLOCK if self.blocks else weight.shape[1]
        """Columns of x per scale."""


class ScaledMM(FusedKernel):
    """FP8 GEMM by `torch._scaled_mm`. x is rounded to FP8 with a scale per row, or per 128 columns of a row."""

    name = SCALED
    capabilities = LinearCapabilities(frozenset({"fp8"}), (torch.bfloat16,), fused=frozenset({"norm", "bias"}))
    rounds_input = True

    @cached_property
    def launchers(self) -> Launchers:
        """Launchers of the kernel that rounds x."""
        return Launchers(self.spec.device)

    @classmethod
    def available(cls) -> Support:
        """Return whether there is a GPU."""
        return has_gpu()

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the weight has one scale per row, or (on Hopper) per block."""
        support = cls.capabilities.check(spec)
        if spec.weight.name == "fp8":
            support &= float8_scales(spec)
        blocks, found = spec.weight.block == (BLOCK, BLOCK), capability(spec.device) or (0, 0)
        if (blocks and found != (9, 0)) or found < (8, 9):
            support &= Support.no("compute capability", "9.0 for blocks" if blocks else "8.9 or newer", "{}.{}".format(*found))
        return support

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> Float8Operand:
        """Return the weight with its scales in torch's layout."""
        return Float8Operand(weight, bias)

    def compute(self, x: Tensor, weight: Float8Operand, norm: Norm | None = None, out: Tensor | None = None) -> Tensor:
        """Compute the layer in one launch that rounds x, one for the GEMM, and one that adds a bias."""
        rows = x.shape[0]
        y, x_scales = round_rows(self.launchers, x, weight.group, norm)
        x_scales = x_scales if weight.blocks else x_scales.contiguous()
        product: Tensor = torch._scaled_mm(y, weight.weight.values.t(), x_scales, weight.scales, out_dtype=x.dtype)
        product = product[:rows]
        product = product if weight.bias is None else product.add_(weight.bias)
        return product if out is None else out.copy_(product)


def dequantize(launchers: Launchers, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight in half precision [N, K], with columns in their original order. This takes one launch, or several
    torch operations for rare group sizes."""
    described = weight_bytes(weight)
    if described is None or dtype not in HALF_DTYPES:
        y = weight.dequantized(dtype)
        return y[:, weight.order.long()] if isinstance(weight, Int4Weight) and weight.order is not None else y
    (rows, columns), block_n = weight.shape, 16
    span = max(described.span & -described.span, 16)
    constants = {**described.constants, "SPAN": span, "BLOCK_N": block_n, "N": rows, "K": columns, "ASSEMBLY": False}
    launch = launchers.get(dequantize_rows, 4, constants)
    y = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    grid, (codes, scales, zeros) = (triton.cdiv(rows, block_n), described.row // span, 1), tensors_of(weight)
    launch(grid, weight_ptr=codes, scales_ptr=scales, zeros_ptr=zeros, y_ptr=y)
    return y


class Dequantize(TritonProducts):
    """Kernel that dequantizes the weight before each call of cuBLAS, for many rows and for formats that no other kernel reads."""

    name = DEQUANTIZED
    capabilities = LinearCapabilities(QUANTIZED, devices=DEVICES, order=True, fused=frozenset({"bias"}))

    @cached_property
    def _launchers(self) -> Launchers:
        return Launchers(self.spec.device)

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the weight is quantized. x may have any type."""
        return cls.capabilities.check(dataclasses.replace(spec, dtype=torch.bfloat16))

    def compute(self, x: Tensor, weight: Operand, out: Tensor | None = None) -> Tensor:
        """Compute the layer in one launch that dequantizes the weight, and one for the GEMM."""
        x = x if weight.order is None else x.index_select(1, weight.order)
        dense = dequantize(self._launchers, weight.weight, x.dtype).t()
        return torch.mm(x, dense, out=out) if weight.bias is None else torch.addmm(weight.bias, x, dense, out=out)


GROUPS: Final = (32, 64, 128)
"""Supported group sizes, in columns. A complete row is also supported as a group."""
_GROUPED: Final = [row + 8 * step for row in range(8) for step in range(8)]
_WHOLE: Final = [2 * pair + row + 8 * step for pair in range(4) for step in range(4) for row in (0, 1)]
_NIBBLES: Final = [0, 2, 4, 6, 1, 3, 5, 7]
"""Order of 4-bit values in a word, because pairs of values are unpacked at once. The order of four bytes in a word is _BYTES."""
_BYTES: Final = [0, 2, 1, 3]


@dataclass(frozen=True, slots=True)
class MarlinWeight:
    """A layer's weight and bias as Marlin reads them.

    Marlin (Frantar et al. 2024, arXiv 2408.11743), as extended by vLLM, needs a repacked weight. Quantized values are passed to
    `gptq_marlin_repack` in GPTQ's format, in which a word holds adjacent columns of one weight row. Scales and zeros are permuted
    into the order in which a warp's threads use them. If scales change along a row, a thread uses rows that are eight rows apart.
    If there is one scale per row, which is applied when results are stored, a thread uses pairs of adjacent rows that are eight
    rows apart.
    """

    codes: Tensor
    """int32: output of `gptq_marlin_repack`."""
    scales: Tensor
    """[K / group, N]: scales in x's type, or in e8m0 for MXFP4."""
    zeros: Tensor | None
    """int32 [K / group, N / 8]: zero points. None if the weight has no zero points."""
    bias: Tensor | None
    """[N]: bias in Marlin's order."""
    order: Tensor | None
    """int32 [K]: input feature of each column. None means that columns are in order."""
    type_id: int


def can_arrange(spec: LinearSpec) -> Support:
    """Return whether Marlin supports a format and shape."""
    rows, columns, weight, support = spec.out_features, spec.in_features, spec.weight, YES
    if not ((rows % 64 == 0 and columns % 128 == 0) or (rows % 128 == 0 and columns % 64 == 0)):
        need = "multiples of 64 x 128 or 128 x 64"
        support &= Support.no("shape", need, f"{rows} x {columns}")
    group = weight.group_size
    if weight.name == "int4" and group is not None:
        if group != columns and group not in GROUPS:
            support &= Support.no("group size", f"{', '.join(map(str, GROUPS))} or a whole row", group)
        elif columns % group:
            support &= Support.no("columns", "whole groups", f"{columns} in groups of {group}")
    elif weight.name == "mxfp4" and spec.dtype != torch.bfloat16:
        support &= Support.no("dtype", "bfloat16 for MXFP4", spec.dtype)
    elif weight.block is not None and (weight.block[1] != GROUPS[-1] or columns % GROUPS[-1]):
        got = "{} x {}".format(*weight.block)
        support &= Support.no("scales", f"one a row, or of {GROUPS[-1]} columns", got)
    return support


def words(weight: QuantizedWeight) -> Tensor:
    """Return the values in GPTQ's format, first column in the lowest bits: int32 [K / 8, N] for 4 bits, [K / 4, N] for 8."""
    if isinstance(weight, Float8Weight):
        codes = weight.values.view(torch.uint8)
    else:
        assert isinstance(weight, Int4Weight | Float4Weight)
        flat = unpacked(weight.packed, weight.group_size if isinstance(weight, Int4Weight) else MX_GROUP)
        low, high = flat.view(len(flat), -1, 2).unbind(2)
        codes = low | high << 4
    return codes.contiguous().view(torch.int32).t().contiguous()


def scales_of(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return scales [K / group, N] in Marlin's order and x's type. FP8 scales include the difference of the exponent biases.

    :raises ArithmeticError: if a scale is too large or too small for x's type.
    """
    if isinstance(weight, Float4Weight):
        # Powers of two, one byte each, of which four are unpacked at once.
        permuted = _permuted(weight.exponents.t(), _GROUPED)
        return permuted.view(-1, 4)[:, _BYTES].view(permuted.shape).contiguous().view(torch.float8_e8m0fnu)
    if isinstance(weight, Float8Weight):
        # vLLM's kernel copies e4m3's exponent bits to x's type unchanged, so the scales correct the bias.
        scales = weight.scales.repeat_interleave(weight.block[0], 0)[: weight.shape[0]] * 2.0 ** _EXPONENTS[dtype]
    else:
        assert isinstance(weight, Int4Weight)
        scales = weight.scales
    found = scales.to(dtype)
    if not bool((found.isfinite() & ((found != 0) | (scales == 0))).all()):
        raise ArithmeticError(f"the weight's scales have no place in {dtype}")
    by_row = found.shape[1] == 1
    return _permuted(found.t(), _WHOLE if by_row else _GROUPED)


def zeros_of(weight: QuantizedWeight) -> Tensor | None:
    """Return zero points, int32 [K / group, N / 8], in Marlin's order for grouped scales, regardless of the group size. None
    means that the weight has no zero points."""
    if not isinstance(weight, Int4Weight) or weight.zeros is None:
        return None
    permuted = _permuted(weight.zeros.t(), _GROUPED)
    low, high = permuted.view(len(permuted), -1, 8)[:, :, _NIBBLES].reshape(len(permuted), -1, 2).unbind(2)
    return (low | high << 4).contiguous().view(torch.int32)


def type_of(weight: QuantizedWeight) -> int:
    """Return vLLM's ID for a weight's element type."""
    if isinstance(weight, Int4Weight):
        return INT4_LESS_8 if weight.zeros is None else INT4
    return FLOAT8 if isinstance(weight, Float8Weight) else FLOAT4


def _permuted(values: Tensor, order: list[int]) -> Tensor:
    return values.reshape(-1, len(order))[:, order].view(values.shape).contiguous()


_EXPONENTS: Final = {torch.float16: 8, torch.bfloat16: 120}
"""Type of x -> its exponent bias minus the exponent bias of e4m3."""


_SCALED_PRODUCT, _ROWS, _BLOCKS = "cutlass_scaled_mm", "cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"


class Cutlass(ScaledMM):
    """FP8 GEMM by vLLM's `cutlass_scaled_mm`. x is rounded as for `torch._scaled_mm`, and the weight keeps its layout."""

    name = CUTLASS
    capabilities = LinearCapabilities(frozenset({"fp8"}), devices=DEVICES, fused=frozenset({"norm", "bias"}))
    library = True

    @cached_property
    def _operators(self) -> Mapping[str, BoundOperator]:
        return bind(_SCALED_PRODUCT, _ROWS, _BLOCKS)[0]

    @classmethod
    def available(cls) -> Support:
        """Return whether vLLM's library is installed and has the required operators."""
        return bind(_SCALED_PRODUCT, _ROWS, _BLOCKS)[1]

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the weight has scales per row or per block, and the library was built for this GPU."""
        support = cls.capabilities.check(spec)
        if spec.weight.name == "fp8":
            support &= float8_scales(spec)
        if not support:
            return support
        operators, support = bind(_SCALED_PRODUCT, _ROWS, _BLOCKS)
        if not support:
            return support
        asked = _BLOCKS if spec.weight.block == (BLOCK, BLOCK) else _ROWS
        major, minor = capability(spec.device) or (0, 0)
        if not operators[asked](cuda_device_capability=10 * major + minor):
            support &= Support.no("compute capability", "one that the library's products are built for", f"{major}.{minor}")
        return support

    def compute(self, x: Tensor, weight: Float8Operand, norm: Norm | None = None, out: Tensor | None = None) -> Tensor:
        """Compute the layer in one launch that rounds x, one for the GEMM and, with block scales, one that adds a bias."""
        rows, blocks, bias = x.shape[0], weight.blocks, weight.bias
        y, x_scales = round_rows(self.launchers, x, weight.group, norm)
        if not blocks:  # row scales allow any number of rows, and must be contiguous
            y, x_scales = y[:rows], x_scales[:rows].contiguous()
        product = out if out is not None and len(y) == rows else x.new_empty(len(y), weight.weight.shape[0])
        self._operators[_SCALED_PRODUCT](
            out=product, a=y, b=weight.weight.values.t(), a_scales=x_scales, b_scales=weight.scales, bias=None if blocks else bias
        )
        product = product[:rows]
        product = product.add_(bias) if blocks and bias is not None else product
        return product if out is None or product.data_ptr() == out.data_ptr() else out.copy_(product)


_PRODUCT, _REPACK = "marlin_gemm", "gptq_marlin_repack"
_CAPABILITY = (8, 0)


class Marlin(FusedKernel):
    """GEMM by vLLM's `marlin_gemm`. x keeps its type, and scales are rounded to that type. The repacked weight is as large as the
    original.
    """

    name = MARLIN
    capabilities = LinearCapabilities(frozenset({"int4", "fp8", "mxfp4"}), devices=DEVICES, order=True, fused=frozenset({"bias"}))
    library = copies = True

    @cached_property
    def _operators(self) -> Mapping[str, BoundOperator]:
        return bind(_PRODUCT, _REPACK)[0]

    @cached_property
    def _locks(self) -> Tensor:
        """int32 [number of SMs]: locks of thread blocks, zero between launches."""
        count = self.multiprocessors if torch.cuda.is_available() else 1
        return torch.zeros(count, dtype=torch.int32, device=self.spec.device)

    @classmethod
    def available(cls) -> Support:
        """Return whether vLLM's library is installed and has the required operators."""
        return bind(_PRODUCT, _REPACK)[1]

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether Marlin supports the weight's format, group size and shape on this GPU."""
        return cls.capabilities.check(spec) & can_arrange(spec) & at_least(_CAPABILITY, spec.device)

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> MarlinWeight:
        """Return the weight, repacked on its device.

        :raises ArithmeticError: if a scale is too large or too small for x's type.
        """
        assert not isinstance(weight, Tensor)
        repack, (rows, columns), dtype = self._operators[_REPACK], weight.shape, self.spec.dtype
        given: dict[str, int | Tensor] = {
            "b_q_weight": words(weight),
            "size_k": columns,
            "size_n": rows,
            "num_bits": 8 if isinstance(weight, Float8Weight) else 4,
        }
        if "perm" in repack.place:  # columns are sorted by group already
            given["perm"] = torch.empty(0, dtype=torch.int32, device=weight.device)
        return MarlinWeight(
            codes=repack(**given),
            scales=scales_of(weight, dtype),
            zeros=zeros_of(weight),
            bias=None if bias is None else _permuted(bias[None], _WHOLE)[0],
            order=weight.order if isinstance(weight, Int4Weight) else None,
            type_id=type_of(weight),
        )

    def compute(self, x: Tensor, weight: MarlinWeight, out: Tensor | None = None) -> Tensor:
        """Compute the layer in one launch, preceded by a launch that reorders the columns of x if needed."""
        x = x if weight.order is None else x.index_select(1, weight.order)
        product: Tensor = self._operators[_PRODUCT](
            a=x,
            c=out,
            b_q_weight=weight.codes,
            b_bias=weight.bias,
            b_scales=weight.scales,
            b_zeros=weight.zeros,
            workspace=self._locks,
            b_type_id=weight.type_id,
            size_m=len(x),
            size_n=self.spec.out_features,
            size_k=self.spec.in_features,
        )
        return product
