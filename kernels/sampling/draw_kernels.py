"""Triton kernels that select one token per row in one pass over the logits or over a rank's shard of them, and that verify draft
tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.contract.kernel import AHEAD
from headway.core.sampling.sampler import LANES
from headway.kernels.runtime.triton_launch import INTERPRETED, Launchers


class FusedPart:
    """`best_of_part` and `winners` of core.sampling.candidates for a rank's shard of the vocabulary. The noise depends on the
    shard's token ids.

    CUDA graphs can capture all calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers = Launchers(device)

    def best_of_part(self, logits: Tensor, scales: Tensor | None, keys: Tensor | None, first: int) -> Tensor:
        """Return the best token of a shard; see core.sampling.candidates.best_of_part. logits: rows may be strided, but elements
        must be contiguous.
        """
        rows, width = logits.shape
        numbers = torch.empty(rows, dtype=torch.int64, device=self._device)
        if rows == 0:
            return numbers
        chunks = triton.cdiv(first % (4 * LANES) + width, BLOCK)
        scores = torch.empty((rows, chunks), dtype=torch.float32, device=self._device)
        tokens = torch.empty((rows, chunks), dtype=torch.int64, device=self._device)
        constants = {"BLOCK": BLOCK, "LANES": LANES, "NOISE": scales is not None}
        self._launchers.get(argmax_of_part_chunks, 4, constants)(
            (rows, chunks, 1),
            logits=logits,
            scales=scores if scales is None else scales,
            keys=tokens if keys is None else keys,
            scores=scores,
            tokens=tokens,
            stride=logits.stride(0),
            begin=first,
            end=first + width,
        )
        launch = self._launchers.get(pack_best_of_rows, 1, {"BLOCK": triton.next_power_of_2(chunks)})
        launch((rows, 1, 1), scores=scores, tokens=tokens, numbers=numbers, chunks=chunks)
        return numbers

    def winners(self, numbers: Tensor) -> Tensor:
        """Return the winning tokens; see core.sampling.candidates.winners."""
        ranks, rows = numbers.shape
        # Nothing is launched while kernels are compiled ahead, yet these tokens are used as indices.
        make = torch.empty if AHEAD.get() is None else torch.zeros
        chosen = make(rows, dtype=torch.int64, device=self._device)
        launch = self._launchers.get(choose_winners, 1, {"BLOCK": triton.next_power_of_2(ranks)})
        launch((rows, 1, 1), numbers=numbers, chosen=chosen, rows=rows, ranks=ranks)
        return chosen


# Triton reads annotations at compile time, so they must not be deferred here.


_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _philox(counter, key):
    """Return Philox4x32-7 random bits (core.sampling.sampler): four uint32 tiles of counter's shape. counter: int32; key: one
    uint64.
    """
    left, right = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    a = counter.to(tl.uint32)
    b, c, d = tl.zeros_like(a), tl.zeros_like(a), tl.zeros_like(a)
    for _ in tl.static_range(7):
        first, third = (
            a.to(tl.uint64) * 0xD2511F53,
            c.to(tl.uint64) * 0xCD9E8D57,
        )  # one instruction each for the high and the low half
        a, b = (third >> 32).to(tl.uint32) ^ b ^ left, third.to(tl.uint32)
        c, d = (first >> 32).to(tl.uint32) ^ d ^ right, first.to(tl.uint32)
        left, right = left + 0x9E3779B9, right + 0xBB67AE85
    return a, b, c, d


@triton.jit
def _log2(x):
    """Return log2(x), computed by one instruction with an error of 2^-22 near 1. tl.log2 takes 20 instructions and is more
    accurate than needed."""
    if _INTERPRETED:  # the interpreter does not support libdevice
        y = tl.log2(x)
    else:
        y = libdevice.fast_log2f(x)
    return y


@triton.jit
def _log2_exponential(bits):
    """Return log2(e / log 2) for an Exp(1) number e made from 32 random bits. core.sampling.sampler defines the bounds of the
    uniform number."""
    uniform = bits.to(tl.float32) * 2.3283062977608182e-10 + 1.1641532182693481e-10
    # For small u, 1 - u loses the digits of u, and the instruction's absolute error matters: use a series. At the border it is as
    # exact as the logarithm beyond it, about 3e-6. It includes the factor log2(e).
    series = uniform * (-1.442695041 - uniform * (0.72134752 + uniform * (0.480898347 + uniform * 0.36067376)))
    return _log2(-tl.where(uniform < 0.0625, series, _log2(1 - uniform)))


@triton.jit
def gumbel_argmax(logits, counter, first, begin, end, scale, key, LANES: tl.constexpr, NOISE: tl.constexpr, PART: tl.constexpr):
    """Return the largest score among the four columns of each counter, the column of that score, and True if one of the logits is
    NaN.

    Only columns below `end` count and, with PART, only columns from `begin` on.
    """
    if NOISE:
        bits = _philox(counter, key)
    # A strict comparison suffices, since the columns are in order.
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
    scales,  # float32 [rows] (NOISE, like keys)
    keys,  # int64 [rows]
    scores,  # float32 [rows, chunks], written: largest score of each chunk
    tokens,  # int64 [rows, chunks], written: its first column; -1 if the chunk contains a NaN
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,  # see core.sampling.sampler; BLOCK is a multiple of 4 LANES
    NOISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the argmax of each chunk of each row. Grid (rows, chunks).

    Without NOISE, the score is the logit. With NOISE, the score is (logit * scale - log(e)) / log(2) with e ~ Exp(1), which draws
    a token by the Gumbel-max trick (core.sampling.sampler.draw). If a row's scale is 0, the score is the logit, which takes half
    the time.
    """
    row = tl.program_id(0).to(tl.int64)
    counter = tl.program_id(1) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    first = counter // LANES * (4 * LANES) + counter % LANES
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _store_argmax(logits + row * stride, scales, keys, scores, tokens, row, counter, first, 0, vocab_size, LANES, NOISE, False)


@triton.jit
def _store_argmax(own, scales, keys, scores, tokens, row, counter, first, begin, end, LANES: tl.constexpr,
                  NOISE: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """Store the best score of a program's chunk, and the token with that score. own: address of the row's logit of token 0."""
    if NOISE:
        scale = tl.load(scales + row) * 1.4426950408889634
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        if scale > 0:
            best, at, has_nan = gumbel_argmax(own, counter, first, begin, end, scale, key, LANES, True, PART)
        else:
            best, at, has_nan = gumbel_argmax(own, counter, first, begin, end, scale, key, LANES, False, PART)
    else:
        best, at, has_nan = gumbel_argmax(own, counter, first, begin, end, 1.0, 0, LANES, False, PART)
    most = tl.max(best, axis=0)
    token = tl.min(tl.where(best == most, at, 0x7FFFFFFF), axis=0)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores + out, most)
    tl.store(tokens + out, tl.where(tl.max(has_nan.to(tl.int32), axis=0) > 0, -1, token.to(tl.int64)))


@triton.jit
def best_in_row(scores, tokens, row, chunks, BLOCK: tl.constexpr):
    """Return the largest score of a row's chunks, the token with that score, and True if any chunk contains a NaN."""
    chunk = tl.arange(0, BLOCK)
    inside = chunk < chunks
    score = tl.load(scores + row * chunks + chunk, mask=inside, other=float("-inf"))
    token = tl.load(tokens + row * chunks + chunk, mask=inside, other=0)
    has_nan = tl.max((token < 0).to(tl.int32), axis=0) > 0
    at = tl.argmax(score, axis=0)
    return tl.max(score, axis=0), tl.sum(tl.where(chunk == at, token, 0), axis=0), has_nan


@triton.jit
def argmax_in_row(scores, tokens, row, chunks, BLOCK: tl.constexpr):
    """Return the token with the largest score in a row's chunks, or -1 if any chunk contains a NaN."""
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
    sampled,  # int64 [rows, WIDTH]: token sampled after each query token
    ids,  # int64 [rows, WIDTH]: query tokens
    fill,  # int64 [rows]: number of query tokens before the new ones
    places,  # int64 [rows]: index into `newest`
    newest,  # int64, written: the last accepted token of each row
    found,  # int64 [rows, WIDTH + 1], written: new tokens from the first on, and the number of accepted ones
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH rounded up to a power of two
    PDL: tl.constexpr,
):
    """Compare draft tokens with sampled tokens, like core.sampling.verification. Grid (rows)."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.load(fill + row) + place
    token = tl.load(sampled + row * WIDTH + column, mask=column < WIDTH, other=-1)
    guess = tl.load(ids + row * WIDTH + column + 1, mask=column + 1 < WIDTH, other=-2)  # differs from every token
    last = tl.min(tl.where(token == guess, BLOCK, place), axis=0)
    tl.store(newest + tl.load(places + row), tl.sum(tl.where(place == last, token, 0), axis=0))
    tl.store(found + row * (WIDTH + 1) + place, token, mask=place < WIDTH)
    tl.store(found + row * (WIDTH + 1) + WIDTH, last.to(tl.int64) + 1)


BLOCK = 4096
"""Number of logits per program. It is large enough for many bytes in flight, and small enough for many programs per row."""


class FusedSampling:
    """`greedy` and `draw` of core.sampling.sampler with the same noise, in two launches, and `accept_drafts` in one.

    CUDA graphs can capture all calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launchers = Launchers(device)

    def greedy(self, logits: Tensor) -> Tensor:
        """Return the most likely token of each row of logits [rows, vocab_size]: int64 [rows], -1 if a logit is NaN."""
        return self._choose(logits, None, None)

    def draw(self, logits: Tensor, scales: Tensor, keys: Tensor) -> Tensor:
        """Draw a token per row: int64 [rows], -1 if a logit is NaN. scales: float32 [rows], 0 means greedy. keys: int64
        [rows].
        """
        return self._choose(logits, scales, keys)

    def accept_drafts(self, sampled: Tensor, ids: Tensor, fill: Tensor, places: Tensor, newest: Tensor) -> Tensor:
        """Verify draft tokens like core.sampling.verification.accept_drafts, in one launch instead of the dozen launches that
        torch needs."""
        rows, width = sampled.shape
        found = torch.empty((rows, width + 1), dtype=torch.int64, device=self._device)
        launch = self._launchers.get(verify_drafts, 1, {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)})
        launch((rows, 1, 1), sampled=sampled, ids=ids, fill=fill, places=places, newest=newest, found=found)
        return found

    def _choose(self, logits: Tensor, scales: Tensor | None, keys: Tensor | None) -> Tensor:
        """Select tokens in two launches. logits: rows may be strided, but elements must be contiguous."""
        rows, vocab_size = logits.shape
        # Nothing is launched while kernels are compiled ahead, yet these tokens are used as indices.
        make = torch.empty if AHEAD.get() is None else torch.zeros
        chosen = make(rows, dtype=torch.int64, device=self._device)
        if rows == 0:
            return chosen
        chunks = triton.cdiv(vocab_size, BLOCK)
        scores = torch.empty((rows, chunks), dtype=torch.float32, device=self._device)
        tokens = torch.empty((rows, chunks), dtype=torch.int64, device=self._device)
        constants = {"BLOCK": BLOCK, "LANES": LANES, "NOISE": scales is not None}
        self._launchers.get(argmax_of_chunks, 4, constants)(
            (rows, chunks, 1),
            logits=logits,
            scales=scores if scales is None else scales,
            keys=tokens if keys is None else keys,
            scores=scores,
            tokens=tokens,
            stride=logits.stride(0),
            vocab_size=vocab_size,
        )
        launch = self._launchers.get(argmax_of_rows, 1, {"BLOCK": triton.next_power_of_2(chunks)})
        launch((rows, 1, 1), scores=scores, tokens=tokens, chosen=chosen, chunks=chunks)
        return chosen


# Triton reads annotations at compile time, so they must not be deferred here.


_LOW: tl.constexpr = tl.constexpr(0xFFFFFFFF)
_NAN: tl.constexpr = tl.constexpr(0x7FC00000)
_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit(do_not_specialize=["stride", "begin", "end"], do_not_specialize_on_alignment=["scales", "keys"])
def argmax_of_part_chunks(
    logits,  # [rows, end - begin]
    scales,  # float32 [rows] (NOISE, like keys)
    keys,  # int64 [rows]
    scores,  # float32 [rows, chunks], written: largest score of each chunk
    tokens,  # int64 [rows, chunks], written: its first token; -1 if the chunk contains a NaN
    stride,
    begin,  # first token of this rank
    end,
    BLOCK: tl.constexpr,  # as in argmax_of_chunks
    LANES: tl.constexpr,
    NOISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute `argmax_of_chunks` for consecutive tokens of the vocabulary, with noise that depends on the token ids. Grid (rows,
    chunks).

    The first chunk starts with the group of 4 LANES tokens that contains `begin`.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    counter = begin // (4 * LANES) * LANES + chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    first = counter // LANES * (4 * LANES) + counter % LANES
    own = logits + row * stride - begin
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _store_argmax(own, scales, keys, scores, tokens, row, counter, first, begin, end, LANES, NOISE, True)


@triton.jit(do_not_specialize=["chunks"])
def pack_best_of_rows(
    scores,  # float32 [rows, chunks]
    tokens,  # int64 [rows, chunks]
    numbers,  # int64 [rows], written: score and token, see core.sampling.candidates.pack
    chunks,
    BLOCK: tl.constexpr,  # chunks rounded up to a power of two
    PDL: tl.constexpr,
):
    """Reduce the chunks of each row to one number, into which the best token and its score are packed. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    most, best, has_nan = best_in_row(scores, tokens, row, chunks, BLOCK)
    # Normalise -0 to 0, so that equal scores have equal bits.
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
    """Select the token of each row's largest number, or -1 if the score of that number is NaN. Grid (rows)."""
    row, rank = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    best = tl.max(tl.load(numbers + rank * rows + row, mask=rank < ranks, other=-0x8000000000000000), axis=0)
    tl.store(chosen + row, tl.where((best >> 32) > _INFINITY, -1, _LOW - (best & _LOW)))
