"""Weights as products in CUDA C++ read them, and which of them they read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.core.contract.support import YES, Support
from headway.kernels.linear.cuda_cuts import PART_ROWS, SLICE_BYTES
from headway.kernels.linear.cuda_variant import HALVES, KINDS
from headway.kernels.linear.forms import Float4Weight, Float8Weight, Int4Weight, Int8Weight, QuantizedWeight, form_name
from headway.kernels.linear.quantized import WeightBytes, weight_bytes

_COPY = 16
"""Bytes that a thread copies at a time."""
_NARROW_EXPONENT, _NARROW_SCALE = 128, 128.0
"""The largest of MXFP4's exponents, and of FP8's scales, that half precision holds beside what exponents of codes lack."""


@dataclass(frozen=True, slots=True)
class ArrangedWeight:
    """A weight as the kernel reads it."""

    described: WeightBytes
    codes: Tensor
    """uint8 [rows, bytes of a row]"""
    scales: Tensor
    """float32 [N] or [N / rows, K / columns]; of groups [K / group_size, N]"""
    zeros: Tensor | None = None
    """uint8 [K / group_size, N]"""
    wide: bool = False
    """Whether a scale is larger than the kernels' first way of unpacking has place for."""


class Arrangements:
    """Weights as the kernels read them, each arranged once."""

    def __init__(self) -> None:
        self._known: dict[QuantizedWeight, ArrangedWeight] = {}

    def __call__(self, weight: Tensor | QuantizedWeight) -> ArrangedWeight:
        """The arrangement of a weight, made now where there is none."""
        assert not isinstance(weight, Tensor)
        known = self._known.get(weight)
        if known is None:
            known = self._known[weight] = arranged(weight)
        return known

    def num_bytes(self, weight: Tensor | QuantizedWeight) -> int:
        """Bytes that the arrangement takes beside the weight: scales and zeros, in another order."""
        made = self(weight)
        return made.scales.nbytes + (0 if made.zeros is None else made.zeros.nbytes)


def computes(dtype: torch.dtype, weight: QuantizedWeight, rows: int | None = None) -> Support:
    """Whether the kernels compute products over a weight, on whatever GPU. dtype: of x.

    rows: of each expert, where the weight is that of several (expert_rows.cu); None: it is that of one product.
    """
    described, columns = weight_bytes(weight), weight.shape[1]
    if described is None or described.kind not in KINDS or dtype not in HALVES:
        return Support.no(form_name(weight), "fp8, int8, int4 or mxfp4 in groups that fill a row, and x in half precision", dtype)
    support, span, by_row = YES, described.scale_span, described.scale_span >= described.row
    if rows is None and (weight.shape[0] % (2 * PART_ROWS) or described.row % (SLICE_BYTES * (1 if described.half else 2))):
        support &= Support.no("shape", "multiples of 32 x 128", f"{weight.shape[0]} x {columns}")
    if rows is not None and (rows % PART_ROWS or described.row % (SLICE_BYTES if described.half >= SLICE_BYTES else _COPY)):
        support &= Support.no("shape", "experts of multiples of 16 rows of 16 bytes", f"{rows} x {columns}")
    short = described.half > 0 and SLICE_BYTES % span == 0 and span % 16 == 0  # codes are scaled, which those of bytes are not
    whole = span % SLICE_BYTES == 0 or short or by_row
    if not whole or (1 < described.scale_rows < weight.shape[0] and described.scale_rows % PART_ROWS and not by_row):
        support &= Support.no("scales", "blocks of multiples of 16 rows and 64 columns", form_name(weight))
    if described.zeros and by_row:
        support &= Support.no("zeros", "of groups that are shorter than a row", form_name(weight))
    if described.kind == "mxfp4" and dtype != torch.bfloat16:
        support &= Support.no("dtype", "bfloat16, which has place for the scales", dtype)
    return support


def arranged(weight: QuantizedWeight) -> ArrangedWeight:
    """A weight as the kernel reads it: codes where they are, scales of neighbouring rows side by side."""
    described = weight_bytes(weight)
    assert described is not None
    if isinstance(weight, Float8Weight):
        scales = weight.scales
        if described.scale_span >= described.row:  # one for a row, or for some: for each row, to be multiplied at the end
            scales = scales.view(-1).repeat_interleave(described.scale_rows)[: weight.shape[0]].contiguous()
            described = replace(described, scale_rows=1)
        elif described.scale_rows == 1:
            scales = scales.t().contiguous()
        return ArrangedWeight(described, weight.values.view(torch.uint8), scales, wide=float(scales.max()) > _NARROW_SCALE)
    if isinstance(weight, Float4Weight):
        wide = int(weight.exponents.max()) > _NARROW_EXPONENT
        return ArrangedWeight(described, weight.packed, weight.exponents.t().contiguous(), wide=wide)
    if isinstance(weight, Int8Weight):
        return ArrangedWeight(described, weight.values.view(torch.uint8), weight.scales)
    assert isinstance(weight, Int4Weight)
    if described.scale_span >= described.row:
        return ArrangedWeight(described, weight.packed, weight.scales.view(-1).float())
    zeros = None if weight.zeros is None else weight.zeros.t().contiguous()
    return ArrangedWeight(described, weight.packed, weight.scales.t().contiguous(), zeros)
