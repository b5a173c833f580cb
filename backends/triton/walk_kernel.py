"""How the keys of a run join a query tile's running sums (m, l, acc) in prefill and extend."""

from __future__ import annotations

import triton
import triton.language as tl

from headway.backends.triton.tiles import (
    add_scaled,
    block_numbers,
    cached_rows,
    dense_rows,
    head_offsets,
    peeked_blocks,
    row_scales,
    softmax_step,
)
from headway.kernels.runtime.triton_launch import INTERPRETED as _INTERPRETED

INTERPRETED = tl.constexpr(_INTERPRETED)


@triton.jit
def _keys(
    key, table, kv_head, start, first, kv_len, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, VALUE_IN_KEY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_X: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PEEK: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The keys first .. first + BLOCK_N: a tuple of a tile [BLOCK_N, BLOCK_D] and, where there is one, [BLOCK_N, TAIL]."""
    if TMA:
        block, slot = 0, start + first
        if PAGED:
            block = peeked_blocks(table, first, kv_len, BLOCK_SIZE, BLOCK_N).to(tl.int32)
            slot = first % BLOCK_SIZE
        k = (key.load([block, kv_head, slot, 0]).reshape(BLOCK_N, BLOCK_D).to(DOT),)
    elif PAGED:
        if PEEK:
            blocks = peeked_blocks(table, first, kv_len, BLOCK_SIZE, BLOCK_N)
        else:
            blocks = block_numbers(table, first, kv_len, BLOCK_SIZE, BLOCK_N)
        base = key + kv_head * k_stride_head
        rows = cached_rows(
            base, blocks, head_offsets(k_stride_dim, k_stride_x, K_X, BLOCK_D), first, kv_len, k_stride_block, k_stride_slot,
            K_X, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, MASKED and VALUE_IN_KEY, False, DOT, STEP,
        )  # fmt: skip
        k = (rows,)
        if TAIL > 0:
            tail = cached_rows(
                base + BLOCK_D // K_X * k_stride_dim, blocks, head_offsets(k_stride_dim, k_stride_x, K_X, TAIL), first, kv_len,
                k_stride_block, k_stride_slot, K_X, BLOCK_SIZE, HEAD_DIM - BLOCK_D, TAIL, BLOCK_N, MASKED, False, False,
                DOT, STEP,
            )  # fmt: skip
            k = (rows, tail)
    else:
        base = key + start.to(tl.int64) * k_stride_slot + kv_head * k_stride_head
        rows = dense_rows(base, first, kv_len, k_stride_slot, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, DOT)
        k = (rows,)
        if TAIL > 0:
            tail = dense_rows(base + BLOCK_D, first, kv_len, k_stride_slot, HEAD_DIM - BLOCK_D, TAIL, BLOCK_N, MASKED, DOT)
            k = (rows, tail)
    return k


@triton.jit
def _values(
    value, table, kv_head, start, first, kv_len, v_stride_block, v_stride_slot, v_stride_head, v_stride_dim, v_stride_x,
    V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, V_X: tl.constexpr, V_SLOTS_INNER: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PEEK: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """The values of the keys first .. first + BLOCK_N, [BLOCK_N, BLOCK_DV]; MASKED: zero from kv_len on."""
    if TMA:
        block, slot = 0, start + first
        if PAGED:
            block = peeked_blocks(table, first, kv_len, BLOCK_SIZE, BLOCK_N).to(tl.int32)
            slot = first % BLOCK_SIZE
        v = value.load([block, kv_head, slot, 0]).reshape(BLOCK_N, BLOCK_DV).to(DOT)
        if MASKED:  # a weight of 0 does not silence NaN: rows past the end are a neighbour's or nobody's
            v = tl.where((first + tl.arange(0, BLOCK_N) < kv_len)[:, None], v, 0.0).to(DOT)
    elif PAGED:
        if PEEK:
            blocks = peeked_blocks(table, first, kv_len, BLOCK_SIZE, BLOCK_N)
        else:
            blocks = block_numbers(table, first, kv_len, BLOCK_SIZE, BLOCK_N)
        v = cached_rows(
            value + kv_head * v_stride_head, blocks, head_offsets(v_stride_dim, v_stride_x, V_X, BLOCK_DV), first, kv_len,
            v_stride_block, v_stride_slot, V_X, BLOCK_SIZE, V_HEAD_DIM, BLOCK_DV, BLOCK_N, MASKED, MASKED,
            V_SLOTS_INNER, DOT, STEP,
        )  # fmt: skip
    else:
        base = value + start.to(tl.int64) * v_stride_slot + kv_head * v_stride_head
        v = dense_rows(base, first, kv_len, v_stride_slot, V_HEAD_DIM, BLOCK_DV, BLOCK_N, MASKED, DOT)
    return v


@triton.jit
def walk(
    q, key, value, key_scale_ptr, value_scale_ptr, m, l, acc, table, kv_head, start, begin, end, kv_len, positions,
    newest, slopes,
    score_scale, cap_log2, window, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
    v_stride_block, v_stride_slot, v_stride_head, v_stride_dim, v_stride_x,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr, BLOCK_SIZE: tl.constexpr, K_X: tl.constexpr, V_X: tl.constexpr, V_SLOTS_INNER: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PEEK: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr,
    SCALED: tl.constexpr, SCALE_STRIDES: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Fold the keys begin .. end into (m, l, acc), one tile after the other; begin is a multiple of BLOCK_N.

    newest: [BLOCK_M] position of the newest key that a query may see.
    """
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        k = _keys(
            key, table, kv_head, start, first, kv_len, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
            HEAD_DIM, BLOCK_D, TAIL, VALUE_IN_KEY, BLOCK_SIZE, K_X, BLOCK_N, PAGED, PEEK, STEP, TMA, MASKED, DOT,
        )  # fmt: skip
        if VALUE_IN_KEY:
            v = k[0]
        else:
            v = _values(
                value, table, kv_head, start, first, kv_len, v_stride_block, v_stride_slot, v_stride_head, v_stride_dim,
                v_stride_x, V_HEAD_DIM, BLOCK_DV, BLOCK_SIZE, V_X, V_SLOTS_INNER, BLOCK_N, PAGED, PEEK, STEP, TMA,
                MASKED, DOT,
            )  # fmt: skip
        scores = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)
        if TAIL > 0:
            scores = tl.dot(q[1], tl.trans(k[1]), scores, input_precision=PRECISION)
        if SCALED:
            if PEEK:
                blocks = peeked_blocks(table, first, kv_len, BLOCK_SIZE, BLOCK_N)
            else:
                blocks = block_numbers(table, first, kv_len, BLOCK_SIZE, BLOCK_N)
            k_scales = row_scales(
                key_scale_ptr, kv_head, blocks, first, kv_len, SCALE_STRIDES[0], SCALE_STRIDES[1], SCALE_STRIDES[2],
                BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
            v_scales = row_scales(
                value_scale_ptr, kv_head, blocks, first, kv_len, SCALE_STRIDES[3], SCALE_STRIDES[4], SCALE_STRIDES[5],
                BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
            scores = scores * k_scales[None, :]
        m, l, weights, shrink = softmax_step(
            scores, m, l, first + tl.arange(0, BLOCK_N), positions, newest, slopes, score_scale, cap_log2, window,
            MASKED, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, DOT,
        )  # fmt: skip
        if SCALED:
            acc = add_scaled(acc * shrink[:, None], weights, v, v_scales, DOT, PRECISION)
        else:
            acc = tl.dot(weights.to(DOT), v, acc * shrink[:, None], input_precision=PRECISION)
    return m, l, acc
