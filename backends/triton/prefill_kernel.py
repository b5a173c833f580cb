"""Varlen prefill and extend: each program folds a run of keys into a tile of query rows, as `prefill_schedule` lists.

FlashAttention's forward pass (Dao et al. 2022, 2023) with FlashInfer's head packing. The keys come from this step's k and v (no
context) or through the block table. With TMA they are read by tensor descriptors over the same memory, one box a tile. Where
tiles are too few for the GPU, several programs share the keys of one (flash-decoding, Dao et al. 2023) and `merge_tiles` combines
what they leave.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.backends.triton.tiles import alibi_slopes, normalise, query_tile
from headway.backends.triton.walk_kernel import walk


@triton.jit(
    do_not_specialize=["window", "table_stride", "sums_stride_head"],
    do_not_specialize_on_alignment=["table_ptr", "sums_ptr"],
)
def varlen_attention(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    key,  # pointer to a cache (PAGED) or to k [num_tokens, kv_heads, HEAD_DIM]; with TMA a descriptor [block, head, slot, dim]
    value,
    out_ptr,  # [num_tokens, num_heads, V_HEAD_DIM]
    sums_ptr,  # HAS_LSE: float32 [num_heads, num_tokens], the log-sum-exp of each row
    key_scale_ptr,  # SCALED: float32, addressed by strides of [block, slot, head]
    value_scale_ptr,
    schedule_ptr,  # int32 [programs, 8], columns of prefill_schedule.TileColumn
    partial_ptr,  # SPLIT: float32 [slots, NUM_KV_HEADS, BLOCK_M, BLOCK_DV]
    lse_ptr,  # SPLIT: float32 [slots, NUM_KV_HEADS, BLOCK_M]
    table_ptr,  # int32 [num_seqs, max_blocks]
    slopes_ptr,  # float32 [num_heads], log2(e) * ALiBi slope
    sinks_ptr,  # float32 [num_heads], log2(e) * sink
    score_scale,
    cap_log2,
    v_scale,
    window,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    sums_stride_head,
    table_stride,
    k_stride_block,  # those of k, v without context: 0, token, head, 1, 1
    k_stride_slot,
    k_stride_head,
    k_stride_dim,
    k_stride_x,
    v_stride_block,
    v_stride_slot,
    v_stride_head,
    v_stride_dim,
    v_stride_x,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two, or the power of two before its TAIL
    TAIL: tl.constexpr,  # the rest of a long row, rounded up to a power of two; 0: there is none
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr,  # the value is the key's first tile
    BLOCK_SIZE: tl.constexpr,
    K_X: tl.constexpr,
    V_X: tl.constexpr,
    V_SLOTS_INNER: tl.constexpr,  # neighbouring slots of the value lie side by side
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr,
    PEEK: tl.constexpr,  # block numbers are read by `peeked_blocks`
    STEP: tl.constexpr,  # of the strides of blocks: both are multiples of it
    TMA: tl.constexpr,
    SCALED: tl.constexpr,  # a row of the cache is whole numbers times a scale of its own; PAGED
    SCALE_STRIDES: tl.constexpr,  # three of the key's scales, three of the value's
    CAUSAL: tl.constexpr,  # else a query sees later keys, too: all of them, or the window's
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,  # a tile's keys may be shared by programs
    PDL: tl.constexpr,  # launched before the kernels it depends on have ended
):
    """Grid (NUM_KV_HEADS, programs). Row r of a sequence is token r // GROUP, head r % GROUP of the kv head's group."""
    if PDL:
        gdc_wait()
    kv_head = tl.program_id(0)
    tile = schedule_ptr + tl.program_id(1) * 8
    seq = tl.load(tile)
    start = tl.load(tile + 1)
    query_len = tl.load(tile + 2)
    kv_len = tl.load(tile + 3)
    first_row = tl.load(tile + 4) * BLOCK_M
    begin = tl.load(tile + 5) * BLOCK_N  # a number of tiles there, so that the compiler sees a multiple
    end = tl.load(tile + 6)
    slot = tl.load(tile + 7)
    context = kv_len - query_len

    row = first_row + tl.arange(0, BLOCK_M)
    live = row < query_len * GROUP
    head = kv_head * GROUP + row % GROUP
    positions = context + row // GROUP
    d = tl.arange(0, BLOCK_D)
    inside = live[:, None] & (d[None, :] < HEAD_DIM)
    q_rows = (start + row // GROUP).to(tl.int64) * q_stride_token + head * q_stride_head
    q = query_tile(q_ptr + q_rows[:, None], d, inside, live, HEAD_DIM, BLOCK_D, TAIL, DOT)
    slopes = alibi_slopes(slopes_ptr, head, live, BLOCK_M, HAS_ALIBI)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table = table_ptr + seq * table_stride

    # Between the keys that the tile's last row no longer sees and those that its first row does not see yet, none is masked.
    oldest = context + first_row // GROUP
    full_begin = begin
    if CAUSAL:
        newest = positions
        unmasked = oldest + 1
    elif HAS_WINDOW:
        newest = tl.minimum(positions + window - 1, kv_len - 1)
        unmasked = tl.minimum(oldest + window, kv_len)
    else:
        newest = tl.zeros([BLOCK_M], tl.int32) + (kv_len - 1)
        unmasked = kv_len
    full_end = tl.maximum(tl.minimum(unmasked // BLOCK_N * BLOCK_N, end), begin)
    if HAS_WINDOW:
        last = tl.minimum(context + (first_row + BLOCK_M - 1) // GROUP, kv_len - 1)
        full_begin = tl.cdiv(tl.maximum(last - window + 1, 0), BLOCK_N) * BLOCK_N
        full_begin = tl.minimum(tl.maximum(full_begin, begin), full_end)
    if HAS_WINDOW:
        m, l, acc = walk(
            q, key, value, key_scale_ptr, value_scale_ptr, m, l, acc, table, kv_head, start, begin, full_begin, kv_len, positions,
            newest,
            slopes, score_scale, cap_log2, window, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
            v_stride_block, v_stride_slot, v_stride_head, v_stride_dim, v_stride_x,
            HEAD_DIM, BLOCK_D, TAIL, V_HEAD_DIM, BLOCK_DV, VALUE_IN_KEY, BLOCK_SIZE, K_X, V_X, V_SLOTS_INNER, BLOCK_N,
            PAGED, PEEK, STEP, TMA, SCALED, SCALE_STRIDES, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, DOT, PRECISION, STAGES,
        )  # fmt: skip
    m, l, acc = walk(
        q, key, value, key_scale_ptr, value_scale_ptr, m, l, acc, table, kv_head, start, full_begin, full_end, kv_len, positions,
        newest,
        slopes, score_scale, cap_log2, window, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
        v_stride_block, v_stride_slot, v_stride_head, v_stride_dim, v_stride_x,
        HEAD_DIM, BLOCK_D, TAIL, V_HEAD_DIM, BLOCK_DV, VALUE_IN_KEY, BLOCK_SIZE, K_X, V_X, V_SLOTS_INNER, BLOCK_N,
        PAGED, PEEK, STEP, TMA, SCALED, SCALE_STRIDES, False, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, DOT, PRECISION, STAGES,
    )  # fmt: skip
    m, l, acc = walk(
        q, key, value, key_scale_ptr, value_scale_ptr, m, l, acc, table, kv_head, start, full_end, end, kv_len, positions,
        newest,
        slopes, score_scale, cap_log2, window, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
        v_stride_block, v_stride_slot, v_stride_head, v_stride_dim, v_stride_x,
        HEAD_DIM, BLOCK_D, TAIL, V_HEAD_DIM, BLOCK_DV, VALUE_IN_KEY, BLOCK_SIZE, K_X, V_X, V_SLOTS_INNER, BLOCK_N,
        PAGED, PEEK, STEP, TMA, SCALED, SCALE_STRIDES, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, DOT, PRECISION, STAGES,
    )  # fmt: skip

    if PDL:
        gdc_launch_dependents()
    if HAS_SOFTCAP or HAS_ALIBI:
        score_scale = 1.0
    m = m * score_scale
    dv = tl.arange(0, BLOCK_DV)
    if not SPLIT or slot < 0:
        result = normalise(
            acc, m, l, sums_ptr, sinks_ptr, start, row, head, live, v_scale, sums_stride_head, GROUP, HAS_SINKS, HAS_LSE
        )
        out_rows = (start + row // GROUP).to(tl.int64) * out_stride_token + head * out_stride_head
        out_mask = live[:, None] & (dv[None, :] < V_HEAD_DIM)
        tl.store(out_ptr + out_rows[:, None] + dv[None, :], result.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        part = (slot.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(lse_ptr + part, m + tl.log2(l))  # of a row without a visible key in this run: -inf
        result = acc * (1.0 / tl.where(l > 0, l, 1.0))[:, None]
        tl.store(partial_ptr + part[:, None] * BLOCK_DV + dv[None, :], result, mask=live[:, None])
