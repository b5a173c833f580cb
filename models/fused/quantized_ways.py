"""The ways of multiplying over a quantised weight on a GPU. All run inside CUDA graphs: the number of rows alone decides."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor

from headway.backends.triton.launch import FixedLauncher
from headway.models.config import Activation
from headway.models.fused.dequantize_kernels import dequantize_rows, quantize_rows
from headway.models.fused.quantized import CutRule, QuantizedProducts, quantized_cut, tensors_of, weight_bytes
from headway.models.fused.quantized_choice import DEQUANTIZED, KERNEL, SCALED, ProductTimes, rule
from headway.models.linear import Linear
from headway.models.operations import Heads, Norm, Rope
from headway.models.quantization.forms import Float8Weight, Int4Weight, QuantizedWeight

BLOCK = 128
"""Rows and columns of the blocks that `torch._scaled_mm` takes."""


class QuantizedWays:
    """Products of x in half precision over quantised weights: `takes` tells of those that one launch of our kernel computes with
    what comes before and after them; `product` computes any."""

    def __init__(self, device: torch.device, times: ProductTimes | None = None, cut: CutRule = quantized_cut) -> None:
        """times: what chooses; None: a rule."""
        self._device, self._times = device, times
        self.kernel = QuantizedProducts(device, cut)
        self._launchers: dict[Hashable, FixedLauncher] = {}
        self._scaled = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
        self._blocks = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)

    def able(self, x: Tensor, linear: Linear) -> tuple[str, ...]:
        """Ways that compute this product; none, where the weight is not quantised."""
        weight = linear.weight
        if isinstance(weight, Tensor):
            return ()
        kernel = (KERNEL,) if self.kernel.takes(x, linear) else ()
        return (*kernel, *((SCALED,) if self._can_scale(x, weight) else ()), DEQUANTIZED)

    def way(self, x: Tensor, linear: Linear) -> str | None:
        """What serves products of so many rows; None: the weight is not quantised, or there are no rows."""
        able = self.able(x, linear)
        if not able or not x.shape[0]:
            return None
        measured = None if self._times is None else self._times.fastest(x.shape[0], able)
        return measured or rule(x.shape[0], able)

    def takes(self, x: Tensor, linear: Linear, heads: Heads | None = None) -> bool:
        """Whether our kernel serves the product, with its heads rotated where they are given."""
        return self.way(x, linear) == KERNEL and self.kernel.takes(x, linear, heads)

    def __call__(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None = None,
        gated: bool = False,
        activation: Activation | None = None,
        add_to: Tensor | None = None,
        rotated: tuple[Heads, Rope] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """One launch of our kernel; see `FewRows`, whose arguments these are."""
        return self.kernel(x, linear, norm, gated, activation, add_to, rotated, out)

    def product(
        self, x: Tensor, linear: Linear, out: Tensor | None = None, norm: Norm | None = None, way: str | None = None
    ) -> Tensor:
        """The product of x [rows, in_features] by `way` or the chosen one, normed first where `normed_in` says so."""
        way = way or self.way(x, linear)
        if way == KERNEL:
            return self.kernel(x, linear, norm, out=out)
        if way == SCALED:
            y = self._scaled_mm(x, linear, norm)
            return y if out is None else out.copy_(y)
        assert norm is None
        if way is None:
            return linear(x, out)
        assert not isinstance(linear.weight, Tensor)
        weight = linear.weight
        x = x.index_select(1, weight.order) if isinstance(weight, Int4Weight) and weight.order is not None else x
        dense = self.dequantized(weight, x.dtype).t()
        return torch.mm(x, dense, out=out) if linear.bias is None else torch.addmm(linear.bias, x, dense, out=out)

    def normed_in(self, x: Tensor, linear: Linear) -> bool:
        """Whether `product` norms x itself."""
        return self.way(x, linear) in (KERNEL, SCALED)

    def dequantized(self, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        """The weight in half precision [N, K], its columns in their own order: one launch, or some of torch's for rare groups."""
        described = weight_bytes(weight)
        if described is None or dtype not in (torch.bfloat16, torch.float16):
            y = weight.dequantized(dtype)
            return y[:, weight.order.long()] if isinstance(weight, Int4Weight) and weight.order is not None else y
        (rows, columns), block_n = weight.shape, 16
        span = max(described.span & -described.span, 16)
        sizes = {"ROW": described.row, "HALF": described.half, "SCALES": described.scales, "SCALE_SPAN": described.scale_span}
        sizes |= {"SCALE_ROWS": described.scale_rows, "SPAN": span, "BLOCK_N": block_n, "N": rows, "K": columns}
        kind = {"WEIGHT": described.kind, "ZEROS": described.zeros}
        launch = self._launcher(
            ("dequantize", *sizes.values(), *kind.values()), dequantize_rows, 4, ASSEMBLY=False, **sizes, **kind
        )
        y = torch.empty(rows, columns, dtype=dtype, device=self._device)
        launch((triton.cdiv(rows, block_n), described.row // span, 1), *tensors_of(weight), y)
        return y

    def quantized(self, x: Tensor, group: int, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """x in floats of 8 bits, a multiple of four rows, and its scales, which multiply: [rows, columns / group]."""
        rows, columns = x.shape
        padded = -(-rows // 4) * 4
        y = torch.empty(padded, columns, dtype=torch.float8_e4m3fn, device=self._device)
        scales = torch.empty(columns // group, padded, device=self._device)
        block = triton.next_power_of_2(columns)
        constants = {"K": columns, "BLOCK": block, "GROUP": group, "NORM": norm is not None}
        launch = self._launcher(("quantize", *constants.values()), quantize_rows, 4 if block <= 2048 else 8, **constants)
        weight, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
        launch((rows, 1, 1), x, weight, y, scales, eps, padded)
        return y, scales.t()

    def _launcher(self, key: Hashable, kernel: Any, num_warps: int, **constants: Any) -> FixedLauncher:
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = FixedLauncher(kernel, num_warps, self._device, **constants)
        return launcher

    def _can_scale(self, x: Tensor, weight: QuantizedWeight) -> bool:
        rows, columns = weight.shape
        if not isinstance(weight, Float8Weight) or not self._scaled or x.dtype != torch.bfloat16 or rows % 16 or columns % 16:
            return False
        if weight.block == (BLOCK, BLOCK):
            return self._blocks and rows % BLOCK == 0 and columns % BLOCK == 0
        return weight.scales.shape[1] == 1 and weight.block[0] in (1, rows)

    def _scaled_mm(self, x: Tensor, linear: Linear, norm: Norm | None) -> Tensor:
        weight, rows = linear.weight, x.shape[0]
        assert isinstance(weight, Float8Weight)
        blocks = weight.block == (BLOCK, BLOCK)
        y, x_scales = self.quantized(x, BLOCK if blocks else x.shape[1], norm)
        # [K / 128, N / 128] with neighbours along K, or [1, N] of scales a row.
        scales = weight.scales.t() if blocks else weight.scales.view(-1).expand(linear.out_features).contiguous()[None]
        x_scales = x_scales if blocks else x_scales.contiguous()
        product: Tensor = torch._scaled_mm(y, weight.values.t(), x_scales, scales, out_dtype=x.dtype)
        product = product[:rows]
        return product if linear.bias is None else product.add_(linear.bias)
