"""Triton kernels of a rank that has a part of the vocabulary: its best token as a number, and the best of all ranks'."""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.sampling.draw_kernels import best_in_row, gumbel_argmax

_LOW: tl.constexpr = tl.constexpr(0xFFFFFFFF)
_NAN: tl.constexpr = tl.constexpr(0x7FC00000)
_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit(do_not_specialize=["stride", "begin", "end"], do_not_specialize_on_alignment=["scales", "keys"])
def argmax_of_part_chunks(
    logits,  # [rows, end - begin]
    scales,  # float32 [rows] (NOISE, as the next one)
    keys,  # int64 [rows]
    scores,  # float32 [rows, chunks], written: the largest of each chunk
    tokens,  # int64 [rows, chunks], written: its first token; -1 where the chunk holds a NaN
    stride,
    begin,  # tokens of this rank
    end,
    BLOCK: tl.constexpr,  # as in argmax_of_chunks
    LANES: tl.constexpr,
    NOISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """`argmax_of_chunks` of some consecutive tokens of the vocabulary, whose noise is that of their ids. Grid (rows, chunks).

    The first chunk begins with the group of 4 LANES tokens that `begin` lies in.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    counter = begin // (4 * LANES) * LANES + chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    first = counter // LANES * (4 * LANES) + counter % LANES
    own = logits + row * stride - begin
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if NOISE:
        scale = tl.load(scales + row) * 1.4426950408889634
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        if scale > 0:
            best, at, has_nan = gumbel_argmax(own, counter, first, begin, end, scale, key, LANES, True, True)
        else:
            best, at, has_nan = gumbel_argmax(own, counter, first, begin, end, scale, key, LANES, False, True)
    else:
        best, at, has_nan = gumbel_argmax(own, counter, first, begin, end, 1.0, 0, LANES, False, True)
    most = tl.max(best, axis=0)
    token = tl.min(tl.where(best == most, at, 0x7FFFFFFF), axis=0)
    out = row * tl.num_programs(1) + chunk
    tl.store(scores + out, most)
    tl.store(tokens + out, tl.where(tl.max(has_nan.to(tl.int32), axis=0) > 0, -1, token.to(tl.int64)))


@triton.jit(do_not_specialize=["chunks"])
def pack_best_of_rows(
    scores,  # float32 [rows, chunks]
    tokens,  # int64 [rows, chunks]
    numbers,  # int64 [rows], written: see core.sampling.candidates.pack
    chunks,
    BLOCK: tl.constexpr,  # chunks rounded up to a power of two
    PDL: tl.constexpr,
):
    """Reduce the chunks of each row to the number of its best token. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    most, best, has_nan = best_in_row(scores, tokens, row, chunks, BLOCK)
    # Equal scores have equal bits: -0 becomes 0.
    bits = tl.where(has_nan, _NAN, tl.where(most == 0.0, 0.0, most).to(tl.int32, bitcast=True))
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tl.store(numbers + row, (ordered.to(tl.int64) << 32) | (_LOW - tl.where(has_nan, 0, best)))


@triton.jit(do_not_specialize=["rows", "ranks"])
def choose_winners(
    numbers,  # int64 [ranks, rows]
    chosen,  # int64 [rows], written
    rows,
    ranks,
    BLOCK: tl.constexpr,  # ranks rounded up to a power of two
    PDL: tl.constexpr,
):
    """Take the token of each row's largest number, -1 where its score is NaN. Grid (rows)."""
    row, rank = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    best = tl.max(tl.load(numbers + rank * rows + row, mask=rank < ranks, other=-0x8000000000000000), axis=0)
    tl.store(chosen + row, tl.where((best >> 32) > _INFINITY, -1, _LOW - (best & _LOW)))
