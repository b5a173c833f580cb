"""Round-to-nearest quantization of plain weights (`--quantization`), and random quantized weights in a checkpoint's format.

Quantized values and scales of random weights are drawn directly: rounding random floats takes a minute per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from headway.core.contract.weights import FP4_VALUES, MX_GROUP, Float4Weight, Float8Weight, Int4Weight, Int8Weight, Weight, packed

_LARGEST: Final = 448.0
"""Largest FP8 (e4m3) value."""
_LEAST: Final = 1e-12
"""Minimum scale, which avoids division by 0 if all values are 0."""


def float8(weight: Tensor, block: tuple[int, int] | None = None) -> Float8Weight:
    """Quantize to FP8, with a scale per block that maps the block's largest magnitude to 448. weight: [N, K].
    block: rows and columns per block; None means one row.
    """
    rows, columns = weight.shape
    high, wide = block or (1, columns)
    padded = pad(weight, (0, -columns % wide, 0, -rows % high)).float()
    tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    scales = (tiles.abs().amax((1, 3)) / _LARGEST).clamp(min=_LEAST)
    values = (tiles / scales[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return Float8Weight(values.to(torch.float8_e4m3fn).contiguous(), scales, (high, wide))


def int8(weight: Tensor) -> Int8Weight:
    """Quantize to int8, with a scale per row that maps the row's largest magnitude to 127. weight: [N, K]."""
    scales = (weight.float().abs().amax(1) / 127).clamp(min=_LEAST)
    return Int8Weight((weight.float() / scales[:, None]).round().to(torch.int8), scales)


def int4(weight: Tensor, group_size: int) -> Int4Weight:
    """Quantize to int4; each group's scale maps its largest magnitude to 7. weight: [N, K], K a multiple of group_size."""
    groups = weight.float().view(len(weight), -1, group_size)
    scales = (groups.abs().amax(2) / 7).clamp(min=_LEAST).to(weight.dtype)
    codes = ((groups / scales.float()[:, :, None]).round() + 8).clamp(0, 15).to(torch.uint8).flatten(1)
    return Int4Weight(packed(codes, group_size), scales, None, group_size)


def float4(weight: Tensor) -> Float4Weight:
    """Quantize to MXFP4. A power-of-two scale per 32 columns maps the largest magnitude to a value between 4 and 8; values above
    6 become 6.

    weight: [N, K], K a multiple of 32. Section 6.3 of the Open Compute Project's MX specification defines this rule.
    """
    groups = weight.float().view(len(weight), -1, MX_GROUP)
    largest = groups.abs().amax(2).clamp(min=2.0**-120)
    powers = torch.frexp(largest).exponent - 3  # largest is below 2 ** (power + 3)
    table = torch.tensor(FP4_VALUES[:8], device=weight.device)
    scaled = torch.ldexp(groups, -powers[:, :, None])
    codes = (
        torch.bucketize(scaled.abs(), (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)
        | (scaled < 0).to(torch.uint8) << 3
    )
    return Float4Weight(packed(codes.flatten(1), MX_GROUP), (powers + 127).to(torch.uint8))


Octets = Callable[..., Tensor]
"""Function that draws uniform random uint8 values. Its arguments are the sizes of the axes."""


_NO_NUMBER: Final = 0x7F
"""Bit pattern of a NaN in float8_e4m3fn, without the sign bit."""


def _deviation(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def drawn_float8(octets: Octets, rows: int, columns: int, std: float, block: tuple[int, int] | None = None) -> Float8Weight:
    """Draw uniform FP8 bit patterns. block: number of rows and columns that share a scale; None means one row."""
    high, wide = block or (1, columns)
    codes = octets(rows, columns)
    codes.masked_fill_((codes & _NO_NUMBER) == _NO_NUMBER, 0)
    every = torch.arange(_NO_NUMBER, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scales = torch.full((-(-rows // high), -(-columns // wide)), std / _deviation(every), device=codes.device)
    return Float8Weight(codes.view(torch.float8_e4m3fn), scales, (high, wide))


def drawn_int8(octets: Octets, rows: int, columns: int, std: float) -> Int8Weight:
    """Draw integers from -127 to 127; 0 is twice as likely as any other value."""
    values = octets(rows, columns).view(torch.int8)
    values.masked_fill_(values == -128, 0)
    scale = std / _deviation(torch.arange(-127, 128))
    return Int8Weight(values, torch.full((rows,), scale, device=values.device))


def drawn_int4(octets: Octets, rows: int, columns: int, std: float, group_size: int, dtype: torch.dtype) -> Int4Weight:
    """Draw integers from -7 to 7; 0 is twice as likely as others. dtype: the scales' dtype. columns: multiple of group_size."""
    packed = octets(rows, columns // 2)
    for least, zero in ((0x0F, 0x08), (0xF0, 0x80)):
        packed |= ((packed & least) == 0).to(torch.uint8) * zero
    scale = std / _deviation(torch.tensor([*range(-7, 8), 0]))
    scales = torch.full((rows, columns // group_size), scale, dtype=dtype, device=packed.device)
    return Int4Weight(packed, scales, None, group_size)


def drawn_float4(octets: Octets, rows: int, columns: int, std: float) -> Float4Weight:
    """Draw uniform FP4 values. Each group has one of two exponents, whose frequencies give the standard deviation `std`."""
    square = (std / _deviation(torch.tensor(FP4_VALUES))) ** 2
    low = int(torch.frexp(torch.tensor(square**0.5, dtype=torch.float64)).exponent) - 1  # 4 ** low <= square < 4 ** (low + 1)
    larger = round(256 * (square / 4.0**low - 1) / 3)
    packed = octets(rows, columns // 2)
    exponents = (octets(rows, columns // MX_GROUP).int() < larger).to(torch.uint8) + (low + 127)
    return Float4Weight(packed, exponents)


ON_LOADING: Final[Mapping[str, Callable[[Tensor], Weight]]] = {"fp8": float8}
"""Quantization function for each value of `--quantization`."""
