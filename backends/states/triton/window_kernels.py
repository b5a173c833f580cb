"""Device functions that kernels of layers with a state share: a convolution's window, its output and its states, and gates."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def window_of(
    x_ptr,  # the sequence's first new token
    conv_ptr,  # the conv state of the slot that is read
    t,  # the new token, counted from the sequence's first
    channels,  # [C]
    inside,  # bool [C]
    stride_x,  # of tokens
    CONV_CHANNEL: tl.constexpr,  # stride of a channel in the conv state
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,  # WIDTH rounded up to a power of two
):
    """Return the inputs [C, BLOCK_W] under a token's taps, float32, oldest first, 0 past WIDTH; before the sequence's first new
    token they come from the conv state, which holds the last WIDTH - 1 of them."""
    tap = tl.arange(0, BLOCK_W)
    token = t - (WIDTH - 1) + tap
    new = x_ptr + token.to(tl.int64)[None, :] * stride_x + channels[:, None]
    old = conv_ptr + channels[:, None] * CONV_CHANNEL + (WIDTH - 1 + token)[None, :] * CONV_TIME
    there = inside[:, None] & (tap < WIDTH)[None, :]
    return tl.load(tl.where((token < 0)[None, :], old, new), mask=there, other=0.0).to(tl.float32)


@triton.jit
def convolved(
    x_ptr,  # the sequence's first new token
    conv_ptr,  # the conv state of the slot that is read
    weight_ptr,
    bias_ptr,
    t,  # the new token, counted from the sequence's first
    channels,  # [C]
    inside,  # bool [C]
    stride_x,  # of tokens
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Return the convolution's output [C] at a token, float32, tap by tap: an axis of taps would spread the tile's layout."""
    y = tl.zeros([channels.shape[0]], tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        token = t - (WIDTH - 1) + tap
        new = x_ptr + token * stride_x + channels
        old = conv_ptr + channels * CONV_CHANNEL + (WIDTH - 1 + token) * CONV_TIME
        input = tl.load(tl.where(channels * 0 + token < 0, old, new), mask=inside, other=0.0).to(tl.float32)
        y += input * tl.load(weight_ptr + channels * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
    return activated(y, SILU)


@triton.jit
def convolved_once(
    x_ptr,  # the token
    conv_ptr,  # all slots
    weight_ptr,
    bias_ptr,
    slot,  # that is read
    target,  # slot that is written, -1: none
    channels,  # [C]
    inside,  # bool [C]
    CONV_SLOT: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Return the convolution's output [C] at a sequence's only token and move its conv state on, which no other program reads."""
    old = conv_ptr + slot.to(tl.int64) * CONV_SLOT + channels * CONV_CHANNEL
    new = conv_ptr + target.to(tl.int64) * CONV_SLOT + channels * CONV_CHANNEL
    y = tl.zeros([channels.shape[0]], tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    inputs = ()
    for tap in tl.static_range(WIDTH - 1):
        inputs = inputs + (tl.load(old + tap * CONV_TIME, mask=inside, other=0.0),)
    inputs = inputs + (tl.load(x_ptr + channels, mask=inside, other=0.0),)
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        y += inputs[tap].to(tl.float32) * weight
    tl.debug_barrier()  # all of it is read before any of it is written over
    if target >= 0:
        for tap in tl.static_range(1, WIDTH):
            tl.store(new + (tap - 1) * CONV_TIME, inputs[tap].to(conv_ptr.dtype.element_ty), mask=inside)
    return activated(y, SILU)


@triton.jit
def activated(y, SILU: tl.constexpr):
    """The activation after a convolution."""
    if SILU:
        # y sigmoid(y), in two functions that the GPU has as such: a division would be eight instructions.
        half = tl.rsqrt(1.0 + tl.exp2(y * -1.4426950408889634))
        y = y * half * half
    return y


@triton.jit
def softplus(x):
    """log(1 + exp(x)), also where exp(x) overflows or vanishes beside 1."""
    # log(1 + s) = 2 artanh(s / (2 + s)), whose series needs seven terms where s <= 1. The GPU's own logarithm errs by
    # 2^-22 of 1, not of the result, and Mamba's dt is often near 1e-3.
    s = tl.exp(-tl.abs(x))
    z = s / (2.0 + s)
    w = z * z
    series = 1.0 + w * (1 / 3 + w * (1 / 5 + w * (1 / 7 + w * (1 / 9 + w * (1 / 11 + w * (1 / 13))))))
    return tl.maximum(x, 0.0) + 2.0 * z * series


@triton.jit
def store_window(
    conv_ptr,  # the slot that is written
    window,  # [C, BLOCK_W]
    channels,
    inside,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the conv state after the newest token of a window: its inputs but the oldest."""
    tap = tl.arange(0, BLOCK_W)
    there = inside[:, None] & ((tap > 0) & (tap < WIDTH))[None, :]
    ptrs = conv_ptr + channels[:, None] * CONV_CHANNEL + (tap - 1)[None, :] * CONV_TIME
    tl.store(ptrs, window.to(conv_ptr.dtype.element_ty), mask=there)


@triton.jit
def leave_windows(
    x_ptr,  # the sequence's first new token
    conv_ptr,  # all slots
    out_slots_ptr,  # of the sequence
    slot,  # that is read
    count,  # new tokens
    channels,
    inside,
    stride_x,
    SINGLE: tl.constexpr,  # there is one new token
    OUT_WIDTH: tl.constexpr,
    CONV_SLOT: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the conv state after each new token to its slot, the source slot last; no other program may use the channels."""
    base = conv_ptr + slot.to(tl.int64) * CONV_SLOT
    for place in tl.static_range(1 if SINGLE else 2):
        for t in range(count):
            target = out_slot_of(out_slots_ptr, t, count, OUT_WIDTH)
            wanted = target >= 0
            if not SINGLE:
                wanted = wanted & ((target == slot) == (place == 1))
            if wanted:
                window = window_of(x_ptr, base, t, channels, inside, stride_x, CONV_CHANNEL, CONV_TIME, WIDTH, BLOCK_W)
                tl.debug_barrier()  # all of it is read before any of it is written over
                out_ptr = conv_ptr + target.to(tl.int64) * CONV_SLOT
                store_window(out_ptr, window, channels, inside, CONV_CHANNEL, CONV_TIME, WIDTH, BLOCK_W)


@triton.jit
def out_slot_of(out_slots_ptr, t, count, OUT_WIDTH: tl.constexpr):
    """The slot that gets the state after a token, -1: none. With one column that is the state after the last token."""
    if OUT_WIDTH == 1:
        wanted = t == count - 1
        target = tl.load(out_slots_ptr, mask=wanted, other=-1)
    else:
        target = tl.load(out_slots_ptr + t)
    return target
