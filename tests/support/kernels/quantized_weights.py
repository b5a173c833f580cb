"""Simple quantization to each format that kernels read: nearest values, with scales for the largest element."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from headway.core.contract.weights import FP4_VALUES, MX_GROUP, Float4Weight, Float8Weight, Int4Weight, Int8Weight, Weight, packed


def float8(weight: Tensor, block: tuple[int, int] | None = None) -> Float8Weight:
    """A scale for each block, or each row."""
    rows, columns = block = block or (1, weight.shape[1])
    down, across = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    padded = torch.zeros(down * rows, across * columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = padded.view(down, rows, across, columns).abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
    return Float8Weight((weight.float() / spread).to(torch.float8_e4m3fn), scales, block)


def int8(weight: Tensor) -> Int8Weight:
    """A scale for each row."""
    scales = weight.float().abs().amax(1) / 127
    return Int8Weight((weight.float() / scales[:, None]).round().to(torch.int8), scales)


def int4(weight: Tensor, group: int, zeros: bool = False, order: bool = False) -> Int4Weight:
    """Random zero points and columns in random order, if requested."""
    generator = torch.Generator().manual_seed(len(weight))
    inputs = torch.randperm(weight.shape[1], generator=generator) if order else torch.arange(weight.shape[1])
    groups = weight.float()[:, inputs].view(len(weight), -1, group)
    scales = (groups.abs().amax(2) / 5).half()
    zero = torch.randint(5, 11, scales.shape, generator=generator) if zeros else torch.full(scales.shape, 8)
    codes = ((groups / scales.float()[:, :, None]).round() + zero[:, :, None]).clamp(0, 15).to(torch.uint8).flatten(1)
    return Int4Weight(
        packed(codes, group), scales, zero.to(torch.uint8) if zeros else None, group, inputs.int() if order else None
    )


def mxfp4(weight: Tensor) -> Float4Weight:
    """The scale is the power of two below the largest element's, over 4."""
    groups = weight.float().view(len(weight), -1, MX_GROUP)
    exponents = groups.abs().amax(2).log2().floor().clamp(-120, 120) - 2
    codes = (groups[..., None] / exponents.exp2()[:, :, None, None] - torch.tensor(FP4_VALUES)).abs().argmin(-1)
    return Float4Weight(packed(codes.to(torch.uint8).flatten(1), MX_GROUP), (exponents + 127).to(torch.uint8))


FORMS: dict[str, Callable[[Tensor], Weight]] = {
    "fp8 rows": float8,
    "fp8 blocks": partial(float8, block=(128, 128)),
    "int8": int8,
    "int4 of 128": partial(int4, group=128),
    "int4 of 64 with zeros": partial(int4, group=64, zeros=True),
    "int4 of 32 in another order": partial(int4, group=32, zeros=True, order=True),
    "mxfp4": mxfp4,
}
