"""Split-KV paged decode in one launch. The program of each chunk writes a partial result, and the last program to arrive merges
all partial results.

The keys of a sequence are split over programs as in flash-decoding (Dao et al. 2023). The query heads of a kv head share one
tile, as in the GQA packing of FlashInfer and FlashAttention, so each key is read once and the tensor cores have several rows.
Merging in the last program avoids a second launch, which would take longer than the merge at short contexts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.backends.triton.merge_kernel import merge_parts, merge_rows
from headway.backends.triton.tiles import (
    add_scaled,
    alibi_slopes,
    block_numbers,
    cached_rows,
    head_offsets,
    key_rows,
    listed_tile,
    normalise,
    query_tile,
    row_scales,
    rule_rows,
    scale_of,
    softmax_step,
    unpack_fp8,
    unpack_int8,
)
from headway.backends.triton.write_kernel import store_kv


@triton.jit
def prefetch_rows(
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
    """Prefetch rows of keys first .. first + BLOCK_N before `limit` to the L2 cache. Rows must be contiguous."""
    LINE: tl.constexpr = 128 // (base_ptr.dtype.element_ty.primitive_bitwidth // 8)  # elements per cache line
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(HEAD_DIM, LINE))
    known = tl.minimum(first, tl.maximum(limit - 1, 0) // BLOCK_N * BLOCK_N)  # the table has no further entries
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
    rule, row_scale, score_scale, cap_log2, window,
    k_stride_block, k_stride_slot, k_stride_dim, k_stride_x, v_stride_block, v_stride_slot, v_stride_dim, v_stride_x,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_X: tl.constexpr, V_X: tl.constexpr,
    V_SLOTS_INNER: tl.constexpr, K_PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr, SCALE_STRIDES: tl.constexpr, PAIRS: tl.constexpr,
    ZEROED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, RULE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update (m, l, acc) with cached keys first .. first + BLOCK_N that are before `end` and not newer than `newest`. PAIRS:
    acc_odd contains the accumulator's odd elements."""
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
        scores, m, l, first + tl.arange(0, BLOCK_N), positions, newest, slopes, rule, score_scale, cap_log2,
        window, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, RULE, DOT,
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
    q, k, v, m, l, acc, at, positions, slopes, rule, score_scale, cap_log2, window,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, RULE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Update (m, l, acc) with a token's own k and v [BLOCK_D] at position `at`, without tensor cores. q: [ROWS, BLOCK_D]."""
    BLOCK_M: tl.constexpr = m.shape[0]
    ROWS: tl.constexpr = q.shape[0]
    scores = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1)
    scores = tl.reshape(tl.broadcast_to(scores[None, :], (BLOCK_M // ROWS, ROWS)), (BLOCK_M, 1))  # repeated in unused rows
    m, l, weights, shrink = softmax_step(
        scores, m, l, at + tl.arange(0, 1), positions, positions, slopes, rule, score_scale, cap_log2, window,
        RULE.mask is not None, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, RULE, DOT,
    )  # fmt: skip
    return m, l, acc * shrink[:, None] + weights * v.to(tl.float32)[None, :]


@triton.jit(
    do_not_specialize=["tiles_stride", "window", "table_stride", "sums_stride_head"],
    do_not_specialize_on_alignment=["table_ptr", "lse_ptr", "sums_ptr"],
)
def split_kv_decode(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    key_ptr,  # a cache in any layout, addressed by the strides of its logical view [block, slot, head, dim / X, X]
    value_ptr,
    out_ptr,  # [num_tokens, num_heads, V_HEAD_DIM]
    new_k_ptr,  # NEW: [num_seqs, kv_heads, HEAD_DIM]
    new_v_ptr,
    sums_ptr,  # HAS_LSE: float32 [num_heads, num_tokens], the caller's log-sum-exp
    key_scale_ptr,  # SCALED: float32, addressed by strides of [block, slot, head]
    value_scale_ptr,
    table_ptr,  # int32 [num_seqs, max_blocks]
    chunks_ptr,  # int32 [chunks, 8], see chunk_kernel.CHUNK_FIELDS
    slopes_ptr,  # float32 [num_heads]: log2(e) * ALiBi slope
    sinks_ptr,  # float32 [num_heads]: log2(e) * sink
    floats_ptr,  # RULE: its parameters
    ints_ptr,
    tiles_ptr,  # RULE.mask: int32 [num_seqs, tiles_stride], output of `list_sequences`
    tiles_stride,
    partial_ptr,  # float32 [chunks, items, ROWS, BLOCK_DV]; items: grid axis 0
    lse_ptr,  # float32 [chunks, items, ROWS]
    arrivals_ptr,  # int32 [(chunks + num_seqs) * items], zero between launches
    score_scale,
    cap_log2,
    v_scale,
    window,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    sums_stride_head,
    new_k_stride_token,
    new_k_stride_head,
    new_v_stride_token,
    new_v_stride_head,
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
    GROUP: tl.constexpr,  # query heads per kv head
    ONE_TOKEN: tl.constexpr,  # every sequence has exactly one query token
    NEW: tl.constexpr,  # that token's k and v are at new_k_ptr, new_v_ptr, not in the cache yet; needs ONE_TOKEN, no FP8 cache
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two, or the power of two before its TAIL
    TAIL: tl.constexpr,  # rest of a long row, rounded up to a power of two; 0 means none
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,  # V_HEAD_DIM rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    K_X: tl.constexpr,
    V_X: tl.constexpr,
    V_SLOTS_INNER: tl.constexpr,  # adjacent slots of the value are contiguous
    K_PIECES: tl.constexpr,  # a tile lies in one block, with K_X-element chunks interleaved over slots
    BLOCK_M: tl.constexpr,  # rows of the query tile; tensor cores need 16
    ROWS: tl.constexpr,  # rows that can be in use, rounded up to a power of two
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,  # cache rows are int8 with a scale per row
    SCALE_STRIDES: tl.constexpr,  # three strides of the key's scales, then three of the value's
    PAIRS: tl.constexpr,  # contiguous 8-bit rows, loaded as pairs of elements, which tensor-core loads can transpose
    SPLIT: tl.constexpr,  # a sequence may have more than one chunk
    MERGED: tl.constexpr,  # number of partial results merged at a time
    FAN: tl.constexpr,  # number of partial results merged by one program in the first merge stage; 0: `merge_chunks` merges
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    RULE: tl.constexpr,  # a rule_code.RuleCode
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,  # launched before the kernels it depends on have ended
    EARLY: tl.constexpr,  # the next kernel may start at once
    LATE: tl.constexpr,  # the next kernel may start when the cached keys have been read
    AHEAD: tl.constexpr,  # number of key and value tiles prefetched to L2 before the wait; 0 means nothing is read before it
):
    """Attend to one chunk of keys. Grid (kv heads * query tiles, chunks). Query row r is token r // GROUP, head r % GROUP.

    NEW: the program with a sequence's last keys also processes the new key and value, from registers, and writes them to the
    cache. If the query heads take several tiles, the program of each tile writes the same data. Loads of the new token's slot are
    not ordered with this write, so their result is not used.
    """
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        if AHEAD == 0:
            gdc_wait()
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    first_row = (tl.program_id(0) // NUM_KV_HEADS) * BLOCK_M
    chunk = chunks_ptr + tl.program_id(1) * 8
    seq = tl.load(chunk)
    kv_len = tl.load(chunk + 1)
    start = tl.load(chunk + 4) * BLOCK_N  # stored as a number of tiles, so that the compiler sees a multiple
    end = tl.load(chunk + 5)
    first_chunk = tl.load(chunk + 6)
    num_chunks = tl.load(chunk + 7)
    token = seq
    query_len = 1
    if not ONE_TOKEN:
        token = tl.load(chunk + 2)
        query_len = tl.load(chunk + 3)
    if AHEAD > 0:  # keys and values are still loaded after the wait, but then from L2
        ahead_table = table_ptr + tl.maximum(seq, 0) * table_stride
        for tile in tl.static_range(AHEAD):
            prefetch_rows(
                key_ptr + kv_head * k_stride_head, ahead_table, start + tile * BLOCK_N, end, k_stride_block, k_stride_slot,
                HEAD_DIM, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
            prefetch_rows(
                value_ptr + kv_head * v_stride_head, ahead_table, start + tile * BLOCK_N, end, v_stride_block, v_stride_slot,
                V_HEAD_DIM, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
        gdc_wait()
    if seq < 0:
        return
    if first_row >= query_len * GROUP:
        return
    d = tl.arange(0, BLOCK_D)
    last = end == kv_len
    if RULE.mask is not None:  # start and end are indices in the list of tiles, times BLOCK_N
        last = tl.program_id(1) - first_chunk == num_chunks - 1
    if NEW:  # loaded before the loop, used after it; compares a tensor, not a scalar, for the interpreter of Triton 3.9
        if RULE.mask is None:
            own = (d < HEAD_DIM) & (tl.zeros([BLOCK_D], tl.int32) + end == kv_len)
        else:
            own = (d < HEAD_DIM) & (tl.zeros([BLOCK_D], tl.int32) + tl.program_id(1) == first_chunk + num_chunks - 1)
        new_k_row = new_k_ptr + seq.to(tl.int64) * new_k_stride_token + kv_head * new_k_stride_head
        new_v_row = new_v_ptr + seq.to(tl.int64) * new_v_stride_token + kv_head * new_v_stride_head
        new_k = tl.load(new_k_row + d, mask=own, other=0.0)
        new_v = tl.load(new_v_row + d, mask=own, other=0.0)
        r = first_row + tl.arange(0, ROWS)
        new_q_rows = q_ptr + seq.to(tl.int64) * q_stride_token + ((kv_head * GROUP + r) * q_stride_head)[:, None]
        new_q = tl.load(new_q_rows + d[None, :], mask=(r < GROUP)[:, None] & own[None, :], other=0.0)
    limit = tl.minimum(end, kv_len - 1 if NEW else kv_len)
    if RULE.mask is None:
        end = limit
    else:
        limit = kv_len - 1 if NEW else kv_len

    row = first_row + tl.arange(0, BLOCK_M)
    live = row < query_len * GROUP
    head = kv_head * GROUP + row % GROUP
    positions = kv_len - query_len + row // GROUP
    newest = positions - 1 if NEW else positions  # position of the newest cached key that a query sees
    inside = live[:, None] & (d[None, :] < HEAD_DIM)
    q_rows = q_ptr + ((token + row // GROUP).to(tl.int64) * q_stride_token + head * q_stride_head)[:, None]
    row_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if PAIRS:
        # q is multiplied with the cache's numbers in float16; it is divided by a power of two to prevent overflow.
        half = tl.arange(0, BLOCK_D // 2)
        half_inside = live[:, None] & (half[None, :] < HEAD_DIM // 2)
        q_even = tl.load(q_rows + 2 * half[None, :], mask=half_inside, other=0.0).to(tl.float32)
        q_odd = tl.load(q_rows + 2 * half[None, :] + 1, mask=half_inside, other=0.0).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(q_even), 1), tl.max(tl.abs(q_odd), 1))
        row_scale = tl.exp2(tl.ceil(tl.log2(tl.maximum(largest, 1e-30))))
        q = ((q_even / row_scale[:, None]).to(tl.float16), (q_odd / row_scale[:, None]).to(tl.float16))
    else:
        q = query_tile(q_rows, d, inside, live, HEAD_DIM, BLOCK_D, TAIL, DOT)
    slopes = alibi_slopes(slopes_ptr, head, live, BLOCK_M, HAS_ALIBI)
    rule = rule_rows(positions, head, live, floats_ptr, ints_ptr, RULE)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV // 2 if PAIRS else BLOCK_DV], tl.float32)
    acc_odd = acc
    table = table_ptr + seq * table_stride
    if NEW:
        at = kv_len - 1
        new_block = tl.load(table + at // BLOCK_SIZE)
    key = key_ptr + kv_head * k_stride_head
    value = value_ptr + kv_head * v_stride_head
    # Zeroing keys after the end takes many instructions if adjacent slots are contiguous, so only the last tile does it.
    whole = end // BLOCK_N * BLOCK_N if V_SLOTS_INNER else end
    tiles = tiles_ptr
    if RULE.mask is not None:
        tiles += seq.to(tl.int64) * tiles_stride
        if V_SLOTS_INNER:
            whole = end - last.to(tl.int32) * BLOCK_N
    for step in tl.range(start, whole, BLOCK_N, num_stages=STAGES):
        first = step
        if RULE.mask is not None:
            first = listed_tile(tiles, step // BLOCK_N, end // BLOCK_N) * BLOCK_N
        m, l, acc, acc_odd = fold_cached(
            q=q, key=key, value=value, key_scale_ptr=key_scale_ptr, value_scale_ptr=value_scale_ptr, kv_head=kv_head,
            table=table, m=m, l=l, acc=acc, acc_odd=acc_odd, first=first, end=limit, positions=positions, newest=newest,
            slopes=slopes, rule=rule, row_scale=row_scale, score_scale=score_scale, cap_log2=cap_log2, window=window,
            k_stride_block=k_stride_block, k_stride_slot=k_stride_slot, k_stride_dim=k_stride_dim, k_stride_x=k_stride_x,
            v_stride_block=v_stride_block, v_stride_slot=v_stride_slot, v_stride_dim=v_stride_dim, v_stride_x=v_stride_x,
            HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D, TAIL=TAIL, V_HEAD_DIM=V_HEAD_DIM, BLOCK_DV=BLOCK_DV, BLOCK_SIZE=BLOCK_SIZE,
            K_X=K_X, V_X=V_X, V_SLOTS_INNER=V_SLOTS_INNER, K_PIECES=K_PIECES, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, SCALED=SCALED,
            SCALE_STRIDES=SCALE_STRIDES, PAIRS=PAIRS, ZEROED=not V_SLOTS_INNER, HAS_WINDOW=HAS_WINDOW, HAS_SOFTCAP=HAS_SOFTCAP,
            HAS_ALIBI=HAS_ALIBI, RULE=RULE, DOT=DOT, PRECISION=PRECISION,
        )  # fmt: skip
    if V_SLOTS_INNER:
        for step in tl.range(whole, end, BLOCK_N, num_stages=1):
            first = step
            if RULE.mask is not None:
                first = listed_tile(tiles, step // BLOCK_N, end // BLOCK_N) * BLOCK_N
            m, l, acc, acc_odd = fold_cached(
                q=q, key=key, value=value, key_scale_ptr=key_scale_ptr, value_scale_ptr=value_scale_ptr, kv_head=kv_head,
                table=table, m=m, l=l, acc=acc, acc_odd=acc_odd, first=first, end=limit, positions=positions, newest=newest,
                slopes=slopes, rule=rule, row_scale=row_scale, score_scale=score_scale, cap_log2=cap_log2, window=window,
                k_stride_block=k_stride_block, k_stride_slot=k_stride_slot, k_stride_dim=k_stride_dim, k_stride_x=k_stride_x,
                v_stride_block=v_stride_block, v_stride_slot=v_stride_slot, v_stride_dim=v_stride_dim, v_stride_x=v_stride_x,
                HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D, TAIL=TAIL, V_HEAD_DIM=V_HEAD_DIM, BLOCK_DV=BLOCK_DV, BLOCK_SIZE=BLOCK_SIZE,
                K_X=K_X, V_X=V_X, V_SLOTS_INNER=V_SLOTS_INNER, K_PIECES=K_PIECES, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
                SCALED=SCALED, SCALE_STRIDES=SCALE_STRIDES, PAIRS=PAIRS, ZEROED=True, HAS_WINDOW=HAS_WINDOW,
                HAS_SOFTCAP=HAS_SOFTCAP, HAS_ALIBI=HAS_ALIBI, RULE=RULE, DOT=DOT, PRECISION=PRECISION,
            )  # fmt: skip
    if PDL and LATE:
        gdc_launch_dependents()
    if NEW:  # noqa: SIM102 - only NEW is known at compile time
        if last:
            m, l, acc = fold_new(
                new_q, new_k, new_v, m, l, acc, at, positions, slopes, rule, score_scale, cap_log2, window,
                HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, RULE, DOT,
            )  # fmt: skip
            store_kv(
                new_k[None, :], new_v[None, :], key_ptr, value_ptr,
                new_block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE + tl.arange(0, 1), kv_head, 1.0, 1.0,
                k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
                v_stride_block, v_stride_slot, v_stride_head, v_stride_dim, v_stride_x,
                HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, True, BLOCK_SIZE, K_X, V_X, V_SLOTS_INNER, False,
            )  # fmt: skip
    if PAIRS:
        acc = tl.interleave(acc, acc_odd)
    m = m * scale_of(score_scale, HAS_SOFTCAP, HAS_ALIBI, RULE)

    dv = tl.arange(0, BLOCK_DV)
    out_rows = (token + row // GROUP).to(tl.int64) * out_stride_token + head * out_stride_head
    out_ptrs = out_ptr + out_rows[:, None] + dv[None, :]
    if not SPLIT or num_chunks == 1:
        result = normalise(
            acc, m, l, sums_ptr, sinks_ptr, token, row, head, live, v_scale, sums_stride_head, GROUP, HAS_SINKS, HAS_LSE
        )
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dv[None, :] < V_HEAD_DIM))
    else:
        lse = m + tl.log2(l)  # -inf for a row without a visible key in this chunk
        result = acc / tl.where(l > 0, l, 1.0)[:, None]
        item = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        slot = item * ROWS + tl.arange(0, BLOCK_M)
        used = tl.arange(0, BLOCK_M) < ROWS
        tl.store(lse_ptr + slot, lse, mask=used)
        tl.store(partial_ptr + slot[:, None] * BLOCK_DV + dv[None, :], result, mask=used[:, None])
        if FAN > 0:
            # Many parts are merged in two stages: groups of FAN parts by the last program of the group, then the groups' results.
            number = tl.program_id(1) - first_chunk
            fan = number // FAN * FAN
            in_fan = tl.minimum(num_chunks - fan, FAN)
            stride = tl.num_programs(0) * ROWS
            first_slot = (first_chunk.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * ROWS
            arrivals_ptr += tl.program_id(0)
            fan_arrivals = arrivals_ptr + (first_chunk + fan) * tl.num_programs(0)
            seq_arrivals = arrivals_ptr + (tl.num_programs(1) + seq) * tl.num_programs(0)
            final = number < 0  # False
            tl.debug_barrier()  # the atomic below releases the stores of all threads of this program
            if tl.atomic_add(fan_arrivals, 1, sem="acq_rel", scope="gpu") == in_fan - 1:
                tl.store(fan_arrivals, 0)
                final = number >= 0
                if num_chunks > FAN:
                    m_fan, l_fan, acc_fan = merge_parts(
                        partial_ptr, lse_ptr, first_slot + fan * stride, stride, in_fan, BLOCK_DV, ROWS, MERGED
                    )
                    fan_slot = first_slot + fan * stride + tl.arange(0, ROWS)
                    tl.debug_barrier()  # all threads have read the part that the result overwrites
                    tl.store(lse_ptr + fan_slot, m_fan + tl.log2(l_fan))
                    acc_fan = acc_fan / tl.where(l_fan > 0, l_fan, 1.0)[:, None]
                    tl.store(partial_ptr + fan_slot[:, None] * BLOCK_DV + dv[None, :], acc_fan)
                    tl.debug_barrier()
                    final = tl.atomic_add(seq_arrivals, 1, sem="acq_rel", scope="gpu") == tl.cdiv(num_chunks, FAN) - 1
            if final:
                left = num_chunks
                if num_chunks > FAN:
                    tl.store(seq_arrivals, 0)
                    left = tl.cdiv(num_chunks, FAN)
                    stride = stride * FAN
                merge_rows(
                    partial_ptr, lse_ptr, out_ptr, sums_ptr, sinks_ptr, first_slot, stride, left, token, kv_head, first_row,
                    query_len, v_scale, out_stride_token, out_stride_head, sums_stride_head,
                    GROUP, V_HEAD_DIM, BLOCK_DV, ROWS, MERGED, HAS_SINKS, HAS_LSE,
                )  # fmt: skip
