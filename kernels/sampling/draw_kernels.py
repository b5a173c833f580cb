"""Triton kernels that choose one token per row in one pass over the logits, and compare drafts with tokens."""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.runtime.triton_launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _philox(counter, key):
    """Philox4x32-7 random bits (core.sampling.sampler): four uint32 tiles of counter's shape. counter: int32; key: one uint64."""
    left, right = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    a = counter.to(tl.uint32)
    b, c, d = tl.zeros_like(a), tl.zeros_like(a), tl.zeros_like(a)
    for _ in tl.static_range(7):
        first, third = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57  # one instruction each, high half and low
        a, b = (third >> 32).to(tl.uint32) ^ b ^ left, third.to(tl.uint32)
        c, d = (first >> 32).to(tl.uint32) ^ d ^ right, first.to(tl.uint32)
        left, right = left + 0x9E3779B9, right + 0xBB67AE85
    return a, b, c, d


@triton.jit
def _log2(x):
    """The GPU's own instruction, whose error near 1 is 2^-22; tl.log2 takes 20 instructions to be more exact than is needed."""
    if _INTERPRETED:  # which knows no libdevice
        y = tl.log2(x)
    else:
        y = libdevice.fast_log2f(x)
    return y


@triton.jit
def _log2_exponential(bits):
    """log2(e / log 2) for an Exp(1) number e made from 32 random bits; core.sampling.sampler bounds the uniform number."""
    uniform = bits.to(tl.float32) * 2.3283062977608182e-10 + 1.1641532182693481e-10
    # log(1 - u) of a small u has lost its digits in 1 - u, and the instruction's absolute error counts: a series, which at the
    # border is as exact as the logarithm beyond, about 3e-6. Times log2(e), as all else.
    series = uniform * (-1.442695041 - uniform * (0.72134752 + uniform * (0.480898347 + uniform * 0.36067376)))
    return _log2(-tl.where(uniform < 0.0625, series, _log2(1 - uniform)))


@triton.jit
def gumbel_argmax(logits, counter, first, begin, end, scale, key, LANES: tl.constexpr, NOISE: tl.constexpr, PART: tl.constexpr):
    """The largest score of the four columns of each counter, its column, and whether one of the logits is NaN.

    Columns are tokens, up to `end`, and with PART from `begin` on.
    """
    if NOISE:
        bits = _philox(counter, key)
    # A comparison suffices, since the columns are in order.
    for number in tl.static_range(4):
        column = first + number * LANES
        inside = column < end
        if PART:
            inside = inside & (column >= begin)
        x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        score = x
        if NOISE:
            score = x * scale - _log2_exponential(bits[number])
        if number == 0:
            best, at, has_nan = score, column, x != x
        else:
            better = score > best
            best, at, has_nan = tl.where(better, score, best), tl.where(better, column, at), has_nan | (x != x)
    return best, at, has_nan


@triton.jit(do_not_specialize=["stride", "vocab_size"], do_not_specialize_on_alignment=["scales", "keys"])
def argmax_of_chunks(
    logits,  # [rows, vocab_size]
    scales,  # float32 [rows] (NOISE, as the next one)
    keys,  # int64 [rows]
    scores,  # float32 [rows, chunks], written: the largest of each chunk
    tokens,  # int64 [rows, chunks], written: its first column; -1 where the chunk holds a NaN
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,  # see core.sampling.sampler; BLOCK is a multiple of 4 LANES
    NOISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Argmax of each chunk of each row. Grid (rows, chunks).

    The score is the logit or, with NOISE, (logit * scale - log(e)) / log(2) with e ~ Exp(1): a draw by Gumbel-max
    (core.sampling.sampler.draw). A row of scale 0 takes the logit alone, at half the cost.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    counter = chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    first = counter // LANES * (4 * LANES) + counter % LANES
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if NOISE:
        scale = tl.load(scales + row) * 1.4426950408889634
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        if scale > 0:
            best, at, has_nan = gumbel_argmax(
                logits + row * stride, counter, first, 0, vocab_size, scale, key, LANES, True, False
            )
        else:
            best, at, has_nan = gumbel_argmax(
                logits + row * stride, counter, first, 0, vocab_size, scale, key, LANES, False, False
            )
    else:
        best, at, has_nan = gumbel_argmax(logits + row * stride, counter, first, 0, vocab_size, 1.0, 0, LANES, False, False)
    most = tl.max(best, axis=0)
    token = tl.min(tl.where(best == most, at, 0x7FFFFFFF), axis=0)
    out = row * tl.num_programs(1) + chunk
    tl.store(scores + out, most)
    tl.store(tokens + out, tl.where(tl.max(has_nan.to(tl.int32), axis=0) > 0, -1, token.to(tl.int64)))


@triton.jit
def best_in_row(scores, tokens, row, chunks, BLOCK: tl.constexpr):
    """The largest score of a row's chunks, its token, and whether any chunk held a NaN."""
    chunk = tl.arange(0, BLOCK)
    inside = chunk < chunks
    score = tl.load(scores + row * chunks + chunk, mask=inside, other=float("-inf"))
    token = tl.load(tokens + row * chunks + chunk, mask=inside, other=0)
    has_nan = tl.max((token < 0).to(tl.int32), axis=0) > 0
    at = tl.argmax(score, axis=0)
    return tl.max(score, axis=0), tl.sum(tl.where(chunk == at, token, 0), axis=0), has_nan


@triton.jit
def argmax_in_row(scores, tokens, row, chunks, BLOCK: tl.constexpr):
    """The token of the largest score of a row's chunks, -1 if any chunk held a NaN."""
    _, token, has_nan = best_in_row(scores, tokens, row, chunks, BLOCK)
    return tl.where(has_nan, -1, token)


@triton.jit(do_not_specialize=["chunks"])
def argmax_of_rows(
    scores,  # float32 [rows, chunks]
    tokens,  # int64 [rows, chunks]
    chosen,  # int64 [rows], written
    chunks,
    BLOCK: tl.constexpr,  # chunks rounded up to a power of two
    PDL: tl.constexpr,
):
    """Reduce the chunks of each row to its token. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(chosen + row, argmax_in_row(scores, tokens, row, chunks, BLOCK))


@triton.jit
def verify_drafts(
    sampled,  # int64 [rows, WIDTH]: what came after each query token
    ids,  # int64 [rows, WIDTH]: the query tokens
    fill,  # int64 [rows]: number of query tokens before the new ones
    places,  # int64 [rows]: index into `newest`
    newest,  # int64, written: the last accepted token of each row
    found,  # int64 [rows, WIDTH + 1], written: the new tokens from the first on, and how many of them are accepted
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH rounded up to a power of two
    PDL: tl.constexpr,
):
    """Compare drafts with sampled tokens, as core.sampling.verification does. Grid (rows)."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.load(fill + row) + place
    token = tl.load(sampled + row * WIDTH + column, mask=column < WIDTH, other=-1)
    guess = tl.load(ids + row * WIDTH + column + 1, mask=column + 1 < WIDTH, other=-2)  # equals no token
    last = tl.min(tl.where(token == guess, BLOCK, place), axis=0)
    tl.store(newest + tl.load(places + row), tl.sum(tl.where(place == last, token, 0), axis=0))
    tl.store(found + row * (WIDTH + 1) + place, token, mask=place < WIDTH)
    tl.store(found + row * (WIDTH + 1) + WIDTH, last.to(tl.int64) + 1)
