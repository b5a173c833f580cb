"""Experts of few tokens: each pair of token and expert by itself, its weights streamed through registers.

A decode step's time is that of reading the weights of the experts touched. Nothing is sorted: two tokens that chose the same
expert read it twice, the second time mostly out of the L2 cache. No split of a sum crosses a program, so every run gives the
same bits.

Of quantised weights, bytes are read in slices of 16, which a thread loads at once, and which lie under one scale. A slice's codes
are multiplied and added up in the thread that has them, in float32, and its sum is multiplied by the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.linear.unpack_kernels import unpack_bytes, unpack_pairs


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


# Triton reads annotations when it compiles: no deferred ones here.


@triton.jit
def gate_up_quantized_rows(
    x_ptr,  # [num_tokens, HIDDEN], normed
    weight_ptr,  # bytes [NUM_ALL * 2 INNER, ROW], gate over up
    scales_ptr,  # [rows of scales, SCALES], float; exponents, uint8 (mxfp4)
    zeros_ptr,  # uint8, likewise (ZEROS)
    bias_ptr,  # [NUM_ALL, 2 INNER] (BIAS)
    experts_ptr,  # int32 [num_tokens * SLOTS]
    y_ptr,  # [num_tokens * SLOTS, INNER], written
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SLOTS: tl.constexpr,
    ROW: tl.constexpr,  # bytes of a row
    WEIGHT: tl.constexpr,  # kind of the weight (kernels/linear/forms.py)
    HALF: tl.constexpr,  # bytes of a group of two codes a byte; 0: a byte is a code
    SCALES: tl.constexpr,  # scales of a row
    SCALE_SPAN: tl.constexpr,  # bytes of a row under one scale
    SCALE_ROWS: tl.constexpr,  # rows that share scales
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,  # slices of a chunk
    SPAN: tl.constexpr,  # bytes of a slice
    DEPTH: tl.constexpr,  # chunks that are asked for ahead
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: none
    BIAS: tl.constexpr,
    DOT: tl.constexpr,  # what codes are unpacked to
    ASSEMBLY: tl.constexpr,  # by instructions of NVIDIA's
    PDL: tl.constexpr,
):
    """y = activation(W_e x + bias) for a pair. Grid (num_tokens * SLOTS, cdiv(INNER, BLOCK_N))."""
    CHUNKS: tl.constexpr = (ROW // SPAN + BLOCK_G - 1) // BLOCK_G
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    g = tl.arange(0, BLOCK_G)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # not before: the kernel after this one reads the experts before it waits
    first = tl.load(experts_ptr + pair).to(tl.int64) * (2 * INNER)
    x_row = x_ptr + (pair // SLOTS).to(tl.int64) * HIDDEN
    gates = ()
    ups = ()
    for c in tl.static_range(DEPTH):
        gates = gates + (_slices(weight_ptr, scales_ptr, zeros_ptr, first, n, g, c, INNER, ROW, SPAN, SCALES, SCALE_SPAN,
                                 SCALE_ROWS, ZEROS),)  # fmt: skip
        ups = ups + (_slices(weight_ptr, scales_ptr, zeros_ptr, first + INNER, n, g, c, INNER, ROW, SPAN, SCALES, SCALE_SPAN,
                             SCALE_ROWS, ZEROS),)  # fmt: skip
    gate = tl.zeros((BLOCK_N, BLOCK_G), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_G), tl.float32)
    for c in tl.static_range(CHUNKS):
        low, high = _inputs(x_row, g, c, ROW, SPAN, HALF)
        gate += _products(gates[c], low, high, WEIGHT, HALF, ZEROS, DOT, ASSEMBLY)
        up += _products(ups[c], low, high, WEIGHT, HALF, ZEROS, DOT, ASSEMBLY)
        if c + DEPTH < CHUNKS:
            gates = gates + (_slices(weight_ptr, scales_ptr, zeros_ptr, first, n, g, c + DEPTH, INNER, ROW, SPAN, SCALES,
                                     SCALE_SPAN, SCALE_ROWS, ZEROS),)  # fmt: skip
            ups = ups + (_slices(weight_ptr, scales_ptr, zeros_ptr, first + INNER, n, g, c + DEPTH, INNER, ROW, SPAN, SCALES,
                                 SCALE_SPAN, SCALE_ROWS, ZEROS),)  # fmt: skip
    gate_sum = tl.sum(gate, 1)
    up_sum = tl.sum(up, 1)
    if BIAS:
        own = bias_ptr + first + n
        gate_sum += tl.load(own, mask=n < INNER, other=0.0).to(tl.float32)
        up_sum += tl.load(own + INNER, mask=n < INNER, other=0.0).to(tl.float32)
    y = activated(gate_sum, up_sum, ALPHA, LIMIT)
    tl.store(y_ptr + pair * INNER + n, y.to(y_ptr.dtype.element_ty), mask=n < INNER)


@triton.jit
def down_quantized_rows(
    x_ptr,  # [num_tokens * SLOTS, INNER]
    weight_ptr,  # bytes [NUM_ALL * HIDDEN, ROW]
    scales_ptr,  # as above
    zeros_ptr,
    bias_ptr,  # [NUM_ALL, HIDDEN] (BIAS)
    experts_ptr,  # int32 [num_tokens * SLOTS]
    weights_ptr,  # float32 [num_tokens * SLOTS]
    y_ptr,  # [num_tokens, HIDDEN], added to
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SLOTS: tl.constexpr,
    ROW: tl.constexpr,  # as above
    WEIGHT: tl.constexpr,
    HALF: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_SPAN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SPAN: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    DOT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """y += the weighted sum of W_e x + bias over a token's slots. Grid (num_tokens, cdiv(HIDDEN, BLOCK_N)).

    Weights are asked for before x is there: see down_rows.
    """
    CHUNKS: tl.constexpr = (ROW // SPAN + BLOCK_G - 1) // BLOCK_G
    pair = tl.program_id(0) * SLOTS
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    g = tl.arange(0, BLOCK_G)
    tiles = ()
    for i in tl.static_range(DEPTH):
        first = tl.load(experts_ptr + pair + i // CHUNKS).to(tl.int64) * HIDDEN
        tiles = tiles + (_slices(weight_ptr, scales_ptr, zeros_ptr, first, n, g, i % CHUNKS, HIDDEN, ROW, SPAN, SCALES,
                                 SCALE_SPAN, SCALE_ROWS, ZEROS),)  # fmt: skip
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
    sums = tl.zeros((BLOCK_N, BLOCK_G), tl.float32)
    for i in tl.static_range(SLOTS * CHUNKS):
        low, high = _inputs(x_ptr + (pair + i // CHUNKS).to(tl.int64) * INNER, g, i % CHUNKS, ROW, SPAN, HALF)
        part = _products(tiles[i], low, high, WEIGHT, HALF, ZEROS, DOT, ASSEMBLY)
        sums += tl.load(weights_ptr + pair + i // CHUNKS) * part
        if i + DEPTH < SLOTS * CHUNKS:
            first = tl.load(experts_ptr + pair + (i + DEPTH) // CHUNKS).to(tl.int64) * HIDDEN
            tiles = tiles + (_slices(weight_ptr, scales_ptr, zeros_ptr, first, n, g, (i + DEPTH) % CHUNKS, HIDDEN, ROW, SPAN,
                                     SCALES, SCALE_SPAN, SCALE_ROWS, ZEROS),)  # fmt: skip
    tl.store(y_at, (y + tl.sum(sums, 1)).to(y_ptr.dtype.element_ty), mask=n < HIDDEN)


@triton.jit
def _slices(weight_ptr, scales_ptr, zeros_ptr, first, n, g, c, N: tl.constexpr, ROW: tl.constexpr, SPAN: tl.constexpr,
            SCALES: tl.constexpr, SCALE_SPAN: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Bytes of chunk c of rows first + n [BLOCK_N, BLOCK_G, SPAN], read once, and their scales and zeros [BLOCK_N, BLOCK_G]."""
    u = c * g.shape[0] + g
    inside = (n < N)[:, None] & (u < ROW // SPAN)[None, :]
    at = n[:, None, None] * ROW + (u[:, None] * SPAN + tl.arange(0, SPAN)[None, :])[None, :, :]
    codes = tl.load(weight_ptr + first * ROW + at, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
    place = ((first + n) // SCALE_ROWS * SCALES)[:, None] + (u * SPAN // SCALE_SPAN)[None, :]
    scales = tl.load(scales_ptr + place, mask=inside, other=0)
    zeros = scales
    if ZEROS:
        zeros = tl.load(zeros_ptr + place, mask=inside, other=0)
    return codes, scales, zeros


@triton.jit
def _inputs(x_row, g, c, ROW: tl.constexpr, SPAN: tl.constexpr, HALF: tl.constexpr):
    """x [BLOCK_G, SPAN] that belongs to the lower, and to the upper codes of those bytes, in float32."""
    u = c * g.shape[0] + g
    inside = (u < ROW // SPAN)[:, None]
    column = u[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    if HALF > 0:
        column += column // HALF * HALF
    low = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
    high = low
    if HALF > 0:
        high = tl.load(x_row + column + HALF, mask=inside, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _products(slices, low, high, WEIGHT: tl.constexpr, HALF: tl.constexpr, ZEROS: tl.constexpr, DOT: tl.constexpr,
              ASSEMBLY: tl.constexpr):  # fmt: skip
    """The sum of each slice's weights times x [BLOCK_N, BLOCK_G]."""
    codes = slices[0]
    if WEIGHT == "mxfp4":  # exponents; the least has no place but among the subnormals
        wide = slices[1].to(tl.int32)
        scales = tl.where(wide == 0, 0x00400000, wide << 23).to(tl.float32, bitcast=True)
    else:
        scales = slices[1].to(tl.float32)
    if HALF > 0:
        first, second = unpack_pairs(codes, WEIGHT, DOT, ASSEMBLY)
        first, second = first.to(tl.float32), second.to(tl.float32)
        if WEIGHT == "int4":
            BASE: tl.constexpr = (1024 if DOT == tl.float16 else 128) if ASSEMBLY else 0  # noqa: SIM300
            if ZEROS:
                zero = (slices[2].to(tl.float32) + BASE)[:, :, None]
                first, second = first - zero, second - zero
            else:
                first, second = first - (BASE + 8), second - (BASE + 8)
        sums = tl.sum(first * low[None, :, :] + second * high[None, :, :], 2)
    else:
        sums = tl.sum(unpack_bytes(codes, WEIGHT, DOT, ASSEMBLY).to(tl.float32) * low[None, :, :], 2)
    return sums * scales
