"""Chunk kernels for prompts: the convolution, and within a chunk the gates, the GEMMs and the delta rule's matrix inverse."""

from __future__ import annotations

import triton
import triton.language as tl

from headway.backends.states.triton.window_kernels import activated, softplus, store_window, window_of

CHUNK_FIELDS = tl.constexpr(4)
"""Number of int32 fields per chunk: slot of the chunk's sequence (-1 means zeros), first packed token, number of the sequence's
new tokens before the chunk, number of tokens in the chunk."""


@triton.jit(do_not_specialize=["scale"])
def convolve_chunks(
    x_ptr,  # [num_tokens, CHANNELS]
    conv_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,  # [num_tokens, CHANNELS]
    chunks_ptr,  # see CHUNK_FIELDS
    stride_x,
    stride_out,
    scale,
    CHANNELS: tl.constexpr,
    KEY_UNITS: tl.constexpr,  # number of leading units with KEY_DIM channels: heads of q, then of k
    KEY_DIM: tl.constexpr,
    UNIT: tl.constexpr,  # channels of the following units
    BLOCK_C: tl.constexpr,  # the larger of both, rounded up to a power of two
    ROWS: tl.constexpr,  # tokens per program
    RUN: tl.constexpr,  # tokens that a thread processes in sequence
    CONV_SLOT: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """Convolve a chunk, and scale q. Grid (units, chunks, 64 / ROWS). The inputs in the convolution's window stay in registers
    from one token to the next."""
    unit = tl.program_id(0)
    slot = tl.load(chunks_ptr + tl.program_id(1) * CHUNK_FIELDS)
    first = tl.load(chunks_ptr + tl.program_id(1) * CHUNK_FIELDS + 1).to(tl.int64)
    before = tl.load(chunks_ptr + tl.program_id(1) * CHUNK_FIELDS + 2)
    count = tl.load(chunks_ptr + tl.program_id(1) * CHUNK_FIELDS + 3)
    if tl.program_id(2) * ROWS >= count:
        return
    start = tl.program_id(2) * ROWS + RUN * tl.arange(0, ROWS // RUN)
    within = tl.arange(0, BLOCK_C)
    key = unit < KEY_UNITS
    channels = tl.where(key, unit * KEY_DIM, KEY_UNITS * KEY_DIM + (unit - KEY_UNITS) * UNIT) + within
    # Triton loads element by element unless it can prove that a mask is equal for adjacent elements.
    if BLOCK_C == UNIT and (KEY_UNITS == 0 or KEY_DIM == UNIT) and CHANNELS % UNIT == 0:
        inside = within >= 0
    else:
        inside = (within < tl.where(key, KEY_DIM, UNIT)) & (channels < CHANNELS)
    inputs = x_ptr + (first + start)[:, None] * stride_x + channels[None, :]
    outputs = out_ptr + (first + start)[:, None] * stride_out + channels[None, :]
    window = ()
    for at in tl.static_range(WIDTH - 1 if WIDTH else 0):
        token = start - (WIDTH - 1) + at
        there = ((token < count) & (before + token >= 0))[:, None] & inside[None, :]
        held = tl.load(inputs + (at - WIDTH + 1) * stride_x, mask=there, other=0.0)
        if (before == 0) & (slot >= 0) & (tl.program_id(2) == 0):
            there = (token < 0)[:, None] & inside[None, :]
            old = conv_ptr + slot.to(tl.int64) * CONV_SLOT
            ptrs = old + channels[None, :] * CONV_CHANNEL + (WIDTH - 1 + token)[:, None] * CONV_TIME
            held += tl.load(ptrs, mask=there, other=0.0).to(held.dtype)  # one of the two is zero
        window = window + (held,)
    for step in tl.static_range(RUN):
        there = (start + step < count)[:, None] & inside[None, :]
        window = window + (tl.load(inputs + step * stride_x, mask=there, other=0.0),)
    if WIDTH:
        tap = tl.arange(0, BLOCK_W)
        taps = inside[:, None] & (tap < WIDTH)[None, :]
        table = tl.load(weight_ptr + channels[:, None] * WIDTH + tap[None, :], mask=taps, other=0.0).to(tl.float32)
        weight = ()
        for at in tl.static_range(WIDTH):
            weight = weight + (tl.sum(tl.where((tap == at)[None, :], table, 0.0), 1)[None, :],)
    for step in tl.static_range(RUN):
        if WIDTH:
            y = window[step].to(tl.float32) * weight[0]
            for at in tl.static_range(1, WIDTH):
                y += window[step + at].to(tl.float32) * weight[at]
            if HAS_BIAS:
                y += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
            y = activated(y, SILU)
        else:
            y = window[step].to(tl.float32)
        if KEY_UNITS:
            if QK_NORM and key:
                y *= tl.rsqrt(tl.sum(tl.where(inside[None, :], y * y, 0.0), 1) + 1e-6)[:, None]
            if unit < KEY_UNITS // 2:
                y *= scale
        there = (start + step < count)[:, None] & inside[None, :]
        tl.store(outputs + step * stride_out, y.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["stride_x"])
def leave_inputs(
    x_ptr,  # [num_tokens, CHANNELS]
    conv_ptr,
    places_ptr,  # int32 [places, 4]: a sequence's first token, new tokens before the state, slot to read or -1, slot to write
    stride_x,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CONV_SLOT: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Store convolution states. This runs after all convolutions have read their slots. Grid (cdiv(CHANNELS, BLOCK_C),
    places)."""
    first = tl.load(places_ptr + tl.program_id(1) * 4).to(tl.int64)
    tokens = tl.load(places_ptr + tl.program_id(1) * 4 + 1)
    slot = tl.load(places_ptr + tl.program_id(1) * 4 + 2)
    target = tl.load(places_ptr + tl.program_id(1) * 4 + 3).to(tl.int64)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channels < CHANNELS
    old = conv_ptr + tl.maximum(slot, 0).to(tl.int64) * CONV_SLOT
    new = x_ptr + first * stride_x
    window = window_of(new, old, tokens - 1, channels, inside, stride_x, CONV_CHANNEL, CONV_TIME, WIDTH, BLOCK_W)
    remembered = tl.arange(0, BLOCK_W) + tokens - WIDTH >= tl.where(slot >= 0, -WIDTH, 0)
    window = tl.where(
        remembered[None, :], window, 0.0
    )  # without a context, inputs before the sequence are zeros, whatever the slot contains
    tl.debug_barrier()  # all reads precede all writes
    ptr = conv_ptr + target * CONV_SLOT
    store_window(ptr, window, channels, inside, CONV_CHANNEL, CONV_TIME, WIDTH, BLOCK_W)


@triton.jit
def diagonal(blocks):
    """Return the block-diagonal matrix [64, 64] of four blocks, [4, 16, 16]."""
    b = tl.arange(0, 4)
    same = b[:, None, None, None] == b[None, None, :, None]
    spread = tl.where(same, tl.broadcast_to(blocks[:, :, None, :], (4, 16, 4, 16)), 0.0)
    return tl.reshape(spread, (64, 64))


@triton.jit
def inverse_of(a, scratch_ptr, BLOCKS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + a)^-1 for a strictly lower triangular matrix a [64, 64]. scratch_ptr: 2,048 float32 elements.

    The four diagonal blocks of 16 are inverted by forward substitution, one thread per column. If BLOCKS is twice the number of
    warps, the tile's last axis is within a thread, so threads exchange no data. Rows that all threads of a block need are passed
    through memory.

    Let D be the matrix of the blocks' inverses, and N = D times the part of a below the blocks. The result is (I + N)^-1 D. Since
    N^4 = 0, (I + N)^-1 = (I - N)(I + N^2). Applying the same formula to a itself would need powers up to a^32, which overflow if
    keys are similar.
    """
    n = tl.arange(0, 64)
    own = n[:, None] // 16 == n[None, :] // 16
    below = tl.where(n[:, None] // 16 > n[None, :] // 16, a, 0.0).to(DOT)
    turned = scratch_ptr + (n[:, None] // 16) * 256 + (n[None, :] % 16) * 16 + n[:, None] % 16
    tl.store(turned, a, mask=own)
    tl.debug_barrier()
    c = tl.arange(0, 16)[:, None, None]
    b = tl.arange(0, BLOCKS)[None, :, None] % 4
    r = tl.arange(0, 16)[None, None, :]
    x = tl.where((r == c) & (b >= 0), 1.0, 0.0)
    for i in tl.static_range(1, 16):
        row = tl.load(scratch_ptr + b * 256 + r * 16 + i + c * 0, mask=(r < i) & (b >= 0) & (c >= 0), other=0.0)
        x -= tl.where(r == i, tl.sum(x * row, 2)[:, :, None], 0.0)
    tl.store(scratch_ptr + 1024 + b * 256 + r * 16 + (c ^ 1), x)  # xor: no vectors, which would turn the layout of x
    tl.debug_barrier()
    d = tl.load(scratch_ptr + 1024 + n[:, None] * 16 + (n[None, :] % 16 ^ 1), mask=own, other=0.0)
    tl.debug_barrier()  # the scratch may be written over
    d_dot = d.to(DOT)
    n1 = tl.dot(d_dot, below, input_precision=PRECISION)
    n_dot = n1.to(DOT)
    square = tl.dot(n_dot, n_dot, input_precision=PRECISION)
    rest = square - n1 - tl.dot(n_dot, square.to(DOT), input_precision=PRECISION)
    return d + tl.dot(rest.to(DOT), d_dot, input_precision=PRECISION)


@triton.jit
def channel_products(
    q,  # [64, K] float32
    k,  # [64, K] float32
    sums,  # [64, K] float32 or float64: cumulative log decays
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    K: tl.constexpr,
):
    """Return k k^T and q k^T [64, 64] of a chunk with a decay per key channel. The factor exp(sum_i - sum_j) is applied within
    the inner products.

    A decay over many tokens cannot be inverted in float32. For tokens of different blocks of 16, both factors are relative to the
    start of the later block, so neither exceeds 1. Within a block, the decay is computed for each pair of tokens.
    """
    row = tl.arange(0, 64)
    kk = tl.zeros([64, 64], tl.float32)
    qk = tl.zeros([64, 64], tl.float32)
    for block in tl.static_range(1, 4):
        edge = tl.sum(tl.where((row == 16 * block - 1)[:, None], sums, 0.0), 0)[None, :]
        mine = (row // 16 == block)[:, None]
        from_edge = tl.where(mine, tl.exp(tl.where(mine, sums - edge, 0.0).to(tl.float32)), 0.0)
        earlier = (row < 16 * block)[:, None]
        to_edge = tl.where(earlier, tl.exp(tl.where(earlier, edge - sums, 0.0).to(tl.float32)), 0.0)
        right = tl.trans((k * to_edge).to(DOT))
        kk += tl.dot((k * from_edge).to(DOT), right, input_precision=PRECISION)
        qk += tl.dot((q * from_edge).to(DOT), right, input_precision=PRECISION)
    r = tl.arange(0, 16)
    k4, q4, sums4 = tl.reshape(k, (4, 16, K)), tl.reshape(q, (4, 16, K)), tl.reshape(sums, (4, 16, K))
    kk4 = tl.zeros([4, 16, 16], tl.float32)
    qk4 = tl.zeros([4, 16, 16], tl.float32)
    for j in range(16):
        at = (r == j)[None, :, None]
        later = (r >= j)[None, :, None]
        sums_j = tl.sum(tl.where(at, sums4, 0.0), 1)[:, None, :]
        k_j = tl.sum(tl.where(at, k4, 0.0), 1)[:, None, :]
        decayed = tl.where(later, tl.exp(tl.where(later, sums4 - sums_j, 0.0).to(tl.float32)), 0.0) * k_j
        column = (r == j)[None, None, :]
        kk4 += tl.where(column, tl.sum(k4 * decayed, 2)[:, :, None], 0.0)
        qk4 += tl.where(column, tl.sum(q4 * decayed, 2)[:, :, None], 0.0)
    return kk + diagonal(kk4), qk + diagonal(qk4)


@triton.jit(do_not_specialize=["stride_a", "stride_b", "beta_scale", "dt_least", "dt_most"])
def cut_chunks(
    x_ptr,  # [num_tokens, channels]: convolved, normed and scaled
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    chunks_ptr,  # see CHUNK_FIELDS
    sums_ptr,  # [chunks, HEADS, 64]: cumulative log decays; kda: [chunks, HEADS, KEY_DIM], over the chunk.
    # float32; float64 for float32 layers, since differences of large sums must be exact to the last bit
    put_ptr,  # float32 [chunks, HEADS, 64]: dt of mamba2
    inverse_ptr,  # [chunks, HEADS, 64, 64]: (I + A)^-1 diag(beta), of gated_delta and kda
    inner_ptr,  # [chunks, HEADS, 64, 64]: q k^T with decays
    rows_ptr,  # kda: [3, chunks, HEADS, 64, KEY_DIM]: k decayed from the chunk's start, k to its end, q from its start
    stride_x,
    stride_a,
    stride_b,
    beta_scale,
    dt_least,
    dt_most,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECE: tl.constexpr,  # number of key elements per dot product; without tensor cores both operands are in registers
    BLOCKS: tl.constexpr,  # twice the number of warps, at least 4; see `inverse_of`
    DOT: tl.constexpr,
    INVERSE_DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a chunk's gates, GEMMs and inverse for the scan. Grid (HEADS, chunks)."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    first = tl.load(chunks_ptr + chunk * CHUNK_FIELDS + 1).to(tl.int64)
    count = tl.load(chunks_ptr + chunk * CHUNK_FIELDS + 3)
    key_head = head // (HEADS // KEY_HEADS)
    row = tl.arange(0, 64)
    live = row < count
    if KIND == "mamba2":
        k_at = HEADS * VALUE_DIM + key_head * KEY_DIM
        q_at = k_at + KEY_HEADS * KEY_DIM
    else:
        q_at = key_head * KEY_DIM
        k_at = q_at + KEY_HEADS * KEY_DIM
    lines = x_ptr + (first + row)[:, None] * stride_x
    slope = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    place = (chunk * HEADS + head).to(tl.int64)
    SUM: tl.constexpr = sums_ptr.dtype.element_ty
    ROW: tl.constexpr = rows_ptr.dtype.element_ty
    kk = tl.zeros([64, 64], tl.float32)
    qk = tl.zeros([64, 64], tl.float32)
    for piece in range(0, BLOCK_K, PIECE):
        i = piece + tl.arange(0, PIECE)
        in_key = i < KEY_DIM
        inside = live[:, None] & in_key[None, :]
        k = tl.load(lines + (k_at + i)[None, :], mask=inside, other=0.0).to(DOT)
        q = tl.load(lines + (q_at + i)[None, :], mask=inside, other=0.0).to(DOT)
        if KIND == "kda":
            gates = a_ptr + (first + row)[:, None] * stride_a + head * KEY_DIM + i[None, :]
            a = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
            dt_bias = tl.load(dt_bias_ptr + head * KEY_DIM + i, mask=in_key, other=0.0)
            sums = tl.cumsum(tl.where(inside, -slope * softplus(a + dt_bias[None, :]), 0.0).to(SUM), 0)
            whole = tl.sum(tl.where((row == 63)[:, None], sums, 0.0), 0)
            tl.store(sums_ptr + place * KEY_DIM + i, whole, mask=in_key)
            q32, k32 = q.to(tl.float32), k.to(tl.float32)
            more_kk, more_qk = channel_products(q32, k32, sums, DOT, PRECISION, PIECE)
            kk += more_kk
            qk += more_qk
            size = tl.num_programs(1).to(tl.int64) * HEADS * 64 * KEY_DIM
            there = rows_ptr + place * 64 * KEY_DIM + row[:, None] * KEY_DIM + i[None, :]
            from_start, to_end = tl.exp(sums.to(tl.float32)), tl.exp((whole[None, :] - sums).to(tl.float32))
            tl.store(there, (k32 * from_start).to(ROW), mask=in_key[None, :])
            tl.store(there + size, (k32 * to_end).to(ROW), mask=in_key[None, :])
            tl.store(there + 2 * size, (q32 * from_start).to(ROW), mask=in_key[None, :])
        else:
            k_turned = tl.trans(k)
            qk = tl.dot(q, k_turned, qk, input_precision=PRECISION)
            if KIND == "gated_delta":
                kk = tl.dot(k, k_turned, kk, input_precision=PRECISION)
    if KIND != "kda":
        if KIND == "lightning":
            steps = tl.where(live, -slope, 0.0)
        else:
            dt = softplus(
                tl.load(a_ptr + (first + row) * stride_a + head, mask=live, other=0.0).to(tl.float32)
                + tl.load(dt_bias_ptr + head)
            )
            if KIND == "mamba2":
                dt = tl.minimum(tl.maximum(dt, dt_least), dt_most)
                tl.store(put_ptr + place * 64 + row, tl.where(live, dt, 0.0))
            steps = tl.where(live, -slope * dt, 0.0)
        sums = tl.cumsum(steps.to(SUM), 0)
        tl.store(sums_ptr + place * 64 + row, sums)
        earlier = row[:, None] >= row[None, :]
        decay = tl.where(earlier, tl.exp(tl.where(earlier, sums[:, None] - sums[None, :], 0.0).to(tl.float32)), 0.0)
        kk *= decay
        qk *= decay
    square = place * 64 * 64 + row[:, None] * 64 + row[None, :]
    tl.store(inner_ptr + square, qk.to(inner_ptr.dtype.element_ty))
    if KIND == "gated_delta" or KIND == "kda":
        b = tl.load(b_ptr + (first + row) * stride_b + head, mask=live, other=0.0).to(tl.float32)
        beta = tl.where(live, beta_scale * tl.sigmoid(b), 0.0)
        lower = tl.where(row[:, None] > row[None, :], kk * beta[:, None], 0.0)
        # The memory of the result (or half of it) is used as scratch first.
        scratch = (inverse_ptr + place * 64 * 64).to(tl.pointer_type(tl.float32))
        inverse = inverse_of(lower, scratch, BLOCKS, INVERSE_DOT, PRECISION) * beta[None, :]
        tl.store(inverse_ptr + square, inverse.to(inverse_ptr.dtype.element_ty))
