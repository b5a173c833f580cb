"""Random weights in the forms of products: codes and scales are drawn, since rounding random floats takes a minute a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from headway.kernels.linear.forms import FP4_VALUES, MX_GROUP, Float4Weight, Float8Weight, Int4Weight, Int8Weight

Octets = Callable[..., Tensor]
"""Draws uint8 of a shape, each of the 256 values as often as any other."""

_NO_NUMBER: Final = 0x7F
"""Bits of a float8_e4m3fn below its sign that stand for no number."""


def _deviation(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def float8(octets: Octets, rows: int, columns: int, std: float, block: tuple[int, int] | None = None) -> Float8Weight:
    """Every float of 8 bits is as likely. block: rows and columns under one scale; None: a whole row."""
    high, wide = block or (1, columns)
    codes = octets(rows, columns)
    codes.masked_fill_((codes & _NO_NUMBER) == _NO_NUMBER, 0)
    every = torch.arange(_NO_NUMBER, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scales = torch.full((-(-rows // high), -(-columns // wide)), std / _deviation(every), device=codes.device)
    return Float8Weight(codes.view(torch.float8_e4m3fn), scales, (high, wide))


def int8(octets: Octets, rows: int, columns: int, std: float) -> Int8Weight:
    """From -127 to 127; 0 is twice as likely."""
    values = octets(rows, columns).view(torch.int8)
    values.masked_fill_(values == -128, 0)
    scale = std / _deviation(torch.arange(-127, 128))
    return Int8Weight(values, torch.full((rows,), scale, device=values.device))


def int4(octets: Octets, rows: int, columns: int, std: float, group_size: int, dtype: torch.dtype) -> Int4Weight:
    """From -7 to 7; 0 is twice as likely. dtype: of the scales; columns: a multiple of group_size."""
    packed = octets(rows, columns // 2)
    for least, zero in ((0x0F, 0x08), (0xF0, 0x80)):
        packed |= ((packed & least) == 0).to(torch.uint8) * zero
    scale = std / _deviation(torch.tensor([*range(-7, 8), 0]))
    scales = torch.full((rows, columns // group_size), scale, dtype=dtype, device=packed.device)
    return Int4Weight(packed, scales, None, group_size)


def float4(octets: Octets, rows: int, columns: int, std: float) -> Float4Weight:
    """Every float of 4 bits is as likely; the exponent of a group is one of two, so often that the deviation is right."""
    square = (std / _deviation(torch.tensor(FP4_VALUES))) ** 2
    low = int(torch.frexp(torch.tensor(square**0.5, dtype=torch.float64)).exponent) - 1  # 4 ** low <= square < 4 ** (low + 1)
    larger = round(256 * (square / 4.0**low - 1) / 3)
    packed = octets(rows, columns // 2)
    exponents = (octets(rows, columns // MX_GROUP).int() < larger).to(torch.uint8) + (low + 127)
    return Float4Weight(packed, exponents)
