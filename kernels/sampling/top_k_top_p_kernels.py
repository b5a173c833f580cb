"""Triton kernels for top-k, top-p and min-p without a sort: list the candidates in a row's bracket, find the cutoff, draw a
token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.contract.kernel import AHEAD
from headway.core.sampling.sampler import LANES
from headway.kernels.runtime.triton_launch import Launchers
from headway.kernels.sampling.draw_kernels import _log2_exponential, _philox
from headway.kernels.sampling.threshold_kernels import (
    _COUNTERS,
    _FINISHED,
    _LENGTHS,
    _LOG2E,
    _STEPS,
    _TILE,
    COUNTERS,
    NAN_KEY,
    NEG_INF_KEY,
    THRESHOLDS,
    TILE,
    _bracket_of,
    _key_of,
    _logit_of,
    _mass_of,
    _max_key_of_row,
    _row_in_stage,
    _target_of,
    _tile_columns,
    _tile_logits,
    _top_p_target,
    _values,
    count_above_thresholds,
    sample_thresholds,
)

# Triton reads annotations at compile time, so they must not be deferred here.


_PHILOX_COUNTERS = tl.constexpr(256)
"""Number of Philox counters per tile. Each counter yields four random numbers."""


@triton.jit(
    do_not_specialize=["logits_stride", "filters_stride", "part_size", "vocab_size"], do_not_specialize_on_alignment=["filters"]
)
def list_candidates(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    part_max_keys,  # int32 [rows, parts]
    thresholds,  # float32 [rows, THRESHOLDS]
    counts,  # int32 [rows, COUNTERS], adds the list's length
    masses,  # int64 [rows, COUNTERS]
    targets,  # int64 [rows]
    candidates,  # int64 [rows, CAPACITY], written in any order: sort key (high half) and id of each token in the bracket
    ties,  # int32 [rows, parts], written: tokens of a part whose logit equals the bracket's lower end
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
    """Collect the tokens in each row's bracket in a list. Grid (rows, parts)."""
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
            # One atomic reserves the positions. Then each thread reads its logits again and stores its tokens.
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
                # Stored as a row, since compiler versions differ in which threads store a tile.
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
    counts,  # int32 [rows, COUNTERS]; the last counter counts a row's finished programs
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
    """Draw a token of each row among the kept tokens (Gumbel-max, like `argmax_of_chunks`). Grid (rows, parts)."""
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
                        # A strict comparison suffices, since a thread's columns are in order.
                        better = score > largest
                        largest, token = tl.where(better, score, largest), tl.where(better, column, token)
            score = tl.max(largest, axis=0)
            at = tl.min(tl.where(largest == score, token, NAN_KEY), axis=0)
            tl.atomic_max(best + row, (_key_of(score).to(tl.int64) << 32) + (at ^ NAN_KEY))
            if tl.atomic_add(counts + row * _COUNTERS + _FINISHED, 1) == tl.num_programs(1) - 1:
                winner = tl.atomic_max(best + row, tl.full([], -0x8000000000000000, tl.int64))
                tl.store(chosen + row, (winner & NAN_KEY) ^ NAN_KEY)


# Triton reads annotations at compile time, so they must not be deferred here.


_BLOCK = tl.constexpr(4096)


@triton.jit
def _amount_above(sort_key, mass, pivot, row_logits, vocab_size, scale, largest, overflowed, BY_MASS: tl.constexpr):
    """Return the number or the mass (int64) of tokens at or above a pivot. Both are computed from the list, or from the whole row
    if the list overflowed."""
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
    """Return the largest sort key in [low, end) at which the tokens at or above it reach the target, and the number or mass of
    tokens above that key.

    above: number or mass of tokens at or above `end`, which are not in the list. The target is reached at `low`, and not at
    `end`.
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
    """Return the column of the n-th token (n = number) whose logit equals `value`, searching from `column` on."""
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
    targets,  # int64 [rows], written in stage 0: the mass that top_p keeps if stage 1 has to find the cutoff, else 0
    cutoffs,  # float32 [rows], written: the smallest kept logit
    last_ids,  # int32 [rows], written: last kept token with that logit; -1 if the row already has its token
    chosen,  # int64 [rows], written if the list holds all kept tokens
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
    """Bisect the bracket until the smallest kept logit is found, then find the last kept token with that logit. Grid (rows).

    If a list overflowed because of an unlucky sample (one row in 100,000), each bisection step reads the whole row.
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
        min_p_cutoff = tl.where(min_p == float("-inf"), min_p, largest + min_p)  # avoids NaN if the largest logit is +inf
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
                    # Tokens at the bracket's lower end are not in the list, but each part has counted its own.
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


MAX_PROGRAMS = 924
"""Approximate maximum number of programs per launch. Seven programs run concurrently on each SM, and each processes enough logits
to be worth its launch."""
LIST_CAPACITY = 1024, 16384
"""Minimum and maximum capacity of a candidate list, in tokens."""
_CAPACITY_SHARE = 20
"""Vocabulary size divided by the capacity of a list. A list can hold two to three times the number of tokens between two
thresholds."""
_MAX_ROWS = 256
"""Maximum number of rows per launch, which limits the memory for lists to 32 MiB."""


class TopKTopPSampler:
    """`Filter` of core.sampling.filtering, in nine launches that a CUDA graph can capture.

    First, the tokens above a few thresholds from a sample of the row are counted, then the tokens above a few thresholds between
    two of these. The tokens between two adjacent thresholds are listed, and the last kept token is searched for in the list. A
    second search handles top_p after a large top_k. Other rows skip this search, except for its launches. Finally, a token is
    drawn from the kept tokens. The search itself draws the token if the list contains all kept tokens. Counts and masses are
    integers, so a row's token depends neither on other rows nor on the number of programs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers = Launchers(device)

    def __call__(self, logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor) -> Tensor:
        """Draw tokens as described in core.sampling.filtering. The elements of a row of logits must be contiguous, but rows may
        have any stride."""
        others, keys = others.contiguous(), keys.contiguous()
        filters = filters if filters.stride(1) == 1 else filters.contiguous()
        make = torch.empty if AHEAD.get() is None else torch.zeros  # as in FusedSampling
        chosen = make(len(logits), dtype=torch.int64, device=self._device)
        for first in range(0, len(logits), _MAX_ROWS):
            part = slice(first, first + _MAX_ROWS)
            self._choose(logits[part], others[part], keys[part], filters[:, part], chosen[part])
        return chosen

    def _choose(self, logits: Tensor, others: Tensor, keys: Tensor, filters: Tensor, chosen: Tensor) -> None:
        rows, vocab = logits.shape
        tiles = triton.cdiv(vocab, TILE)
        part_size = triton.cdiv(tiles * rows, MAX_PROGRAMS) * TILE
        parts = triton.cdiv(vocab, part_size)
        capacity = min(max(triton.next_power_of_2(triton.cdiv(vocab, _CAPACITY_SHARE)), LIST_CAPACITY[0]), LIST_CAPACITY[1])
        limits = {"CAPACITY": capacity, "PARTS": triton.next_power_of_2(tiles)}
        get = self._launchers.get

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty((rows, *shape), dtype=dtype, device=self._device)

        part_max_keys, ties, counts, last_ids = buffer(parts), buffer(parts), buffer(COUNTERS), buffer()
        thresholds, cutoffs = buffer(THRESHOLDS, dtype=torch.float32), buffer(dtype=torch.float32)
        masses, candidates = buffer(COUNTERS, dtype=torch.int64), buffer(capacity, dtype=torch.int64)
        targets, best = buffer(dtype=torch.int64), buffer(dtype=torch.int64)
        grid = rows, parts, 1
        read = {"logits": logits, "filters": filters}
        bracket = {"part_max_keys": part_max_keys, "thresholds": thresholds, "counts": counts, "masses": masses}
        found = {"candidates": candidates, "ties": ties, "targets": targets, "cutoffs": cutoffs, "last_ids": last_ids}
        found["chosen"] = chosen
        strides = {"logits_stride": logits.stride(0), "filters_stride": filters.stride(0), "part_size": part_size}
        last: dict[str, int] = {**strides, "vocab_size": vocab}
        """Arguments that most kernels have at the end: strides and vocabulary size."""

        get(sample_thresholds, 4, {})((rows, 1 + parts, 1), **read, **bracket, best=best, **last)
        get(count_above_thresholds, 4, {"ROUND": 0, **limits})(grid, **read, **bracket, targets=targets, **last)
        for stage in (0, 1):
            get(count_above_thresholds, 4, {"ROUND": 1 + stage, **limits})(grid, **read, **bracket, targets=targets, **last)
            list_kernel = get(list_candidates, 4, {"STAGE": stage, **limits, "LANES": LANES})
            list_kernel(grid, **read, **bracket, targets=targets, candidates=candidates, ties=ties, **last)
            cutoff_kernel = get(find_cutoffs, 16, {"STAGE": stage, **limits, "LANES": LANES})
            cutoff_kernel(
                (rows, 1, 1), **read, keys=keys, others=others, **bracket, **found, **strides, parts=parts, vocab_size=vocab
            )
        drawn = {"counts": counts, "cutoffs": cutoffs, "last_ids": last_ids, "best": best, "chosen": chosen}
        get(draw_kept, 4, {"LANES": LANES})(grid, **read, keys=keys, **drawn, **last)
