"""Kernels for products over quantised weights: their common interface, `torch._scaled_mm`, and dequantising before a GEMM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import triton
from torch import Tensor

from headway.core.contract.support import YES, Support
from headway.core.contract.weights import Float8Weight, Int4Weight
from headway.kernels.linear.cuda_products import CudaProducts
from headway.kernels.linear.forms import QuantizedWeight, tensors_of, weight_bytes
from headway.kernels.linear.linear import Linear
from headway.kernels.linear.quantized import QuantizedProducts
from headway.kernels.linear.quantized_choice import DEQUANTIZED, SCALED, MeasuredWay
from headway.kernels.linear.unpack_kernels import dequantize_rows, quantize_rows
from headway.kernels.runtime.triton_launch import Launchers
from headway.kernels.step.operations import Norm

FusedProducts = QuantizedProducts | CudaProducts
"""Kernels that compute what comes before and after a product, too."""


class ProductWay(MeasuredWay, ABC):
    """One way of computing products of x in half precision over quantised weights."""

    kernel: FusedProducts | None = None
    """Our kernel, which computes what comes before and after the product too."""
    norms: ClassVar[bool] = False
    """Whether the norm before the product is a part of it."""

    def takes(self, dtype: torch.dtype, weight: QuantizedWeight) -> Support:
        """Whether it computes products over a weight, whose elements may be missing, and why not. dtype: of x."""
        return YES

    @abstractmethod
    def __call__(self, x: Tensor, linear: Linear, out: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """The product of x [rows, in_features]: [rows, out_features]; `out`, contiguous, where it is given.

        norm: of x before the product, for a way that norms. No call synchronises, and all of it can be captured in a CUDA graph.
        """


BLOCK = 128
"""Rows and columns of the blocks that products of floats of 8 bits take."""


class RowRounding:
    """Rounds rows to floats of 8 bits, normed first, in one launch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers = Launchers(device)

    def __call__(self, x: Tensor, group: int, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """x in floats of 8 bits, a multiple of four rows, and its scales, which multiply: [rows, columns / group]."""
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


def float8_scales(weight: QuantizedWeight, whole: bool = True) -> Support:
    """Whether a weight is of floats of 8 bits with the scales that products of such floats take: by rows, or by blocks.

    whole: whether all blocks must be.
    """
    if not isinstance(weight, Float8Weight):
        return Support.no("form", "floats of 8 bits", weight.kind)
    rows, columns = weight.shape
    support = YES
    if rows % 16 or columns % 16:
        support &= Support.no("shape", "multiples of 16", f"{rows} x {columns}")
    by_row = weight.scales.shape[1] == 1 and weight.block[0] in (1, rows)
    if weight.block == (BLOCK, BLOCK):
        if whole and (rows % BLOCK or columns % BLOCK):
            support &= Support.no("shape", f"multiples of {BLOCK} for blocks", f"{rows} x {columns}")
    elif not by_row:
        got = "{} x {}".format(*weight.block)
        support &= Support.no("scales", f"one a row, one, or blocks of {BLOCK} x {BLOCK}", got)
    return support


def row_scales(weight: Float8Weight) -> Tensor:
    """float32 [1, N], for a weight whose rows or all of it share a scale."""
    return weight.scales.view(-1).expand(weight.shape[0]).contiguous()[None]


class ScaledMM(ProductWay):
    """`torch._scaled_mm`, for which x is rounded to floats of 8 bits: a scale for each row, or for each 128 columns of it."""

    name = SCALED
    norms = rounds = True

    def __init__(self, device: torch.device, rounding: RowRounding) -> None:
        self._rounding = rounding
        self._capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)

    def takes(self, dtype: torch.dtype, weight: QuantizedWeight) -> Support:
        """Floats of 8 bits, by rows or (Hopper) by blocks."""
        support = float8_scales(weight)
        blocks = isinstance(weight, Float8Weight) and weight.block == (BLOCK, BLOCK)
        if dtype != torch.bfloat16:
            support &= Support.no("dtype", "bfloat16", dtype)
        if (blocks and self._capability != (9, 0)) or self._capability < (8, 9):
            need = "9.0 for blocks" if blocks else "8.9 or newer"
            support &= Support.no("compute capability", need, "{}.{}".format(*self._capability))
        return support

    def __call__(self, x: Tensor, linear: Linear, out: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """A launch for x, one for the product, and one for a bias."""
        weight, rows = linear.weight, x.shape[0]
        assert isinstance(weight, Float8Weight)
        blocks = weight.block == (BLOCK, BLOCK)
        y, x_scales = self._rounding(x, BLOCK if blocks else x.shape[1], norm)
        # [K / 128, N / 128] with neighbours along K, or [1, N] of scales a row.
        scales = weight.scales.t() if blocks else row_scales(weight)
        x_scales = x_scales if blocks else x_scales.contiguous()
        product: Tensor = torch._scaled_mm(y, weight.values.t(), x_scales, scales, out_dtype=x.dtype)
        product = product[:rows]
        product = product if linear.bias is None else product.add_(linear.bias)
        return product if out is None else out.copy_(product)


class Dequantize(ProductWay):
    """The weight expanded for each product of cuBLAS: for many rows, and where nothing else reads a form."""

    name = DEQUANTIZED

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers = Launchers(device)

    def __call__(self, x: Tensor, linear: Linear, out: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """A launch that expands the weight, and one for the product."""
        assert norm is None
        weight = linear.weight
        assert not isinstance(weight, Tensor)
        x = x.index_select(1, weight.order) if isinstance(weight, Int4Weight) and weight.order is not None else x
        dense = self.dequantized(weight, x.dtype).t()
        return torch.mm(x, dense, out=out) if linear.bias is None else torch.addmm(linear.bias, x, dense, out=out)

    def dequantized(self, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        """The weight in half precision [N, K], its columns in their own order: one launch, or some of torch's for rare groups."""
        described = weight_bytes(weight)
        if described is None or dtype not in (torch.bfloat16, torch.float16):
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
