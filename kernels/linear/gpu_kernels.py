"""GPU GEMM kernels of linear layers that torch provides: scaled_mm with x rounded to FP8, and cuBLAS after dequantizing the
weight."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import torch
import triton
from torch import Tensor

from headway.core.contract.linear import LinearCapabilities, LinearSpec
from headway.core.contract.support import Support
from headway.core.contract.weights import Float8Weight, Int4Weight, QuantizedWeight, Weight
from headway.kernels.linear.choice import DEQUANTIZED, SCALED
from headway.kernels.linear.cuda_products import BLOCK, float8_scales
from headway.kernels.linear.forms import Operand, tensors_of, weight_bytes
from headway.kernels.linear.fused_kernel import FusedKernel
from headway.kernels.linear.product_kernels import DEVICES, QUANTIZED, TritonProducts
from headway.kernels.linear.unpack_kernels import dequantize_rows, quantize_rows
from headway.kernels.runtime.probe import HALF_DTYPES, capability, has_gpu
from headway.kernels.runtime.triton_launch import Launchers
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
