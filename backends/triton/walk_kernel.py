"""How the keys of a run join a query tile's running sums (m, l, acc) in prefill and extend."""

from __future__ import annotations

import triton
import triton.language as tl

from headway.backends.triton.layer import INTERPRETED as _INTERPRETED
from headway.backends.triton.tiles import (
    block_numbers,
    cached_rows,
    dense_rows,
    head_offsets,
    peeked_blocks,
    softmax_step,
    visible_scores,
    weigh,
)

INTERPRETED = tl.constexpr(_INTERPRETED)


@triton.jit
def _keys(
    key, table, kv_head, start, first, kv_len, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, VALUE_IN_KEY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_X: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PEEK: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    DOT: tl.constexpr,
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
            K_X, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, MASKED and VALUE_IN_KEY, False, DOT,
        )  # fmt: skip
        k = (rows,)
        if TAIL > 0:
            tail = cached_rows(
                base + BLOCK_D // K_X * k_stride_dim, blocks, head_offsets(k_stride_dim, k_stride_x, K_X, TAIL), first, kv_len,
                k_stride_block, k_stride_slot, K_X, BLOCK_SIZE, HEAD_DIM - BLOCK_D, TAIL, BLOCK_N, MASKED, False, False, DOT,
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
    BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PEEK: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr,
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
            v_stride_block, v_stride_slot, V_X, BLOCK_SIZE, V_HEAD_DIM, BLOCK_DV, BLOCK_N, MASKED, MASKED, V_SLOTS_INNER, DOT,
        )  # fmt: skip
    else:
        base = value + start.to(tl.int64) * v_stride_slot + kv_head * v_stride_head
        v = dense_rows(base, first, kv_len, v_stride_slot, V_HEAD_DIM, BLOCK_DV, BLOCK_N, MASKED, DOT)
    return v


@triton.jit
def walk(
    q, key, value, m, l, acc, table, kv_head, start, begin, end, kv_len, positions, slopes,
    score_scale, cap_log2, window, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
    v_stride_block, v_stride_slot, v_stride_head, v_stride_dim, v_stride_x,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr, BLOCK_SIZE: tl.constexpr, K_X: tl.constexpr, V_X: tl.constexpr, V_SLOTS_INNER: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PEEK: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Fold the keys begin .. end into (m, l, acc), one tile after the other; begin is a multiple of BLOCK_N."""
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        k = _keys(
            key, table, kv_head, start, first, kv_len, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
            HEAD_DIM, BLOCK_D, TAIL, VALUE_IN_KEY, BLOCK_SIZE, K_X, BLOCK_N, PAGED, PEEK, TMA, MASKED, DOT,
        )  # fmt: skip
        if VALUE_IN_KEY:
            v = k[0]
        else:
            v = _values(
                value, table, kv_head, start, first, kv_len, v_stride_block, v_stride_slot, v_stride_head, v_stride_dim,
                v_stride_x, V_HEAD_DIM, BLOCK_DV, BLOCK_SIZE, V_X, V_SLOTS_INNER, BLOCK_N, PAGED, PEEK, TMA, MASKED, DOT,
            )  # fmt: skip
        scores = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)
        if TAIL > 0:
            scores = tl.dot(q[1], tl.trans(k[1]), scores, input_precision=PRECISION)
        m, l, weights, shrink = softmax_step(
            scores, m, l, first + tl.arange(0, BLOCK_N), positions, positions, slopes, score_scale, cap_log2, window,
            MASKED, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, DOT,
        )  # fmt: skip
        acc = tl.dot(weights.to(DOT), v, acc * shrink[:, None], input_precision=PRECISION)
    return m, l, acc


@triton.jit
def start_ahead(
    q, key, table, kv_head, start, begin, kv_len, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, K_X: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr, PEEK: tl.constexpr, TMA: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `walk_ahead` begins with: the scores of the first tile, and no weights of a tile before it."""
    k = _keys(
        key, table, kv_head, start, begin, kv_len, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
        HEAD_DIM, BLOCK_D, 0, False, BLOCK_SIZE, K_X, BLOCK_N, PAGED, PEEK, TMA, True, DOT,
    )  # fmt: skip
    scores = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)
    return scores, _bits(tl.zeros_like(scores), DOT)


@triton.jit
def walk_ahead(
    q, key, value, m, l, acc, scores, weights, table, kv_head, start, first_tile, begin, end, run_end, kv_len, positions, slopes,
    score_scale, cap_log2, window, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
    v_stride_block, v_stride_slot, v_stride_head, v_stride_dim, v_stride_x,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr, BLOCK_SIZE: tl.constexpr, K_X: tl.constexpr, V_X: tl.constexpr, V_SLOTS_INNER: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PEEK: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """As `walk`, with the tensor cores at the next tile's scores while this tile's weights are computed (FlashAttention-3, Shah
    et al. 2024, overlaps them within a warp group in this way).

    scores: of the tile `begin`; weights: of the tile before it, as `_bits`, not in acc yet. Both are returned for the tile that
    follows. first_tile, run_end: of the whole run. m is in the base-2 domain here.

    The order of the lines is what makes Triton and ptxas keep the product in flight. Triton lets a product run into the next
    iteration if nothing else uses it in this one and if there its first use stands after a wait for all products: that of the
    product with the values. ptxas lets it run if no other instruction touches its registers meanwhile: hence `_scaled`.
    """
    last_tile = (run_end - 1) // BLOCK_N * BLOCK_N
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        v = _values(
            value, table, kv_head, start, tl.maximum(first - BLOCK_N, first_tile), kv_len, v_stride_block, v_stride_slot,
            v_stride_head, v_stride_dim, v_stride_x, V_HEAD_DIM, BLOCK_DV, BLOCK_SIZE, V_X, V_SLOTS_INNER, BLOCK_N, PAGED, PEEK,
            TMA, MASKED, DOT,
        )  # fmt: skip
        k = _keys(
            key, table, kv_head, start, tl.minimum(first + BLOCK_N, last_tile), kv_len, k_stride_block, k_stride_slot,
            k_stride_head, k_stride_dim, k_stride_x, HEAD_DIM, BLOCK_D, 0, False, BLOCK_SIZE, K_X, BLOCK_N, PAGED, PEEK, TMA,
            True, DOT,
        )  # fmt: skip
        acc = tl.dot(_numbers(weights, DOT), v, acc, input_precision=PRECISION)
        current = visible_scores(
            _scaled(scores, score_scale), first + tl.arange(0, BLOCK_N), positions, positions, slopes, cap_log2, window,
            MASKED, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, DOT,
        )  # fmt: skip
        largest = tl.maximum(m, tl.max(current, 1))
        scores = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)
        m, l, fresh, shrink = weigh(current, m, l, largest, 1.0, MASKED)
        acc = acc * shrink[:, None]
        weights = _bits(fresh, DOT)
    return m, l, acc, scores, weights


@triton.jit
def end_ahead(
    value, weights, acc, table, kv_head, start, run_end, kv_len, v_stride_block, v_stride_slot, v_stride_head, v_stride_dim,
    v_stride_x, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, V_X: tl.constexpr,
    V_SLOTS_INNER: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PEEK: tl.constexpr, TMA: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the values of the run's last tile into acc."""
    v = _values(
        value, table, kv_head, start, (run_end - 1) // BLOCK_N * BLOCK_N, kv_len, v_stride_block, v_stride_slot, v_stride_head,
        v_stride_dim, v_stride_x, V_HEAD_DIM, BLOCK_DV, BLOCK_SIZE, V_X, V_SLOTS_INNER, BLOCK_N, PAGED, PEEK, TMA, True, DOT,
    )  # fmt: skip
    return tl.dot(_numbers(weights, DOT), v, acc, input_precision=PRECISION)


@triton.jit
def _scaled(scores, scale):
    """scores * scale, which the compiler must not fuse with what follows: the scores are needed no more after it."""
    if INTERPRETED:
        scaled = scores * scale
    else:
        scaled = tl.inline_asm_elementwise(
            "mul.f32 $0, $1, $2;", "=f,f,f", args=[scores, scale], dtype=tl.float32, is_pure=True, pack=1
        )
    return scaled


@triton.jit
def _bits(weights, DOT: tl.constexpr):
    """Weights as a loop carries them: as integers, since a product would move floats that come from a loop's head to shared
    memory."""
    if INTERPRETED:
        bits = weights
    else:
        bits = weights.to(DOT).to(tl.int16, bitcast=True)
    return bits


@triton.jit
def _numbers(bits, DOT: tl.constexpr):
    """Back from `_bits`."""
    if INTERPRETED:
        weights = bits
    else:
        weights = bits.to(DOT, bitcast=True)
    return weights
