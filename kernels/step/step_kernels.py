"""Triton kernels of a decoder step: embedding with RoPE angles, norms, QK-norm and rotary embedding, activation, gate.

Each kernel is one launch and reads its input once. Sums are float32 for any element type, and nothing is rounded between the
operations of one kernel. PDL means programmatic dependent launch (compute capability 9.0): the next kernel's programs may start
while this kernel runs. They wait (`gdc_wait`) before they touch anything that an earlier kernel writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "positions_ptr"])
def embed_tokens(
    ids_ptr,  # int32 or int64 [num_tokens]
    positions_ptr,  # int32 or int64 [num_tokens]
    table_ptr,  # [vocab_size, HIDDEN]
    places_ptr,  # [positions, HIDDEN] (PLACES)
    inv_freq_ptr,  # float32 [ROPES, HALF]
    factors_ptr,  # float32 [ROPES, HALF]
    scale,
    x_ptr,  # [num_tokens, HIDDEN], written
    cos_ptr,  # float32 [ROPES, num_tokens, HALF], written
    sin_ptr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,  # add learned position embeddings
    ROPES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,  # ROPES HALF rounded up to a power of two
    PDL: tl.constexpr,
):
    """Embed tokens, and compute cos and sin of the RoPE angles at their positions. Grid (num_tokens)."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_HALF)
    inv_freq = tl.load(inv_freq_ptr + h, mask=h < ROPES * HALF, other=0.0)
    factors = tl.load(factors_ptr + h, mask=h < ROPES * HALF, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    x = tl.load(table_ptr + row * HIDDEN + at, mask=at < HIDDEN).to(tl.float32) * scale
    position = tl.load(positions_ptr + token)
    if PLACES:
        x += tl.load(places_ptr + position.to(tl.int64) * HIDDEN + at, mask=at < HIDDEN).to(tl.float32)
    tl.store(x_ptr + token * HIDDEN + at, x.to(x_ptr.dtype.element_ty), mask=at < HIDDEN)
    if ROPES > 0:
        angles = position.to(tl.float32) * inv_freq
        to = h if ROPES == 1 else h // HALF * (tl.num_programs(0) * HALF) + h % HALF
        tl.store(cos_ptr + token * HALF + to, tl.cos(angles) * factors, mask=h < ROPES * HALF)
        tl.store(sin_ptr + token * HALF + to, tl.sin(angles) * factors, mask=h < ROPES * HALF)


@triton.jit
def norm_rows(
    x_ptr,  # [rows, SIZE]
    weight_ptr,  # [SIZE]
    bias_ptr,  # [SIZE] (LAYER)
    residual_ptr,  # [rows, SIZE] (ADD)
    y_ptr,  # [rows, SIZE], written; may be the residual
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYER: tl.constexpr,  # LayerNorm, else RMSNorm
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x / sqrt(mean(x^2) + eps) * weight. LAYER: subtracts the mean first and adds a bias. ADD: adds the residual.

    Grid (rows).
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        x = tl.where(inside, x - tl.sum(x, 0) / SIZE, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    if LAYER:
        y += bias
    if ADD:
        y += tl.load(residual_ptr + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * SIZE + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return an activation of x in float32. ACTIVATION: name of the activation (see `kernels.step.config`)."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        y = tl.maximum(x, 0.0)
        if ACTIVATION == "relu2":
            y = y * y
    return y


@triton.jit
def norm_and_rotate(
    qkv_ptr,  # [num_tokens, ALL_HEADS HEAD_DIM]: q, k, v and possibly more; q and k are overwritten
    cos_ptr,  # float32 [num_tokens, HEAD_DIM / 2]
    sin_ptr,
    q_norm_ptr,  # [HEAD_DIM]
    k_norm_ptr,
    x_ptr,  # [num_tokens, ROW] (ROW)
    eps,
    row_eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm q and k, and rotate their half-heads (RoPE). Grid (num_tokens, cdiv(HEADS + KV_HEADS, BLOCK_H)).

    ROW: the GEMM's input x was not normed. Therefore all heads, including v, are scaled by the row's norm factor, and the grid is
    (num_tokens, cdiv(ALL_HEADS, BLOCK_H)).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    HALF: tl.constexpr = HEAD_DIM // 2
    h = tl.arange(0, BLOCK_HALF)[None, :]
    TOUCHED: tl.constexpr = ALL_HEADS if ROW else HEADS + KV_HEADS
    mask = (head < TOUCHED) & (h < HALF)
    if NORM:
        is_q = head < HEADS
        low_weight = either(q_norm_ptr, k_norm_ptr, h, is_q, mask)
        high_weight = either(q_norm_ptr, k_norm_ptr, h + HALF, is_q, mask)
    else:
        low_weight, high_weight = 1.0, 1.0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = qkv_ptr + token * (ALL_HEADS * HEAD_DIM) + head * HEAD_DIM + h
    cos = tl.load(cos_ptr + token * HALF + h, mask=h < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + h, mask=h < HALF, other=0.0)
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if ROW:
        scale = row_scale(x_ptr + token * ROW, row_eps, ROW, BLOCK_ROW)
        low, high = low * scale, high * scale
    rotated_low, rotated_high = rotate(low, high, cos, sin, low_weight, high_weight, eps, HEAD_DIM, NORM)
    if ROW:  # v is scaled, not rotated
        rotates = head < HEADS + KV_HEADS
        low, high = tl.where(rotates, rotated_low, low), tl.where(rotates, rotated_high, high)
    else:
        low, high = rotated_low, rotated_high
    tl.store(at, low.to(qkv_ptr.dtype.element_ty), mask=mask)
    tl.store(at + HALF, high.to(qkv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_scale(x_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the RMSNorm factor of one row."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < SIZE, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)


@triton.jit
def rotate(low, high, cos, sin, low_weight, high_weight, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Apply RMSNorm to heads (NORM), then RoPE (Su et al. 2021). low, high, cos, sin: float32 [heads or rows, HEAD_DIM / 2]."""
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)[:, None]
        low = low * scale * low_weight
        high = high * scale * high_weight
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def either(q_ptr, k_ptr, at, is_q, mask):
    """Return elements of q's norm weight where `is_q` is true, and of k's elsewhere, in float32."""
    q = tl.load(q_ptr + at, mask=mask & is_q, other=0.0).to(tl.float32)
    return q + tl.load(k_ptr + at, mask=mask & (is_q == 0), other=0.0).to(tl.float32)


@triton.jit
def activate_and_mul(
    x_ptr,  # [rows, 2 SIZE]
    y_ptr,  # [rows, SIZE], written
    row_ptr,  # [rows, ROW] (ROW)
    row_eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = activation(first half) * second half. ROW: each row of x is first scaled by its norm factor. Grid (rows, cdiv(SIZE,
    BLOCK)).
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(x_ptr + row * (2 * SIZE) + at, mask=at < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * SIZE) + SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    if ROW:
        scale = row_scale(row_ptr + row * ROW, row_eps, ROW, BLOCK_ROW)
        gate, up = gate * scale, up * scale
    y = activate(gate, ACTIVATION) * up
    tl.store(y_ptr + row * SIZE + at, y.to(y_ptr.dtype.element_ty), mask=at < SIZE)


@triton.jit
def gate_rows(
    x_ptr,  # rows of WIDTH elements
    by_ptr,  # rows of WIDTH elements
    weight_ptr,  # [SIZE], or [WIDTH] (WHOLE) (NORM)
    y_ptr,  # [rows, WIDTH], written
    eps,
    STRIDE_X: tl.constexpr,
    STRIDE_BY: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,  # elements per group
    BLOCK: tl.constexpr,  # SIZE rounded up to a power of two
    BLOCK_G: tl.constexpr,  # groups per program
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,  # RMSNorm of x by groups
    WHOLE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = norm(x) * activation(by), or norm(x * activation(by)) (GATE_FIRST). Grid (rows, cdiv(groups, BLOCK_G))."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    at = group * SIZE + i
    inside = (i < SIZE) & (at < WIDTH)
    if NORM:
        if WHOLE:
            weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        else:
            weight = tl.load(weight_ptr + i, mask=i < SIZE, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y = tl.load(x_ptr + row * STRIDE_X + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(by_ptr + row * STRIDE_BY + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        factor = factor * tl.sigmoid(factor)
    elif ACTIVATION == "sigmoid":
        factor = tl.sigmoid(factor)
    else:
        tl.static_assert(ACTIVATION == "none")
    if GATE_FIRST:
        y = y * factor
    if NORM:
        y = y * tl.rsqrt(tl.sum(y * y, 1) / SIZE + eps)[:, None] * weight
    if not GATE_FIRST:
        y = y * factor
    tl.store(y_ptr + row * WIDTH + at, y.to(y_ptr.dtype.element_ty), mask=inside)
