"""Triton kernels that bracket a row's cutoff: the smallest logit that top_k and top_p keep.

Thresholds are logits from a sample of the row. For each threshold, the tokens at or above it are counted, and their probability
mass is added. A radix search with two digits finds the highest threshold that reaches the target: the high digit selects eight
thresholds, and the low digit selects one of these. Masses are fixed-point integers (core.sampling.filtering), so sums do not
depend on the order of additions.
"""

# Triton reads annotations at compile time, so they must not be deferred here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.sampling.filtering import LOG2E, UNIT_MASS

_LOG2E = tl.constexpr(LOG2E)
_UNIT = tl.constexpr(float(UNIT_MASS))
THRESHOLDS = 64
"""Number of thresholds per row: logits of a sample in descending order, then -inf. The high digit compares every eighth
threshold."""
ROUNDS = 3
"""Counting rounds per row: for the high digit, the low digit, and the low digit of top_p after a large top_k."""
COUNTERS = 8 * ROUNDS + 3
"""Number of counters per row: eight for each round, the lengths of two candidate lists, and the number of finished programs."""
TILE = 1024
"""Number of logits that a program of four warps reads at once."""
_THRESHOLDS, _SAMPLE, _COUNTERS = tl.constexpr(THRESHOLDS), tl.constexpr(512), tl.constexpr(COUNTERS)
_LENGTHS, _FINISHED = tl.constexpr(8 * ROUNDS), tl.constexpr(COUNTERS - 1)
_TILE, _LANES, _STEPS = tl.constexpr(TILE), tl.constexpr(128), tl.constexpr(TILE // 128)
_COUNT = tl.constexpr(2**50)
"""Value that counts one token in the upper bits of a sum whose lower bits are the mass. A thread adds fewer than a thousand
tokens."""
NEG_INF_KEY = tl.constexpr(-0x7F800001)
"""Sort key of -inf."""
NAN_KEY = tl.constexpr(0x7FFFFFFF)
"""Sort key of NaN, which is greater than the sort key of any number."""


@triton.jit
def _key_of(y):
    """Return int32 sort keys, which are in the same order as the float32 numbers y."""
    bits = y.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _logit_of(sort_key):
    """Return the float32 number of a sort key."""
    return tl.where(sort_key < 0, sort_key ^ 0x7FFFFFFF, sort_key).to(tl.float32, bitcast=True)


@triton.jit
def _values(logits, column, vocab_size, scale):
    """Return float32 logits divided by the temperature; -inf outside the row. -0 becomes 0, so that their sort keys are equal."""
    return tl.load(logits + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32) * scale + 0.0


@triton.jit
def _tile_columns():
    """Return the columns of a tile, [steps, lanes]. All columns of a thread are in the same lane."""
    return tl.arange(0, _STEPS)[:, None] * _LANES + tl.arange(0, _LANES)[None, :]


@triton.jit
def _tile_logits(row_logits, start, vocab_size, scale):
    """Return the scaled logits of a tile. Offsets from the tile's start are constants in the instructions, unlike columns of the
    row."""
    return _values(row_logits + start, _tile_columns(), vocab_size - start, scale)


@triton.jit
def _mass_of(y, largest):
    """Return fixed-point probability masses (core.sampling.filtering). largest: the row's largest logit."""
    power = tl.where(y == largest, 0.0, (y - largest) * _LOG2E)
    return (tl.exp2(power) * _UNIT).to(tl.int64)


@triton.jit
def _max_key_of_row(part_max_keys, row, parts, PARTS: tl.constexpr):
    """Return the sort key of a row's largest logit; NAN_KEY if a logit is NaN."""
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(part_max_keys + row * parts + part, mask=part < parts, other=NEG_INF_KEY), axis=0)


@triton.jit
def _row_in_stage(
    filters, filters_stride, row, part_max_keys, targets, parts, CAPACITY: tl.constexpr, PARTS: tl.constexpr, STAGE: tl.constexpr
):
    """Return (True if a stage must find a row's cutoff, the row's largest sort key, scale, top_k, top_p). The sort key is valid
    only if the first item is True.

    Stage 0 is for top_k, and for top_p without top_k. Stage 1 is for top_p after a top_k that may keep more tokens than a list
    can hold.
    """
    scale = tl.load(filters + row)
    top_k, top_p = tl.load(filters + filters_stride + row).to(tl.int32), tl.load(filters + 2 * filters_stride + row)
    sort_key = tl.full([], NEG_INF_KEY, tl.int32)
    if STAGE == 0:
        active = (scale > 0) & ((top_k > 0) | (top_p < 1))
    else:
        active = (scale > 0) & (top_k > CAPACITY // 8) & (top_p < 1)
        if active:
            active = tl.load(targets + row) > 0
    if active:
        sort_key = _max_key_of_row(part_max_keys, row, parts, PARTS)
        active = (sort_key > NEG_INF_KEY) & (sort_key < NAN_KEY)
    return active, sort_key, scale, top_k, top_p


@triton.jit
def _target_of(masses, targets, row, top_k, top_p, STAGE: tl.constexpr):
    """Return the number or mass (int64) that the tokens to keep must reach, and True if the value is a mass."""
    by_mass = top_k <= 0
    target = top_k.to(tl.int64)
    if STAGE == 1:
        by_mass = top_k > 0
        target = tl.load(targets + row)
    elif by_mass:
        target = _top_p_target(tl.load(masses + row * _COUNTERS + 7), top_p)
    return target, by_mass


@triton.jit
def _top_p_target(total, top_p):
    """Return the mass that the tokens kept by top_p must reach. total: mass of all tokens to which top_p applies."""
    return tl.maximum((top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _select_threshold(counts, masses, row, target, by_mass, ROUND: tl.constexpr):
    """Search one digit among a round's eight thresholds.

    Return the number of thresholds that do not reach the target, and the number of tokens at or above the next threshold. Also
    return the number and mass of tokens at or above the last threshold that does not reach the target.
    """
    threshold = tl.arange(0, 8)
    at = row * _COUNTERS + 8 * ROUND + threshold
    count, mass = tl.load(counts + at), tl.load(masses + at)
    amount = tl.where(by_mass, mass, count.to(tl.int64))
    digit = tl.minimum(tl.sum((amount < target).to(tl.int32), axis=0), 7)
    reached = tl.sum(tl.where(threshold == digit, count, 0), axis=0)
    above = tl.sum(tl.where(threshold == digit - 1, count, 0), axis=0).to(tl.int64)
    return digit, reached, above, tl.sum(tl.where(threshold == digit - 1, mass, 0), axis=0)


@triton.jit
def _bracket_of(thresholds, counts, masses, row, target, by_mass, CAPACITY: tl.constexpr, STAGE: tl.constexpr):
    """Return the exclusive lower and the inclusive upper logit between which the cutoff lies, and the number and mass of tokens
    above the upper logit.

    If at most CAPACITY tokens are at or above the selected threshold, all of them are in the bracket. Otherwise, the lower logit
    is the threshold itself, and the cutoff may be equal to it.
    """
    high, reached, above, mass = _select_threshold(counts, masses, row, target, by_mass, 0)
    index = high * 8 + 7
    if reached > CAPACITY:
        low, reached, nearer, nearer_mass = _select_threshold(counts, masses, row, target, by_mass, 1 + STAGE)
        index = high * 8 + low
        above, mass = tl.where(low > 0, nearer, above), tl.where(low > 0, nearer_mass, mass)
    row_thresholds = thresholds + row * _THRESHOLDS
    first, top = _key_of(tl.load(row_thresholds + index)), tl.full([], float("inf"), tl.float32)
    if reached <= CAPACITY:
        first = tl.maximum(first - 1, NEG_INF_KEY)
    if (reached > CAPACITY) & (above > CAPACITY // 8):
        top = _logit_of(_key_of(tl.load(row_thresholds + index - 1)) - 1)
    else:
        above, mass = above * 0, mass * 0
    return _logit_of(first), top, above, mass


@triton.jit(
    do_not_specialize=["logits_stride", "filters_stride", "part_size", "vocab_size"], do_not_specialize_on_alignment=["filters"]
)
def sample_thresholds(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]: scale, 0 if the row has no filter; top_k, 0 means all; top_p; log(min_p)
    part_max_keys,  # int32 [rows, parts], written: sort key of a part's largest logit; NAN_KEY if one is NaN
    thresholds,  # float32 [rows, THRESHOLDS], written
    counts,  # int32 [rows, COUNTERS], set to 0
    masses,  # int64 [rows, COUNTERS], set to 0
    best,  # int64 [rows], set to the smallest number
    logits_stride,
    filters_stride,  # elements between the rows of filters
    part_size,  # logits per part, a multiple of TILE
    vocab_size,
    PDL: tl.constexpr,
):
    """Find each row's largest logit, and rank a sample of the row to choose the row's thresholds. Grid (rows, 1 + parts).

    The sample affects how fast the cutoff is found, but not the result.
    """
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1) - 1, tl.num_programs(1) - 1
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.load(filters + row)
    row_logits = logits + row * logits_stride
    if scale > 0:
        if part >= 0:
            largest, has_nan = tl.full([_LANES], float("-inf"), tl.float32), tl.zeros([_LANES], tl.int32)
            for start in range(part * part_size, tl.minimum(part * part_size + part_size, vocab_size), _TILE):
                y = _tile_logits(row_logits, start, vocab_size, scale)
                largest = tl.maximum(largest, tl.max(y, axis=0))
                has_nan = tl.maximum(has_nan, tl.max((y != y).to(tl.int32), axis=0))
            sort_key = tl.where(tl.max(has_nan, axis=0) > 0, NAN_KEY, _key_of(tl.max(largest, axis=0)))
            tl.store(part_max_keys + row * parts + part, sort_key)
        else:
            counter = tl.arange(0, triton.next_power_of_2(_COUNTERS))
            tl.store(counts + row * _COUNTERS + counter, counter * 0, mask=counter < _COUNTERS)
            tl.store(masses + row * _COUNTERS + counter, (counter * 0).to(tl.int64), mask=counter < _COUNTERS)
            tl.store(best + row, tl.full([], -0x8000000000000000, tl.int64))
            place, slot = tl.arange(0, _SAMPLE), tl.arange(0, 32)
            y = _values(row_logits, _sample_columns(place, vocab_size), vocab_size, scale)
            # Comparing each with each is faster than sorting this few. Equal logits share the rank of the first.
            rank = tl.zeros([_SAMPLE], tl.int32)
            for start in range(0, _SAMPLE, 32):
                other = _values(row_logits, _sample_columns(start + slot, vocab_size), vocab_size, scale)
                rank += tl.sum((other[:, None] > y[None, :]).to(tl.int32), axis=0)
            # The likeliest tokens are far apart and the rest close together: use the first eight, then every ninth of the sample.
            for start in tl.static_range(0, _THRESHOLDS, 8):
                threshold = start + tl.arange(0, 8)
                active = tl.where(threshold < 8, threshold, 9 * threshold - 56)
                chosen = tl.min(tl.where(rank[None, :] <= active[:, None], y[None, :], float("inf")), axis=1)
                tl.store(
                    thresholds + row * _THRESHOLDS + threshold, tl.where(threshold == _THRESHOLDS - 1, float("-inf"), chosen)
                )


@triton.jit
def _sample_columns(place, vocab_size):
    """Return the columns of a sample: one column from each of 512 equal parts of the row, at varying positions."""
    return ((place * _SAMPLE + (place * 40503) % _SAMPLE).to(tl.int64) * vocab_size) // (_SAMPLE * _SAMPLE)


@triton.jit(
    do_not_specialize=["logits_stride", "filters_stride", "part_size", "vocab_size"], do_not_specialize_on_alignment=["filters"]
)
def count_above_thresholds(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    part_max_keys,  # int32 [rows, parts]
    thresholds,  # float32 [rows, THRESHOLDS]
    counts,  # int32 [rows, COUNTERS]: adds the tokens at or above a round's eight thresholds
    masses,  # int64 [rows, COUNTERS]: adds their mass, if top_p needs it
    targets,  # int64 [rows]
    logits_stride,
    filters_stride,
    part_size,
    vocab_size,
    ROUND: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the tokens at or above each of eight thresholds, and if needed add up their mass. Grid (rows, parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    STAGE: tl.constexpr = 1 if ROUND == 2 else 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    parts = tl.num_programs(1)
    active, sort_key, scale, top_k, top_p = _row_in_stage(
        filters, filters_stride, row, part_max_keys, targets, parts, CAPACITY, PARTS, STAGE
    )
    first, step = 7, 8
    if ROUND > 0:
        step = 1
        if active:
            target, by_mass = _target_of(masses, targets, row, top_k, top_p, STAGE)
            high, reached, _, _ = _select_threshold(counts, masses, row, target, by_mass, 0)
            first = high * 8
            active = reached > CAPACITY
    if active:
        index = tl.arange(0, 8)
        threshold = tl.load(thresholds + row * _THRESHOLDS + first + index * step)[:, None, None]
        row_logits, end = logits + row * logits_stride, tl.minimum(part * part_size + part_size, vocab_size)
        out = row * _COUNTERS + 8 * ROUND + index
        if (top_p < 1) & ((top_k <= 0) | (top_k > CAPACITY // 8)):
            largest = _logit_of(sort_key)
            both = tl.zeros([8, _LANES], tl.int64)
            for start in range(part * part_size, end, _TILE):
                y = _tile_logits(row_logits, start, vocab_size, scale)
                amount = _mass_of(y, largest) + _COUNT
                both += tl.sum(tl.where(y[None, :, :] >= threshold, amount[None, :, :], 0), axis=1)
            tl.atomic_add(counts + out, tl.sum((both >> 50).to(tl.int32), axis=1))
            tl.atomic_add(masses + out, tl.sum(both & (_COUNT - 1), axis=1))
        else:
            count = tl.zeros([8, _LANES], tl.int32)
            for start in range(part * part_size, end, _TILE):
                y = _tile_logits(row_logits, start, vocab_size, scale)
                count += tl.sum((y[None, :, :] >= threshold).to(tl.int32), axis=1)
            tl.atomic_add(counts + out, tl.sum(count, axis=1))
