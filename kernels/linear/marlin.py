"""GEMM kernels of vLLM's library over weights of 4 and 8 bits: Marlin, and CUTLASS for FP8.

Marlin (Frantar et al. 2024, arXiv 2408.11743), as extended by vLLM, needs a repacked weight. Quantized values are passed to
`gptq_marlin_repack` in GPTQ's format, in which a word holds adjacent columns of one weight row. Scales and zeros are permuted
into the order in which a warp's threads use them. If scales change along a row, a thread uses rows that are eight rows apart. If
there is one scale per row, which is applied when results are stored, a thread uses pairs of adjacent rows that are eight rows
apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from headway.core.contract.linear import LinearCapabilities, LinearSpec
from headway.core.contract.support import YES, Support
from headway.core.contract.weights import MX_GROUP, Float4Weight, Float8Weight, Int4Weight, QuantizedWeight, Weight, unpacked
from headway.kernels.linear.choice import CUTLASS, MARLIN
from headway.kernels.linear.cuda_products import BLOCK, float8_scales
from headway.kernels.linear.fused_kernel import FusedKernel
from headway.kernels.linear.gpu_kernels import Float8Operand, ScaledMM, round_rows
from headway.kernels.linear.product_kernels import DEVICES
from headway.kernels.runtime.compiled_library import BoundOperator
from headway.kernels.runtime.probe import at_least, capability
from headway.kernels.runtime.vllm_library import FLOAT4, FLOAT8, INT4, INT4_LESS_8, bind
from headway.kernels.step.operations import Norm

GROUPS: Final = (32, 64, 128)
"""Supported group sizes, in columns. A complete row is also supported as a group."""
_GROUPED: Final = [row + 8 * step for row in range(8) for step in range(8)]
_WHOLE: Final = [2 * pair + row + 8 * step for pair in range(4) for step in range(4) for row in (0, 1)]
_NIBBLES: Final = [0, 2, 4, 6, 1, 3, 5, 7]
"""Order of 4-bit values in a word, because pairs of values are unpacked at once. The order of four bytes in a word is _BYTES."""
_BYTES: Final = [0, 2, 1, 3]


@dataclass(frozen=True, slots=True)
class MarlinWeight:
    """A layer's weight and bias as Marlin reads them."""

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
