"""Drawing a token a row in one pass over the logits: the Triton kernel."""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """SplitMix64's finalizer. x: uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def draw_rows(
    logits,  # [rows, vocab_size]
    temperatures,  # float32 [rows]
    keys,  # int64 [rows]
    scores,  # float32 [rows, chunks]: largest of each chunk
    tokens,  # int64 [rows, chunks]: where it is
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """The largest logit / temperature - log(e), e ~ Exp(1), over one chunk of a row; see core.sampler.draw."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    x = tl.load(logits + row * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
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
    tl.store(tokens + out, (chunk * BLOCK + at).to(tl.int64))
