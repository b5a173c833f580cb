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
    CONV_SLOT: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """Grid (units, chunks, 64 / ROWS). q is scaled."""
    unit = tl.program_id(0)
    slot = tl.load(chunks_ptr + tl.program_id(1) * CHUNK_FIELDS)
    first = tl.load(chunks_ptr + tl.program_id(1) * CHUNK_FIELDS + 1).to(tl.int64)
    before = tl.load(chunks_ptr + tl.program_id(1) * CHUNK_FIELDS + 2)
    count = tl.load(chunks_ptr + tl.program_id(1) * CHUNK_FIELDS + 3)
    if tl.program_id(2) * ROWS >= count:
        return
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    within = tl.arange(0, BLOCK_C)
    key = unit < KEY_UNITS
    channels = tl.where(key, unit * KEY_DIM, KEY_UNITS * KEY_DIM + (unit - KEY_UNITS) * UNIT) + within
    inside = (within < tl.where(key, KEY_DIM, UNIT)) & (channels < CHANNELS)
    live = row < count
    if WIDTH:
        y = tl.zeros([ROWS, BLOCK_C], tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(WIDTH):
            weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
            token = row - (WIDTH - 1) + tap
            there = (live & (before + token >= 0))[:, None] & inside[None, :]
            ptrs = x_ptr + (first + token)[:, None] * stride_x + channels[None, :]
            y += tl.load(ptrs, mask=there, other=0.0).to(tl.float32) * weight[None, :]
            if (before == 0) & (slot >= 0):
                there = (live & (token < 0))[:, None] & inside[None, :]
                old = conv_ptr + slot.to(tl.int64) * CONV_SLOT
                ptrs = old + channels[None, :] * CONV_CHANNEL + (WIDTH - 1 + token)[:, None] * CONV_TIME
                y += tl.load(ptrs, mask=there, other=0.0).to(tl.float32) * weight[None, :]
        y = activated(y, SILU)
    else:
        ptrs = x_ptr + (first + row)[:, None] * stride_x + channels[None, :]
        y = tl.load(ptrs, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
    if KEY_UNITS:
        if QK_NORM:
            norm = tl.rsqrt(tl.sum(tl.where(inside[None, :], y * y, 0.0), 1) + 1e-6)
            y = tl.where(key, y * norm[:, None], y)
        y = tl.where(unit < KEY_UNITS // 2, y * scale, y)
    ptrs = out_ptr + (first + row)[:, None] * stride_out + channels[None, :]
    tl.store(ptrs, y.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


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
