"""Experts of few tokens: each pair of token and expert by itself, its weights streamed through registers.

A decode step's time is that of reading the weights of the experts touched. Nothing is sorted: two tokens that chose the same
expert read it twice, the second time mostly out of the L2 cache. No split of a sum crosses a program, so every run gives the
same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def gate_up_rows(
    x_ptr,  # [num_tokens, HIDDEN], normed
    weight_ptr,  # [NUM_ALL, 2 INNER, HIDDEN], gate over up
    bias_ptr,  # [NUM_ALL, 2 INNER] (BIAS)
    experts_ptr,  # int32 [num_tokens * SLOTS]
    y_ptr,  # [num_tokens * SLOTS, INNER], written
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,  # chunks of the weights that are asked for ahead
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: none
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = activation(W_e x + bias) for a pair. Grid (num_tokens * SLOTS, cdiv(INNER, BLOCK_N))."""
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # not before: the kernel after this one reads the experts before it waits
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    rows = weight_ptr + expert * (2 * INNER * HIDDEN)
    at = n[:, None] * HIDDEN + k[None, :]
    x_at = x_ptr + (pair // SLOTS).to(tl.int64) * HIDDEN + k
    gates = ()
    ups = ()
    for c in tl.static_range(DEPTH):
        gates = gates + (_streamed(rows, at, n, k, c, INNER, HIDDEN, BLOCK_N, BLOCK_K),)
        ups = ups + (_streamed(rows + INNER * HIDDEN, at, n, k, c, INNER, HIDDEN, BLOCK_N, BLOCK_K),)
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for c in tl.static_range(CHUNKS):
        x = tl.load(x_at + c * BLOCK_K, mask=c * BLOCK_K + k < HIDDEN, other=0.0).to(tl.float32)[None, :]
        gate += gates[c].to(tl.float32) * x
        up += ups[c].to(tl.float32) * x
        if c + DEPTH < CHUNKS:
            gates = gates + (_streamed(rows, at, n, k, c + DEPTH, INNER, HIDDEN, BLOCK_N, BLOCK_K),)
            ups = ups + (_streamed(rows + INNER * HIDDEN, at, n, k, c + DEPTH, INNER, HIDDEN, BLOCK_N, BLOCK_K),)
    gate_sum = tl.sum(gate, 1)
    up_sum = tl.sum(up, 1)
    if BIAS:
        own = bias_ptr + expert * (2 * INNER) + n
        gate_sum += tl.load(own, mask=n < INNER, other=0.0).to(tl.float32)
        up_sum += tl.load(own + INNER, mask=n < INNER, other=0.0).to(tl.float32)
    y = activated(gate_sum, up_sum, ALPHA, LIMIT)
    tl.store(y_ptr + pair * INNER + n, y.to(y_ptr.dtype.element_ty), mask=n < INNER)


@triton.jit
def down_rows(
    x_ptr,  # [num_tokens * SLOTS, INNER]
    weight_ptr,  # [NUM_ALL, HIDDEN, INNER]
    bias_ptr,  # [NUM_ALL, HIDDEN] (BIAS)
    experts_ptr,  # int32 [num_tokens * SLOTS]
    weights_ptr,  # float32 [num_tokens * SLOTS]
    y_ptr,  # [num_tokens, HIDDEN], added to
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,  # chunks of the weights that are asked for ahead
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """y += the weighted sum of W_e x + bias over a token's slots. Grid (num_tokens, cdiv(HIDDEN, BLOCK_N)).

    The experts were written two kernels before this one, and the kernel between them waited for them before it let this one
    start: so their weights are asked for before x is there.
    """
    CHUNKS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    pair = tl.program_id(0) * SLOTS
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at = n[:, None] * INNER + k[None, :]
    tiles = ()
    for i in tl.static_range(DEPTH):
        expert = tl.load(experts_ptr + pair + i // CHUNKS).to(tl.int64)
        rows = weight_ptr + expert * (HIDDEN * INNER)
        tiles = tiles + (_streamed(rows, at, n, k, i % CHUNKS, HIDDEN, INNER, BLOCK_N, BLOCK_K),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y_at = y_ptr + tl.program_id(0).to(tl.int64) * HIDDEN + n
    y = tl.load(y_at, mask=n < HIDDEN, other=0.0).to(tl.float32)
    if BIAS:
        for slot in tl.static_range(SLOTS):
            expert = tl.load(experts_ptr + pair + slot).to(tl.int64)
            bias = tl.load(bias_ptr + expert * HIDDEN + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
            y += tl.load(weights_ptr + pair + slot) * bias
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for i in tl.static_range(SLOTS * CHUNKS):
        inside = (i % CHUNKS) * BLOCK_K + k < INNER
        weight = tl.load(weights_ptr + pair + i // CHUNKS)
        x = tl.load(x_ptr + (pair + i // CHUNKS) * INNER + (i % CHUNKS) * BLOCK_K + k, mask=inside, other=0.0)
        sums += tiles[i].to(tl.float32) * (x.to(tl.float32) * weight)[None, :]
        if i + DEPTH < SLOTS * CHUNKS:
            expert = tl.load(experts_ptr + pair + (i + DEPTH) // CHUNKS).to(tl.int64)
            rows = weight_ptr + expert * (HIDDEN * INNER)
            tiles = tiles + (_streamed(rows, at, n, k, (i + DEPTH) % CHUNKS, HIDDEN, INNER, BLOCK_N, BLOCK_K),)
    tl.store(y_at, (y + tl.sum(sums, 1)).to(y_ptr.dtype.element_ty), mask=n < HIDDEN)


@triton.jit
def activated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """gate * sigmoid(ALPHA gate) * up, clamped and raised where LIMIT is not 0 (see ExpertsConfig)."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # not minimum, which would hide a NaN
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    return gate * tl.sigmoid(ALPHA * gate) * up


@triton.jit
def _streamed(rows, at, n, k, c, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A chunk of weights [BLOCK_N, BLOCK_K], which is read once and need not stay in the cache."""
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        tile = tl.load(rows + c * BLOCK_K + at, eviction_policy="evict_first")
    else:
        inside = (n < N)[:, None] & (c * BLOCK_K + k < K)[None, :]
        tile = tl.load(rows + c * BLOCK_K + at, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile
