"""Drawing from what top_k, top_p and min_p keep: the Triton kernels that gather a bracket's tokens, and race those that are kept.

See `level_kernels` for keys and cuts.
"""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.models.fused.draw_kernels import _log2_exponential, _philox, best_in_row
from headway.models.fused.level_kernels import _LEVELS, _LOG2E, _keys, _masses, _num_levels, _value_of, _values


@triton.jit(do_not_specialize=["stride", "apart", "units"], do_not_specialize_on_alignment=["filters"])
def gather_between(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    brackets,  # int64 [rows, 4]
    most_of,  # float32 [rows]
    offsets,  # int32 [rows, chunks]
    found,  # int64 [rows, ROOM], written: keys of the tokens in the bracket, where it holds no more
    sums,  # int64 [rows, chunks, 2], written: mass of all tokens, and of those above the bracket
    stride,
    apart,
    units,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    ROOM: tl.constexpr,
    COLUMN_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Put the tokens of a row's bracket side by side. Grid (rows, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.load(filters + row)
    top_k, top_p = tl.load(filters + apart + row), tl.load(filters + 2 * apart + row)
    if (scale > 0) & (_num_levels(top_k, top_p) > 0):
        low, high, count = tl.load(brackets + row * 4), tl.load(brackets + row * 4 + 1), tl.load(brackets + row * 4 + 2)
        column = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = column // UNIT < units
        y, _ = _values(logits + row * stride * UNIT, column, inside, scale)
        key = _keys(y, column, COLUMN_BITS)
        if top_p < 1:
            mass = tl.where(inside, _masses(y, tl.load(most_of + row)), 0)
            out = (row * tl.num_programs(1) + chunk) * 2
            tl.store(sums + out, tl.sum(mass, axis=0))
            tl.store(sums + out + 1, tl.sum(tl.where(key >= high, mass, 0), axis=0))
        if count <= ROOM:
            between = (inside & (key >= low) & (key < high)).to(tl.int32)
            place = tl.load(offsets + row * tl.num_programs(1) + chunk) + tl.cumsum(between, axis=0) - between
            tl.store(found + row * ROOM + place, key, mask=between > 0)


@triton.jit(do_not_specialize=["stride", "apart", "vocab_size"], do_not_specialize_on_alignment=["filters", "keys"])
def race_kept(
    logits,  # [rows, vocab_size]
    filters,  # float32 [4, rows]
    keys,  # int64 [rows]: of the draws
    counts,  # int32 [rows, chunks, LEVELS]
    mosts,  # float32 [rows, chunks]
    cuts,  # int64 [rows]
    floors,  # float32 [rows]
    scores,  # float32 [rows, chunks], written
    tokens,  # int64 [rows, chunks], written
    stride,
    apart,
    vocab_size,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    COLUMN_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`best_of_chunks` among the tokens that are kept. Grid (rows, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    counter = chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    first = counter // LANES * (4 * LANES) + counter % LANES
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scale = tl.load(filters + row)
    if scale > 0:
        out = row * tl.num_programs(1) + chunk
        cut, floor = tl.load(cuts + row), tl.load(floors + row)
        most, token = tl.full([], float("-inf"), tl.float32), chunk * BLOCK
        if tl.load(mosts + out) >= tl.maximum(floor, _value_of(cut >> COLUMN_BITS)):  # else none of the chunk is kept
            bits = _philox(counter, tl.load(keys + row).to(tl.uint64, bitcast=True))
            # A comparison suffices, for their columns are in order.
            for number in tl.static_range(4):
                column = first + number * LANES
                y, _ = _values(logits + row * stride, column, column < vocab_size, scale)
                kept = (column < vocab_size) & (_keys(y, column, COLUMN_BITS) >= cut) & (y >= floor)
                score = tl.where(kept, y * _LOG2E - _log2_exponential(bits[number]), float("-inf"))
                if number == 0:
                    best, at = score, column
                else:
                    better = score > best
                    best, at = tl.where(better, score, best), tl.where(better, column, at)
            most = tl.max(best, axis=0)
            token = tl.min(tl.where(best == most, at, 0x7FFFFFFF), axis=0)
        sick = tl.load(counts + out * _LEVELS + _LEVELS - 1)
        tl.store(scores + out, most)
        tl.store(tokens + out, tl.where(sick > 0, -1, token).to(tl.int64))


@triton.jit(do_not_specialize=["chunks"], do_not_specialize_on_alignment=["filters", "others"])
def best_of_kept(
    scores,  # float32 [rows, chunks]
    tokens,  # int64 [rows, chunks]
    filters,  # float32 [4, rows]
    others,  # int64 [rows]: tokens of the rows that filter nothing
    chosen,  # int64 [rows], written
    chunks,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`best_of_rows` for the rows that filter. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.load(filters + row) > 0:
        tl.store(chosen + row, best_in_row(scores, tokens, row, chunks, BLOCK))
    else:
        tl.store(chosen + row, tl.load(others + row))
