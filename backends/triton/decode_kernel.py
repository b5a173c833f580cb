"""Split-KV paged decode in one launch: every split leaves a partial result, and the last one to arrive merges them.

Splitting the keys of a sequence over programs is flash-decoding (Dao et al. 2023); packing the query heads of a kv head into one
tile is FlashInfer's and FlashAttention's GQA packing, so that no key is read twice and the tensor cores have rows to work on.
The merge by the last arriver saves the second launch, which costs more than it does at short contexts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.backends.triton.tiles import block_numbers, cached_rows, head_offsets, online_step


@triton.jit
def split_kv_decode(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    key_ptr,  # a cache in any layout, addressed by the strides of its logical view [block, slot, head, dim / X, X]
    value_ptr,
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    table_ptr,  # int32 [num_seqs, max_blocks]
    seq_lens_ptr,  # int32 [num_seqs]; 0: a padding row, skipped
    query_start_ptr,  # int32 [num_seqs + 1]
    slopes_ptr,  # float32 [num_heads], log2(e) * ALiBi slope
    sinks_ptr,  # float32 [num_heads], log2(e) * sink
    partial_ptr,  # float32 [num_seqs * items, NUM_SPLITS, ROWS, BLOCK_D]; items: grid axis 0
    lse_ptr,  # float32 [num_seqs * items, NUM_SPLITS, ROWS]
    arrivals_ptr,  # int32 [num_seqs * items], zero between launches
    score_scale,
    cap_log2,
    v_scale,
    window,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    table_stride,
    k_stride_block,
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
    GROUP: tl.constexpr,  # query heads a kv head
    MAX_QUERY_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    K_X: tl.constexpr,
    V_X: tl.constexpr,
    V_SLOTS_INNER: tl.constexpr,  # neighbouring slots of the value lie side by side
    BLOCK_M: tl.constexpr,  # rows of the query tile; the tensor cores want 16
    ROWS: tl.constexpr,  # rows that can be in use, rounded up to a power of two
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,  # partial results merged at a time
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (kv heads * query tiles, NUM_SPLITS, num_seqs). Row r of a sequence's query is token r // GROUP, head r % GROUP."""
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    first_row = (tl.program_id(0) // NUM_KV_HEADS) * BLOCK_M
    split = tl.program_id(1)
    seq = tl.program_id(2)
    kv_len = tl.load(seq_lens_ptr + seq)
    if MAX_QUERY_LEN == 1:
        token = seq
        query_len = 1
    else:
        token = tl.load(query_start_ptr + seq)
        query_len = tl.load(query_start_ptr + seq + 1) - token

    # The host fixes the number of splits, and this sequence's length their size: a captured graph stays right at any length.
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(kv_len - query_len - window + 1, 0) // BLOCK_N
    tiles = tl.cdiv(kv_len, BLOCK_N) - first_tile
    tiles_a_split = tl.cdiv(tiles, NUM_SPLITS)
    if split * tiles_a_split >= tiles:  # also every padding row
        return
    if first_row >= query_len * GROUP:
        return
    start = (first_tile + split * tiles_a_split) * BLOCK_N
    end = tl.minimum(start + tiles_a_split * BLOCK_N, kv_len)

    row = first_row + tl.arange(0, BLOCK_M)
    live = row < query_len * GROUP
    head = kv_head * GROUP + row % GROUP
    positions = kv_len - query_len + row // GROUP
    d = tl.arange(0, BLOCK_D)
    inside = live[:, None] & (d[None, :] < HEAD_DIM)
    q_rows = (token + row // GROUP).to(tl.int64) * q_stride_token + head * q_stride_head
    q = tl.load(q_ptr + q_rows[:, None] + d[None, :], mask=inside, other=0.0).to(DOT)
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + head, mask=live, other=0.0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = table_ptr + seq * table_stride
    key = key_ptr + kv_head * k_stride_head
    value = value_ptr + kv_head * v_stride_head
    k_offsets = head_offsets(k_stride_dim, k_stride_x, K_X, BLOCK_D)
    v_offsets = head_offsets(v_stride_dim, v_stride_x, V_X, BLOCK_D)
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        blocks = block_numbers(table, first, end, BLOCK_SIZE, BLOCK_N)
        k = cached_rows(
            key, blocks, k_offsets, first, end, k_stride_block, k_stride_slot,
            K_X, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, False, False, DOT,
        )  # fmt: skip
        v = cached_rows(
            value, blocks, v_offsets, first, end, v_stride_block, v_stride_slot,
            V_X, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, True, V_SLOTS_INNER, DOT,
        )  # fmt: skip
        m, l, acc = online_step(
            q, k, v, m, l, acc, first + tl.arange(0, BLOCK_N), positions, slopes, score_scale, cap_log2, window,
            True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, DOT, PRECISION,
        )  # fmt: skip
    if HAS_SOFTCAP or HAS_ALIBI:
        score_scale = 1.0
    m = m * score_scale

    out_rows = (token + row // GROUP).to(tl.int64) * out_stride_token + head * out_stride_head
    out_ptrs = out_ptr + out_rows[:, None] + d[None, :]
    active = tl.cdiv(tiles, tl.maximum(tiles_a_split, 1))
    if active == 1:
        if HAS_SINKS:
            l += tl.exp2(tl.load(sinks_ptr + head, mask=live, other=0.0) - m)
        result = acc * (v_scale / tl.where(l > 0, l, 1.0))[:, None]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        item = seq * tl.num_programs(0) + tl.program_id(0)
        lse = m + tl.log2(l)  # of a row without a visible key in this split: -inf
        result = acc / tl.where(l > 0, l, 1.0)[:, None]
        slot = (item.to(tl.int64) * NUM_SPLITS + split) * ROWS + tl.arange(0, BLOCK_M)
        used = tl.arange(0, BLOCK_M) < ROWS
        tl.store(lse_ptr + slot, lse, mask=used)
        tl.store(partial_ptr + slot[:, None] * BLOCK_D + d[None, :], result, mask=used[:, None])
        tl.debug_barrier()  # the atomic below releases what all threads of this program stored
        arrived = tl.atomic_add(arrivals_ptr + item, 1, sem="acq_rel", scope="gpu")
        if arrived == active - 1:
            _merge(
                partial_ptr, lse_ptr, out_ptr, sinks_ptr, item, token, kv_head, first_row, query_len, active, v_scale,
                out_stride_token, out_stride_head, GROUP, HEAD_DIM, BLOCK_D, ROWS, NUM_SPLITS, CHUNK, HAS_SINKS,
            )  # fmt: skip
            tl.store(arrivals_ptr + item, 0)


@triton.jit
def _merge(
    partial_ptr,
    lse_ptr,
    out_ptr,
    sinks_ptr,
    item,
    token,
    kv_head,
    first_row,
    query_len,
    active,  # splits that hold a result
    v_scale,
    out_stride_token,
    out_stride_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Combine the splits of one query tile by their log-sum-exp, CHUNK at a time so that the loads overlap."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + (first_row + r) % GROUP
    live = first_row + r < query_len * GROUP
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in range(0, active, CHUNK):
        split = first + tl.arange(0, CHUNK)
        slot = (item.to(tl.int64) * NUM_SPLITS + split)[:, None] * ROWS + r[None, :]
        there = split < active
        lse = tl.load(lse_ptr + slot, mask=there[:, None], other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(
            partial_ptr + slot[:, :, None] * BLOCK_D + d[None, None, :],
            mask=there[:, None, None],
            other=0.0,
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m, tl.max(lse, 0))
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(lse - finite[None, :])
        shrink = tl.exp2(m - finite)
        l = l * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        m = m_new
    if HAS_SINKS:
        l += tl.exp2(tl.load(sinks_ptr + head, mask=live, other=0.0) - m)
    result = acc * (v_scale / tl.where(l > 0, l, 1.0))[:, None]
    out_rows = (token + (first_row + r) // GROUP).to(tl.int64) * out_stride_token + head * out_stride_head
    inside = live[:, None] & (d[None, :] < HEAD_DIM)
    tl.store(out_ptr + out_rows[:, None] + d[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)
