"""Plain weights in a form of fewer bits, rounded to nearest: `--quantization`, and random weights in a checkpoint's format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from headway.core.contract.weights import FP4_VALUES, MX_GROUP, Float4Weight, Float8Weight, Int4Weight, Int8Weight, packed
from headway.kernels.linear.forms import QuantizedWeight

_LARGEST: Final = 448.0
"""The largest float of 8 bits (e4m3)."""
_LEAST: Final = 1e-12
"""A scale of rows of zeros."""


def float8(weight: Tensor, block: tuple[int, int] | None = None) -> Float8Weight:
    """Give each block a scale that makes its largest magnitude 448. weight: [N, K]; block: rows, columns; None: a whole row."""
    rows, columns = weight.shape
    high, wide = block or (1, columns)
    padded = pad(weight, (0, -columns % wide, 0, -rows % high)).float()
    tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    scales = (tiles.abs().amax((1, 3)) / _LARGEST).clamp(min=_LEAST)
    values = (tiles / scales[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return Float8Weight(values.to(torch.float8_e4m3fn).contiguous(), scales, (high, wide))


def int8(weight: Tensor) -> Int8Weight:
    """Give each row a scale that makes its largest magnitude 127. weight: [N, K]."""
    scales = (weight.float().abs().amax(1) / 127).clamp(min=_LEAST)
    return Int8Weight((weight.float() / scales[:, None]).round().to(torch.int8), scales)


def int4(weight: Tensor, group_size: int) -> Int4Weight:
    """Give each group of columns a scale that makes its largest magnitude 7. weight: [N, K], K a multiple of group_size."""
    groups = weight.float().view(len(weight), -1, group_size)
    scales = (groups.abs().amax(2) / 7).clamp(min=_LEAST).to(weight.dtype)
    codes = ((groups / scales.float()[:, :, None]).round() + 8).clamp(0, 15).to(torch.uint8).flatten(1)
    return Int4Weight(packed(codes, group_size), scales, None, group_size)


def float4(weight: Tensor) -> Float4Weight:
    """Give each 32 columns the power of two that makes their largest magnitude 4 to 8, above 6 rounded down to it.

    weight: [N, K], K a multiple of 32. The rule of the Open Compute Project's specification of MX formats, 6.3.
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


ON_LOADING: Final[Mapping[str, Callable[[Tensor], QuantizedWeight]]] = {"fp8": float8}
"""What `--quantization` makes of plain weights, by name."""
