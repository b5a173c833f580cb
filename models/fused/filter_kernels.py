"""Drawing from what top_k, top_p and min_p keep: the Triton kernels that list a bracket's tokens, and race those that are kept.

See `level_kernels` for brackets and turns.
"""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.models.fused.draw_kernels import _log2_exponential, _philox
from headway.models.fused.level_kernels import (
    _LENGTHS,
    _LOG2E,
    _RACED,
    _STEPS,
    _TALLIES,
    _TURN,
    SICK,
    _bracket,
    _goal,
    _ordered,
    _searched,
    _tile,
    _turn,
    _values,
)

_COUNTERS = tl.constexpr(256)
"""Of four numbers each: one turn's."""


@triton.jit(do_not_specialize=["stride", "apart", "size", "vocab_size"], do_not_specialize_on_alignment=["filters"])
def list_between(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    mosts,  # int32 [rows, parts]
    levels,  # float32 [rows, LEVELS]
    counts,  # int32 [rows, TALLIES], the list's length added to
    masses,  # int64 [rows, TALLIES]
    goals,  # int64 [rows]
    found,  # int64 [rows, ROOM], written, in any order: logits, ordered, and ids of the tokens in the bracket
    ties,  # int32 [rows, parts], written: tokens of a part at the bracket's lower end
    stride,
    apart,
    size,
    vocab_size,
    STAGE: tl.constexpr,
    ROOM: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Put the tokens of a row's bracket side by side. Grid (rows, parts)."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    wanted, _most, scale, top_k, top_p = _searched(filters, apart, row, mosts, goals, parts, ROOM, PARTS, STAGE)
    if wanted:
        goal, weigh = _goal(masses, goals, row, top_k, top_p, STAGE)
        bottom, top, _above, _mass = _bracket(levels, counts, masses, row, goal, weigh, ROOM, STAGE)
        of_row, end = logits + row * stride, tl.minimum(part * size + size, vocab_size)
        mine, tied = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32)
        for start in range(part * size, end, _TURN):
            y = _turn(of_row, start, vocab_size, scale)
            mine += tl.sum(((y > bottom) & (y <= top)).to(tl.int32), axis=0)
            tied += tl.sum((y == bottom).to(tl.int32), axis=0)
        tl.store(ties + row * parts + part, tl.sum(tied, axis=0))
        count = tl.sum(mine, axis=0)
        if count > 0:
            # One request for room; then each thread reads its logits again, and knows where its own go.
            place = tl.atomic_add(counts + row * _TALLIES + _LENGTHS + STAGE, count) + tl.cumsum(mine, axis=0) - mine
            shift = 4 * tl.arange(0, _STEPS)[:, None]
            for start in range(part * size, end, _TURN):
                y = _turn(of_row, start, vocab_size, scale)
                inside = (y > bottom) & (y <= top)
                # Each of eight steps has four bits, in which those before it are counted.
                before = tl.sum(tl.where(inside, 0x11111110 << shift, 0), axis=0)[None, :] >> shift & 15
                at = place[None, :] + before
                key = (_ordered(y).to(tl.int64) << 32) + (start + _tile())
                room = inside & (at < ROOM)
                # As a row: versions of the compiler differ in which threads they let store a tile.
                at, key, room = tl.reshape(at, [_TURN]), tl.reshape(key, [_TURN]), tl.reshape(room, [_TURN])
                tl.store(found + row * ROOM + at, key, mask=room)
                place += tl.sum(inside.to(tl.int32), axis=0)


@triton.jit(
    do_not_specialize=["stride", "apart", "size", "vocab_size"], do_not_specialize_on_alignment=["filters", "keys", "chosen"]
)
def race_kept(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    keys,  # int64 [rows]: of the draws
    counts,  # int32 [rows, TALLIES], the last counts the programs of a row that are done
    floors,  # float32 [rows]
    lasts,  # int32 [rows]
    best,  # int64 [rows]: the largest score so far, ordered, and its token
    chosen,  # int64 [rows], written by a row's last program
    stride,
    apart,
    size,
    vocab_size,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`best_of_chunks` among the tokens that are kept, and `best_of_rows`. Grid (rows, parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.load(filters + row)
    if scale > 0:
        last = tl.load(lasts + row)
        if last >= 0:
            floor, key = tl.load(floors + row), tl.load(keys + row).to(tl.uint64, bitcast=True)
            of_row = logits + row * stride
            most = tl.full([_COUNTERS], float("-inf"), tl.float32)
            token = part * size + tl.zeros([_COUNTERS], tl.int32)
            for start in range(part * size, tl.minimum(part * size + size, vocab_size), _TURN):
                if tl.max(tl.max(_turn(of_row, start, vocab_size, scale), axis=0), axis=0) >= floor:
                    counter = start // 4 + tl.arange(0, _COUNTERS)
                    first = counter // LANES * (4 * LANES) + counter % LANES
                    bits = _philox(counter, key)
                    for number in tl.static_range(4):
                        column = first + number * LANES
                        y = _values(of_row, column, vocab_size, scale)
                        kept = (column < vocab_size) & ((y > floor) | ((y == floor) & (column <= last)))
                        score = tl.where(kept, y * _LOG2E - _log2_exponential(bits[number]), float("-inf"))
                        # A comparison suffices, for a thread's columns are in order.
                        better = score > most
                        most, token = tl.where(better, score, most), tl.where(better, column, token)
            score = tl.max(most, axis=0)
            at = tl.min(tl.where(most == score, token, SICK), axis=0)
            tl.atomic_max(best + row, (_ordered(score).to(tl.int64) << 32) + (at ^ SICK))
            if tl.atomic_add(counts + row * _TALLIES + _RACED, 1) == tl.num_programs(1) - 1:
                winner = tl.atomic_max(best + row, tl.full([], -0x8000000000000000, tl.int64))
                tl.store(chosen + row, (winner & SICK) ^ SICK)
