"""Where a row's kept tokens end: the Triton kernel that finds the last of them, and draws where it has all of them at hand."""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.models.fused.draw_kernels import _log2_exponential, _philox
from headway.models.fused.level_kernels import (
    _LENGTHS,
    _LOG2E,
    _TALLIES,
    LOWEST,
    SICK,
    _bracket,
    _goal,
    _masses,
    _most_of,
    _ordered,
    _searched,
    _target,
    _value_of,
    _values,
)

_BLOCK = tl.constexpr(4096)


@triton.jit
def _amount(order, mass, pivot, of_row, vocab_size, scale, most, whole, WEIGH: tl.constexpr):
    """Tokens, or their mass, int64, at or above a pivot: of a list's, or, slowly, of the whole row."""
    if whole:
        amount = tl.full([], 0, tl.int64)
        for start in range(0, vocab_size, _BLOCK):
            y = _values(of_row, start + tl.arange(0, _BLOCK), vocab_size, scale)
            above = _ordered(y) >= pivot
            if WEIGH:
                amount += tl.sum(tl.where(above, _masses(y, most), 0), axis=0)
            else:
                amount += tl.sum(above.to(tl.int64), axis=0)
    else:
        if WEIGH:
            amount = tl.sum(tl.where(order >= pivot, mass, 0), axis=0)
        else:
            amount = tl.sum((order >= pivot).to(tl.int32), axis=0).to(tl.int64)
    return amount


@triton.jit
def _search(order, mass, above, low, end, goal, of_row, vocab_size, scale, most, whole, WEIGH: tl.constexpr):
    """The last number from low on and below end at or above which the goal is reached, and the amount above it.

    above: what lies at or above end and in no list. At low the goal is reached, at end it is not.
    """
    over, turn = above, tl.full([], 1, tl.int32)
    while end - low > 1:
        pivot = low + (end - low) // 2
        if (turn % 4 == 0) & (whole == 0):  # lest the gap be halved on and on between tokens of one logit and the next
            nearest = tl.max(tl.where(order < end, order, -SICK), axis=0).to(tl.int64)
            pivot = tl.maximum(nearest, low + 1)
        amount = above + _amount(order, mass, pivot, of_row, vocab_size, scale, most, whole, WEIGH)
        enough = amount >= goal
        low, end = tl.where(enough, pivot, low), tl.where(enough, end, pivot)
        over = tl.where(enough, over, amount)
        turn += 1
    return low, over


@triton.jit
def _nth(of_row, column, vocab_size, scale, value, number):
    """The column of the number-th token of a value, from a column on."""
    last = column * 0
    while (number > 0) & (column < vocab_size):
        at = column + tl.arange(0, _BLOCK)
        equal = (_values(of_row, at, vocab_size, scale) == value) & (at < vocab_size)
        count = tl.sum(equal.to(tl.int32), axis=0)
        if count >= number:
            last = tl.min(tl.where(equal & (tl.cumsum(equal.to(tl.int32), axis=0) == number), at, SICK), axis=0)
        number -= count
        column += _BLOCK
    return last


@triton.jit(
    do_not_specialize=["stride", "apart", "size", "parts", "vocab_size"],
    do_not_specialize_on_alignment=["filters", "keys", "others", "chosen"],
)
def cut_rows(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    keys,  # int64 [rows]: of the draws
    others,  # int64 [rows]: tokens of the rows that filter nothing
    mosts,  # int32 [rows, parts]
    levels,  # float32 [rows, LEVELS]
    counts,  # int32 [rows, TALLIES]
    masses,  # int64 [rows, TALLIES]
    found,  # int64 [rows, ROOM]
    ties,  # int32 [rows, parts]
    goals,  # int64 [rows], written in stage 0: the mass that top_p keeps where stage 1 has to find its cut, else 0
    floors,  # float32 [rows], written: the least logit that is kept
    lasts,  # int32 [rows], written: the last token of that logit that is kept; -1: the row has its token
    chosen,  # int64 [rows], written where the list holds all tokens that are kept
    stride,
    apart,
    size,
    parts,
    vocab_size,
    STAGE: tl.constexpr,
    ROOM: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Halve the bracket until the last logit that is kept is found, then the last token of that logit. Grid (rows).

    Where a list had no room for its tokens, since the sample misled (a row in 100,000), all of the row is read for each halving.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    wanted, order_of_most, scale, top_k, top_p = _searched(filters, apart, row, mosts, goals, parts, ROOM, PARTS, STAGE)
    if STAGE == 0:
        order_of_most = _most_of(mosts, row, parts, PARTS)
    if wanted | ((STAGE == 0) & (scale > 0)):
        most = _value_of(order_of_most)
        floor, last = tl.full([], float("-inf"), tl.float32), tl.full([], SICK, tl.int32)
        token, later = tl.full([], -1, tl.int64), tl.full([], 0, tl.int64)
        min_p = tl.load(filters + 3 * apart + row)
        least = tl.where(min_p == float("-inf"), min_p, most + min_p)  # a largest of +inf makes no NaN
        has_token = order_of_most == SICK
        if wanted:
            of_row = logits + row * stride
            goal, weigh = _goal(masses, goals, row, top_k, top_p, STAGE)
            bottom, top, above, mass_above = _bracket(levels, counts, masses, row, goal, weigh, ROOM, STAGE)
            length = tl.load(counts + row * _TALLIES + _LENGTHS + STAGE)
            whole = length > ROOM
            if whole:
                bottom, top, above, mass_above = least * 0 + float("-inf"), most, above * 0, mass_above * 0
            slot = tl.arange(0, ROOM)
            key = found + row * ROOM + slot
            order = (tl.load(key, mask=slot < length, other=LOWEST * 2**32) >> 32).to(tl.int32)
            mass = tl.zeros([ROOM], tl.int64)
            if top_p < 1:
                mass = _masses(_value_of(order), most)
            low, end = _ordered(bottom).to(tl.int64), _ordered(tl.minimum(top, most)).to(tl.int64) + 1
            all_above = top >= most
            kept = tl.full([], 0, tl.int64)
            if not weigh:
                low, over = _search(
                    order, mass, above.to(tl.int64), low, end, goal, of_row, vocab_size, scale, most, whole, False
                )
                kept = goal - over
            if top_p < 1:
                if not weigh:
                    of_above = mass_above + _amount(order, mass, low + 1, of_row, vocab_size, scale, most, whole, True)
                    goal = _target(of_above + kept * _masses(_value_of(low.to(tl.int32)), most), top_p)
                if weigh | all_above:
                    low, over = _search(order, mass, mass_above, low, end, goal, of_row, vocab_size, scale, most, whole, True)
                    unit = tl.maximum(_masses(_value_of(low.to(tl.int32)), most), 1)
                    kept = (goal - over + unit - 1) // unit
                else:
                    later = goal
            order_of_floor = low.to(tl.int32)
            floor = _value_of(order_of_floor)
            if low > LOWEST:
                tied = order == order_of_floor
                count = tl.sum(tied.to(tl.int32), axis=0)
                number = kept.to(tl.int32)
                if whole | (count == 0):
                    # In no list, but counted a part.
                    column = number * 0
                    if not whole:
                        part = tl.arange(0, PARTS)
                        tie = tl.load(ties + row * parts + part, mask=part < parts, other=0)
                        before = tl.cumsum(tie, axis=0) - tie
                        mine = (before < number) & (before + tie >= number)
                        column = tl.sum(tl.where(mine, part, 0), axis=0) * size
                        number -= tl.sum(tl.where(mine, before, 0), axis=0)
                    last = _nth(of_row, column, vocab_size, scale, floor, number)
                elif count > number:
                    upward = tl.where(tied, tl.load(key, mask=tied, other=0).to(tl.int32) ^ SICK, -1)
                    least_id = low * 0 - vocab_size + SICK
                    downward, _ = _search(
                        upward, mass, kept * 0, least_id, least_id + vocab_size + 1, number.to(tl.int64), of_row,
                        vocab_size, scale, most, whole, False,
                    )  # fmt: skip
                    last = downward.to(tl.int32) ^ SICK
            if all_above & (whole == 0) & (later == 0) & ((low > _ordered(bottom)) | (low == LOWEST)):
                y, column = _value_of(order), tl.load(key, mask=slot < length, other=0).to(tl.int32)
                remains = (slot < length) & ((y > floor) | ((y == floor) & (column <= last))) & (y >= least)
                number_of = column // LANES
                bits = _philox(number_of // 4 * LANES + column % LANES, tl.load(keys + row).to(tl.uint64, bitcast=True))
                word = number_of % 4
                drawn = tl.where(word < 2, tl.where(word == 0, bits[0], bits[1]), tl.where(word == 2, bits[2], bits[3]))
                score = tl.where(remains, y * _LOG2E - _log2_exponential(drawn), float("-inf"))
                token = tl.min(tl.where(remains & (score == tl.max(score, axis=0)), column, SICK), axis=0).to(tl.int64)
                has_token = low >= LOWEST
        if STAGE == 0:
            tl.store(goals + row, later)
        if has_token:
            tl.store(chosen + row, token)
        tl.store(floors + row, tl.maximum(floor, least))
        tl.store(lasts + row, tl.where(has_token, -1, tl.where(floor >= least, last, SICK)))
    elif STAGE == 0:
        tl.store(chosen + row, tl.load(others + row))
