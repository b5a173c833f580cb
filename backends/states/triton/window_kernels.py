"""Device functions for layers with a state: the inputs, output and states of a convolution, and gate functions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def window_of(
    x_ptr,  # pointer to the sequence's first new token
    conv_ptr,  # convolution state of the slot to read
    t,  # index of the new token in its sequence
    channels,  # [C]
    inside,  # bool [C]
    stride_x,  # stride of tokens
    CONV_CHANNEL: tl.constexpr,  # stride of a channel in the conv state
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,  # WIDTH rounded up to a power of two
):
    """Return the convolution's inputs at a token, float32 [C, BLOCK_W], oldest first. Columns from WIDTH on are zeros.

    Inputs before the sequence's first new token come from the convolution state, which contains the last WIDTH - 1 inputs.
    """
    tap = tl.arange(0, BLOCK_W)
    token = t - (WIDTH - 1) + tap
    new = x_ptr + token.to(tl.int64)[None, :] * stride_x + channels[:, None]
    old = conv_ptr + channels[:, None] * CONV_CHANNEL + (WIDTH - 1 + token)[None, :] * CONV_TIME
    there = inside[:, None] & (tap < WIDTH)[None, :]
    return tl.load(tl.where((token < 0)[None, :], old, new), mask=there, other=0.0).to(tl.float32)


@triton.jit
def convolved(
    x_ptr,  # pointer to the sequence's first new token
    conv_ptr,  # convolution state of the slot to read
    weight_ptr,
    bias_ptr,
    t,  # index of the new token in its sequence
    channels,  # [C]
    inside,  # bool [C]
    stride_x,  # stride of tokens
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Return the convolution's output at a token, float32 [C]. Taps are added one by one, which preserves the register layout."""
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
    x_ptr,  # pointer to the token
    conv_ptr,  # states of all slots
    weight_ptr,
    bias_ptr,
    slot,  # slot to read
    target,  # slot to write; -1 means none
    channels,  # [C]
    inside,  # bool [C]
    CONV_SLOT: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Return the convolution's output [C] at the only new token of a sequence, and update the convolution state. No other program
    may read that state."""
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
    tl.debug_barrier()  # all reads precede all writes
    if target >= 0:
        for tap in tl.static_range(1, WIDTH):
            tl.store(new + (tap - 1) * CONV_TIME, inputs[tap].to(conv_ptr.dtype.element_ty), mask=inside)
    return activated(y, SILU)


@triton.jit
def activated(y, SILU: tl.constexpr):
    """Return y after the activation that follows a convolution."""
    if SILU:
        # y sigmoid(y) in two native GPU functions; a division would take eight instructions.
        half = tl.rsqrt(1.0 + tl.exp2(y * -1.4426950408889634))
        y = y * half * half
    return y


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), accurate also if exp(x) overflows or is negligible compared with 1."""
    # log(1 + s) = 2 artanh(s / (2 + s)), whose series needs seven terms for s <= 1. The GPU's logarithm has an absolute error of
    # 2^-22, too large for Mamba's dt, which is often near 1e-3.
    s = tl.exp(-tl.abs(x))
    z = s / (2.0 + s)
    w = z * z
    series = 1.0 + w * (1 / 3 + w * (1 / 5 + w * (1 / 7 + w * (1 / 9 + w * (1 / 11 + w * (1 / 13))))))
    return tl.maximum(x, 0.0) + 2.0 * z * series


@triton.jit
def store_window(
    conv_ptr,  # state of the slot to write
    window,  # [C, BLOCK_W]
    channels,
    inside,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the convolution state after the newest token of a window. The state contains all inputs of the window except the
    oldest."""
    tap = tl.arange(0, BLOCK_W)
    there = inside[:, None] & ((tap > 0) & (tap < WIDTH))[None, :]
    ptrs = conv_ptr + channels[:, None] * CONV_CHANNEL + (tap - 1)[None, :] * CONV_TIME
    tl.store(ptrs, window.to(conv_ptr.dtype.element_ty), mask=there)


@triton.jit
def leave_windows(
    x_ptr,  # pointer to the sequence's first new token
    conv_ptr,  # states of all slots
    out_slots_ptr,  # out_slots of the sequence
    slot,  # slot to read
    count,  # number of new tokens
    channels,
    inside,
    stride_x,
    SINGLE: tl.constexpr,  # True if there is one new token
    OUT_WIDTH: tl.constexpr,
    CONV_SLOT: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the convolution state after each new token to the slot for that state. The slot from which the state was read is
    written last. No other program may use these channels."""
    base = conv_ptr + slot.to(tl.int64) * CONV_SLOT
    for place in tl.static_range(1 if SINGLE else 2):
        for t in range(count):
            target = out_slot_of(out_slots_ptr, t, count, OUT_WIDTH)
            wanted = target >= 0
            if not SINGLE:
                wanted = wanted & ((target == slot) == (place == 1))
            if wanted:
                window = window_of(x_ptr, base, t, channels, inside, stride_x, CONV_CHANNEL, CONV_TIME, WIDTH, BLOCK_W)
                tl.debug_barrier()  # all reads precede all writes
                out_ptr = conv_ptr + target.to(tl.int64) * CONV_SLOT
                store_window(out_ptr, window, channels, inside, CONV_CHANNEL, CONV_TIME, WIDTH, BLOCK_W)


@triton.jit
def out_slot_of(out_slots_ptr, t, count, OUT_WIDTH: tl.constexpr):
    """Return the slot for the state after a token, or -1 for none. If `out_slots` has one column, it is the slot for the state
    after the last token."""
    if OUT_WIDTH == 1:
        wanted = t == count - 1
        target = tl.load(out_slots_ptr, mask=wanted, other=-1)
    else:
        target = tl.load(out_slots_ptr + t)
    return target
