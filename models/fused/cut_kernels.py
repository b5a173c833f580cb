"""Where a row's kept tokens end: the Triton kernel that finds the last of them."""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.models.fused.level_kernels import _keys, _masses, _num_levels, _ordered, _value_of, _values


@triton.jit
def _measure(
    found, logits, pivots, count, whole, most, scale, BLOCK: tl.constexpr, COLUMN_BITS: tl.constexpr, WEIGH: tl.constexpr
):
    """How many tokens, int32, and what mass, int64, lie at or above each pivot. whole: of all logits, not of the keys found."""
    counts, masses = tl.zeros_like(pivots).to(tl.int32), tl.zeros_like(pivots)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        if whole:
            y, _ = _values(logits, at, inside, scale)
            key = _keys(y, at, COLUMN_BITS)
        else:
            key = tl.load(found + at, mask=inside, other=0)
            y = _value_of(key >> COLUMN_BITS)
        above = inside[None, :] & (key[None, :] >= pivots[:, None])
        counts += tl.sum(above.to(tl.int32), axis=1)
        if WEIGH:
            masses += tl.sum(tl.where(above, _masses(y, most)[None, :], 0), axis=1)
    return counts, masses


@triton.jit(do_not_specialize=["stride", "apart", "chunks", "vocab_size"], do_not_specialize_on_alignment=["filters"])
def cut_rows(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    brackets,  # int64 [rows, 4]
    most_of,  # float32 [rows]
    found,  # int64 [rows, ROOM]
    sums,  # int64 [rows, chunks, 2]
    cuts,  # int64 [rows], written: the least key that is kept
    floors,  # float32 [rows], written: the least logit that min_p keeps
    stride,
    apart,
    chunks,
    vocab_size,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROOM: tl.constexpr,
    COLUMN_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Search the bracket for the last token that is kept: PIVOTS keys at a time, at equal distances. Grid (rows).

    Where the bracket holds more tokens than there was room for, or rounding has misplaced it, all of the row is searched.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.load(filters + row)
    if scale > 0:
        top_k, top_p = tl.load(filters + apart + row), tl.load(filters + 2 * apart + row)
        most = tl.load(most_of + row)
        lowest = _ordered(tl.full([], float("-inf"), tl.float32)) << COLUMN_BITS
        highest = (_ordered(most) + 1) << COLUMN_BITS
        cut = lowest
        min_p = tl.load(filters + 3 * apart + row)
        tl.store(floors + row, tl.where(min_p == float("-inf"), min_p, most + min_p))  # a largest of +inf makes no NaN
        if _num_levels(top_k, top_p) > 0:
            of_row, keys = logits + row * stride, found + row * ROOM
            low, high = tl.load(brackets + row * 4), tl.load(brackets + row * 4 + 1)
            count, above = tl.load(brackets + row * 4 + 2).to(tl.int32), tl.load(brackets + row * 4 + 3).to(tl.int32)
            chunk = tl.arange(0, CHUNKS)
            at = (row * chunks + chunk) * 2
            total, mass_above = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
            if top_p < 1:
                total = tl.sum(tl.load(sums + at, mask=chunk < chunks, other=0), axis=0)
                mass_above = tl.sum(tl.load(sums + at + 1, mask=chunk < chunks, other=0), axis=0)
            step = tl.arange(0, PIVOTS) + 1
            whole = count > ROOM
            if whole:
                low, high, count, above, mass_above = lowest, highest, vocab_size, above * 0, mass_above * 0
            of_low = above + count  # tokens at or above low
            mass_low = total
            if top_p < 1:
                _, mass = _measure(keys, of_row, step * 0 + low, count, whole, most, scale, BLOCK, COLUMN_BITS, True)
                mass_low = mass_above + tl.max(mass, axis=0)
            cut = low
            if top_k > 0:
                wanted, end = top_k.to(tl.int32), high
                while (of_low > wanted) & (end - cut > 1):
                    pivots = cut + (end - cut) * step // (PIVOTS + 1)
                    if top_p < 1:
                        tokens, mass = _measure(keys, of_row, pivots, count, whole, most, scale, BLOCK, COLUMN_BITS, True)
                    else:
                        tokens, mass = _measure(keys, of_row, pivots, count, whole, most, scale, BLOCK, COLUMN_BITS, False)
                    tokens += above
                    enough = tokens >= wanted
                    cut = tl.max(tl.where(enough, pivots, cut), axis=0)
                    end = tl.min(tl.where(enough, end, pivots), axis=0)
                    of_low = tl.min(tl.where(enough, tokens, of_low), axis=0)
                    mass_low = tl.min(tl.where(enough, mass + mass_above, mass_low), axis=0)
                total = mass_low
            if top_p < 1:
                target = tl.maximum((top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
                end, of_end = high, above
                if (mass_above >= target) | (mass_low < target):
                    whole, count, above, mass_above = count >= 0, vocab_size, above * 0, mass_above * 0
                    end, of_end = highest, above
                    if top_k <= 0:
                        cut, of_low = lowest, vocab_size
                while (of_low - of_end > 1) & (end - cut > 1):
                    pivots = cut + (end - cut) * step // (PIVOTS + 1)
                    tokens, mass = _measure(keys, of_row, pivots, count, whole, most, scale, BLOCK, COLUMN_BITS, True)
                    tokens += above
                    enough = mass + mass_above >= target
                    cut = tl.max(tl.where(enough, pivots, cut), axis=0)
                    end = tl.min(tl.where(enough, end, pivots), axis=0)
                    of_low = tl.min(tl.where(enough, tokens, of_low), axis=0)
                    of_end = tl.max(tl.where(enough, of_end, tokens), axis=0)
        tl.store(cuts + row, cut)
