"""Tilings and compile-time constants of the CUDA C++ GEMM kernels over quantized weights: GEMV, split_k GEMM, FP8 GEMM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headway.kernels.linear.forms import WeightBytes
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.step.config import Activation

SLICE_BYTES = 64
"""Number of bytes of a weight row that one warp multiplies per step."""
PART_ROWS = 16
"""Weight rows per tensor-core instruction (m16)."""
SHARED_BYTES = 112 * 1024
"""Maximum shared memory of a thread block, in bytes, if two thread blocks are to fit on an SM."""
ALONE_BYTES = 114 * 1024
"""Shared memory of a thread block, in bytes, that leaves no room on the SM for a second thread block of the launch. There is
still room for a thread block of the next launch with SHARED_BYTES."""


@dataclass(frozen=True, slots=True)
class CudaTiling:
    """Tiling of one GEMM; see the kernels' constants."""

    tiles: int
    """Groups of 16 weight rows per warp."""
    warps: int
    stages: int
    splits: int = 0
    """Number of thread blocks that split a sum over K in shared_rows.cu (split-K). 0 means that few_rows.cu is used instead."""
    per_multiprocessor: int = 1
    """Thread blocks of few_rows.cu per SM."""
    kept: bool = False
    """True if x stays in shared memory for all tiles of a thread block of few_rows.cu."""
    alone: bool = False
    """True if each SM has at most one thread block of the launch. Each thread block then allocates at least ALONE_BYTES, so that
    thread blocks are distributed over the SMs."""


CudaTilingRule = Callable[[WeightBytes, int, int, bool, int], CudaTiling]
"""(weight, rows, out_features, gated, number of SMs) -> tiling."""


def few_rows_tiling(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaTiling:
    """Return the tiling of a GEMV for up to 16 rows, with warps that split K. Small tiles balance the load of the SMs."""
    parts, most = out_features // PART_ROWS, most_rows_of(rows)
    kept = next(
        (tiling for tiling in _kept_tilings(weight, most, gated) if few_rows_bytes(weight, most, tiling) <= _MOST_BYTES), None
    )
    if kept is not None:
        return kept
    wide = not gated and -(-parts // 4) / multiprocessors > _FULL
    tiles = 2 if gated or parts > 2 * _FULL * multiprocessors else 1
    if most == 1:
        alone = tiles == 2 and not gated and _busiest(parts, 1, multiprocessors) < _busiest(parts, 2, multiprocessors)
        # An H100 takes 6.0 us for 5120 x 2048 in FP8 with single tiles and three stages, and 6.9 us with pairs.
        return CudaTiling(1, 16, 7, kept=True) if alone else CudaTiling(tiles, 16, 4)
    if wide and -(-parts // 4) <= multiprocessors:
        return CudaTiling(4, 4, 4)
    return CudaTiling(tiles, 8, 5 if most == 8 else 3 if weight.half else 4)


def _busiest(parts: int, tiles: int, multiprocessors: int) -> int:
    """Return the number of 16-row groups on the busiest SM, for `parts` groups in tiles of `tiles` groups."""
    return -(-parts // tiles // multiprocessors) * tiles


def _kept_tilings(weight: WeightBytes, most: int, gated: bool) -> tuple[CudaTiling, ...]:
    """Return tilings with which x stays in shared memory, fastest first. On an H100, a 4-bit weight of 28672 x 4096 at 16 rows
    takes 29.0 us, and 32.6 us if x is in a ring."""
    if most == 1:
        return ()
    tiles = 2 if gated or (weight.half and most == 8) else 1
    if most == 8:
        return (CudaTiling(tiles, 8, 5 if tiles == 2 else 6, kept=True),)
    return (CudaTiling(2, 8, 3, kept=True),) if gated else (CudaTiling(1, 16, 3, kept=True), CudaTiling(1, 8, 4, kept=True))


def few_rows_bytes(weight: WeightBytes, most_rows: int, tiling: CudaTiling, scale_bytes: int = 4) -> int:
    """Return the shared memory of few_rows.cu in bytes: for its header, its warps (see `warps_bytes`), and sums of squares."""
    return _HEADER_BYTES + warps_bytes(weight, most_rows, tiling, scale_bytes) + tiling.warps * most_rows * 4


def warps_bytes(weight: WeightBytes, most_rows: int, tiling: CudaTiling, scale_bytes: int = 4) -> int:
    """Return the shared memory of warp_step.cuh in bytes: for rings, sums, and x if it stays in shared memory. scale_bytes: size
    of a scale in bytes, at most 4."""
    rows, halves, groups = PART_ROWS * tiling.tiles, 2 if weight.half else 1, max(1, SLICE_BYTES // weight.scale_span)
    if weight.scale_rows > 1:
        scales = -(-tiling.tiles * 4 // 16) * 16
    else:
        scales = 0 if weight.scale_span >= weight.row else groups * rows * scale_bytes
    codes = rows * SLICE_BYTES + scales + (groups * rows if weight.zeros else 0)
    slices = -(-weight.row // SLICE_BYTES // tiling.warps) if tiling.kept else tiling.stages
    inputs = slices * halves * most_rows * 128
    return tiling.warps * (tiling.stages * codes + inputs + 2 * most_rows * (rows + 4) * 4)


def fitted(tiling: CudaTiling, weight: WeightBytes, most_rows: int, room: int) -> CudaTiling:
    """Return a tiling of few_rows.cu that fits a thread block's shared memory, which is smaller on GPUs other than Hopper.

    room: shared memory of a thread block, in bytes. Until the tiling fits, x is removed from shared memory first, then rings are
    made shorter, and then fewer warps split a sum.
    """
    while few_rows_bytes(weight, most_rows, tiling) > room and (tiling.kept or tiling.stages > 2 or tiling.warps > 2):
        if tiling.kept:
            tiling = replace(tiling, kept=False)
        elif tiling.stages > 2:
            tiling = replace(tiling, stages=tiling.stages - 1)
        else:
            tiling = replace(tiling, warps=tiling.warps // 2)
    return tiling


def shared_rows_tiling(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaTiling:
    """Return the tiling of a split-K GEMM, which splits K if there are fewer thread blocks than SMs."""
    tiles = 2 if rows > _MANY else 1
    return _shared_tiling(weight, rows, out_features, gated, CudaTiling(tiles, 8, 0), multiprocessors, multiprocessors)


def shared_rows_tiling_narrow(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaTiling:
    """Return a tiling with smaller thread blocks, which is faster for some shapes even if the default tiling fills the SMs."""
    most = 2 * multiprocessors if rows <= 32 else multiprocessors
    return _shared_tiling(weight, rows, out_features, gated, CudaTiling(1, 8 if rows > _MANY else 4, 0), most, multiprocessors)


def _shared_tiling(
    weight: WeightBytes, rows: int, out_features: int, gated: bool, tiling: CudaTiling, most_blocks: int, multiprocessors: int
) -> CudaTiling:
    """Complete a tiling with stages and splits. most_blocks: maximum number of thread blocks with split-K."""
    most = max(most_rows_of(rows), 8)
    steps = weight.row // SLICE_BYTES * (2 if weight.half else 1) // 2
    tiling = replace(_split(tiling, rows, out_features, gated, steps, most_blocks, multiprocessors), stages=6)
    step = 2 * most * 128 + tiling.warps * tiling.tiles * 1024 * (1 if weight.half else 2) * 17 // 16
    return _with_room(tiling, step, 2 * SHARED_BYTES if tiling.alone or not two_fit(tiling, most) else SHARED_BYTES)


def _split(
    tiling: CudaTiling, rows: int, out_features: int, gated: bool, steps: int, most_blocks: int, multiprocessors: int
) -> CudaTiling:
    """Return the tiling with split-K added. If the tiles of `tiling` would leave SMs idle, the smallest tiles are used
    instead."""
    for tried in (tiling, replace(tiling, tiles=1, warps=4)):
        blocks = _blocks(tried, rows, out_features, gated)
        splits = _splits(blocks, steps, most_blocks, multiprocessors)
        if blocks * splits >= _WORKING * multiprocessors:
            return replace(tried, splits=splits, alone=blocks * splits <= multiprocessors)
    return replace(tried, splits=splits, alone=True)


def _blocks(tiling: CudaTiling, rows: int, out_features: int, gated: bool) -> int:
    """Return the number of thread blocks before split-K."""
    row_blocks = -(-(1 << (rows - 1).bit_length()) // max(most_rows_of(rows), 8))
    return -(-out_features // (tiling.warps * tiling.tiles * PART_ROWS // (2 if gated else 1))) * row_blocks


def _splits(blocks: int, steps: int, most_blocks: int, multiprocessors: int) -> int:
    """Return the number of splits: the largest number with which all thread blocks run at once and each computes several
    steps."""

    def fits(count: int) -> bool:
        rounds = 2 if blocks * count > multiprocessors else 1  # two thread blocks per SM
        return blocks * count <= most_blocks and steps >= 4 * count and blocks <= rounds * _clusters(count, multiprocessors)

    return next(count for count in (8, 4, 2, 1) if count == 1 or fits(count))


def _clusters(size: int, multiprocessors: int) -> int:
    """Return the maximum number of clusters that run at once with one thread block per SM.

    A cluster must fit into one GPC. The number of SMs per GPC is even, and differs between GPCs and chips. Clusters of 2 leave no
    SM idle. An H100 runs 30 clusters of 4 or 15 of 8 (cuOccupancyMaxActiveClusters). Additional clusters wait until earlier
    clusters end. With 32 clusters of 4, a weight of 4096 x 14336 therefore took twice as long.
    """
    return multiprocessors // 2 if size == 2 else (multiprocessors - 2 * _GROUPS) // size


def _with_room(tiling: CudaTiling, step: int, room: int) -> CudaTiling:
    """Limit the stages of a tiling to the available shared memory. step: bytes per stage. room: available bytes."""
    return replace(tiling, stages=max(2, min((room - 2048) // step, tiling.stages)))


def two_fit(tiling: CudaTiling, most_rows: int) -> bool:
    """Return whether an SM has enough registers for two thread blocks of shared_rows.cu."""
    return tiling.warps <= 8 and tiling.tiles * most_rows <= _MANY


def float8_tiling(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaTiling:
    """Return the tiling of w8a8.cu: thread blocks of 128 weight rows, or of 256 if copies of x would take many bytes."""
    tiles = 2 if rows > _FEW else 1
    return _float8_tiling(weight, rows, out_features, gated, CudaTiling(tiles, 8, 12), multiprocessors, multiprocessors)


def float8_tiling_narrow(weight: WeightBytes, rows: int, out_features: int, gated: bool, multiprocessors: int) -> CudaTiling:
    """Return the tiling of w8a8.cu with smaller thread blocks."""
    most = 2 * multiprocessors if rows <= _FEW else multiprocessors
    return _float8_tiling(weight, rows, out_features, gated, CudaTiling(1, 8 if rows > _FEW else 4, 12), most, multiprocessors)


def _float8_tiling(
    weight: WeightBytes, rows: int, out_features: int, gated: bool, tiling: CudaTiling, most_blocks: int, multiprocessors: int
) -> CudaTiling:
    """Complete a tiling of w8a8.cu with stages and splits, like _shared_tiling.

    The ring is only as deep as needed if this leaves shared memory for a thread block of the next launch, which can then load its
    first weights.
    """
    most, columns = max(most_rows_of(rows), 8), 2 * SLICE_BYTES
    tiling = _split(tiling, rows, out_features, gated, weight.row // columns, most_blocks, multiprocessors)
    step = (tiling.warps * tiling.tiles * PART_ROWS + most) * columns + 4 * most
    one = tiling.alone or not float8_two_fit(tiling, most, weight.scale_span >= weight.row)
    return _with_room(tiling, step, 2 * SHARED_BYTES if one and _DEEP * step > SHARED_BYTES else SHARED_BYTES)


def float8_two_fit(tiling: CudaTiling, most_rows: int, by_row: bool) -> bool:
    """Return whether an SM has enough registers for two thread blocks of w8a8.cu.

    An SM has four partitions, among which the warps of both thread blocks are distributed. by_row: True if each row of x and of
    the weight has one scale.
    """
    sums = (1 if tiling.tiles * most_rows > 2 * _MANY else tiling.tiles) + tiling.tiles
    warps = -(-2 * (tiling.warps + 1) // 4)
    return sums * most_rows // 2 + (_BESIDE_ROWS if by_row else _BESIDE_BLOCKS) <= _REGISTERS // (32 * warps) // 8 * 8


_REGISTERS, _BESIDE_ROWS, _BESIDE_BLOCKS = 16 * 1024, 16, 32
"""Registers per SM partition; registers per thread of w8a8.cu for data other than its sums, with scales per row; the same number
with scales per block."""
_FEW = 32
"""Maximum number of rows for which x, copied by every thread block, has at most a quarter of the bytes of 128 weight rows."""
_DEEP = 5
"""Number of ring stages, of 16 KiB each, that hide the memory latency. A bandwidth of 4.8 TB/s and a latency of 1.2 us need 44 KB
in flight per SM."""
_HEADER_BYTES = 128
"""Size, in bytes, of the barriers and of one word that precede the rings of few_rows.cu."""
_MOST_BYTES = 227 * 1024
"""Maximum shared memory of a thread block on compute capability 9.0, in bytes."""
_GROUPS = 8
"""Number of GPCs, each of which may leave two SMs unused."""
_WORKING = 0.8
"""Fraction of the SMs that is sufficient to saturate the memory bandwidth."""
_FULL = 0.9
"""Minimum fraction of the SMs that must have work."""


_MANY = 64
"""Minimum number of rows at which tensor cores dominate the time and sums fill the registers."""
MOST_COMPILED_ROWS = 128
"""Maximum number of rows that a kernel of shared_rows.cu is compiled for. Inputs with more rows are distributed over several
thread blocks."""


def most_rows_of(rows: int) -> int:
    """Return the number of rows to compile a kernel for."""
    return 1 if rows == 1 else max(8, min(1 << (rows - 1).bit_length(), MOST_COMPILED_ROWS))


CSRC = Path(__file__).parent / "csrc"
MOST_FEW_ROWS, MOST_SHARED_ROWS, MOST_FLOAT8_ROWS = 16, 512, 256
"""Maximum number of rows for few_rows.cu, shared_rows.cu and w8a8.cu."""
FLOAT8_COLUMNS = 128
"""Number of columns per step of w8a8.cu, and per weight block with one scale."""
KINDS = {"fp8": 0, "int4": 1, "mxfp4": 2, "int8": 3}
HALVES = {torch.bfloat16: 0, torch.float16: 1}
"""Integers by which the CUDA sources identify quantization formats and half-precision types."""
_FULL_SUMS = 128
"""Product of rows and tiles per warp above which sums of shared_rows.cu and w8a8.cu need registers that the copying warps give up
(FULL)."""
_ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu2": 5}


@dataclass(frozen=True, slots=True)
class CudaVariant:
    """Parameters that few_rows.cu or, with splits, shared_rows.cu is compiled for."""

    dtype: torch.dtype
    weight: WeightBytes
    scale_dtype: torch.dtype
    wide: bool
    tiling: CudaTiling
    most_rows: int
    in_features: int
    out_features: int
    norm: torch.dtype | None
    gated: bool
    activation: Activation | None
    add: bool
    bias: bool
    heads: tuple[int, int, int] | None
    """num_heads, num_kv_heads and head_dim to rotate (RoPE). None means no RoPE."""
    head_norm: torch.dtype | None

    @property
    def constants(self) -> dict[str, str | int]:
        """Values of the macros in the CUDA sources."""
        weight, tiling = self.weight, self.tiling
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
            "TILES": tiling.tiles,
            "WARPS": tiling.warps,
            "STAGES": tiling.stages,
            "SPLITS": tiling.splits,
            "KEPT": int(tiling.kept),
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
        """Name of the kernel and of its file."""
        return "shared_rows" if self.tiling.splits else "few_rows"

    @property
    def source(self) -> Variant:
        """Source and constants for the compiler."""
        return Variant(CSRC, f"{self.name}.cu", tuple(self.constants.items()))

    @property
    def by_row(self) -> bool:
        """True if each row of the weight has one scale."""
        return self.weight.scale_span >= self.weight.row and self.weight.scale_rows == 1

    @property
    def tile_rows(self) -> int:
        """Columns of y per tile."""
        along = self.tiling.warps if self.tiling.splits else 1
        return PART_ROWS * self.tiling.tiles * along // (2 if self.gated else 1)

    @property
    def two_fit(self) -> bool:
        """True if an SM has enough registers for two thread blocks."""
        return two_fit(self.tiling, self.most_rows) if self.tiling.splits else self.most_rows <= MOST_FEW_ROWS

    @property
    def threads(self) -> int:
        """Threads per thread block: warps that multiply and warps that copy; see THREADS in the kernels."""
        if self.tiling.splits:
            copying = 4 if self.tiling.tiles * self.most_rows > _FULL_SUMS else 1  # four warps give their registers away
        else:
            copying = 1 if self.most_rows == 1 else 4
        return 32 * (self.tiling.warps + copying)

    @property
    def _copied_scales(self) -> int:
        """Bytes of scales and zeros for 16 rows of a slice, in shared_rows.cu."""
        weight = self.weight
        if weight.scale_rows > 1 or weight.scale_span >= weight.row:
            return 0
        return max(1, SLICE_BYTES // weight.scale_span) * 16 * (self.scale_dtype.itemsize + int(weight.zeros))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per launch, in bytes."""
        return max(self.needed_bytes, ALONE_BYTES) if self.tiling.alone else self.needed_bytes

    @property
    def needed_bytes(self) -> int:
        """Dynamic shared memory that the kernels use, in bytes."""
        tiling, slices, rows = self.tiling, 1 if self.weight.half else 2, PART_ROWS * self.tiling.tiles
        if not tiling.splits:
            return few_rows_bytes(self.weight, self.most_rows, tiling, self.scale_dtype.itemsize)
        step = 2 * self.most_rows * 128 + slices * tiling.warps * tiling.tiles * (1024 + self._copied_scales)
        return max(tiling.stages * -(-step // 1024) * 1024, self.most_rows * (tiling.warps * rows + 4) * 4) + 1024


@dataclass(frozen=True, slots=True)
class Float8Variant(CudaVariant):
    """Parameters that w8a8.cu is compiled for."""

    @property
    def name(self) -> str:
        """Name of the kernel and of its file."""
        return "w8a8"

    @property
    def groups(self) -> int:
        """Number of scales per row of x."""
        return 1 if self.by_row else self.in_features // FLOAT8_COLUMNS

    @property
    def two_fit(self) -> bool:
        """True if an SM has enough registers for two thread blocks."""
        return float8_two_fit(self.tiling, self.most_rows, self.by_row)

    @property
    def needed_bytes(self) -> int:
        """Dynamic shared memory that the kernel uses, in bytes."""
        rows, most = PART_ROWS * self.tiling.tiles * self.tiling.warps, self.most_rows
        step = (rows + most) * FLOAT8_COLUMNS + (0 if self.by_row else 4 * most)
        return max(self.tiling.stages * step, most * (rows + 4) * 4) + 1024
