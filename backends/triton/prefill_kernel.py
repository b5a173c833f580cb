"""Varlen prefill and extend. Each program processes a run of keys for a tile of query rows, as scheduled by splits.py.

This is FlashAttention's forward pass (Dao et al. 2022, 2023) with FlashInfer's head packing. Keys are read from this step's k and
v (no context) or through the block table. With TMA, tensor descriptors over the same memory load one box per tile. If there are
too few tiles for the GPU, several programs share a tile's keys (split-KV, flash-decoding, Dao et al. 2023), and `merge_tiles`
combines their partial results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.backends.triton.tiles import (
    add_scaled,
    alibi_slopes,
    block_numbers,
    cached_rows,
    dense_rows,
    head_offsets,
    listed_tile,
    normalise,
    peeked_blocks,
    query_tile,
    row_scales,
    rule_rows,
    scale_of,
    softmax_step,
)


@triton.jit
def _keys(
    key, table, kv_head, start, first, kv_len, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, VALUE_IN_KEY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_X: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PEEK: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Return keys first .. first + BLOCK_N: a tuple of [BLOCK_N, BLOCK_D] and, if TAIL > 0, [BLOCK_N, TAIL]."""
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
    """Return [BLOCK_N, BLOCK_DV]: the values of keys first .. first + BLOCK_N. MASKED: values from kv_len on are zero."""
    if TMA:
        block, slot = 0, start + first
        if PAGED:
            block = peeked_blocks(table, first, kv_len, BLOCK_SIZE, BLOCK_N).to(tl.int32)
            slot = first % BLOCK_SIZE
        v = value.load([block, kv_head, slot, 0]).reshape(BLOCK_N, BLOCK_DV).to(DOT)
        if MASKED:  # a weight of 0 does not cancel NaN: rows after the end belong to another sequence or are free
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
def fold_keys(
    q, key, value, key_scale_ptr, value_scale_ptr, m, l, acc, table, kv_head, start, begin, end, kv_len, positions,
    newest, slopes, rule, tiles,
    score_scale, cap_log2, window, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
    v_stride_block, v_stride_slot, v_stride_head, v_stride_dim, v_stride_x,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr, BLOCK_SIZE: tl.constexpr, K_X: tl.constexpr, V_X: tl.constexpr, V_SLOTS_INNER: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PEEK: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr,
    SCALED: tl.constexpr, SCALE_STRIDES: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, RULE: tl.constexpr, LISTED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Update (m, l, acc) with keys begin .. end. begin: a multiple of BLOCK_N. newest: [BLOCK_M]: position of the newest key that
    each query may see. If LISTED, begin .. end are indices in the list `tiles` of tiles of keys instead."""
    for step in tl.range(begin, end, 1 if LISTED else BLOCK_N, num_stages=STAGES):
        first = step
        if LISTED:
            first = listed_tile(tiles, step, end) * BLOCK_N
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
            scores, m, l, first + tl.arange(0, BLOCK_N), positions, newest, slopes, rule, score_scale, cap_log2, window,
            MASKED, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, RULE, DOT,
        )  # fmt: skip
        if SCALED:
            acc = add_scaled(acc * shrink[:, None], weights, v, v_scales, DOT, PRECISION)
        else:
            acc = tl.dot(weights.to(DOT), v, acc * shrink[:, None], input_precision=PRECISION)
    return m, l, acc


@triton.jit(
    do_not_specialize=["tiles_stride", "window", "table_stride", "sums_stride_head"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "sums_ptr"],
)
def varlen_attention(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    key,  # pointer to a cache (PAGED) or to k [num_tokens, kv_heads, HEAD_DIM]; with TMA a descriptor [block, head, slot, dim]
    value,
    out_ptr,  # [num_tokens, num_heads, V_HEAD_DIM]
    sums_ptr,  # HAS_LSE: float32 [num_heads, num_tokens]: log-sum-exp of each row
    key_scale_ptr,  # SCALED: float32, addressed by strides of [block, slot, head]
    value_scale_ptr,
    schedule_ptr,  # int32 [programs, 8], columns of splits.TileColumn
    partial_ptr,  # SPLIT: float32 [slots, NUM_KV_HEADS, BLOCK_M, BLOCK_DV]
    lse_ptr,  # SPLIT: float32 [slots, NUM_KV_HEADS, BLOCK_M]
    table_ptr,  # int32 [num_seqs, max_blocks]
    lens_ptr,  # int32 [num_seqs]: lengths of the sequences (ONE_PATH)
    slopes_ptr,  # float32 [num_heads]: log2(e) * ALiBi slope
    sinks_ptr,  # float32 [num_heads]: log2(e) * sink
    floats_ptr,  # RULE: its parameters
    ints_ptr,
    tiles_ptr,  # int32 [programs, lists, tiles_stride], output of `list_tiles` (LISTED)
    tiles_stride,
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
    k_stride_block,  # strides of k, v without context: 0, token, head, 1, 1
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
    TAIL: tl.constexpr,  # rest of a long row, rounded up to a power of two; 0 means none
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr,  # the value is the key's first tile
    BLOCK_SIZE: tl.constexpr,
    K_X: tl.constexpr,
    V_X: tl.constexpr,
    V_SLOTS_INNER: tl.constexpr,  # adjacent slots of the value are contiguous
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr,
    PEEK: tl.constexpr,  # block numbers are read by `peeked_blocks`
    STEP: tl.constexpr,  # common divisor of both block strides
    TMA: tl.constexpr,
    SCALED: tl.constexpr,  # cache rows are int8 with a scale per row; needs PAGED
    SCALE_STRIDES: tl.constexpr,  # three strides of the key's scales, then three of the value's
    CAUSAL: tl.constexpr,  # False if a query also sees later keys: all of them, or the window's
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    RULE: tl.constexpr,  # a rule_code.RuleCode
    LISTED: tl.constexpr,  # the program reads the tiles of keys in the list at tiles_ptr
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,  # programs may share a tile's keys
    ONE_PATH: tl.constexpr,  # every tile of keys is masked: a row's bits then do not depend on the other rows of its tile; the
    # keys are those of the lengths in lens_ptr, so that a captured decode serves other lengths
    PDL: tl.constexpr,  # launched before the kernels it depends on have ended
):
    """Attend to a run of keys. Grid (NUM_KV_HEADS, programs). Row r is token r // GROUP, head r % GROUP of the kv head."""
    if PDL:
        gdc_wait()
    kv_head = tl.program_id(0)
    tile = schedule_ptr + tl.program_id(1) * 8
    seq = tl.load(tile)
    start = tl.load(tile + 1)
    query_len = tl.load(tile + 2)
    kv_len = tl.load(tile + 3)
    first_row = tl.load(tile + 4) * BLOCK_M
    begin = tl.load(tile + 5) * BLOCK_N  # stored as a number of tiles, so that the compiler sees a multiple
    end = tl.load(tile + 6)
    slot = tl.load(tile + 7)
    if ONE_PATH:
        kv_len = tl.load(lens_ptr + seq)
        begin = 0
        end = kv_len
        if CAUSAL:
            end = tl.minimum(kv_len - query_len + (first_row + BLOCK_M - 1) // GROUP + 1, kv_len)
            if HAS_WINDOW:
                begin = tl.maximum(kv_len - query_len + first_row // GROUP - window + 1, 0) // BLOCK_N * BLOCK_N
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
    rule = rule_rows(positions, head, live, floats_ptr, ints_ptr, RULE)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table = table_ptr + seq * table_stride

    # Keys after the last row's window start and before the first row's position need no mask.
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
    if ONE_PATH:
        full_end = begin
    if HAS_WINDOW:
        last = tl.minimum(context + (first_row + BLOCK_M - 1) // GROUP, kv_len - 1)
        full_begin = tl.cdiv(tl.maximum(last - window + 1, 0), BLOCK_N) * BLOCK_N
        full_begin = tl.minimum(tl.maximum(full_begin, begin), full_end)
    tiles, part_begin = tiles_ptr, full_end
    if LISTED:
        place = tl.program_id(1) * NUM_KV_HEADS + kv_head if RULE.by_head else tl.program_id(1)
        tiles += place.to(tl.int64) * tiles_stride
        full_begin = 2
        full_end = 2 + tl.load(tiles)
        part_begin = tiles_stride - tl.load(tiles + 1)
        end = tiles_stride
    if HAS_WINDOW and not LISTED:
        m, l, acc = fold_keys(
            q, key, value, key_scale_ptr, value_scale_ptr, m, l, acc, table, kv_head, start, begin, full_begin, kv_len, positions,
            newest, slopes, rule, tiles,
            score_scale, cap_log2, window, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
            v_stride_block, v_stride_slot, v_stride_head, v_stride_dim, v_stride_x,
            HEAD_DIM, BLOCK_D, TAIL, V_HEAD_DIM, BLOCK_DV, VALUE_IN_KEY, BLOCK_SIZE, K_X, V_X, V_SLOTS_INNER, BLOCK_N,
            PAGED, PEEK, STEP, TMA, SCALED, SCALE_STRIDES, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, RULE, LISTED, DOT,
            PRECISION, STAGES,
        )  # fmt: skip
    m, l, acc = fold_keys(
        q, key, value, key_scale_ptr, value_scale_ptr, m, l, acc, table, kv_head, start, full_begin, full_end, kv_len, positions,
        newest, slopes, rule, tiles,
        score_scale, cap_log2, window, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
        v_stride_block, v_stride_slot, v_stride_head, v_stride_dim, v_stride_x,
        HEAD_DIM, BLOCK_D, TAIL, V_HEAD_DIM, BLOCK_DV, VALUE_IN_KEY, BLOCK_SIZE, K_X, V_X, V_SLOTS_INNER, BLOCK_N,
        PAGED, PEEK, STEP, TMA, SCALED, SCALE_STRIDES, False, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, RULE, LISTED, DOT,
        PRECISION, STAGES,
    )  # fmt: skip
    m, l, acc = fold_keys(
        q, key, value, key_scale_ptr, value_scale_ptr, m, l, acc, table, kv_head, start, part_begin, end, kv_len, positions,
        newest, slopes, rule, tiles,
        score_scale, cap_log2, window, k_stride_block, k_stride_slot, k_stride_head, k_stride_dim, k_stride_x,
        v_stride_block, v_stride_slot, v_stride_head, v_stride_dim, v_stride_x,
        HEAD_DIM, BLOCK_D, TAIL, V_HEAD_DIM, BLOCK_DV, VALUE_IN_KEY, BLOCK_SIZE, K_X, V_X, V_SLOTS_INNER, BLOCK_N,
        PAGED, PEEK, STEP, TMA, SCALED, SCALE_STRIDES, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, RULE, LISTED, DOT,
        PRECISION, STAGES,
    )  # fmt: skip

    if PDL:
        gdc_launch_dependents()
    m = m * scale_of(score_scale, HAS_SOFTCAP, HAS_ALIBI, RULE)
    if ONE_PATH:
        m = tl.where(l > 0, m, 0.0)  # a captured decode may have sequences without keys
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
        tl.store(lse_ptr + part, m + tl.log2(l))  # -inf for a row without a visible key in this run
        result = acc * (1.0 / tl.where(l > 0, l, 1.0))[:, None]
        tl.store(partial_ptr + part[:, None] * BLOCK_DV + dv[None, :], result, mask=live[:, None])


@triton.jit(do_not_specialize=["tiles_stride", "window"])
def list_tiles(
    schedule_ptr,  # as in `varlen_attention`
    tiles_ptr,  # output
    tiles_stride,
    floats_ptr,
    ints_ptr,
    window,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,  # maximum number of tokens of a query tile, rounded up to a power of two
    HAS_WINDOW: tl.constexpr,
    RULE: tl.constexpr,
):
    """List the tiles of keys that a program of `varlen_attention` reads. Grid (kv heads if RULE.by_head, else 1; programs). A
    layer with a rule is causal.

    A list begins with two counts. They are followed by the tiles that every query sees. The tiles of which a mask hides a part
    are at the end of the list. Tiles that no query sees are not listed.
    """
    tile = schedule_ptr + tl.program_id(1) * 8
    query_len = tl.load(tile + 2)
    kv_len = tl.load(tile + 3)
    first_row = tl.load(tile + 4) * BLOCK_M
    last = tl.minimum((first_row + BLOCK_M - 1) // GROUP, query_len - 1)
    positions = kv_len - query_len + tl.minimum(first_row // GROUP + tl.arange(0, TOKENS), last)  # the last one repeats
    listed = tiles_ptr + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * tiles_stride
    num_full = query_len * 0
    num_part = query_len * 0
    for number in range(tl.load(tile + 5), tl.cdiv(tl.load(tile + 6), BLOCK_N)):
        at = number * BLOCK_N + tl.arange(0, BLOCK_N)
        within = at[None, :] <= positions[:, None]
        if HAS_WINDOW:
            within = within & (at[None, :] > positions[:, None] - window)
        count = query_len * 0
        for member in tl.static_range(GROUP if RULE.by_head else 1):
            head = tl.full([TOKENS, 1], member, tl.int32) + tl.program_id(0) * GROUP
            seen = within & RULE.mask(RULE.rows(positions[:, None], head, floats_ptr, ints_ptr), at[None, :], tl.float32)
            count += tl.sum(seen.to(tl.int32))
        full = count == TOKENS * BLOCK_N * (GROUP if RULE.by_head else 1)
        part = (count > 0) & (count < TOKENS * BLOCK_N * (GROUP if RULE.by_head else 1))
        tl.store(listed + 2 + num_full, number, mask=full)
        tl.store(listed + tiles_stride - 1 - num_part, number, mask=part)
        num_full += full.to(tl.int32)
        num_part += part.to(tl.int32)
    tl.store(listed, num_full)
    tl.store(listed + 1, num_part)
