"""How keys join a query tile's running sums (m, l, acc) in decode: a tile of cached ones, or the new token's own."""

from __future__ import annotations

import triton
import triton.language as tl

from headway.backends.triton.tiles import (
    add_scaled,
    block_numbers,
    cached_rows,
    head_offsets,
    key_rows,
    row_scales,
    softmax_step,
    unpack_fp8,
    unpack_int8,
)


@triton.jit
def ask_for_rows(
    base_ptr,  # the head's first element
    table_ptr,
    first,
    limit,
    stride_block,
    stride_slot,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Bring the rows of the keys first .. first + BLOCK_N before `limit` to the L2 cache. A row lies in one piece.

    first may lie beyond `limit`, where nothing is asked for.
    """
    LINE: tl.constexpr = 128 // (base_ptr.dtype.element_ty.primitive_bitwidth // 8)  # elements of a line of the cache
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(HEAD_DIM, LINE))
    known = tl.minimum(first, tl.maximum(limit - 1, 0) // BLOCK_N * BLOCK_N)  # the table has no more entries
    blocks = block_numbers(table_ptr, known, limit, BLOCK_SIZE, BLOCK_N)
    n = tl.arange(0, BLOCK_N)
    place = tl.arange(0, LINES) * LINE
    rows = blocks * stride_block + ((known + n) % BLOCK_SIZE) * stride_slot
    lines = base_ptr + rows[:, None] + place[None, :]
    asked = (n < limit - first)[:, None] & (place < HEAD_DIM)[None, :]
    tl.inline_asm_elementwise(
        "{ .reg .pred asked; setp.ne.b32 asked, $2, 0; @asked prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r", args=[lines.to(tl.int64), asked.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def fold_cached(
    q, key, value, key_scale_ptr, value_scale_ptr, kv_head, table, m, l, acc, acc_odd, first, end, positions, newest, slopes,
    row_scale, score_scale, cap_log2, window,
    k_stride_block, k_stride_slot, k_stride_dim, k_stride_x, v_stride_block, v_stride_slot, v_stride_dim, v_stride_x,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_X: tl.constexpr, V_X: tl.constexpr,
    V_SLOTS_INNER: tl.constexpr, K_PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr, SCALE_STRIDES: tl.constexpr, PAIRS: tl.constexpr,
    ZEROED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the cached keys first .. first + BLOCK_N into (m, l, acc), those before `end` of which a query sees up to `newest`.

    PAIRS: acc holds the even elements of a row, acc_odd the odd.
    """
    blocks = block_numbers(table, first, end, BLOCK_SIZE, BLOCK_N)
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if PAIRS:
        k = cached_rows(
            key.to(tl.pointer_type(tl.int16)), blocks, tl.arange(0, BLOCK_D // 2), first, end,
            k_stride_block // 2, k_stride_slot // 2, 1, BLOCK_SIZE, HEAD_DIM // 2, BLOCK_D // 2, BLOCK_N,
            True, True, False, tl.int16,
        )  # fmt: skip
        v = cached_rows(
            value.to(tl.pointer_type(tl.int16)), blocks, tl.arange(0, BLOCK_D // 2), first, end,
            v_stride_block // 2, v_stride_slot // 2, 1, BLOCK_SIZE, HEAD_DIM // 2, BLOCK_D // 2, BLOCK_N,
            True, True, False, tl.int16,
        )  # fmt: skip
        if SCALED:
            k_even, k_odd = unpack_int8(k)
        else:
            k_even, k_odd = unpack_fp8(k)
        scores = tl.dot(q[0], tl.trans(k_even), scores)
        scores = tl.dot(q[1], tl.trans(k_odd), scores) * row_scale[:, None]
    else:
        k = key_rows(
            key, blocks, first, end, k_stride_block, k_stride_slot, k_stride_dim, k_stride_x, K_X, K_PIECES, BLOCK_SIZE,
            HEAD_DIM, BLOCK_D, BLOCK_N, True, DOT,
        )  # fmt: skip
        scores = tl.dot(q[0], tl.trans(k), scores, input_precision=PRECISION)
        if TAIL > 0:
            k_tail = key_rows(
                key + BLOCK_D // K_X * k_stride_dim, blocks, first, end, k_stride_block, k_stride_slot, k_stride_dim, k_stride_x,
                K_X, K_PIECES, BLOCK_SIZE, HEAD_DIM - BLOCK_D, TAIL, BLOCK_N, True, DOT,
            )  # fmt: skip
            scores = tl.dot(q[1], tl.trans(k_tail), scores, input_precision=PRECISION)
        v = cached_rows(
            value, blocks, head_offsets(v_stride_dim, v_stride_x, V_X, BLOCK_DV), first, end,
            v_stride_block, v_stride_slot, V_X, BLOCK_SIZE, V_HEAD_DIM, BLOCK_DV, BLOCK_N,
            True, ZEROED, V_SLOTS_INNER, DOT,
        )  # fmt: skip
    if SCALED:
        k_scales = row_scales(
            key_scale_ptr, kv_head, blocks, first, end, SCALE_STRIDES[0], SCALE_STRIDES[1], SCALE_STRIDES[2], BLOCK_SIZE, BLOCK_N
        )
        v_scales = row_scales(
            value_scale_ptr,
            kv_head,
            blocks,
            first,
            end,
            SCALE_STRIDES[3],
            SCALE_STRIDES[4],
            SCALE_STRIDES[5],
            BLOCK_SIZE,
            BLOCK_N,
        )
        scores = scores * k_scales[None, :]
    m, l, weights, shrink = softmax_step(
        scores, m, l, first + tl.arange(0, BLOCK_N), positions, newest, slopes, score_scale, cap_log2,
        window, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, DOT,
    )  # fmt: skip
    if PAIRS and SCALED:
        v_even, v_odd = unpack_int8(v)
        acc = add_scaled(acc * shrink[:, None], weights, v_even, v_scales, tl.float16, PRECISION)
        acc_odd = add_scaled(acc_odd * shrink[:, None], weights, v_odd, v_scales, tl.float16, PRECISION)
    elif PAIRS:
        v_even, v_odd = unpack_fp8(v)
        acc = tl.dot(weights.to(tl.float16), v_even, acc * shrink[:, None])
        acc_odd = tl.dot(weights.to(tl.float16), v_odd, acc_odd * shrink[:, None])
    elif SCALED:
        acc = add_scaled(acc * shrink[:, None], weights, v, v_scales, DOT, PRECISION)
    else:
        acc = tl.dot(weights.to(DOT), v, acc * shrink[:, None], input_precision=PRECISION)
    return m, l, acc, acc_odd


@triton.jit
def fold_new(
    q, k, v, m, l, acc, at, positions, slopes, score_scale, cap_log2, window,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Fold a token's own key, k and v [BLOCK_D] at position `at`, into (m, l, acc).

    q: [ROWS, BLOCK_D], the rows in use. One key by few rows is less work without the matrix units, whose tile would hold zeros.
    """
    BLOCK_M: tl.constexpr = m.shape[0]
    ROWS: tl.constexpr = q.shape[0]
    scores = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1)
    scores = tl.reshape(tl.broadcast_to(scores[None, :], (BLOCK_M // ROWS, ROWS)), (BLOCK_M, 1))  # repeated in rows not in use
    m, l, weights, shrink = softmax_step(
        scores, m, l, at + tl.arange(0, 1), positions, positions, slopes, score_scale, cap_log2, window,
        False, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, DOT,
    )  # fmt: skip
    return m, l, acc * shrink[:, None] + weights * v.to(tl.float32)[None, :]
