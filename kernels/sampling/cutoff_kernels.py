"""Triton kernel that finds a row's last kept token, and draws right there where all kept tokens are in the candidate list."""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.sampling.draw_kernels import _log2_exponential, _philox
from headway.kernels.sampling.threshold_kernels import (
    _COUNTERS,
    _LENGTHS,
    _LOG2E,
    NAN_KEY,
    NEG_INF_KEY,
    _bracket_of,
    _key_of,
    _logit_of,
    _mass_of,
    _max_key_of_row,
    _row_in_stage,
    _target_of,
    _top_p_target,
    _values,
)

_BLOCK = tl.constexpr(4096)


@triton.jit
def _amount_above(sort_key, mass, pivot, row_logits, vocab_size, scale, largest, overflowed, BY_MASS: tl.constexpr):
    """Number of tokens, or their mass, int64, at or above a pivot: in the list or, where it overflowed, in the whole row."""
    if overflowed:
        amount = tl.full([], 0, tl.int64)
        for start in range(0, vocab_size, _BLOCK):
            y = _values(row_logits, start + tl.arange(0, _BLOCK), vocab_size, scale)
            above = _key_of(y) >= pivot
            if BY_MASS:
                amount += tl.sum(tl.where(above, _mass_of(y, largest), 0), axis=0)
            else:
                amount += tl.sum(above.to(tl.int64), axis=0)
    else:
        if BY_MASS:
            amount = tl.sum(tl.where(sort_key >= pivot, mass, 0), axis=0)
        else:
            amount = tl.sum((sort_key >= pivot).to(tl.int32), axis=0).to(tl.int64)
    return amount


@triton.jit
def _binary_search(
    sort_key, mass, above, low, end, target, row_logits, vocab_size, scale, largest, overflowed, BY_MASS: tl.constexpr
):
    """The largest sort key in [low, end) at or above which the target is reached, and the amount above that key.

    above: amount at or above end, which is in no list. The target is reached at low and not at end.
    """
    over, turn = above, tl.full([], 1, tl.int32)
    while end - low > 1:
        pivot = low + (end - low) // 2
        if (turn % 4 == 0) & (overflowed == 0):  # jumps over the gap to the next logit that occurs
            nearest = tl.max(tl.where(sort_key < end, sort_key, -NAN_KEY), axis=0).to(tl.int64)
            pivot = tl.maximum(nearest, low + 1)
        amount = above + _amount_above(sort_key, mass, pivot, row_logits, vocab_size, scale, largest, overflowed, BY_MASS)
        enough = amount >= target
        low, end = tl.where(enough, pivot, low), tl.where(enough, end, pivot)
        over = tl.where(enough, over, amount)
        turn += 1
    return low, over


@triton.jit
def _nth_equal(row_logits, column, vocab_size, scale, value, number):
    """Column of the n-th token (n = number) whose logit equals a value, searched from a column on."""
    last_id = column * 0
    while (number > 0) & (column < vocab_size):
        at = column + tl.arange(0, _BLOCK)
        equal = (_values(row_logits, at, vocab_size, scale) == value) & (at < vocab_size)
        count = tl.sum(equal.to(tl.int32), axis=0)
        if count >= number:
            last_id = tl.min(tl.where(equal & (tl.cumsum(equal.to(tl.int32), axis=0) == number), at, NAN_KEY), axis=0)
        number -= count
        column += _BLOCK
    return last_id


@triton.jit(
    do_not_specialize=["logits_stride", "filters_stride", "part_size", "parts", "vocab_size"],
    do_not_specialize_on_alignment=["filters", "keys", "others", "chosen"],
)
def find_cutoffs(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    keys,  # int64 [rows]: keys of the random numbers
    others,  # int64 [rows]: tokens of the rows without filters
    part_max_keys,  # int32 [rows, parts]
    thresholds,  # float32 [rows, THRESHOLDS]
    counts,  # int32 [rows, COUNTERS]
    masses,  # int64 [rows, COUNTERS]
    candidates,  # int64 [rows, CAPACITY]
    ties,  # int32 [rows, parts]
    targets,  # int64 [rows], written in stage 0: the mass that top_p keeps where stage 1 has to find the cutoff, else 0
    cutoffs,  # float32 [rows], written: the smallest logit that is kept
    last_ids,  # int32 [rows], written: the last kept token with that logit; -1: the row already has its token
    chosen,  # int64 [rows], written where the list holds all kept tokens
    logits_stride,
    filters_stride,
    part_size,
    parts,
    vocab_size,
    STAGE: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Halve the bracket until the smallest kept logit is found, then the last kept token with that logit. Grid (rows).

    Where a list overflowed because the sample misled (one row in 100,000), each halving reads the whole row.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    active, max_key, scale, top_k, top_p = _row_in_stage(
        filters, filters_stride, row, part_max_keys, targets, parts, CAPACITY, PARTS, STAGE
    )
    if STAGE == 0:
        max_key = _max_key_of_row(part_max_keys, row, parts, PARTS)
    if active | ((STAGE == 0) & (scale > 0)):
        largest = _logit_of(max_key)
        cutoff, last_id = tl.full([], float("-inf"), tl.float32), tl.full([], NAN_KEY, tl.int32)
        token, later = tl.full([], -1, tl.int64), tl.full([], 0, tl.int64)
        min_p = tl.load(filters + 3 * filters_stride + row)
        min_p_cutoff = tl.where(min_p == float("-inf"), min_p, largest + min_p)  # a largest of +inf makes no NaN
        has_token = max_key == NAN_KEY
        if active:
            row_logits = logits + row * logits_stride
            target, by_mass = _target_of(masses, targets, row, top_k, top_p, STAGE)
            bottom, top, above, mass_above = _bracket_of(thresholds, counts, masses, row, target, by_mass, CAPACITY, STAGE)
            length = tl.load(counts + row * _COUNTERS + _LENGTHS + STAGE)
            overflowed = length > CAPACITY
            if overflowed:
                bottom, top, above, mass_above = min_p_cutoff * 0 + float("-inf"), largest, above * 0, mass_above * 0
            slot = tl.arange(0, CAPACITY)
            key = candidates + row * CAPACITY + slot
            sort_key = (tl.load(key, mask=slot < length, other=NEG_INF_KEY * 2**32) >> 32).to(tl.int32)
            mass = tl.zeros([CAPACITY], tl.int64)
            if top_p < 1:
                mass = _mass_of(_logit_of(sort_key), largest)
            low, end = _key_of(bottom).to(tl.int64), _key_of(tl.minimum(top, largest)).to(tl.int64) + 1
            all_above = top >= largest
            kept = tl.full([], 0, tl.int64)
            if not by_mass:
                low, over = _binary_search(
                    sort_key,
                    mass,
                    above.to(tl.int64),
                    low,
                    end,
                    target,
                    row_logits,
                    vocab_size,
                    scale,
                    largest,
                    overflowed,
                    False,
                )
                kept = target - over
            if top_p < 1:
                if not by_mass:
                    of_above = mass_above + _amount_above(
                        sort_key, mass, low + 1, row_logits, vocab_size, scale, largest, overflowed, True
                    )
                    target = _top_p_target(of_above + kept * _mass_of(_logit_of(low.to(tl.int32)), largest), top_p)
                if by_mass | all_above:
                    low, over = _binary_search(
                        sort_key, mass, mass_above, low, end, target, row_logits, vocab_size, scale, largest, overflowed, True
                    )
                    unit = tl.maximum(_mass_of(_logit_of(low.to(tl.int32)), largest), 1)
                    kept = (target - over + unit - 1) // unit
                else:
                    later = target
            cutoff_key = low.to(tl.int32)
            cutoff = _logit_of(cutoff_key)
            if low > NEG_INF_KEY:
                tied = sort_key == cutoff_key
                count = tl.sum(tied.to(tl.int32), axis=0)
                number = kept.to(tl.int32)
                if overflowed | (count == 0):
                    # Tokens at the bracket's lower end are in no list, but each part has counted its own.
                    column = number * 0
                    if not overflowed:
                        part = tl.arange(0, PARTS)
                        tie = tl.load(ties + row * parts + part, mask=part < parts, other=0)
                        before = tl.cumsum(tie, axis=0) - tie
                        mine = (before < number) & (before + tie >= number)
                        column = tl.sum(tl.where(mine, part, 0), axis=0) * part_size
                        number -= tl.sum(tl.where(mine, before, 0), axis=0)
                    last_id = _nth_equal(row_logits, column, vocab_size, scale, cutoff, number)
                elif count > number:
                    upward = tl.where(tied, tl.load(key, mask=tied, other=0).to(tl.int32) ^ NAN_KEY, -1)
                    least_id = low * 0 - vocab_size + NAN_KEY
                    downward, _ = _binary_search(
                        upward, mass, kept * 0, least_id, least_id + vocab_size + 1, number.to(tl.int64), row_logits,
                        vocab_size, scale, largest, overflowed, False,
                    )  # fmt: skip
                    last_id = downward.to(tl.int32) ^ NAN_KEY
            if all_above & (overflowed == 0) & (later == 0) & ((low > _key_of(bottom)) | (low == NEG_INF_KEY)):
                y, column = _logit_of(sort_key), tl.load(key, mask=slot < length, other=0).to(tl.int32)
                remains = (slot < length) & ((y > cutoff) | ((y == cutoff) & (column <= last_id))) & (y >= min_p_cutoff)
                number_of = column // LANES
                bits = _philox(number_of // 4 * LANES + column % LANES, tl.load(keys + row).to(tl.uint64, bitcast=True))
                word = number_of % 4
                bits_drawn = tl.where(word < 2, tl.where(word == 0, bits[0], bits[1]), tl.where(word == 2, bits[2], bits[3]))
                score = tl.where(remains, y * _LOG2E - _log2_exponential(bits_drawn), float("-inf"))
                token = tl.min(tl.where(remains & (score == tl.max(score, axis=0)), column, NAN_KEY), axis=0).to(tl.int64)
                has_token = low >= NEG_INF_KEY
        if STAGE == 0:
            tl.store(targets + row, later)
        if has_token:
            tl.store(chosen + row, token)
        tl.store(cutoffs + row, tl.maximum(cutoff, min_p_cutoff))
        tl.store(last_ids + row, tl.where(has_token, -1, tl.where(cutoff >= min_p_cutoff, last_id, NAN_KEY)))
    elif STAGE == 0:
        tl.store(chosen + row, tl.load(others + row))
