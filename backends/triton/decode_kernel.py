"""Split-KV paged decode in one launch: every split leaves a partial result, and the last one to arrive merges them.

Splitting the keys of a sequence over programs is flash-decoding (Dao et al. 2023); packing the query heads of a kv head into one
tile is FlashInfer's and FlashAttention's GQA packing, so that no key is read twice and the tensor cores have rows to work on.
The merge by the last arriver saves the second launch, which costs more than it does at short contexts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.backends.triton.tiles import block_numbers, cached_rows, head_offsets, softmax_step, split_rows, unpack_fp8


@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "query_start_ptr", "lse_ptr"],
)
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
    partial_ptr,  # float32 [num_seqs * items, splits, ROWS, BLOCK_D]; items: grid axis 0
    lse_ptr,  # float32 [num_seqs * items, splits, ROWS]
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
    ONE_TOKEN: tl.constexpr,  # every sequence has exactly one query token
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    K_X: tl.constexpr,
    V_X: tl.constexpr,
    V_SLOTS_INNER: tl.constexpr,  # neighbouring slots of the value lie side by side
    BLOCK_M: tl.constexpr,  # rows of the query tile; the tensor cores want 16
    ROWS: tl.constexpr,  # rows that can be in use, rounded up to a power of two
    BLOCK_N: tl.constexpr,
    PAIRS: tl.constexpr,  # an fp8 cache whose rows lie in one piece: read as pairs, which the tensor cores' loads can turn around
    SPLIT: tl.constexpr,  # more than one split may hold keys
    CHUNK: tl.constexpr,  # partial results merged at a time
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,  # launched before the kernels it depends on have ended
    EARLY: tl.constexpr,  # the kernel after this one may start meanwhile
):
    """Grid (kv heads * query tiles, splits, num_seqs). Row r of a sequence's query is token r // GROUP, head r % GROUP."""
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    first_row = (tl.program_id(0) // NUM_KV_HEADS) * BLOCK_M
    split = tl.program_id(1)
    seq = tl.program_id(2)
    kv_len = tl.load(seq_lens_ptr + seq)
    if ONE_TOKEN:
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
    tiles_a_split = tl.cdiv(tiles, tl.num_programs(1))
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
    q_rows = q_ptr + ((token + row // GROUP).to(tl.int64) * q_stride_token + head * q_stride_head)[:, None]
    row_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if PAIRS:
        # q joins the cache's numbers in float16, divided by a power of two so that none overflows.
        half = tl.arange(0, BLOCK_D // 2)
        half_inside = live[:, None] & (half[None, :] < HEAD_DIM // 2)
        q_even = tl.load(q_rows + 2 * half[None, :], mask=half_inside, other=0.0).to(tl.float32)
        q_odd = tl.load(q_rows + 2 * half[None, :] + 1, mask=half_inside, other=0.0).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(q_even), 1), tl.max(tl.abs(q_odd), 1))
        row_scale = tl.exp2(tl.ceil(tl.log2(tl.maximum(largest, 1e-30))))
        q = ((q_even / row_scale[:, None]).to(tl.float16), (q_odd / row_scale[:, None]).to(tl.float16))
    else:
        q = (tl.load(q_rows + d[None, :], mask=inside, other=0.0).to(DOT),)
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + head, mask=live, other=0.0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D // 2 if PAIRS else BLOCK_D], tl.float32)
    acc_odd = acc
    table = table_ptr + seq * table_stride
    key = key_ptr + kv_head * k_stride_head
    value = value_ptr + kv_head * v_stride_head
    # Zeroing what lies past the end costs a layout with neighbouring slots many instructions: only its last tile pays for it.
    whole = end // BLOCK_N * BLOCK_N if V_SLOTS_INNER else end
    for first in tl.range(start, whole, BLOCK_N, num_stages=STAGES):
        m, l, acc, acc_odd = _fold(
            q, key, value, table, m, l, acc, acc_odd, first, end, positions, slopes, row_scale, score_scale, cap_log2, window,
            k_stride_block, k_stride_slot, k_stride_dim, k_stride_x, v_stride_block, v_stride_slot, v_stride_dim, v_stride_x,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, K_X, V_X, V_SLOTS_INNER, BLOCK_M, BLOCK_N, PAIRS, not V_SLOTS_INNER,
            HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, DOT, PRECISION,
        )  # fmt: skip
    if V_SLOTS_INNER:
        for first in tl.range(whole, end, BLOCK_N, num_stages=1):
            m, l, acc, acc_odd = _fold(
                q, key, value, table, m, l, acc, acc_odd, first, end, positions, slopes, row_scale, score_scale, cap_log2, window,
                k_stride_block, k_stride_slot, k_stride_dim, k_stride_x, v_stride_block, v_stride_slot, v_stride_dim, v_stride_x,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, K_X, V_X, V_SLOTS_INNER, BLOCK_M, BLOCK_N, PAIRS, True,
                HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, DOT, PRECISION,
            )  # fmt: skip
    if PAIRS:
        acc = tl.interleave(acc, acc_odd)
    if HAS_SOFTCAP or HAS_ALIBI:
        score_scale = 1.0
    m = m * score_scale

    out_rows = (token + row // GROUP).to(tl.int64) * out_stride_token + head * out_stride_head
    out_ptrs = out_ptr + out_rows[:, None] + d[None, :]
    active = tl.cdiv(tiles, tl.maximum(tiles_a_split, 1))
    if not SPLIT or active == 1:
        if HAS_SINKS:
            l += tl.exp2(tl.load(sinks_ptr + head, mask=live, other=0.0) - m)
        result = acc * (v_scale / tl.where(l > 0, l, 1.0))[:, None]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        item = seq * tl.num_programs(0) + tl.program_id(0)
        lse = m + tl.log2(l)  # of a row without a visible key in this split: -inf
        result = acc / tl.where(l > 0, l, 1.0)[:, None]
        slot = (item.to(tl.int64) * tl.num_programs(1) + split) * ROWS + tl.arange(0, BLOCK_M)
        used = tl.arange(0, BLOCK_M) < ROWS
        tl.store(lse_ptr + slot, lse, mask=used)
        tl.store(partial_ptr + slot[:, None] * BLOCK_D + d[None, :], result, mask=used[:, None])
        tl.debug_barrier()  # the atomic below releases what all threads of this program stored
        arrived = tl.atomic_add(arrivals_ptr + item, 1, sem="acq_rel", scope="gpu")
        if arrived == active - 1:
            _merge(
                partial_ptr, lse_ptr, out_ptr, sinks_ptr, item, token, kv_head, first_row, query_len, active, v_scale,
                out_stride_token, out_stride_head, GROUP, HEAD_DIM, BLOCK_D, ROWS, CHUNK, HAS_SINKS,
            )  # fmt: skip
            tl.store(arrivals_ptr + item, 0)


@triton.jit
def _fold(
    q, key, value, table, m, l, acc, acc_odd, first, end, positions, slopes, row_scale, score_scale, cap_log2, window,
    k_stride_block, k_stride_slot, k_stride_dim, k_stride_x, v_stride_block, v_stride_slot, v_stride_dim, v_stride_x,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, K_X: tl.constexpr, V_X: tl.constexpr,
    V_SLOTS_INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIRS: tl.constexpr,
    ZEROED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys first .. first + BLOCK_N into (m, l, acc). PAIRS: acc holds the even elements of a row, acc_odd the odd."""
    blocks = block_numbers(table, first, end, BLOCK_SIZE, BLOCK_N)
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if PAIRS:
        k = cached_rows(
            key.to(tl.pointer_type(tl.int16)), blocks, tl.arange(0, BLOCK_D // 2), first, end,
            k_stride_block // 2, k_stride_slot // 2, 1, BLOCK_SIZE, HEAD_DIM // 2, BLOCK_D // 2, BLOCK_N,
            True, False, False, tl.int16,
        )  # fmt: skip
        v = cached_rows(
            value.to(tl.pointer_type(tl.int16)), blocks, tl.arange(0, BLOCK_D // 2), first, end,
            v_stride_block // 2, v_stride_slot // 2, 1, BLOCK_SIZE, HEAD_DIM // 2, BLOCK_D // 2, BLOCK_N,
            True, True, False, tl.int16,
        )  # fmt: skip
        k_even, k_odd = unpack_fp8(k)
        scores = tl.dot(q[0], tl.trans(k_even), scores)
        scores = tl.dot(q[1], tl.trans(k_odd), scores) * row_scale[:, None]
    else:
        if K_X > 1 and BLOCK_SIZE % BLOCK_N == 0:
            k = split_rows(
                key, blocks, first, k_stride_block, k_stride_dim, K_X, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, DOT
            )  # fmt: skip
        else:
            k = cached_rows(
                key, blocks, head_offsets(k_stride_dim, k_stride_x, K_X, BLOCK_D), first, end,
                k_stride_block, k_stride_slot, K_X, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
                True, False, False, DOT,
            )  # fmt: skip
        scores = tl.dot(q[0], tl.trans(k), scores, input_precision=PRECISION)
        v = cached_rows(
            value, blocks, head_offsets(v_stride_dim, v_stride_x, V_X, BLOCK_D), first, end,
            v_stride_block, v_stride_slot, V_X, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
            True, ZEROED, V_SLOTS_INNER, DOT,
        )  # fmt: skip
    m, l, weights, shrink = softmax_step(
        scores, m, l, first + tl.arange(0, BLOCK_N), positions, slopes, score_scale, cap_log2, window,
        True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, DOT,
    )  # fmt: skip
    if PAIRS:
        v_even, v_odd = unpack_fp8(v)
        acc = tl.dot(weights.to(tl.float16), v_even, acc * shrink[:, None])
        acc_odd = tl.dot(weights.to(tl.float16), v_odd, acc_odd * shrink[:, None])
    else:
        acc = tl.dot(weights.to(DOT), v, acc * shrink[:, None], input_precision=PRECISION)
    return m, l, acc, acc_odd


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
        slot = (item.to(tl.int64) * tl.num_programs(1) + split)[:, None] * ROWS + r[None, :]
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
