"""Choosing a token a row in one pass over the logits: the Triton kernels."""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _mix(x):
    """SplitMix64's finalizer. x: uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["stride", "vocab_size"])
def best_of_chunks(
    logits,  # [rows, vocab_size]
    temperatures,  # float32 [rows] (NOISE, as the next one)
    keys,  # int64 [rows]
    scores,  # float32 [rows, chunks], written: the largest of each chunk
    tokens,  # int64 [rows, chunks], written: where it is; -1 where the chunk holds a NaN
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
    NOISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest logit, or logit / temperature - log(e), e ~ Exp(1) (see core.sampler.draw). Grid (rows, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits + row * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    sick = tl.max((x != x).to(tl.int32), axis=0)
    score = x
    if NOISE:
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        bits = _mix(key + columns.to(tl.uint64) * 0x9E3779B97F4A7C15) >> 32
        uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-8)
        # -log(1 - u) of a small u has lost its digits in 1 - u: the series is exact there.
        noise = tl.where(uniform < 1e-3, uniform * (1 + uniform * (0.5 + uniform * 0.33333334)), -tl.log(1 - uniform))
        score = x / tl.load(temperatures + row) - tl.log(noise)
        score = tl.where(inside, score, float("-inf"))
    best, at = tl.max(score, axis=0, return_indices=True)
    out = row * tl.num_programs(1) + chunk
    tl.store(scores + out, best)
    tl.store(tokens + out, tl.where(sick > 0, -1, (chunk * BLOCK + at).to(tl.int64)))


@triton.jit(do_not_specialize=["chunks"])
def best_of_rows(
    scores,  # float32 [rows, chunks]
    tokens,  # int64 [rows, chunks]
    chosen,  # int64 [rows], written
    chunks,
    BLOCK: tl.constexpr,  # chunks rounded up to a power of two
    PDL: tl.constexpr,
):
    """The token of the largest score, -1 if any chunk held a NaN. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < chunks
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    score = tl.load(scores + row * chunks + chunk, mask=inside, other=float("-inf"))
    token = tl.load(tokens + row * chunks + chunk, mask=inside, other=0)
    sick = tl.max((token < 0).to(tl.int32), axis=0)
    at = tl.argmax(score, axis=0)
    tl.store(chosen + row, tl.where(sick > 0, -1, tl.sum(tl.where(chunk == at, token, 0), axis=0)))
