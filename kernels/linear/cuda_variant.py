"""Products in CUDA C++ over quantised weights: how each is cut among warps and thread blocks, and what it is compiled for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headway.kernels.linear.forms import WeightBytes
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.step.config import Activation

SLICE_BYTES = 64
"""Bytes of a row that one warp multiplies at a time."""
PART_ROWS = 16
"""Rows of the weight that the matrix units take."""
SHARED_BYTES = 112 * 1024
"""Bytes of shared memory of a block of threads beside which another finds room."""
ALONE_BYTES = 114 * 1024
"""Likewise beside which no other of the same launch does, but a block of SHARED_BYTES of the next."""


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
    kept: bool = False
    """Whether few_rows.cu keeps x in shared memory for all tiles of a block of threads."""
    alone: bool = False
    """Whether no two blocks of threads are to meet on a multiprocessor, of which there are enough: they take ALONE_BYTES."""


CudaCutRule = Callable[[WeightBytes, int, int, bool, int], CudaCut]
"""(weight, rows, out_features, gated, multiprocessors) -> cut"""


def few_rows_cut(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaCut:
    """Cut a product of up to 16 rows, whose warps share a sum over K: tiles of few rows are alike for all multiprocessors."""
    parts, most = out_features // PART_ROWS, most_rows_of(rows)
    kept = next((cut for cut in _kept_cuts(weight, most, gated) if few_rows_bytes(weight, most, cut) <= _MOST_BYTES), None)
    if kept is not None:
        return kept
    wide = not gated and -(-parts // 4) / multiprocessors > _FULL
    tiles = 2 if gated or parts > 2 * _FULL * multiprocessors else 1
    if most == 1:
        alone = tiles == 2 and not gated and _busiest(parts, 1, multiprocessors) < _busiest(parts, 2, multiprocessors)
        # 5120 x 2048 in FP8 took an H100 6.0 us alone, with three stages, and 6.9 by pairs.
        return CudaCut(1, 16, 7, kept=True) if alone else CudaCut(tiles, 16, 4)
    if wide and -(-parts // 4) <= multiprocessors:
        return CudaCut(4, 4, 4)
    return CudaCut(tiles, 8, 5 if most == 8 else 3 if weight.half else 4)


def _busiest(parts: int, tiles: int, multiprocessors: int) -> int:
    """Sixteens of rows that the busiest multiprocessor has, of so many in tiles of so many."""
    return -(-parts // tiles // multiprocessors) * tiles


def _kept_cuts(weight: WeightBytes, most: int, gated: bool) -> tuple[CudaCut, ...]:
    """Cuts that keep x, the fastest first: 28672 x 4096 in 4 bits, 16 rows, took an H100 29.0 us so, and 32.6 by the ring."""
    if most == 1:
        return ()
    tiles = 2 if gated or (weight.half and most == 8) else 1
    if most == 8:
        return (CudaCut(tiles, 8, 5 if tiles == 2 else 6, kept=True),)
    return (CudaCut(2, 8, 3, kept=True),) if gated else (CudaCut(1, 16, 3, kept=True), CudaCut(1, 8, 4, kept=True))


def few_rows_bytes(weight: WeightBytes, most_rows: int, cut: CudaCut, scale_bytes: int = 4) -> int:
    """Shared memory of few_rows.cu: a header, what its warps have, and sums of squares. scale_bytes: as of warps_bytes."""
    return _HEADER_BYTES + warps_bytes(weight, most_rows, cut, scale_bytes) + cut.warps * most_rows * 4


def warps_bytes(weight: WeightBytes, most_rows: int, cut: CudaCut, scale_bytes: int = 4) -> int:
    """Shared memory of warp_step.cuh: rings, x where it is kept, and sums. scale_bytes: of a scale; no form has more than 4."""
    rows, halves, groups = PART_ROWS * cut.tiles, 2 if weight.half else 1, max(1, SLICE_BYTES // weight.scale_span)
    if weight.scale_rows > 1:
        scales = -(-cut.tiles * 4 // 16) * 16
    else:
        scales = 0 if weight.scale_span >= weight.row else groups * rows * scale_bytes
    codes = rows * SLICE_BYTES + scales + (groups * rows if weight.zeros else 0)
    slices = -(-weight.row // SLICE_BYTES // cut.warps) if cut.kept else cut.stages
    inputs = slices * halves * most_rows * 128
    return cut.warps * (cut.stages * codes + inputs + 2 * most_rows * (rows + 4) * 4)


def fitted(cut: CudaCut, weight: WeightBytes, most_rows: int, room: int) -> CudaCut:
    """A cut of few_rows.cu that takes no more shared memory than a block of threads may have: GPUs but H100's kind have less.

    room: bytes. x is kept no longer, then rings are shorter, and at last fewer warps share a sum.
    """
    while few_rows_bytes(weight, most_rows, cut) > room and (cut.kept or cut.stages > 2 or cut.warps > 2):
        if cut.kept:
            cut = replace(cut, kept=False)
        elif cut.stages > 2:
            cut = replace(cut, stages=cut.stages - 1)
        else:
            cut = replace(cut, warps=cut.warps // 2)
    return cut


def shared_rows_cut(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaCut:
    """Cut a product of more rows, whose blocks of threads share a sum over K where there are fewer than multiprocessors."""
    tiles = 2 if rows > _MANY else 1
    return _shared_cut(weight, rows, out_features, gated, CudaCut(tiles, 8, 0), multiprocessors, multiprocessors)


def shared_rows_cut_narrow(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaCut:
    """Likewise, in smaller blocks: where the others fill the multiprocessors, too, some shapes are faster so."""
    most = 2 * multiprocessors if rows <= 32 else multiprocessors
    return _shared_cut(weight, rows, out_features, gated, CudaCut(1, 8 if rows > _MANY else 4, 0), most, multiprocessors)


def _shared_cut(
    weight: WeightBytes, rows: int, out_features: int, gated: bool, cut: CudaCut, most_blocks: int, multiprocessors: int
) -> CudaCut:
    """Complete a cut by its stages and splits. most_blocks: up to which blocks share a sum."""
    most = max(most_rows_of(rows), 8)
    steps = weight.row // SLICE_BYTES * (2 if weight.half else 1) // 2
    cut = replace(_split(cut, rows, out_features, gated, steps, most_blocks, multiprocessors), stages=6)
    step = 2 * most * 128 + cut.warps * cut.tiles * 1024 * (1 if weight.half else 2) * 17 // 16
    return _with_room(cut, step, 2 * SHARED_BYTES if cut.alone or not two_fit(cut, most) else SHARED_BYTES)


def _split(
    cut: CudaCut, rows: int, out_features: int, gated: bool, steps: int, most_blocks: int, multiprocessors: int
) -> CudaCut:
    """Share sums among blocks of threads; of the least rows where those of the cut leave multiprocessors without work."""
    for tried in (cut, replace(cut, tiles=1, warps=4)):
        blocks = _blocks(tried, rows, out_features, gated)
        splits = _splits(blocks, steps, most_blocks, multiprocessors)
        if blocks * splits >= _WORKING * multiprocessors:
            return replace(tried, splits=splits, alone=blocks * splits <= multiprocessors)
    return replace(tried, splits=splits, alone=True)


def _blocks(cut: CudaCut, rows: int, out_features: int, gated: bool) -> int:
    """Blocks of threads without those that share a sum."""
    row_blocks = -(-(1 << (rows - 1).bit_length()) // max(most_rows_of(rows), 8))
    return -(-out_features // (cut.warps * cut.tiles * PART_ROWS // (2 if gated else 1))) * row_blocks


def _splits(blocks: int, steps: int, most_blocks: int, multiprocessors: int) -> int:
    """Blocks of threads that share a sum: as many as all run at once, and have work for some steps."""

    def fits(count: int) -> bool:
        rounds = 2 if blocks * count > multiprocessors else 1  # two on a multiprocessor
        return blocks * count <= most_blocks and steps >= 4 * count and blocks <= rounds * _clusters(count, multiprocessors)

    return next(count for count in (8, 4, 2, 1) if count == 1 or fits(count))


def _clusters(size: int, multiprocessors: int) -> int:
    """Clusters that have place at once, with a block of threads on each multiprocessor.

    A cluster lies in one group of multiprocessors (GPC), of an even number that differs from group to group and from chip to
    chip. Pairs leave none over; of larger ones an H100 takes 30 of 4 and 15 of 8 (cuOccupancyMaxActiveClusters). More wait until
    others have ended: 4096 x 14336 in 32 clusters of 4 took twice its time.
    """
    return multiprocessors // 2 if size == 2 else (multiprocessors - 2 * _GROUPS) // size


def _with_room(cut: CudaCut, step: int, room: int) -> CudaCut:
    """A cut with as many stages as there is room for, of those it has. step: bytes of a stage."""
    return replace(cut, stages=max(2, min((room - 2048) // step, cut.stages)))


def two_fit(cut: CudaCut, most_rows: int) -> bool:
    """Whether the registers suffice for two blocks of threads of shared_rows.cu on a multiprocessor."""
    return cut.warps <= 8 and cut.tiles * most_rows <= _MANY


def float8_cut(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaCut:
    """Cut a product for w8a8.cu, in blocks of 128 rows of the weight; of 256 where copies of x would be many bytes."""
    tiles = 2 if rows > _FEW else 1
    return _float8_cut(weight, rows, out_features, gated, CudaCut(tiles, 8, 12), multiprocessors, multiprocessors)


def float8_cut_narrow(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaCut:
    """Likewise, in smaller blocks."""
    most = 2 * multiprocessors if rows <= _FEW else multiprocessors
    return _float8_cut(weight, rows, out_features, gated, CudaCut(1, 8 if rows > _FEW else 4, 12), most, multiprocessors)


def _float8_cut(
    weight: WeightBytes, rows: int, out_features: int, gated: bool, cut: CudaCut, most_blocks: int, multiprocessors: int
) -> CudaCut:
    """Complete a cut by its stages and splits, as _shared_cut does.

    A ring that is deep enough leaves room for a block of the next launch, which asks for its first weights meanwhile.
    """
    most, columns = max(most_rows_of(rows), 8), 2 * SLICE_BYTES
    cut = _split(cut, rows, out_features, gated, weight.row // columns, most_blocks, multiprocessors)
    step = (cut.warps * cut.tiles * PART_ROWS + most) * columns + 4 * most
    one = cut.alone or not float8_two_fit(cut, most, weight.scale_span >= weight.row)
    return _with_room(cut, step, 2 * SHARED_BYTES if one and _DEEP * step > SHARED_BYTES else SHARED_BYTES)


def float8_two_fit(cut: CudaCut, most_rows: int, by_row: bool) -> bool:
    """Whether the registers suffice for two blocks of threads of w8a8.cu on a multiprocessor.

    They lie in four parts, among which the warps of both are divided. by_row: rows of x and the weight have one scale.
    """
    sums = (1 if cut.tiles * most_rows > 2 * _MANY else cut.tiles) + cut.tiles
    warps = -(-2 * (cut.warps + 1) // 4)
    return sums * most_rows // 2 + (_BESIDE_ROWS if by_row else _BESIDE_BLOCKS) <= _REGISTERS // (32 * warps) // 8 * 8


_REGISTERS, _BESIDE_ROWS, _BESIDE_BLOCKS = 16 * 1024, 16, 32
"""Registers of a quarter of a multiprocessor, and of a thread of w8a8.cu beside its sums, by the scales that it needs."""
_FEW = 32
"""Rows up to which x, which each block of threads copies, is a quarter of the bytes of 128 rows of the weight."""
_DEEP = 5
"""Steps of a ring that cover the memory's latency: of 16 KiB of W each, where 4.8 TB/s have 44 KB under way in 1.2 us."""
_HEADER_BYTES = 128
"""Bytes of barriers and a word, before the rings of few_rows.cu."""
_MOST_BYTES = 227 * 1024
"""Shared memory that the only block of threads of a multiprocessor of compute capability 9.0 may have."""
_GROUPS = 8
"""Groups of multiprocessors, each of which may leave two over."""
_WORKING = 0.8
"""Share of the multiprocessors that suffices for the memory's rate."""
_FULL = 0.9
"""Share of the multiprocessors that must have work."""


_MANY = 64
"""Rows from which on the matrix units' time is most of it, and sums fill the registers."""
MOST_COMPILED_ROWS = 128
"""Rows that a kernel of shared_rows.cu is compiled for at most; more are the work of several blocks of threads."""


def most_rows_of(rows: int) -> int:
    """The rows that a kernel is compiled for, to serve so many."""
    return 1 if rows == 1 else max(8, min(1 << (rows - 1).bit_length(), MOST_COMPILED_ROWS))


CSRC = Path(__file__).parent / "csrc"
MOST_FEW_ROWS, MOST_SHARED_ROWS, MOST_FLOAT8_ROWS = 16, 512, 256
"""Rows up to which few_rows.cu, shared_rows.cu and w8a8.cu compute."""
FLOAT8_COLUMNS = 128
"""Columns of a step of w8a8.cu, and of a block of the weight under one scale."""
KINDS = {"fp8": 0, "int4": 1, "mxfp4": 2, "int8": 3}
HALVES = {torch.bfloat16: 0, torch.float16: 1}
"""Codes of weights, and types of half precision, by their numbers in the sources."""
_FULL_SUMS = 128
"""Rows times parts of a warp above which sums of shared_rows.cu and w8a8.cu take the registers of other warps (FULL)."""
_ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu2": 5}


@dataclass(frozen=True, slots=True)
class CudaVariant:
    """All that few_rows.cu or, where its cut has splits, shared_rows.cu is compiled for."""

    dtype: torch.dtype
    weight: WeightBytes
    scale_dtype: torch.dtype
    wide: bool
    cut: CudaCut
    most_rows: int
    in_features: int
    out_features: int
    norm: torch.dtype | None
    gated: bool
    activation: Activation | None
    add: bool
    bias: bool
    heads: tuple[int, int, int] | None
    """num_heads, num_kv_heads and head_dim, where they are to be rotated."""
    head_norm: torch.dtype | None

    @property
    def constants(self) -> dict[str, str | int]:
        """Macros of the sources."""
        weight, cut = self.weight, self.cut
        num_heads, num_kv_heads, head_dim = self.heads or (0, 0, 0)
        return {
            "WEIGHT": KINDS[weight.kind],
            "HALF_TYPE": HALVES[self.dtype],
            "N": self.out_features,
            "K": self.in_features,
            "ROW": weight.row,
            "HALF": weight.half or 1,
            "SCALE_SPAN": weight.scale_span,
            "SCALE_ROWS": weight.scale_rows,
            "SCALE_SIZE": self.scale_dtype.itemsize,
            "SCALE_FLOAT16": int(self.scale_dtype == torch.float16),
            "ZEROS": int(weight.zeros),
            "WIDE": int(self.wide),
            "TILES": cut.tiles,
            "WARPS": cut.warps,
            "STAGES": cut.stages,
            "SPLITS": cut.splits,
            "KEPT": int(cut.kept),
            "RESIDENT": 2 if self.two_fit and self.needed_bytes <= SHARED_BYTES else 1,
            "MOST_ROWS": self.most_rows,
            "NORM": int(self.norm is not None),
            "NORM_FLOAT": int(self.norm == torch.float32),
            "GATED": int(self.gated),
            "ACTIVATION": _ACTIVATIONS[self.activation],
            "ADD": int(self.add),
            "BIAS": int(self.bias),
            "HEADS": num_heads,
            "KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "QK_NORM": int(self.head_norm is not None),
            "HEAD_NORM_FLOAT": int(self.head_norm == torch.float32),
        }

    @property
    def name(self) -> str:
        """The kernel's name, and its file's."""
        return "shared_rows" if self.cut.splits else "few_rows"

    @property
    def source(self) -> Variant:
        """What the compiler is given."""
        return Variant(CSRC, f"{self.name}.cu", tuple(self.constants.items()))

    @property
    def by_row(self) -> bool:
        """Whether each row of the weight has one scale."""
        return self.weight.scale_span >= self.weight.row and self.weight.scale_rows == 1

    @property
    def tile_rows(self) -> int:
        """Columns of y that a tile has."""
        along = self.cut.warps if self.cut.splits else 1
        return PART_ROWS * self.cut.tiles * along // (2 if self.gated else 1)

    @property
    def two_fit(self) -> bool:
        """Whether the registers suffice for two blocks of threads on a multiprocessor."""
        return two_fit(self.cut, self.most_rows) if self.cut.splits else self.most_rows <= MOST_FEW_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: of the warps that multiply, and of those beside them, see the kernels' THREADS."""
        if self.cut.splits:
            beside = 4 if self.cut.tiles * self.most_rows > _FULL_SUMS else 1  # four give registers away
        else:
            beside = 1 if self.most_rows == 1 else 4
        return 32 * (self.cut.warps + beside)

    @property
    def _copied_scales(self) -> int:
        """Bytes of scales and zeros for 16 rows of a slice, in shared_rows.cu."""
        weight = self.weight
        if weight.scale_rows > 1 or weight.scale_span >= weight.row:
            return 0
        return max(1, SLICE_BYTES // weight.scale_span) * 16 * (self.scale_dtype.itemsize + int(weight.zeros))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a launch."""
        return max(self.needed_bytes, ALONE_BYTES) if self.cut.alone else self.needed_bytes

    @property
    def needed_bytes(self) -> int:
        """Dynamic shared memory that the kernels use."""
        cut, slices, rows = self.cut, 1 if self.weight.half else 2, PART_ROWS * self.cut.tiles
        if not cut.splits:
            return few_rows_bytes(self.weight, self.most_rows, cut, self.scale_dtype.itemsize)
        step = 2 * self.most_rows * 128 + slices * cut.warps * cut.tiles * (1024 + self._copied_scales)
        return max(cut.stages * -(-step // 1024) * 1024, self.most_rows * (cut.warps * rows + 4) * 4) + 1024


@dataclass(frozen=True, slots=True)
class Float8Variant(CudaVariant):
    """All that w8a8.cu is compiled for."""

    @property
    def name(self) -> str:
        """The kernel's name, and its file's."""
        return "w8a8"

    @property
    def groups(self) -> int:
        """Scales of a row of x."""
        return 1 if self.by_row else self.in_features // FLOAT8_COLUMNS

    @property
    def two_fit(self) -> bool:
        """Whether the registers suffice for two blocks of threads on a multiprocessor."""
        return float8_two_fit(self.cut, self.most_rows, self.by_row)

    @property
    def needed_bytes(self) -> int:
        """Dynamic shared memory that the kernel uses."""
        rows, most = PART_ROWS * self.cut.tiles * self.cut.warps, self.most_rows
        step = (rows + most) * FLOAT8_COLUMNS + (0 if self.by_row else 4 * most)
        return max(self.cut.stages * step, most * (rows + 4) * 4) + 1024
