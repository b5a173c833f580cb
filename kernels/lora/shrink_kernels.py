"""The first half of what adapters add to a product on a GPU, x A^T of rows of all adapters at once (shrink).

The rows of a step belong to adapters in any order. A program of `shrink_rows` serves one slot: the matrix units multiply a tile
of rows by the slot's A, and only the rows of that slot are loaded and kept, which costs nothing where the memory's rate decides
(the scheme of Chen et al. 2023, Punica, arXiv 2310.18547, with the matrix units in place of a vector product for each row).

PDL: see kernels/step/step_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def shrunk(
    x_ptr,
    norm_ptr,
    a_ptr,
    sums_ptr,
    squares_ptr,
    mine,
    m,
    slot,
    split,
    tile_n,
    rows,
    SLOT_STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write a split's sums over the rows m that are `mine`, those of one slot; of rows that are not normed yet (NORM) x times the
    norm's weight is summed, and the squares beside it, by which `low_sums` divides."""
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = split * SPLIT_K + tl.arange(0, BLOCK_K)
    x_at = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
    a_at = a_ptr + slot.to(tl.int64) * SLOT_STRIDE + n[None, :] * K + k[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    for first in range(0, SPLIT_K, BLOCK_K):
        inside = k + first < K
        x = tl.load(x_at + first, mask=mine[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_at + first, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        if NORM:
            exact = x.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            weight = tl.load(norm_ptr + k + first, mask=inside, other=0.0).to(tl.float32)
            x = (exact * weight[None, :]).to(x_ptr.dtype.element_ty)
        sums = tl.dot(x.to(DOT), a.to(DOT), sums, input_precision=PRECISION)
    row = split.to(tl.int64) * rows + m
    tl.store(sums_ptr + row[:, None] * N + n[None, :], sums, mask=mine[:, None] & (n < N)[None, :])
    if NORM:  # noqa: SIM102  (one is known to the compiler)
        if tile_n == 0:
            tl.store(squares_ptr + row, squares, mask=mine)


@triton.jit(do_not_specialize=["rows"])
def shrink_rows(
    x_ptr,  # [rows, K]
    a_ptr,  # [slots, N, K]
    slots_ptr,  # int32 [rows]; -1: no adapter
    sums_ptr,  # float32 [SPLITS, rows, N], written for rows with an adapter
    rows,
    SLOT_STRIDE: tl.constexpr,  # elements between the A of two slots
    N: tl.constexpr,  # modules * rank
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,  # columns that a program sums over, a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles of rows, slots, splits of K times tiles of N)."""
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.program_id(1)
    mine = tl.load(slots_ptr + m, mask=m < rows, other=-1) == slot
    if PDL:  # before anything ends: what the next kernel waits for is this one and all before it
        gdc_wait()
        gdc_launch_dependents()
    if tl.max(mine.to(tl.int32), 0) > 0:
        split, tile_n = tl.program_id(2) // TILES_N, tl.program_id(2) % TILES_N
        shrunk(
            x_ptr, x_ptr, a_ptr, sums_ptr, sums_ptr, mine, m, slot, split, tile_n, rows,
            SLOT_STRIDE, N, K, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_K, False, DOT, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def norm_and_shrink(
    x_ptr,  # [rows, K]
    norm_ptr,  # [K]
    a_ptr,  # [slots, N, K]
    slots_ptr,  # int32 [rows]; -1: no adapter
    y_ptr,  # [rows, K], written: RMSNorm of x
    sums_ptr,  # float32 [SPLITS, rows, N], written for rows with an adapter, not yet divided
    squares_ptr,  # float32 [SPLITS, rows], written likewise: sums of squares of x
    eps,
    rows,
    SLOT_STRIDE: tl.constexpr,
    SLOTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK: tl.constexpr,  # K rounded up to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """The norm before a product, and beside it `shrink_rows` of what is normed: two kernels' programs in one launch.

    Grid (rows + tiles of rows * slots * splits of K * tiles of N): the first programs norm a row each.
    """
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    SPLITS: tl.constexpr = (K + SPLIT_K - 1) // SPLIT_K
    program = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if program < rows:
        at = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + program.to(tl.int64) * K + at, mask=at < K, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * weight
        tl.store(y_ptr + program.to(tl.int64) * K + at, y.to(y_ptr.dtype.element_ty), mask=at < K)
    else:
        number = program - rows
        tile_n, number = number % TILES_N, number // TILES_N
        split, number = number % SPLITS, number // SPLITS
        slot, tile_m = number % SLOTS, number // SLOTS
        m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        mine = tl.load(slots_ptr + m, mask=m < rows, other=-1) == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            shrunk(
                x_ptr, norm_ptr, a_ptr, sums_ptr, squares_ptr, mine, m, slot, split, tile_n, rows,
                SLOT_STRIDE, N, K, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_K, True, DOT, PRECISION,
            )  # fmt: skip
