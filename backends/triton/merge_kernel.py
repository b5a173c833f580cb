"""Merge kernels of split-KV attention: combine the partial results of the programs that share a query tile."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.backends.triton.tiles import normalise


@triton.jit
def merge_parts(
    partial_ptr,  # float32 [.., BLOCK_DV]: normalised results, one query-tile row each
    lse_ptr,  # float32 [..]: their log-sum-exp in base 2
    first_slot,  # int64: slot of the first part's first row
    slot_stride,  # distance between the slots of successive parts
    num_parts,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Combine the parts of ROWS rows by log-sum-exp, MERGED at a time. Returns m [ROWS], l [ROWS] and acc [ROWS, BLOCK_DV]."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_DV)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for merged in range(0, num_parts, MERGED):
        number = merged + tl.arange(0, MERGED)
        slot = (first_slot + number * slot_stride)[:, None] + r[None, :]
        there = number < num_parts
        lse = tl.load(lse_ptr + slot, mask=there[:, None], other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(
            partial_ptr + slot[:, :, None] * BLOCK_DV + d[None, None, :],
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
    return m, l, acc


@triton.jit
def merge_rows(
    partial_ptr,
    lse_ptr,
    out_ptr,
    sums_ptr,
    sinks_ptr,
    first_slot,
    slot_stride,
    num_parts,
    token,  # index of the sequence's first token
    kv_head,
    first_row,  # first of these rows in the sequence's query
    query_len,
    v_scale,
    out_stride_token,
    out_stride_head,
    sums_stride_head,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Combine all parts of ROWS rows and store the result. Arguments are as in `merge_parts`."""
    m, l, acc = merge_parts(partial_ptr, lse_ptr, first_slot, slot_stride, num_parts, BLOCK_DV, ROWS, MERGED)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_DV)
    head = kv_head * GROUP + (first_row + r) % GROUP
    live = first_row + r < query_len * GROUP
    result = normalise(
        acc, m, l, sums_ptr, sinks_ptr, token, first_row + r, head, live, v_scale, sums_stride_head, GROUP, HAS_SINKS, HAS_LSE
    )
    out_rows = (token + (first_row + r) // GROUP).to(tl.int64) * out_stride_token + head * out_stride_head
    inside = live[:, None] & (d[None, :] < V_HEAD_DIM)
    tl.store(out_ptr + out_rows[:, None] + d[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sums_stride_head"], do_not_specialize_on_alignment=["sums_ptr", "merges_ptr"])
def merge_tiles(
    out_ptr,  # [num_tokens, num_heads, V_HEAD_DIM]
    sums_ptr,  # HAS_LSE: float32 [num_heads, num_tokens], the caller's log-sum-exp
    merges_ptr,  # int32 [num_merges, 8], columns of splits.MergeColumn
    sinks_ptr,  # float32 [num_heads]: log2(e) * sink
    partial_ptr,  # float32 [slots, NUM_KV_HEADS, BLOCK_M, BLOCK_DV]
    lse_ptr,  # float32 [slots, NUM_KV_HEADS, BLOCK_M]
    v_scale,
    out_stride_token,
    out_stride_head,
    sums_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge ROWS rows of a query tile whose keys were divided among several programs. Grid (NUM_KV_HEADS, BLOCK_M / ROWS,
    num_merges)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    row = tl.program_id(1) * ROWS
    merge = merges_ptr + tl.program_id(2) * 8
    token = tl.load(merge)
    query_len = tl.load(merge + 1)
    first_row = tl.load(merge + 2) * BLOCK_M + row
    slot = tl.load(merge + 3).to(tl.int64) * (NUM_KV_HEADS * BLOCK_M) + kv_head * BLOCK_M + row
    num_parts = tl.load(merge + 4)
    if first_row < query_len * GROUP:
        merge_rows(
            partial_ptr, lse_ptr, out_ptr, sums_ptr, sinks_ptr, slot, NUM_KV_HEADS * BLOCK_M, num_parts, token, kv_head,
            first_row, query_len, v_scale, out_stride_token, out_stride_head, sums_stride_head,
            GROUP, V_HEAD_DIM, BLOCK_DV, ROWS, MERGED, HAS_SINKS, HAS_LSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["sums_stride_head"], do_not_specialize_on_alignment=["sums_ptr", "lse_ptr"])
def merge_chunks(
    out_ptr,  # [num_tokens, num_heads, V_HEAD_DIM]
    sums_ptr,  # HAS_LSE: float32 [num_heads, num_tokens], the caller's log-sum-exp
    seqs_ptr,  # int32 [num_seqs, 4], see chunk_kernel.SEQ_FIELDS
    sinks_ptr,  # float32 [num_heads]: log2(e) * sink
    partial_ptr,  # float32 [chunks, items, TILE_ROWS, BLOCK_DV]; items: grid axis 0
    lse_ptr,  # float32 [chunks, items, TILE_ROWS]
    v_scale,
    out_stride_token,
    out_stride_head,
    sums_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a query tile
    TILE_ROWS: tl.constexpr,  # number of these rows that partial results have
    ROWS: tl.constexpr,
    MERGED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the chunks of ROWS rows of a decode. Grid (kv heads * query tiles, TILE_ROWS / ROWS, num_seqs)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row = tl.program_id(1) * ROWS
    first_row = tl.program_id(0) // NUM_KV_HEADS * BLOCK_M + row
    seq = seqs_ptr + tl.program_id(2) * 4
    token = tl.load(seq)
    query_len = tl.load(seq + 1)
    first_chunk = tl.load(seq + 2)
    num_chunks = tl.load(seq + 3)
    if (num_chunks > 1) & (first_row < query_len * GROUP):
        slot = (first_chunk.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * TILE_ROWS + row
        merge_rows(
            partial_ptr, lse_ptr, out_ptr, sums_ptr, sinks_ptr, slot, tl.num_programs(0) * TILE_ROWS, num_chunks, token, kv_head,
            first_row, query_len, v_scale, out_stride_token, out_stride_head, sums_stride_head,
            GROUP, V_HEAD_DIM, BLOCK_DV, ROWS, MERGED, HAS_SINKS, HAS_LSE,
        )  # fmt: skip
