"""Triton kernels for LoRA (multi-adapter): x A^T for the rows of all adapters at once (shrink), and the result times B^T
(expand).

Rows with different adapters may be mixed in any order. A program of `shrink_rows` handles one slot: tensor cores multiply a tile
of rows by the slot's A, and only that slot's rows are loaded and stored. This costs nothing if memory bandwidth is the limit (the
scheme of Chen et al. 2023, Punica, arXiv 2310.18547, with tensor cores instead of a GEMV per row).

A program that expands handles several slots in one GEMM. The sums of a row are in the columns of the row's slot, and the columns
of other slots are zero. Zeros do not change a sum's bits, so a row's result depends neither on the other rows nor on the index of
its slot.

No kernel writes slots and weights, so they are loaded before the wait (PDL, see kernels/step/step_kernels.py). `expand_rows` also
loads the linear layer's output before the wait if `shrink_rows`, which has waited for that output, ran in between. If
`norm_and_shrink` ran before the linear layer instead (NORMED), `expand_rows` must wait for the output.

If the A of all slots follows the linear layer's weight (BEHIND), the layer's GEMM also computes x A^T, and no shrink kernel is
launched. A row then uses the columns of its slot, which follow the layer's own columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.step.step_kernels import activate


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
    """Store one split's sums for the rows m of one slot. `mine` marks these rows.

    NORM: True if rows are not normed yet. The sums are then over x times the norm's weight. The sums of squares are stored too,
    because `low_sums` needs them to apply the norm's factor.
    """
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
    slots_ptr,  # int32 [rows]; -1 means no adapter
    sums_ptr,  # float32 [SPLITS, rows, N], written for rows with an adapter
    rows,
    SLOT_STRIDE: tl.constexpr,  # elements between the A of two slots
    N: tl.constexpr,  # modules * rank
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,  # columns per program (split-K), a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute x A^T for rows with an adapter. Grid (tiles of rows, slots, splits of K times tiles of N)."""
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.program_id(1)
    mine = tl.load(slots_ptr + m, mask=m < rows, other=-1) == slot
    if PDL:  # not later: the next kernel waits for this one and all earlier ones
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
    slots_ptr,  # int32 [rows]; -1 means no adapter
    y_ptr,  # [rows, K], written: RMSNorm of x
    sums_ptr,  # float32 [SPLITS, rows, N], written for rows with an adapter, not divided by the norm yet
    squares_ptr,  # float32 [SPLITS, rows], sums of squares of x, written for rows with an adapter
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
    """Norm rows before a linear layer, and compute `shrink_rows` of the normed rows, in one launch. Different programs norm and
    shrink.

    Grid (rows + tiles of rows * slots * splits of K * tiles of N): the first programs norm one row each.
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


@triton.jit
def either(a, b):
    """Return the bitwise OR of a and b."""
    return a | b


@triton.jit
def wide_b(
    b_ptr,
    slots,
    n,
    first,
    r,
    SLOT_STRIDE: tl.constexpr,
    RANK: tl.constexpr,
    LAST: tl.constexpr,
    TOGETHER: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Load B [TOGETHER * RANKS, BLOCK_N] of TOGETHER slots, beginning with slot `first`: columns n < LAST, and ranks beginning
    with r. Slots that no row uses are zero."""
    column = tl.arange(0, TOGETHER * RANKS)
    slot = first + column // RANKS
    # One bit for each slot that a row uses. This shows the compiler that all ranks of a slot have the same mask, so that it
    # vectorises loads.
    near = (slots >= first) & (slots < first + TOGETHER)
    bits = tl.reduce(tl.where(near, 1 << ((slots - first) & 31), 0), 0, either)
    used = (bits >> column // RANKS & 1) > 0
    at = b_ptr + slot.to(tl.int64)[:, None] * SLOT_STRIDE + n[None, :] * RANK + (r + column % RANKS)[:, None]
    return tl.load(at, mask=used[:, None] & (n < LAST)[None, :], other=0.0)


@triton.jit
def low_sums(
    sums_ptr,
    squares_ptr,
    eps,
    slots,
    m,
    rows,
    first,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    NORMED: tl.constexpr,
    BEHIND: tl.constexpr,
):
    """Load [BLOCK_M, RANKS]: sums in columns beginning with `first` for rows m with an adapter, and zeros for the other rows.

    NORMED: row length if the rows' RMSNorm factor is still to be applied; 0 means that the sums are final. BEHIND: number of the
    linear layer's own columns, if the sums of all slots follow these columns; 0 means that the sums are float32 [SPLITS, rows,
    WIDTH].
    """
    live = (slots >= 0)[:, None]
    column = first + tl.arange(0, RANKS)[None, :]
    if BEHIND > 0:
        own = BEHIND + slots[:, None] * WIDTH + column
        return tl.load(sums_ptr + m.to(tl.int64)[:, None] * (BEHIND + SLOTS * WIDTH) + own, mask=live, other=0.0)
    at = sums_ptr + m.to(tl.int64)[:, None] * WIDTH + column
    low = tl.load(at, mask=live, other=0.0)
    for split in tl.static_range(1, SPLITS):
        low += tl.load(at + split * rows.to(tl.int64) * WIDTH, mask=live, other=0.0)
    if NORMED > 0:
        squares = tl.load(squares_ptr + m, mask=slots >= 0, other=0.0)
        for split in tl.static_range(1, SPLITS):
            squares += tl.load(squares_ptr + split * rows.to(tl.int64) + m, mask=slots >= 0, other=0.0)
        low *= tl.rsqrt(squares / NORMED + eps)[:, None]
    return low


@triton.jit
def in_own_columns(low, slots, first, TOGETHER: tl.constexpr, RANKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return [BLOCK_M, TOGETHER * RANKS]: the sums of each row in the columns of the row's slot, and zeros in the other
    columns."""
    own = slots[:, None] == (first + tl.arange(0, TOGETHER))[None, :]
    return tl.reshape(tl.where(own[:, :, None], low[:, None, :], 0.0), [BLOCK_M, TOGETHER * RANKS])


@triton.jit
def expanded(
    b_ptr,
    b,
    sums_ptr,
    squares_ptr,
    eps,
    slots,
    m,
    n,
    rows,
    module,
    SLOT_STRIDE: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    RANKS: tl.constexpr,
    NORMED: tl.constexpr,
    BEHIND: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return float32 [BLOCK_M, BLOCK_N]: the adapters' contribution to rows m and columns n < LAST, which belong to one module.

    b: result of `wide_b` beginning with slot 0 and rank 0, which often includes all slots and ranks.
    """
    added = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for r in tl.static_range(0, RANK, RANKS):
        column = module * RANK + r
        low = low_sums(
            sums_ptr, squares_ptr, eps, slots, m, rows, column, MODULES * RANK, SPLITS, SLOTS, RANKS, NORMED, BEHIND
        ).to(b.dtype)  # fmt: skip
        if r > 0:
            b = wide_b(b_ptr, slots, n, 0, r, SLOT_STRIDE, RANK, LAST, TOGETHER, RANKS)
        wide = in_own_columns(low, slots, 0, TOGETHER, RANKS, BLOCK_M)
        added = tl.dot(wide.to(DOT), b.to(DOT), added, input_precision=PRECISION)
        for first in range(TOGETHER, SLOTS, TOGETHER):
            if tl.max(((slots >= first) & (slots < first + TOGETHER)).to(tl.int32), 0) > 0:
                more = wide_b(b_ptr, slots, n, first, r, SLOT_STRIDE, RANK, LAST, TOGETHER, RANKS)
                wide_more = in_own_columns(low, slots, first, TOGETHER, RANKS, BLOCK_M)
                added = tl.dot(wide_more.to(DOT), more.to(DOT), added, input_precision=PRECISION)
    return added


@triton.jit(do_not_specialize=["rows"])
def expand_rows(
    sums_ptr,  # float32 [SPLITS, rows, MODULES * RANK]; BEHIND: the linear layer's output, followed by the sums of every slot
    squares_ptr,  # float32 [SPLITS, rows] (NORMED)
    b_ptr,  # [slots, N, RANK]
    slots_ptr,  # int32 [rows]; -1 means no adapter
    modules_ptr,  # int32 [cdiv(N, BLOCK_N)]: module of each program's columns
    y_ptr,  # [rows, N], added to in rows with an adapter; BEHIND: written in all rows; ADD: added to in all rows
    eps,
    rows,
    SLOT_STRIDE: tl.constexpr,
    N: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOGETHER: tl.constexpr,  # slots per GEMM
    RANKS: tl.constexpr,  # columns of a slot per GEMM: RANK, or a part of it
    NORMED: tl.constexpr,  # row length if the norm of `norm_and_shrink` is still to be applied; 0 means none
    BEHIND: tl.constexpr,  # N if the sums follow the linear layer's output; 0 means that y contains the output
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add sums times B^T to the linear layer's output. Grid (cdiv(N, BLOCK_N), tiles of rows)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    module = tl.load(modules_ptr + tl.program_id(0))
    slots = tl.load(slots_ptr + m, mask=m < rows, other=-1)
    row = m.to(tl.int64)[:, None]
    at = y_ptr + row * N + n[None, :]
    live = (m < rows if BEHIND > 0 else slots >= 0)[:, None] & (n < N)[None, :]
    b = wide_b(b_ptr, slots, n, 0, 0, SLOT_STRIDE, RANK, N, TOGETHER, RANKS)
    if BEHIND == 0 and NORMED == 0:
        y = tl.load(at, mask=live, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if NORMED > 0:
        y = tl.load(at, mask=live, other=0.0)
    if BEHIND > 0:
        y = tl.load(sums_ptr + row * (N + SLOTS * MODULES * RANK) + n[None, :], mask=live, other=0.0).to(tl.float32)
        if ADD:
            y += tl.load(at, mask=live, other=0.0).to(tl.float32)
    elif tl.max(slots, 0) < 0:
        return
    if BEHIND == 0 or tl.max(slots, 0) >= 0:
        y = y.to(tl.float32) + expanded(
            b_ptr, b, sums_ptr, squares_ptr, eps, slots, m, n, rows, module,
            SLOT_STRIDE, MODULES, RANK, SPLITS, SLOTS, TOGETHER, RANKS, NORMED, BEHIND, N, BLOCK_M, BLOCK_N, DOT, PRECISION,
        )  # fmt: skip
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def expand_gated(
    sums_ptr,  # float32 [SPLITS, rows, MODULES * RANK]
    squares_ptr,  # float32 [SPLITS, rows] (NORMED)
    b_ptr,  # [slots, 2 N, RANK], gate over up
    slots_ptr,  # int32 [rows]; -1 means no adapter
    modules_ptr,  # int32 [2 * cdiv(N, BLOCK_N)]: module of each program's columns, first for gate and then for up
    both_ptr,  # [rows, 2 N], the linear layer's output; BEHIND: followed by the sums, and equal to sums_ptr
    y_ptr,  # [rows, N], written
    eps,
    rows,
    SLOT_STRIDE: tl.constexpr,
    N: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    RANKS: tl.constexpr,
    NORMED: tl.constexpr,
    BEHIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = activation(gate) * up of the linear layer plus adapters, for all rows. Grid (cdiv(N, BLOCK_N), tiles of rows)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    gate_module = tl.load(modules_ptr + tl.program_id(0))
    up_module = tl.load(modules_ptr + tl.num_programs(0) + tl.program_id(0))
    slots = tl.load(slots_ptr + m, mask=m < rows, other=-1)
    live = (m < rows)[:, None] & (n < N)[None, :]
    WIDE: tl.constexpr = 2 * N if BEHIND == 0 else BEHIND + SLOTS * MODULES * RANK
    at = both_ptr + m.to(tl.int64)[:, None] * WIDE + n[None, :]
    gate_b = wide_b(b_ptr, slots, n, 0, 0, SLOT_STRIDE, RANK, N, TOGETHER, RANKS)
    up_b = wide_b(b_ptr, slots, n + N, 0, 0, SLOT_STRIDE, RANK, 2 * N, TOGETHER, RANKS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=live, other=0.0).to(tl.float32)
    if tl.max(slots, 0) >= 0:
        gate_added = expanded(
            b_ptr, gate_b, sums_ptr, squares_ptr, eps, slots, m, n, rows, gate_module,
            SLOT_STRIDE, MODULES, RANK, SPLITS, SLOTS, TOGETHER, RANKS, NORMED, BEHIND, N, BLOCK_M, BLOCK_N, DOT, PRECISION,
        )  # fmt: skip
        up_added = expanded(
            b_ptr, up_b, sums_ptr, squares_ptr, eps, slots, m, n + N, rows, up_module,
            SLOT_STRIDE, MODULES, RANK, SPLITS, SLOTS, TOGETHER, RANKS, NORMED, BEHIND, 2 * N, BLOCK_M, BLOCK_N, DOT, PRECISION,
        )  # fmt: skip
        adapted = (slots >= 0)[:, None]
        gate = tl.where(adapted, gate + gate_added, gate)
        up = tl.where(adapted, up + up_added, up)
    y = activate(gate, ACTIVATION) * up
    tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty), mask=live)
