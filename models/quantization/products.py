"""Products over quantised weights on a CPU: torch's own over packed weights, where it has them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headway.models.quantization.forms import Int4Weight, Int8Weight, QuantizedWeight, packed, unpacked

Product = Callable[[Tensor], Tensor]
"""From x [rows, K] to [rows, N]."""


def packed_product(weight: QuantizedWeight, dtype: torch.dtype) -> tuple[Tensor, Product] | None:
    """A product of x in `dtype` by torch's operators over packed weights, and what it reads; None where torch has none.

    Whole numbers of 8 bits, and of 4 bits in groups of 32, 64, 128 or 256 with a multiple of 16 rows. The operators' names are
    private, so each is tried once with a small product.
    """
    if not packs(weight, dtype):
        return None
    if isinstance(weight, Int8Weight):
        return _int8(weight, dtype)
    assert isinstance(weight, Int4Weight)
    return _int4(weight, dtype)


def packs(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether torch has a product of x in `dtype` over a weight in this form."""
    if isinstance(weight, Int8Weight):
        return _works("int8", dtype)
    whole = isinstance(weight, Int4Weight) and weight.group_size in _GROUPS and weight.shape[0] % 16 == 0
    return whole and _works("int4", dtype)


_GROUPS = (32, 64, 128, 256)
"""Columns under one scale that torch's product of 4 bits takes."""


def _int8(weight: Int8Weight, dtype: torch.dtype) -> tuple[Tensor, Product]:
    values, scales = weight.values.contiguous(), weight.scales.to(dtype)
    return values, lambda x: torch.ops.aten._weight_int8pack_mm(x, values, scales)


def _int4(weight: Int4Weight, dtype: torch.dtype) -> tuple[Tensor, Product]:
    """torch's value is (code - 8) * scale + zero."""
    group, order = weight.group_size, weight.order
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpacked(weight.packed, group).int(), 1)
    scales = weight.scales.float()
    zeros = torch.zeros_like(scales) if weight.zeros is None else (8 - weight.zeros.float()) * scales
    both = torch.stack([scales.t(), zeros.t()], dim=2).to(dtype).contiguous()

    def product(x: Tensor) -> Tensor:
        x = x if order is None else x.index_select(1, order)
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, group, both)
        return y

    return codes, product


_tried: dict[tuple[str, torch.dtype], bool] = {}


def _works(kind: str, dtype: torch.dtype) -> bool:
    known = _tried.get((kind, dtype))
    if known is None:
        known = _tried[kind, dtype] = _try(kind, dtype)
    return known


def _try(kind: str, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    codes, x = torch.randint(0, 16, (32, 64), generator=generator), torch.randn(3, 64, generator=generator).to(dtype)
    try:
        if kind == "int8":
            eight = Int8Weight((codes - 8).to(torch.int8), torch.rand(32, generator=generator))
            product, exact = _int8(eight, dtype)[1](x), eight.dequantized(torch.float64)
        else:
            scales, zeros = torch.rand(32, 2, generator=generator), codes[:, :2].to(torch.uint8)
            four = Int4Weight(packed(codes.to(torch.uint8), 32), scales, zeros, 32)
            product, exact = _int4(four, dtype)[1](x), four.dequantized(torch.float64)
    except (AttributeError, RuntimeError):
        return False
    expected = x.double() @ exact.t()
    return bool((product - expected).norm() < 8 * torch.finfo(dtype).eps * expected.norm())
