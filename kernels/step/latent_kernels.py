"""What stands around latent attention, a launch each: norm and rotation, queries absorbed, attended latents projected.

Sums are float32. PDL: see step_kernels.py; weights are asked for before the wait, since no kernel writes them.
"""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def turn_latent(
    q_ptr,  # [num_tokens, HEADS, NOPE + 2 HALF], a row every Q_ROW elements; the last 2 HALF of each head are overwritten
    latent_ptr,  # [num_tokens, RANK + 2 HALF], a row every LATENT_ROW elements, overwritten
    norm_ptr,  # [RANK]
    cos_ptr,  # float32 [num_tokens, HALF]
    sin_ptr,
    eps,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    Q_ROW: tl.constexpr,
    LATENT_ROW: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """RMSNorm of the latents, RoPE (Su et al. 2021) of what follows them and of the end of each query head.

    Grid (num_tokens, 1 + cdiv(HEADS, BLOCK_H)): the first program of a token takes the latent, the others queries.
    """
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_HALF)
    r = tl.arange(0, BLOCK_RANK)
    weight = tl.load(norm_ptr + r, mask=r < RANK, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    cos = tl.load(cos_ptr + token * HALF + h, mask=h < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + h, mask=h < HALF, other=0.0)
    if tl.program_id(1) == 0:
        row = latent_ptr + token * LATENT_ROW
        x = tl.load(row + r, mask=r < RANK, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * weight
        tl.store(row + r, y.to(latent_ptr.dtype.element_ty), mask=r < RANK)
        _turn(row + RANK + h, cos, sin, h < HALF, HALF)
    else:
        head = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        at = q_ptr + token * Q_ROW + head * (NOPE + 2 * HALF) + NOPE + h[None, :]
        _turn(at, cos[None, :], sin[None, :], (head < HEADS) & (h < HALF)[None, :], HALF)


@triton.jit
def _turn(at, cos, sin, mask, HALF: tl.constexpr):
    """Turn the elements at `at` with those HALF further on."""
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (low * cos - high * sin).to(at.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (high * cos + low * sin).to(at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def absorb_queries(
    q_ptr,  # [rows, HEADS, NOPE + ROPE], a row every Q_ROW elements
    weight_ptr,  # [HEADS, NOPE + VALUE, RANK]
    y_ptr,  # [rows, HEADS, RANK + ROPE], written
    rows,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    Q_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # NOPE rounded up to a power of two
    BLOCK_ROPE: tl.constexpr,
    DOT: tl.constexpr,  # what the matrix units multiply
    PDL: tl.constexpr,
):
    """y = q W for the first NOPE elements of each head, the others as they are. Grid (cdiv(RANK, BLOCK_N), HEADS, cdiv(rows,
    BLOCK_M))."""
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = (m < rows)[:, None]
    weight_at = weight_ptr + (head * (NOPE + VALUE) + k)[:, None] * RANK + n[None, :]
    weight = tl.load(weight_at, mask=(k < NOPE)[:, None] & (n < RANK)[None, :], other=0.0).to(DOT)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q_at = q_ptr + m.to(tl.int64)[:, None] * Q_ROW + head * (NOPE + ROPE)
    y_at = y_ptr + (m.to(tl.int64)[:, None] * HEADS + head) * (RANK + ROPE)
    q = tl.load(q_at + k[None, :], mask=live & (k < NOPE)[None, :], other=0.0).to(DOT)
    y = tl.dot(q, weight)
    tl.store(y_at + n[None, :], y.to(y_ptr.dtype.element_ty), mask=live & (n < RANK)[None, :])
    if tl.program_id(0) == 0:
        t = tl.arange(0, BLOCK_ROPE)
        mask = live & (t < ROPE)[None, :]
        tl.store(y_at + RANK + t[None, :], tl.load(q_at + NOPE + t[None, :], mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def project_latents(
    x_ptr,  # [rows, HEADS, RANK]
    weight_ptr,  # [HEADS, NOPE + VALUE, RANK]
    y_ptr,  # [rows, HEADS, VALUE], a row every Y_ROW elements, written
    rows,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    Y_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # RANK rounded up to a power of two
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x W^T for each head. Grid (cdiv(VALUE, BLOCK_N), HEADS, cdiv(rows, BLOCK_M))."""
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = (m < rows)[:, None]
    weight_at = weight_ptr + (head * (NOPE + VALUE) + NOPE + n)[:, None] * RANK + k[None, :]
    weight = tl.load(weight_at, mask=(n < VALUE)[:, None] & (k < RANK)[None, :], other=0.0).to(DOT)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x_at = x_ptr + (m.to(tl.int64)[:, None] * HEADS + head) * RANK + k[None, :]
    x = tl.load(x_at, mask=live & (k < RANK)[None, :], other=0.0).to(DOT)
    y = tl.dot(x, tl.trans(weight))
    y_at = y_ptr + m.to(tl.int64)[:, None] * Y_ROW + head * VALUE + n[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=live & (n < VALUE)[None, :])
