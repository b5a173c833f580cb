"""Triton kernels that list the candidates inside a row's bracket, and draw among the tokens that are kept.

`threshold_kernels` makes the brackets and says what tiles are.
"""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.sampling.draw_kernels import _log2_exponential, _philox
from headway.kernels.sampling.threshold_kernels import (
    _COUNTERS,
    _FINISHED,
    _LENGTHS,
    _LOG2E,
    _STEPS,
    _TILE,
    NAN_KEY,
    _bracket_of,
    _key_of,
    _row_in_stage,
    _target_of,
    _tile_columns,
    _tile_logits,
    _values,
)

_PHILOX_COUNTERS = tl.constexpr(256)
"""Philox counters of a tile; each yields four random numbers."""


@triton.jit(
    do_not_specialize=["logits_stride", "filters_stride", "part_size", "vocab_size"], do_not_specialize_on_alignment=["filters"]
)
def list_candidates(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    part_max_keys,  # int32 [rows, parts]
    thresholds,  # float32 [rows, THRESHOLDS]
    counts,  # int32 [rows, COUNTERS], to which the list's length is added
    masses,  # int64 [rows, COUNTERS]
    targets,  # int64 [rows]
    candidates,  # int64 [rows, CAPACITY], written, in any order: sort key (high half) and id of each token in the bracket
    ties,  # int32 [rows, parts], written: tokens of a part whose logit is the bracket's lower end
    logits_stride,
    filters_stride,
    part_size,
    vocab_size,
    STAGE: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gather the tokens of a row's bracket into one list. Grid (rows, parts)."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    active, _most, scale, top_k, top_p = _row_in_stage(
        filters, filters_stride, row, part_max_keys, targets, parts, CAPACITY, PARTS, STAGE
    )
    if active:
        target, by_mass = _target_of(masses, targets, row, top_k, top_p, STAGE)
        bottom, top, _above, _mass = _bracket_of(thresholds, counts, masses, row, target, by_mass, CAPACITY, STAGE)
        row_logits, end = logits + row * logits_stride, tl.minimum(part * part_size + part_size, vocab_size)
        mine, tied = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32)
        for start in range(part * part_size, end, _TILE):
            y = _tile_logits(row_logits, start, vocab_size, scale)
            mine += tl.sum(((y > bottom) & (y <= top)).to(tl.int32), axis=0)
            tied += tl.sum((y == bottom).to(tl.int32), axis=0)
        tl.store(ties + row * parts + part, tl.sum(tied, axis=0))
        count = tl.sum(mine, axis=0)
        if count > 0:
            # One atomic reserves the places; then each thread reads its logits again and knows where its own go.
            place = tl.atomic_add(counts + row * _COUNTERS + _LENGTHS + STAGE, count) + tl.cumsum(mine, axis=0) - mine
            shift = 4 * tl.arange(0, _STEPS)[:, None]
            for start in range(part * part_size, end, _TILE):
                y = _tile_logits(row_logits, start, vocab_size, scale)
                inside = (y > bottom) & (y <= top)
                # Four bits for each of eight steps count the tokens of the steps before it.
                before = tl.sum(tl.where(inside, 0x11111110 << shift, 0), axis=0)[None, :] >> shift & 15
                at = place[None, :] + before
                key = (_key_of(y).to(tl.int64) << 32) + (start + _tile_columns())
                fits = inside & (at < CAPACITY)
                # Stored as a row, since versions of the compiler differ in which threads store a tile.
                at, key, fits = tl.reshape(at, [_TILE]), tl.reshape(key, [_TILE]), tl.reshape(fits, [_TILE])
                tl.store(candidates + row * CAPACITY + at, key, mask=fits)
                place += tl.sum(inside.to(tl.int32), axis=0)


@triton.jit(
    do_not_specialize=["logits_stride", "filters_stride", "part_size", "vocab_size"],
    do_not_specialize_on_alignment=["filters", "keys", "chosen"],
)
def draw_kept(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    keys,  # int64 [rows]: keys of the random numbers
    counts,  # int32 [rows, COUNTERS], of which the last counts a row's finished programs
    cutoffs,  # float32 [rows]
    last_ids,  # int32 [rows]
    best,  # int64 [rows]: sort key of the largest score so far (high half) and its token (low half)
    chosen,  # int64 [rows], written by a row's last program
    logits_stride,
    filters_stride,
    part_size,
    vocab_size,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw a token of each row among those that are kept (Gumbel-max, as `argmax_of_chunks`). Grid (rows, parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.load(filters + row)
    if scale > 0:
        last_id = tl.load(last_ids + row)
        if last_id >= 0:
            cutoff, key = tl.load(cutoffs + row), tl.load(keys + row).to(tl.uint64, bitcast=True)
            row_logits = logits + row * logits_stride
            largest = tl.full([_PHILOX_COUNTERS], float("-inf"), tl.float32)
            token = part * part_size + tl.zeros([_PHILOX_COUNTERS], tl.int32)
            for start in range(part * part_size, tl.minimum(part * part_size + part_size, vocab_size), _TILE):
                if tl.max(tl.max(_tile_logits(row_logits, start, vocab_size, scale), axis=0), axis=0) >= cutoff:
                    counter = start // 4 + tl.arange(0, _PHILOX_COUNTERS)
                    first = counter // LANES * (4 * LANES) + counter % LANES
                    bits = _philox(counter, key)
                    for number in tl.static_range(4):
                        column = first + number * LANES
                        y = _values(row_logits, column, vocab_size, scale)
                        kept = (column < vocab_size) & ((y > cutoff) | ((y == cutoff) & (column <= last_id)))
                        score = tl.where(kept, y * _LOG2E - _log2_exponential(bits[number]), float("-inf"))
                        # A comparison suffices, since a thread's columns are in order.
                        better = score > largest
                        largest, token = tl.where(better, score, largest), tl.where(better, column, token)
            score = tl.max(largest, axis=0)
            at = tl.min(tl.where(largest == score, token, NAN_KEY), axis=0)
            tl.atomic_max(best + row, (_key_of(score).to(tl.int64) << 32) + (at ^ NAN_KEY))
            if tl.atomic_add(counts + row * _COUNTERS + _FINISHED, 1) == tl.num_programs(1) - 1:
                winner = tl.atomic_max(best + row, tl.full([], -0x8000000000000000, tl.int64))
                tl.store(chosen + row, (winner & NAN_KEY) ^ NAN_KEY)
