"""Where about the tokens end that top_k, top_p and min_p keep: the Triton kernels that bracket a row's cut.

A token's *key* is its logit's bits in rising order, then its id in falling order: keys are unique, and a token is kept if its key
is at least its row's *cut*. Masses are whole numbers (core.sampling.filtering), so no order of adding changes them.
"""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.sampling.filtering import LOG2E, UNIT_MASS

_LOG2E = tl.constexpr(LOG2E)
_UNIT = tl.constexpr(float(UNIT_MASS))
LEVELS = 16
"""Numbers a row that a search begins with: 15 logits out of a sample, in falling order, and the sample's largest."""
SAMPLE = 512
"""Logits of the sample."""
FEW = 2048
"""Up to so large a top_k the kept tokens are so few that all above one level are looked at."""
_LEVELS, _SAMPLE, _FEW = tl.constexpr(LEVELS), tl.constexpr(SAMPLE), tl.constexpr(FEW)


@triton.jit
def _values(logits, column, inside, scale):
    """Logits over their temperature, float32, -inf where one is NaN or outside; and which are NaN. No -0: it equals 0."""
    x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    sick = x != x
    return tl.where(sick, float("-inf"), x * scale + 0.0), sick


@triton.jit
def _ordered(y):
    """Whole numbers, int64, that grow as float32 numbers do."""
    bits = y.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value_of(order):
    """The float32 number of what `_ordered` made."""
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _keys(y, column, COLUMN_BITS: tl.constexpr):
    return (_ordered(y) << COLUMN_BITS) + (((1 << COLUMN_BITS) - 1) - column)


@triton.jit
def _masses(y, most):
    """See core.sampling.filtering. most: the row's largest logit."""
    power = tl.where(y == most, 0.0, (y - most) * _LOG2E)
    return (tl.exp2(power) * _UNIT).to(tl.int64)


@triton.jit
def _num_levels(top_k, top_p):
    """How many levels a row is measured at; 0: it is not searched, for min_p needs the largest logit alone."""
    spread = tl.where(top_p < 1, _LEVELS - 1, 0)
    return tl.where(top_k > 0, tl.where(top_k <= _FEW, 2, _LEVELS - 1), spread)


@triton.jit(do_not_specialize=["stride", "apart", "vocab_size"], do_not_specialize_on_alignment=["filters"])
def sample_levels(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]: scale, 0 where a row filters nothing; top_k, 0: all; top_p; log(min_p)
    levels,  # float32 [rows, LEVELS], written
    stride,
    apart,  # between the rows of filters
    vocab_size,
    PDL: tl.constexpr,
):
    """Rank a few logits of a row, to know which it is worth to be measured at. Grid (rows).

    They decide how soon the cut is found, never where it is.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.load(filters + row)
    if scale > 0:
        top_k = tl.load(filters + apart + row)
        of_row = logits + row * stride
        place, slot = tl.arange(0, _SAMPLE), tl.arange(0, 64)
        y, _ = _values(of_row, place.to(tl.int64) * vocab_size // _SAMPLE, place >= 0, scale)
        # A sort of so few takes longer than to compare each with each.
        rank = tl.zeros([_SAMPLE], tl.int32)
        for start in range(0, _SAMPLE, 64):
            other = start + slot
            # A name of its own for what is not read: Triton lets no name change its shape within a loop.
            z, _z = _values(of_row, other.to(tl.int64) * vocab_size // _SAMPLE, other >= 0, scale)
            equal = (z[None, :] == y[:, None]) & (other[None, :] < place[:, None])
            rank += tl.sum(((z[None, :] > y[:, None]) | equal).to(tl.int32), axis=1)
        expected = top_k * _SAMPLE / vocab_size
        first = (expected + 4 * tl.sqrt(expected)).to(tl.int32) + 6  # all but surely below the k-th
        few = (top_k > 0) & (top_k <= _FEW)
        # The likeliest tokens lie far apart and the rest close together: 1, 2, 9, 28, then every 40th of the sample.
        level = tl.arange(0, _LEVELS)
        spread = tl.where(level < 4, level * level * level + 1, 40 * level - 92)
        wanted = tl.minimum(tl.where(few, first * (1 + 3 * level), spread), _SAMPLE - 1)
        wanted = tl.where(level == _LEVELS - 1, 0, wanted)
        chosen = tl.max(tl.where(rank[None, :] == wanted[:, None], y[None, :], float("-inf")), axis=1)
        tl.store(levels + row * _LEVELS + level, chosen)


@triton.jit(do_not_specialize=["stride", "apart", "units"], do_not_specialize_on_alignment=["filters"])
def measure_levels(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    levels,  # float32 [rows, LEVELS]
    counts,  # int32 [rows, chunks, LEVELS], written: tokens of a chunk at or above each level; last, whether one is NaN
    masses,  # float32 [rows, chunks, LEVELS], written: about their mass, by a unit of the row's; last, that of all
    mosts,  # float32 [rows, chunks], written: the chunk's largest
    stride,  # in UNITs, as the next but one
    apart,
    units,  # the vocabulary
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,  # logits that can be read at once
    PDL: tl.constexpr,
):
    """Count the tokens above each level. Grid (rows, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.load(filters + row)
    if scale > 0:
        top_k, top_p = tl.load(filters + apart + row), tl.load(filters + 2 * apart + row)
        column = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = column // UNIT < units
        y, sick = _values(logits + row * stride * UNIT, column, inside, scale)
        out = (row * tl.num_programs(1) + chunk) * _LEVELS
        tl.store(mosts + row * tl.num_programs(1) + chunk, tl.max(y, axis=0))
        tl.store(counts + out + _LEVELS - 1, tl.max(sick.to(tl.int32), axis=0))
        near = tl.load(levels + row * _LEVELS + _LEVELS - 1)
        mass = tl.exp2(tl.where(y == near, 0.0, tl.minimum((y - near) * _LOG2E, 100.0)))
        if top_p < 1:
            tl.store(masses + out + _LEVELS - 1, tl.sum(mass, axis=0))
        for level in range(_num_levels(top_k, top_p)):
            above = inside & (y >= tl.load(levels + row * _LEVELS + level))
            tl.store(counts + out + level, tl.sum(above.to(tl.int32), axis=0))
            if top_p < 1:
                tl.store(masses + out + level, tl.sum(tl.where(above, mass, 0.0), axis=0))


@triton.jit(do_not_specialize=["apart", "chunks", "vocab_size"], do_not_specialize_on_alignment=["filters"])
def bracket_rows(
    filters,  # float32 [4, rows]
    levels,  # float32 [rows, LEVELS]
    counts,  # int32 [rows, chunks, LEVELS]
    masses,  # float32 [rows, chunks, LEVELS]
    mosts,  # float32 [rows, chunks]
    brackets,  # int64 [rows, 4], written: keys from which and below which the cut lies; tokens between; tokens above
    most_of,  # float32 [rows], written: the row's largest logit
    offsets,  # int32 [rows, chunks], written: tokens between in the chunks before
    apart,
    chunks,
    vocab_size,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,  # chunks rounded up to a power of two
    COLUMN_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the levels between which a row's cut lies. Grid (rows). Masses here are rounded: `cut_rows` tries what is found."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.load(filters + row)
    if scale > 0:
        top_k, top_p = tl.load(filters + apart + row), tl.load(filters + 2 * apart + row)
        limited = top_k > 0
        measured = _num_levels(top_k, top_p)
        chunk, level = tl.arange(0, CHUNKS), tl.arange(0, _LEVELS)
        there = chunk < chunks
        most = tl.max(tl.load(mosts + row * chunks + chunk, mask=there, other=float("-inf")), axis=0)
        at = (row * chunks + chunk)[:, None] * _LEVELS + level[None, :]
        known = level < measured
        count = tl.load(counts + at, mask=there[:, None] & known[None, :], other=0)
        of_row = tl.sum(count, axis=0)
        wanted = tl.where(limited, top_k.to(tl.int32), vocab_size)
        lower = tl.min(tl.where(known & (of_row >= wanted), level, measured), axis=0)
        upper = lower - 1
        if top_p < 1:
            mass = tl.sum(tl.load(masses + at, mask=there[:, None] & known[None, :], other=0.0), axis=0)
            last = (row * chunks + chunk) * _LEVELS + _LEVELS - 1
            total = tl.sum(tl.load(masses + last, mask=there, other=0.0), axis=0)
            # Of what top_k keeps no less than what lies above its own bracket.
            least = tl.where(limited, tl.sum(tl.where(level == upper, mass, 0.0), axis=0), total)
            reached = tl.min(tl.where(known & (mass >= top_p * least), level, measured), axis=0)
            upper = tl.where(limited, tl.minimum(upper, reached - 1), reached - 1)
            lower = tl.where(limited, lower, reached)
        logit = tl.load(levels + row * _LEVELS + level, mask=known, other=float("-inf"))
        low = tl.max(tl.where(level == lower, logit, float("-inf")), axis=0)
        high = tl.max(tl.where(level == upper, logit, float("-inf")), axis=0)
        above = tl.sum(tl.where(level == upper, of_row, 0), axis=0)
        size = tl.maximum(tl.minimum(vocab_size - chunk * BLOCK, BLOCK), 0)
        from_low = tl.where(lower < measured, tl.sum(tl.where(level[None, :] == lower, count, 0), axis=1), size)
        between = from_low - tl.sum(tl.where(level[None, :] == upper, count, 0), axis=1)
        tl.store(offsets + row * chunks + chunk, tl.cumsum(between, axis=0) - between, mask=there)
        tl.store(most_of + row, most)
        tl.store(brackets + row * 4, _ordered(low) << COLUMN_BITS)
        tl.store(brackets + row * 4 + 1, tl.where(upper < 0, _ordered(most) + 1, _ordered(high)) << COLUMN_BITS)
        tl.store(brackets + row * 4 + 2, tl.sum(between, axis=0).to(tl.int64))
        tl.store(brackets + row * 4 + 3, above.to(tl.int64))
