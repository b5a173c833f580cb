"""Products over quantised weights on a CPU: torch's own over packed weights, where it has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from headway.kernels.linear.forms import Int4Weight, QuantizedWeight, packed, unpacked

Product = Callable[[Tensor], Tensor]
"""From x [rows, K] to [rows, N]."""


def packed_product(weight: QuantizedWeight, dtype: torch.dtype) -> tuple[Tensor, Product] | None:
    """A product of x in `dtype` by torch's operators over packed weights, and what it reads; None where torch has none.

    The operator's name is private, so it is tried once with a small product.
    """
    return _int4(weight, dtype) if isinstance(weight, Int4Weight) and packs(weight, dtype) else None


def packs(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether torch has a product of x in `dtype` over a weight in this form that is faster than one over the expanded weight.

    It has for whole numbers of 4 bits in groups of 32, 64, 128 or 256, a multiple of 16 rows, and x in bfloat16: 2 to 3 times
    as fast at one row, as fast at 16. In float32 it is 5 times slower than over the expanded weight, and so is that over whole
    numbers of 8 bits, which in bfloat16 is as fast at one row and 2 to 3 times slower at 16 (docs/notes/cpu.md).
    """
    whole = isinstance(weight, Int4Weight) and weight.group_size in _GROUPS and weight.shape[0] % 16 == 0
    return whole and dtype == torch.bfloat16 and _works()


_GROUPS = (32, 64, 128, 256)
"""Columns under one scale that torch's product of 4 bits takes."""


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


@cache
def _works() -> bool:
    generator = torch.Generator().manual_seed(0)
    codes, x = torch.randint(0, 16, (32, 64), generator=generator), torch.randn(3, 64, generator=generator).bfloat16()
    scales, zeros = torch.rand(32, 2, generator=generator), codes[:, :2].to(torch.uint8)
    weight = Int4Weight(packed(codes.to(torch.uint8), 32), scales, zeros, 32)
    try:
        product = _int4(weight, torch.bfloat16)[1](x)
    except (AttributeError, RuntimeError):
        return False
    expected = x.double() @ weight.dequantized(torch.float64).t()
    return bool((product - expected).norm() < 8 * torch.finfo(torch.bfloat16).eps * expected.norm())
