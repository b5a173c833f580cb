"""Where about the tokens end that top_k, top_p and min_p keep: the Triton kernels that bracket a row's cut.

Tokens and masses are counted at or above *levels*, logits out of a sample. The level that suffices is found as a number of two
digits is: first the high digit, then the low one. Masses are whole numbers (core.sampling.filtering), so no order of adding
changes them.
"""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.sampling.filtering import LOG2E, UNIT_MASS

_LOG2E = tl.constexpr(LOG2E)
_UNIT = tl.constexpr(float(UNIT_MASS))
LEVELS = 64
"""Logits of a sample in falling order, the last one -inf; the high digit counts them by eights."""
ROUNDS = 3
"""Measurements a row: at every eighth level; between two of these; there for top_p, where a large top_k came first."""
TALLIES = 8 * ROUNDS + 3
"""Numbers of a row that programs add up: of tokens, eight a round; lengths of both lists of tokens; programs that have raced."""
TURN = 1024
"""Logits that a program of four warps reads at a time."""
_LEVELS, _SAMPLE, _TALLIES = tl.constexpr(LEVELS), tl.constexpr(512), tl.constexpr(TALLIES)
_LENGTHS, _RACED = tl.constexpr(8 * ROUNDS), tl.constexpr(TALLIES - 1)
_TURN, _LANES, _STEPS = tl.constexpr(TURN), tl.constexpr(128), tl.constexpr(TURN // 128)
_COUNT = tl.constexpr(2**50)
"""A token's one, beside its mass in the same sum: a thread adds up fewer than a thousand of either."""
LOWEST = tl.constexpr(-0x7F800001)
"""What `_ordered` makes of -inf."""
SICK = tl.constexpr(0x7FFFFFFF)
"""More than it makes of any number: stands for NaN."""


@triton.jit
def _ordered(y):
    """Whole numbers, int32, that grow as float32 numbers do."""
    bits = y.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value_of(order):
    """The float32 number of what `_ordered` made."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _values(logits, column, vocab_size, scale):
    """Logits over their temperature, float32, -inf outside. No -0: it equals 0."""
    return tl.load(logits + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32) * scale + 0.0


@triton.jit
def _tile():
    """Columns of a turn, [steps, lanes]: a thread's lie one below the other."""
    return tl.arange(0, _STEPS)[:, None] * _LANES + tl.arange(0, _LANES)[None, :]


@triton.jit
def _turn(of_row, start, vocab_size, scale):
    """The values of a turn. Offsets from its start are constants of a thread's instructions, which columns would not be."""
    return _values(of_row + start, _tile(), vocab_size - start, scale)


@triton.jit
def _masses(y, most):
    """See core.sampling.filtering. most: the row's largest logit."""
    power = tl.where(y == most, 0.0, (y - most) * _LOG2E)
    return (tl.exp2(power) * _UNIT).to(tl.int64)


@triton.jit
def _most_of(mosts, row, parts, PARTS: tl.constexpr):
    """The largest logit of a row, ordered; SICK where one is NaN."""
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(mosts + row * parts + part, mask=part < parts, other=LOWEST), axis=0)


@triton.jit
def _searched(filters, apart, row, mosts, goals, parts, ROOM: tl.constexpr, PARTS: tl.constexpr, STAGE: tl.constexpr):
    """Whether a row's cut is searched for in a stage; its largest logit, ordered, where that matters; its top_k and its top_p.

    Stage 0 is top_k's, and top_p's without one; stage 1 is top_p's after a top_k that keeps more than a list may hold.
    """
    scale = tl.load(filters + row)
    top_k, top_p = tl.load(filters + apart + row).to(tl.int32), tl.load(filters + 2 * apart + row)
    order = tl.full([], LOWEST, tl.int32)
    if STAGE == 0:
        wanted = (scale > 0) & ((top_k > 0) | (top_p < 1))
    else:
        wanted = (scale > 0) & (top_k > ROOM // 8) & (top_p < 1)
        if wanted:
            wanted = tl.load(goals + row) > 0
    if wanted:
        order = _most_of(mosts, row, parts, PARTS)
        wanted = (order > LOWEST) & (order < SICK)
    return wanted, order, scale, top_k, top_p


@triton.jit
def _goal(masses, goals, row, top_k, top_p, STAGE: tl.constexpr):
    """What the kept tokens reach, int64, and whether it is a mass."""
    weigh = top_k <= 0
    goal = top_k.to(tl.int64)
    if STAGE == 1:
        weigh = top_k > 0
        goal = tl.load(goals + row)
    elif weigh:
        goal = _target(tl.load(masses + row * _TALLIES + 7), top_p)
    return goal, weigh


@triton.jit
def _target(total, top_p):
    """The mass that the kept tokens reach of a total."""
    return tl.maximum((top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _digit(counts, masses, row, goal, weigh, ROUND: tl.constexpr):
    """How many of a round's eight levels fall short of the goal; the tokens at the next; tokens and mass at the last of those."""
    level = tl.arange(0, 8)
    at = row * _TALLIES + 8 * ROUND + level
    count, mass = tl.load(counts + at), tl.load(masses + at)
    amount = tl.where(weigh, mass, count.to(tl.int64))
    digit = tl.minimum(tl.sum((amount < goal).to(tl.int32), axis=0), 7)
    reached = tl.sum(tl.where(level == digit, count, 0), axis=0)
    above = tl.sum(tl.where(level == digit - 1, count, 0), axis=0).to(tl.int64)
    return digit, reached, above, tl.sum(tl.where(level == digit - 1, mass, 0), axis=0)


@triton.jit
def _bracket(levels, counts, masses, row, goal, weigh, ROOM: tl.constexpr, STAGE: tl.constexpr):
    """Logits between which the cut lies, the first exclusive, the second inclusive; tokens and mass above the second.

    All above the first belong to the bracket where they are few, and those equal to it too where these are few as well. Else the
    cut may lie at the first itself.
    """
    high, reached, above, mass = _digit(counts, masses, row, goal, weigh, 0)
    index = high * 8 + 7
    if reached > ROOM:
        low, reached, nearer, nearer_mass = _digit(counts, masses, row, goal, weigh, 1 + STAGE)
        index = high * 8 + low
        above, mass = tl.where(low > 0, nearer, above), tl.where(low > 0, nearer_mass, mass)
    of_row = levels + row * _LEVELS
    first, top = _ordered(tl.load(of_row + index)), tl.full([], float("inf"), tl.float32)
    if reached <= ROOM:
        first = tl.maximum(first - 1, LOWEST)
    if (reached > ROOM) & (above > ROOM // 8):
        top = _value_of(_ordered(tl.load(of_row + index - 1)) - 1)
    else:
        above, mass = above * 0, mass * 0
    return _value_of(first), top, above, mass


@triton.jit(do_not_specialize=["stride", "apart", "size", "vocab_size"], do_not_specialize_on_alignment=["filters"])
def survey_rows(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]: scale, 0 where a row filters nothing; top_k, 0: all; top_p; log(min_p)
    mosts,  # int32 [rows, parts], written: a part's largest logit, ordered; SICK where one is NaN
    levels,  # float32 [rows, LEVELS], written
    counts,  # int32 [rows, TALLIES], set to 0
    masses,  # int64 [rows, TALLIES], set to 0
    best,  # int64 [rows], set to the least
    stride,
    apart,  # between the rows of filters
    size,  # logits of a part, a multiple of TURN
    vocab_size,
    PDL: tl.constexpr,
):
    """Find the largest logit, and rank a few to know at which a row is worth to be measured. Grid (rows, 1 + parts).

    The sample decides how soon the cut is found, never where it is.
    """
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1) - 1, tl.num_programs(1) - 1
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.load(filters + row)
    of_row = logits + row * stride
    if scale > 0:
        if part >= 0:
            most, sick = tl.full([_LANES], float("-inf"), tl.float32), tl.zeros([_LANES], tl.int32)
            for start in range(part * size, tl.minimum(part * size + size, vocab_size), _TURN):
                y = _turn(of_row, start, vocab_size, scale)
                most = tl.maximum(most, tl.max(y, axis=0))
                sick = tl.maximum(sick, tl.max((y != y).to(tl.int32), axis=0))
            order = tl.where(tl.max(sick, axis=0) > 0, SICK, _ordered(tl.max(most, axis=0)))
            tl.store(mosts + row * parts + part, order)
        else:
            tally = tl.arange(0, triton.next_power_of_2(_TALLIES))
            tl.store(counts + row * _TALLIES + tally, tally * 0, mask=tally < _TALLIES)
            tl.store(masses + row * _TALLIES + tally, (tally * 0).to(tl.int64), mask=tally < _TALLIES)
            tl.store(best + row, tl.full([], -0x8000000000000000, tl.int64))
            place, slot = tl.arange(0, _SAMPLE), tl.arange(0, 32)
            y = _values(of_row, _spread(place, vocab_size), vocab_size, scale)
            # A sort of so few takes longer than to compare each with each. Equal ones have the rank of their first.
            rank = tl.zeros([_SAMPLE], tl.int32)
            for start in range(0, _SAMPLE, 32):
                other = _values(of_row, _spread(start + slot, vocab_size), vocab_size, scale)
                rank += tl.sum((other[:, None] > y[None, :]).to(tl.int32), axis=0)
            # The likeliest tokens lie far apart and the rest close together: the first eight, then every ninth of the sample.
            for start in tl.static_range(0, _LEVELS, 8):
                level = start + tl.arange(0, 8)
                wanted = tl.where(level < 8, level, 9 * level - 56)
                chosen = tl.min(tl.where(rank[None, :] <= wanted[:, None], y[None, :], float("inf")), axis=1)
                tl.store(levels + row * _LEVELS + level, tl.where(level == _LEVELS - 1, float("-inf"), chosen))


@triton.jit
def _spread(place, vocab_size):
    """The columns of a sample: one of each 512th of the row, not always the same one of it."""
    return ((place * _SAMPLE + (place * 40503) % _SAMPLE).to(tl.int64) * vocab_size) // (_SAMPLE * _SAMPLE)


@triton.jit(do_not_specialize=["stride", "apart", "size", "vocab_size"], do_not_specialize_on_alignment=["filters"])
def measure_levels(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    mosts,  # int32 [rows, parts]
    levels,  # float32 [rows, LEVELS]
    counts,  # int32 [rows, TALLIES], a round's eight added to: tokens at or above its levels
    masses,  # int64 [rows, TALLIES], likewise where a mass is wanted
    goals,  # int64 [rows]
    stride,
    apart,
    size,
    vocab_size,
    ROUND: tl.constexpr,
    ROOM: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count what lies at or above eight levels. Grid (rows, parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    STAGE: tl.constexpr = 1 if ROUND == 2 else 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    parts = tl.num_programs(1)
    wanted, order, scale, top_k, top_p = _searched(filters, apart, row, mosts, goals, parts, ROOM, PARTS, STAGE)
    first, step = 7, 8
    if ROUND > 0:
        step = 1
        if wanted:
            goal, weigh = _goal(masses, goals, row, top_k, top_p, STAGE)
            high, reached, _, _ = _digit(counts, masses, row, goal, weigh, 0)
            first = high * 8
            wanted = reached > ROOM
    if wanted:
        index = tl.arange(0, 8)
        level = tl.load(levels + row * _LEVELS + first + index * step)[:, None, None]
        of_row, end = logits + row * stride, tl.minimum(part * size + size, vocab_size)
        out = row * _TALLIES + 8 * ROUND + index
        if (top_p < 1) & ((top_k <= 0) | (top_k > ROOM // 8)):
            most = _value_of(order)
            both = tl.zeros([8, _LANES], tl.int64)
            for start in range(part * size, end, _TURN):
                y = _turn(of_row, start, vocab_size, scale)
                amount = _masses(y, most) + _COUNT
                both += tl.sum(tl.where(y[None, :, :] >= level, amount[None, :, :], 0), axis=1)
            tl.atomic_add(counts + out, tl.sum((both >> 50).to(tl.int32), axis=1))
            tl.atomic_add(masses + out, tl.sum(both & (_COUNT - 1), axis=1))
        else:
            count = tl.zeros([8, _LANES], tl.int32)
            for start in range(part * size, end, _TURN):
                y = _turn(of_row, start, vocab_size, scale)
                count += tl.sum((y[None, :, :] >= level).to(tl.int32), axis=1)
            tl.atomic_add(counts + out, tl.sum(count, axis=1))
