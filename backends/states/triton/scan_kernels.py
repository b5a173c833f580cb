"""Scan kernels over sequences: chunk by chunk with a tile of the state in registers, or token by token."""

from __future__ import annotations

import triton
import triton.language as tl

from headway.backends.states.triton.window_kernels import softplus

SEQ_FIELDS = tl.constexpr(8)
"""Number of int32 fields per sequence: first chunk, number of chunks (0 in a padding row), first token, number of new tokens,
slot to read (-1 means zeros), first part, and number of parts. The last field is unused."""
PART_FIELDS = tl.constexpr(2)
"""Number of int32 fields per part of a sequence: number of the sequence's chunks up to the part's end, and slot for the state
after these chunks (-1 means none). A sequence is divided into parts because Triton pipelines loads only in innermost loops."""


@triton.jit(do_not_specialize=["num_chunks"])
def walk_chunks(
    x_ptr,  # [num_tokens, channels]: convolved, normed and scaled
    out_ptr,  # [num_tokens, HEADS * VALUE_DIM]
    state_ptr,
    d_ptr,
    seqs_ptr,  # see SEQ_FIELDS
    parts_ptr,  # see PART_FIELDS
    sums_ptr,  # output of `cut_chunks`
    put_ptr,
    inverse_ptr,
    inner_ptr,
    rows_ptr,
    stride_x,
    stride_out,
    num_chunks,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STATE_SLOT: tl.constexpr,
    STATE_HEAD: tl.constexpr,
    STATE_KEY: tl.constexpr,
    STATE_VALUE: tl.constexpr,
    TURNED: tl.constexpr,  # values are the rows of the state in registers, so that MMAs read the state from registers
    HAS_D: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scan a sequence chunk by chunk. Grid (cdiv(VALUE_DIM, BLOCK_V), HEADS, num_seqs).

    Let S be the state at a chunk's start and G the cumulative log decays. The delta rule writes the values v' = T (v - exp(G) K
    S), with T = (I + A)^-1 diag(beta). Other rules write dt v, or v. The output is exp(G) Q S + P v', where P contains the
    decayed scores of q and k. The next state is exp(G_64) S + K^T (exp(G_64 - G) v'). Chunk states are not written to memory.
    """
    head = tl.program_id(1)
    seq = tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    first_chunk = tl.load(seqs_ptr + seq * SEQ_FIELDS)
    chunks = tl.load(seqs_ptr + seq * SEQ_FIELDS + 1)
    first = tl.load(seqs_ptr + seq * SEQ_FIELDS + 2).to(tl.int64)
    tokens = tl.load(seqs_ptr + seq * SEQ_FIELDS + 3)
    slot = tl.load(seqs_ptr + seq * SEQ_FIELDS + 4)
    first_part = tl.load(seqs_ptr + seq * SEQ_FIELDS + 5)
    parts = tl.load(seqs_ptr + seq * SEQ_FIELDS + 6)
    if chunks == 0:
        return
    row = tl.arange(0, 64)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key = i < KEY_DIM
    in_value = j < VALUE_DIM
    if TURNED:
        inside = in_value[:, None] & in_key[None, :]
        within = head * STATE_HEAD + i[None, :] * STATE_KEY + j[:, None] * STATE_VALUE
    else:
        inside = in_key[:, None] & in_value[None, :]
        within = head * STATE_HEAD + i[:, None] * STATE_KEY + j[None, :] * STATE_VALUE
    there = state_ptr + tl.maximum(slot, 0).to(tl.int64) * STATE_SLOT + within
    known = tl.where(slot >= 0, KEY_DIM, 0)
    if TURNED:
        held = in_value[:, None] & (i < known)[None, :]
    else:
        held = (i < known)[:, None] & in_value[None, :]
    state = tl.load(there, mask=held, other=0.0).to(tl.float32)
    if KIND == "mamba2":
        v_at = head * VALUE_DIM
        k_at = HEADS * VALUE_DIM + key_head * KEY_DIM
        q_at = k_at + KEY_HEADS * KEY_DIM
    else:
        q_at = key_head * KEY_DIM
        k_at = q_at + KEY_HEADS * KEY_DIM
        v_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    direct = 0.0
    if HAS_D:
        direct = tl.load(d_ptr + head)

    # Offsets within a chunk are 32-bit and equal in all chunks, so an address takes one instruction.
    of_keys = row[:, None] * stride_x + i[None, :]
    of_values = row[:, None] * stride_x + (v_at + j)[None, :]
    of_square = row[:, None] * 64 + row[None, :]
    of_rows = row[:, None] * KEY_DIM + i[None, :]
    of_out = row[:, None] * stride_out + (head * VALUE_DIM + j)[None, :]
    for part in range(first_part, first_part + parts):
        # Recomputed for each part: with a loop-carried value in the range, Triton 3.6 restarts the inner loop at 0.
        begin = tl.load(parts_ptr + (part - 1) * PART_FIELDS, mask=part > first_part, other=0)
        end = tl.load(parts_ptr + part * PART_FIELDS)
        for n in range(begin, end):
            live = row < tokens - n * 64
            start = first + n * 64
            chunk_ptr = x_ptr + start * stride_x
            place = ((first_chunk + n) * HEADS + head).to(tl.int64)
            v = tl.load(chunk_ptr + of_values, mask=live[:, None] & in_value[None, :], other=0.0)
            if TURNED:
                v = tl.trans(v)
            v = v.to(DOT)
            inner = tl.load(inner_ptr + place * 4096 + of_square).to(DOT)
            if KIND == "kda":
                size = num_chunks.to(tl.int64) * HEADS * 64 * KEY_DIM
                lines = rows_ptr + place * 64 * KEY_DIM + of_rows
                k_in = tl.load(lines, mask=in_key[None, :], other=0.0).to(DOT)
                k_out = tl.load(lines + size, mask=in_key[None, :], other=0.0).to(DOT)
                q = tl.load(lines + 2 * size, mask=in_key[None, :], other=0.0).to(DOT)
                whole = tl.exp(tl.load(sums_ptr + place * KEY_DIM + i, mask=in_key, other=0.0).to(tl.float32))
                whole = whole[None, :] if TURNED else whole[:, None]
            else:
                k_in = tl.load(chunk_ptr + k_at + of_keys, mask=live[:, None] & in_key[None, :], other=0.0).to(DOT)
                q = tl.load(chunk_ptr + q_at + of_keys, mask=live[:, None] & in_key[None, :], other=0.0).to(DOT)
                k_out = k_in
                sums = tl.load(sums_ptr + place * 64 + row)
                last = tl.load(sums_ptr + place * 64 + 63)
                whole = tl.exp(last.to(tl.float32))
                from_start = tl.exp(sums.to(tl.float32))
                from_start = from_start[None, :] if TURNED else from_start[:, None]
                to_end = tl.exp((last - sums).to(tl.float32))
                to_end = to_end[None, :] if TURNED else to_end[:, None]
            state_dot = state.to(DOT)
            if not TURNED:
                y = tl.dot(q, state_dot, input_precision=PRECISION)
            if KIND == "gated_delta" or KIND == "kda":
                inverse = tl.load(inverse_ptr + place * 4096 + of_square).to(DOT)
                if TURNED:
                    seen = tl.dot(state_dot, tl.trans(k_in), input_precision=PRECISION)
                else:
                    seen = tl.dot(k_in, state_dot, input_precision=PRECISION)
                if KIND == "gated_delta":
                    seen *= from_start
                unseen = (v.to(tl.float32) - seen).to(DOT)
                if TURNED:
                    written = tl.dot(unseen, tl.trans(inverse), input_precision=PRECISION)
                else:
                    written = tl.dot(inverse, unseen, input_precision=PRECISION)
            elif KIND == "mamba2":
                written = v.to(tl.float32)
                put = tl.load(put_ptr + place * 64 + row)
                written = written * (put[None, :] if TURNED else put[:, None])
            else:
                written = v.to(tl.float32)
            if TURNED:
                y = tl.dot(state_dot, tl.trans(q), input_precision=PRECISION)
            if KIND == "kda":
                kept = written.to(DOT)
            else:
                kept = (written * to_end).to(DOT)
                y *= from_start
            if TURNED:
                state = tl.dot(kept, k_out, acc=state * whole, input_precision=PRECISION)
                y = tl.dot(written.to(DOT), tl.trans(inner), acc=y, input_precision=PRECISION)
            else:
                state = state * whole + tl.dot(tl.trans(k_out), kept, input_precision=PRECISION)
                y += tl.dot(inner, written.to(DOT), input_precision=PRECISION)
            if HAS_D:
                y += direct * v.to(tl.float32)
            y_ptrs = out_ptr + start * stride_out + of_out
            inside_chunk = live[:, None] & in_value[None, :]
            y = y.to(out_ptr.dtype.element_ty)
            tl.store(y_ptrs, tl.trans(y) if TURNED else y, mask=inside_chunk)
        target = tl.load(parts_ptr + part * PART_FIELDS + 1)
        if target >= 0:
            ptrs = state_ptr + target.to(tl.int64) * STATE_SLOT + within
            tl.store(ptrs, state.to(state_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride_x", "stride_dt", "stride_b", "stride_c", "stride_out"])
def walk_tokens(
    x_ptr,  # [num_tokens, CHANNELS]: convolved
    dt_ptr,  # [num_tokens, CHANNELS]
    b_ptr,  # [num_tokens, KEY_DIM]
    c_ptr,  # [num_tokens, KEY_DIM]
    out_ptr,  # [num_tokens, CHANNELS]
    state_ptr,
    a_log_ptr,  # [CHANNELS, KEY_DIM]
    dt_bias_ptr,
    d_ptr,
    seqs_ptr,  # see SEQ_FIELDS
    parts_ptr,  # see PART_FIELDS
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    stride_out,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STATE_SLOT: tl.constexpr,
    STATE_CHANNEL: tl.constexpr,
    STATE_KEY: tl.constexpr,
    HAS_D: tl.constexpr,
):
    """Scan a `mamba1` sequence: each channel and key element has its own decay. Grid (cdiv(CHANNELS, BLOCK_C), num_seqs)."""
    seq = tl.program_id(1)
    chunks = tl.load(seqs_ptr + seq * SEQ_FIELDS + 1)
    first = tl.load(seqs_ptr + seq * SEQ_FIELDS + 2).to(tl.int64)
    tokens = tl.load(seqs_ptr + seq * SEQ_FIELDS + 3)
    slot = tl.load(seqs_ptr + seq * SEQ_FIELDS + 4)
    first_part = tl.load(seqs_ptr + seq * SEQ_FIELDS + 5)
    parts = tl.load(seqs_ptr + seq * SEQ_FIELDS + 6)
    if chunks == 0:
        return
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_K)
    live = c < CHANNELS
    inside = live[:, None] & (n < KEY_DIM)[None, :]
    within = c[:, None] * STATE_CHANNEL + n[None, :] * STATE_KEY
    there = state_ptr + tl.maximum(slot, 0).to(tl.int64) * STATE_SLOT + within
    known = tl.where(slot >= 0, KEY_DIM, 0)
    state = tl.load(there, mask=live[:, None] & (n < known)[None, :], other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + c[:, None] * KEY_DIM + n[None, :], mask=inside, other=0.0).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + c, mask=live, other=0.0).to(tl.float32)
    direct = tl.zeros([BLOCK_C], tl.float32)
    if HAS_D:
        direct = tl.load(d_ptr + c, mask=live, other=0.0).to(tl.float32)
    for part in range(first_part, first_part + parts):
        # Recomputed for each part: with a loop-carried value in the range, Triton 3.6 restarts the inner loop at 0.
        begin = tl.load(parts_ptr + (part - 1) * PART_FIELDS, mask=part > first_part, other=0)
        end = tl.load(parts_ptr + part * PART_FIELDS)
        for t in range(begin * 64, tl.minimum(end * 64, tokens)):
            token = first + t
            x = tl.load(x_ptr + token * stride_x + c, mask=live, other=0.0).to(tl.float32)
            dt = softplus(tl.load(dt_ptr + token * stride_dt + c, mask=live, other=0.0).to(tl.float32) + dt_bias)
            put = tl.load(b_ptr + token * stride_b + n, mask=n < KEY_DIM, other=0.0).to(tl.float32)
            get = tl.load(c_ptr + token * stride_c + n, mask=n < KEY_DIM, other=0.0).to(tl.float32)
            state = state * tl.exp(-rate * dt[:, None]) + (dt * x)[:, None] * put[None, :]
            y = tl.sum(state * get[None, :], 1) + direct * x
            tl.store(out_ptr + token * stride_out + c, y.to(out_ptr.dtype.element_ty), mask=live)
        target = tl.load(parts_ptr + part * PART_FIELDS + 1)
        if target >= 0:
            ptrs = state_ptr + target.to(tl.int64) * STATE_SLOT + within
            tl.store(ptrs, state.to(state_ptr.dtype.element_ty), mask=inside)
