"""How products of few rows over quantised weights are cut among warps and blocks of threads; see csrc/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    """Blocks of threads that share a sum over K, in shared_rows.cu; 0: few_rows.cu."""
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
    """Cut a product of more rows, whose blocks of threads share a sum over K where there are fewer than multiprocessors."""
    tiles = 2 if rows > _MANY else 1
    return _shared_cut(weight, rows, out_features, gated, CudaCut(tiles, 8, 0), multiprocessors, multiprocessors)


def shared_rows_cut_narrow(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaCut:
    """Likewise, in smaller blocks. On an H200, 4 bits of 4096 x 14336, 64 rows: 28 us to the other cut's 36."""
    most = 2 * multiprocessors if rows <= 32 else multiprocessors
    return _shared_cut(weight, rows, out_features, gated, CudaCut(1, 8 if rows > _MANY else 4, 0), most, multiprocessors)


def _shared_cut(
    weight: WeightBytes, rows: int, out_features: int, gated: bool, cut: CudaCut, most_blocks: int, multiprocessors: int
) -> CudaCut:
    """Complete a cut by its stages and splits. most_blocks: up to which blocks share a sum.

    A ring takes so much that no two blocks of a launch meet without need.
    """
    most, parts = max(most_rows_of(rows), 8), cut.warps * cut.tiles
    step = 2 * most * 128 + parts * 1024 * (1 if weight.half else 2) * 17 // 16
    row_blocks = -(-(1 << (rows - 1).bit_length()) // most)
    blocks = -(-out_features // (parts * PART_ROWS // (2 if gated else 1))) * row_blocks
    steps = weight.row // SLICE_BYTES * (2 if weight.half else 1) // 2
    splits = next(count for count in (8, 4, 2, 1) if count == 1 or (blocks * count <= most_blocks and steps >= 4 * count))
    room = (2 if blocks * splits <= multiprocessors or not two_fit(cut, most) else 1) * SHARED_BYTES
    return replace(cut, stages=max(2, min((room - 2048) // step, 6)), splits=splits)


def two_fit(cut: CudaCut, most_rows: int) -> bool:
    """Whether the registers suffice for two blocks of threads of shared_rows.cu on a multiprocessor."""
    return cut.warps <= 8 and cut.tiles * most_rows <= _MANY


_FULL = 0.9
"""Share of the multiprocessors that must have work."""


_MANY = 64
"""Rows from which on the matrix units' time is most of it, and sums fill the registers."""
MOST_COMPILED_ROWS = 128
"""Rows that a kernel of shared_rows.cu is compiled for at most; more are the work of several blocks of threads."""


def most_rows_of(rows: int) -> int:
    """The rows that a kernel is compiled for, to serve so many."""
    return 1 if rows == 1 else max(8, min(1 << (rows - 1).bit_length(), MOST_COMPILED_ROWS))
