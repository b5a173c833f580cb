"""The ways of multiplying over a quantised weight on a GPU. All run inside CUDA graphs: the number of rows alone decides."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from headway.backends.triton.launch import FixedLauncher
from headway.core.contract.spec import DTYPE_NAMES
from headway.models.fused.dequantize_kernels import dequantize_rows, quantize_rows
from headway.models.fused.quantized import CutRule, QuantizedProducts, quantized_cut, tensors_of, weight_bytes
from headway.models.fused.quantized_choice import DEQUANTIZED, KERNEL, SCALED, ProductKind
from headway.models.fused.quantized_cuts import CHANGES, MOST_ROWS, changed
from headway.models.linear import Linear
from headway.models.operations import Norm
from headway.models.quantization.forms import Float8Weight, Int4Weight, QuantizedWeight, form_name

BLOCK = 128
"""Rows and columns of the blocks that `torch._scaled_mm` takes."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of computing a product: of a library, unless it has a kernel."""

    name: str
    kernel: QuantizedProducts | None = None
    """Our kernel, with its cuts."""

    @property
    def norms(self) -> bool:
        """Whether the norm before the product is a part of it."""
        return self.kernel is not None or self.name == SCALED


class QuantizedWays:
    """Products of x in half precision over quantised weights, by ways that are chosen for each kind of product."""

    def __init__(self, device: torch.device, cut: CutRule = quantized_cut) -> None:
        self._device = device
        self.kernel = QuantizedProducts(device, cut)
        ways = [Way(KERNEL, self.kernel), Way(SCALED), Way(DEQUANTIZED)]
        ways += [Way(f"{KERNEL} {name}", QuantizedProducts(device, changed(change))) for name, change in CHANGES.items()]
        self.ways = {way.name: way for way in ways}
        self._launchers: dict[Hashable, FixedLauncher] = {}
        self._scaled = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
        self._blocks = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        self._kinds: dict[Hashable, ProductKind] = {}
        self._kind_of: dict[tuple[Linear, torch.dtype, bool], ProductKind] = {}

    def kind(self, linear: Linear, dtype: torch.dtype, gated: bool = False) -> ProductKind | None:
        """The kind that a layer's product belongs to; None: its weight is not quantised.

        dtype: of x. gated: the product is of a gate and of what it multiplies, and the kernel computes that too.
        """
        if isinstance(linear.weight, Tensor):
            return None
        place = linear, dtype, gated
        kind = self._kind_of.get(place)
        if kind is None:
            weight, (rows, columns) = linear.weight, linear.weight.shape
            words = [form_name(weight), f"{rows}x{columns}", *(["gated"] if gated else []), DTYPE_NAMES[dtype]]
            name = " ".join(words if linear.bias is None else [*words, "with a bias"])
            kind = self._kinds.get(name)
            if kind is None:
                kind = self._kinds[name] = ProductKind(name, self._able(weight, dtype), gated)
            self._kind_of[place] = kind
        return kind

    def _able(self, weight: QuantizedWeight, dtype: torch.dtype) -> dict[str, int | None]:
        """Ways that compute this product, and up to how many rows each may serve."""
        libraries = [SCALED, DEQUANTIZED] if self._can_scale(dtype, weight) else [DEQUANTIZED]
        if not self.kernel.reads(dtype, weight):
            return dict.fromkeys(libraries)
        changes = [f"{KERNEL} {name}" for name in CHANGES]
        return {KERNEL: None, **dict.fromkeys(changes, MOST_ROWS), **dict.fromkeys(libraries)}

    def way(self, x: Tensor, linear: Linear, gated: bool = False) -> Way | None:
        """What serves products of so many rows; None: the weight is not quantised, or there are no rows."""
        kind = self.kind(linear, x.dtype, gated)
        return None if kind is None or not x.shape[0] else self.ways[kind.way_for(x.shape[0])]

    def product(self, x: Tensor, linear: Linear, way: Way | None, out: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """The product of x [rows, in_features] by a way, normed first where that norms; None: by the layer itself."""
        if way is None:
            assert norm is None
            return linear(x, out)
        if way.kernel is not None:
            return way.kernel(x, linear, norm, out=out)
        if way.name == SCALED:
            y = self._scaled_mm(x, linear, norm)
            return y if out is None else out.copy_(y)
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

    def _can_scale(self, dtype: torch.dtype, weight: QuantizedWeight) -> bool:
        rows, columns = weight.shape
        if not isinstance(weight, Float8Weight) or not self._scaled or dtype != torch.bfloat16 or rows % 16 or columns % 16:
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
