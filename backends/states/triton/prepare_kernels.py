"""The kernels before a chunked scan: the convolution of prompts, norms of q and k, and the convolution's states."""

from __future__ import annotations

import triton
import triton.language as tl

from headway.backends.states.triton.window_kernels import activated, store_window, window_of

CHUNK_FIELDS = tl.constexpr(4)
"""int32 numbers of a chunk: its sequence's slot (-1: it begins with zeros), its first packed token, the sequence's new tokens
before it, and its own."""


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
    KEY_UNITS: tl.constexpr,  # first come so many heads of KEY_DIM channels: q, and as many of k
    KEY_DIM: tl.constexpr,
    UNIT: tl.constexpr,  # channels of a unit after those
    BLOCK_C: tl.constexpr,  # the longer of both, rounded up to a power of two
    ROWS: tl.constexpr,  # tokens of a program
    RUN: tl.constexpr,  # tokens that a thread takes one after another
    CONV_SLOT: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """Grid (units, chunks, 64 / ROWS). q is scaled. The inputs under the taps stay in registers from token to token."""
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
    # A mask that Triton cannot prove to be the same for neighbours makes it read element by element.
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
            held += tl.load(ptrs, mask=there, other=0.0).to(held.dtype)  # one of both is zero
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
    places_ptr,  # int32 [places, 4]: a sequence's first token, its new tokens up to there, the slot read or -1, the slot written
    stride_x,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CONV_SLOT: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Grid (cdiv(CHANNELS, BLOCK_C), places): the conv state after some token. Runs when every convolution has read its slot."""
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
    )  # a sequence without a context has zeros before it, whatever the slot holds
    tl.debug_barrier()  # all of it is read before any of it is written over
    ptr = conv_ptr + target * CONV_SLOT
    store_window(ptr, window, channels, inside, CONV_CHANNEL, CONV_TIME, WIDTH, BLOCK_W)
