"""Products of experts over quantised weights: what the kernels are compiled with for a form, and their launches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.experts.launchers import Launchers, activation
from headway.kernels.experts.quantized_row_kernels import down_quantized_rows, gate_up_quantized_rows
from headway.kernels.experts.router import Routed, dot_type
from headway.kernels.linear.forms import QuantizedWeight
from headway.kernels.linear.quantized import WeightBytes, tensors_of, weight_bytes
from headway.kernels.runtime.triton_launch import INTERPRETED

_SPAN = 16
"""Bytes of a slice: what a thread loads at once."""


@dataclass(frozen=True, slots=True)
class QuantizedRowCut:
    """How the products of single tokens are cut. A warp reads slices of one row side by side, and rows one after the other."""

    gate_rows: int = 2
    """Rows of the gate, and of the other half, that a program of one pair holds."""
    gate_depth: int = 2
    """Chunks of these that are asked for ahead."""
    down_rows: int = 1
    """Rows of the down product that a program of one token holds, in all of its experts."""
    down_depth: int = 8
    warps: int = 1
    """With one, threads hand each other x by shuffles; more wait for each other, and have fewer registers to fill each."""


def described(weight: QuantizedWeight) -> WeightBytes:
    """How kernels read a weight, which they do (`reads_experts`)."""
    found = weight_bytes(weight)
    assert found is not None
    return found


def form_constants(weight: WeightBytes, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernels are compiled with for a form. dtype: of x."""
    return {
        "ROW": weight.row,
        "WEIGHT": weight.kind,
        "HALF": weight.half,
        "SCALES": weight.scales,
        "SCALE_SPAN": weight.scale_span,
        "SCALE_ROWS": weight.scale_rows,
        "ZEROS": weight.zeros,
        "DOT": dot_type(dtype),
        "ASSEMBLY": not INTERPRETED,
    }


def launch_gate_up_rows(
    launchers: Launchers,
    config: ExpertsConfig,
    cut: QuantizedRowCut,
    routed: Routed,
    weight: QuantizedWeight,
    bias: Tensor | None,
    y: Tensor,
) -> None:
    """Compute the gated product of each pair. y: [num_tokens * num_slots, intermediate_size], written."""
    x, form = routed.x, described(weight)
    block_g = slices_of_a_chunk(form.row)
    block_n = cut.gate_rows * (32 // block_g)
    sizes = {"HIDDEN": x.shape[1], "INNER": config.intermediate_size, "SLOTS": config.num_slots}
    how: dict[str, Any] = {
        "BLOCK_N": block_n,
        "BLOCK_G": block_g,
        "SPAN": _SPAN,
        "DEPTH": min(cut.gate_depth, _chunks(form.row, block_g)),
    }
    how |= {**activation(config), "BIAS": bias is not None}
    launch = launchers.get(gate_up_quantized_rows, cut.warps, **sizes, **how, **form_constants(form, x.dtype))
    grid = len(y), triton.cdiv(config.intermediate_size, block_n), 1
    launch(grid, x, *tensors_of(weight), x if bias is None else bias, routed.experts, y)


def launch_down_rows(
    launchers: Launchers,
    config: ExpertsConfig,
    cut: QuantizedRowCut,
    x: Tensor,
    routed: Routed,
    weight: QuantizedWeight,
    bias: Tensor | None,
    residual: Tensor,
) -> None:
    """Add what the experts of each token give. x: of the product before; residual: [num_tokens, hidden_size]."""
    (num_tokens, hidden), form = residual.shape, described(weight)
    block_g = slices_of_a_chunk(form.row)
    block_n = cut.down_rows * (32 // block_g)
    sizes = {"HIDDEN": hidden, "INNER": config.intermediate_size, "SLOTS": config.num_slots}
    depth = min(cut.down_depth, config.num_slots * _chunks(form.row, block_g))
    how = {"BLOCK_N": block_n, "BLOCK_G": block_g, "SPAN": _SPAN, "DEPTH": depth, "BIAS": bias is not None}
    launch = launchers.get(down_quantized_rows, cut.warps, **sizes, **how, **form_constants(form, x.dtype))
    given = x if bias is None else bias, routed.experts, routed.weights
    launch((num_tokens, triton.cdiv(hidden, block_n), 1), x, *tensors_of(weight), *given, residual)


def span_of_a_tile(form: WeightBytes, columns: int) -> int:
    """Bytes of a row that tiles of so many columns multiply at a time: under one scale, or under scales of whole groups."""
    num_bytes = columns // 2 if form.half else columns
    if form.half and num_bytes % form.scale_span == 0:
        return num_bytes
    if num_bytes <= form.scale_span == form.row:  # the end of the last piece is masked
        return num_bytes
    return math.gcd(num_bytes, form.scale_span)


def slices_of_a_chunk(row: int) -> int:
    """Slices that the lanes of a warp read side by side: all of them, where the last chunk of a row is not mostly empty."""
    slices = row // _SPAN
    padded = {count: triton.cdiv(slices, count) * count for count in (32, 16, 8)}
    return next((count for count in padded if padded[count] <= 1.1 * slices), min(padded, key=padded.__getitem__))


def _chunks(row: int, block_g: int) -> int:
    return -(-row // (_SPAN * block_g))
