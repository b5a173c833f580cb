"""What goes before a library's product over a quantised weight: the weight in half precision, or x in floats of 8 bits."""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.linear.unpack_kernels import unpack_bytes, unpack_pairs


@triton.jit
def dequantize_rows(
    weight_ptr,  # bytes [N, ROW]
    scales_ptr,  # [rows of scales, SCALES], float; exponents, uint8 (mxfp4)
    zeros_ptr,  # uint8, likewise (ZEROS)
    y_ptr,  # [N, K], written
    ROW: tl.constexpr,
    WEIGHT: tl.constexpr,
    HALF: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_SPAN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = the weight, rounded once. Grid (cdiv(N, BLOCK_N), ROW / SPAN)."""
    DOT: tl.constexpr = y_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = (n < N)[:, None]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    codes = tl.load(weight_ptr + n.to(tl.int64)[:, None] * ROW + byte[None, :], mask=inside, other=0)
    place = (n // SCALE_ROWS * SCALES)[:, None] + (byte // SCALE_SPAN)[None, :]
    scales = tl.load(scales_ptr + place, mask=inside, other=0)
    if WEIGHT == "mxfp4":
        wide = scales.to(tl.int32)
        scales = tl.where(wide == 0, 0x00400000, wide << 23).to(tl.float32, bitcast=True)
    else:
        scales = scales.to(tl.float32)
    column = byte
    if HALF > 0:
        column += byte // HALF * HALF
    at = y_ptr + n.to(tl.int64)[:, None] * K + column[None, :]
    if HALF > 0:
        low, high = unpack_pairs(codes, WEIGHT, tl.float32, False)
        if WEIGHT == "int4":
            zero = 8.0
            if ZEROS:
                zero = tl.load(zeros_ptr + place, mask=inside, other=0).to(tl.float32)
            low, high = low - zero, high - zero
        tl.store(at, (low * scales).to(DOT), mask=inside)
        tl.store(at + HALF, (high * scales).to(DOT), mask=inside)
    else:
        tl.store(at, (unpack_bytes(codes, WEIGHT, tl.float32, False) * scales).to(DOT), mask=inside)


@triton.jit
def quantize_rows(
    x_ptr,  # [rows, K]
    norm_ptr,  # [K], weight of the RMSNorm that x passes first (NORM)
    y_ptr,  # float8_e4m3fn [rows, K], written
    scales_ptr,  # float32 [groups of a row, STRIDE], written
    eps,
    stride,  # between scales of neighbouring groups
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # a multiple of GROUP, and K of GROUP
    GROUP: tl.constexpr,  # columns under one scale: K, or 128
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = norm(x) / scale, each scale the largest magnitude of its group over 448. Grid (rows): a program a row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    if NORM:
        weight = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * weight
    if GROUP == K:
        scale = tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1e-12)
        tl.store(scales_ptr + row, scale)
        y = x / scale
    else:
        groups = tl.reshape(x, (BLOCK // GROUP, GROUP))
        largest = tl.maximum(tl.max(tl.abs(groups), 1) / 448.0, 1e-12)
        g = tl.arange(0, BLOCK // GROUP)
        tl.store(scales_ptr + g * stride + row, largest, mask=g < K // GROUP)
        y = tl.reshape(groups / largest[:, None], (BLOCK,))
    y = tl.minimum(tl.maximum(y, -448.0), 448.0)
    tl.store(y_ptr + row * K + k, y.to(y_ptr.dtype.element_ty), mask=inside)
