"""How products of few rows over quantised weights are cut among warps and blocks of threads; see csrc/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.models.fused.quantized import WeightBytes

SLICE_BYTES = 64
"""Bytes of a row that one warp multiplies at a time."""
PART_ROWS = 16
"""Rows of the weight that the matrix units take."""
SHARED_BYTES = 112 * 1024
"""Bytes of shared memory of a block of threads beside which another finds room."""


@dataclass(frozen=True, slots=True)
class CudaCut:
    """How one product is cut; see the kernels' constants."""

    tiles: int
    """Sixteens of the weight's rows that a warp holds."""
    warps: int
    stages: int
    splits: int = 0
    """Blocks of threads that share a sum over K, in shared_rows.cu, whose warps hold one such part; 0: few_rows.cu."""
    per_multiprocessor: int = 1
    """Blocks of threads of few_rows.cu."""


CudaCutRule = Callable[[WeightBytes, int, int, bool, int], CudaCut]
"""(weight, rows, out_features, gated, multiprocessors) -> cut"""


def few_rows_cut(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaCut:
    """Cut a product of up to 16 rows, whose warps share a sum over K: tiles of few rows are alike for all multiprocessors."""
    parts, most = out_features // PART_ROWS, most_rows_of(rows)
    wide = not gated and -(-parts // 4) / multiprocessors > _FULL
    tiles = 2 if gated or parts > 2 * _FULL * multiprocessors else 1
    if most == 1:
        return CudaCut(tiles, 16, 4)
    if wide and -(-parts // 4) <= multiprocessors:
        return CudaCut(4, 4, 4)
    return CudaCut(tiles, 8, 5 if most == 8 else 3 if weight.half else 4)


def shared_rows_cut(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaCut:
    """Cut a product of up to 64 rows, whose blocks of threads share a sum over K where there are fewer than multiprocessors."""
    return _shared_cut(weight, rows, out_features, gated, 8, multiprocessors, multiprocessors)


def shared_rows_cut_narrow(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaCut:
    """Likewise, in smaller blocks. On an H200, 4 bits of 4096 x 14336, 64 rows: 28 us to the other cut's 36."""
    most = multiprocessors if rows > 32 else 2 * multiprocessors
    return _shared_cut(weight, rows, out_features, gated, 4, most, multiprocessors)


def _shared_cut(
    weight: WeightBytes, rows: int, out_features: int, gated: bool, warps: int, most_blocks: int, multiprocessors: int
) -> CudaCut:
    """most_blocks: up to which blocks share a sum. A ring takes so much that no two blocks of a launch meet without need."""
    most = max(most_rows_of(rows), 8)
    step = 2 * most * 128 + warps * 1024 * (1 if weight.half else 2) * 17 // 16
    tiles = -(-out_features // (warps * PART_ROWS // (2 if gated else 1)))
    steps = weight.row // SLICE_BYTES * (2 if weight.half else 1) // 2
    splits = next(count for count in (8, 4, 2, 1) if count == 1 or (tiles * count <= most_blocks and steps >= 4 * count))
    room = (2 if tiles * splits <= multiprocessors else 1) * SHARED_BYTES
    return CudaCut(1, warps, max(2, min((room - 2048) // step, 6)), splits)


_FULL = 0.9
"""Share of the multiprocessors that must have work."""


def most_rows_of(rows: int) -> int:
    """The rows that a kernel is compiled for, to serve so many."""
    return 1 if rows == 1 else max(8, 1 << (rows - 1).bit_length())
