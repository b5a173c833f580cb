"""Triton kernels that unpack values of 8 and 4 bits, dequantize weights, and quantize rows to FP8."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton reads annotations at compile time, so they must not be deferred here.


# Move sign, exponent and mantissa to their bits in the wider type. A multiplication corrects the exponent, for subnormals too.
FLOAT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, z;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.b32 c, a, 4;
    and.b32 c, c, 0x07f007f0;
    lop3.b32 a, a, 0x80008000, c, 0xea;
    shr.b32 c, b, 4;
    and.b32 c, c, 0x07f007f0;
    lop3.b32 b, b, 0x80008000, c, 0xea;
    mov.b32 c, 0x7b807b80;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 $0, a, c, z;
    fma.rn.bf16x2 $1, b, c, z;
}""")
FLOAT8_TO_FP16 = tl.constexpr("""{
    .reg .b32 a, b, c;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.b32 c, a, 1;
    and.b32 c, c, 0x3f803f80;
    lop3.b32 a, a, 0x80008000, c, 0xea;
    shr.b32 c, b, 1;
    and.b32 c, c, 0x3f803f80;
    lop3.b32 b, b, 0x80008000, c, 0xea;
    mov.b32 c, 0x5c005c00;
    mul.f16x2 $0, a, c;
    mul.f16x2 $1, b, c;
}""")
FLOAT4_TO_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, s, z, f;
    mov.b32 f, 0x7e807e80;
    mov.b32 z, 0x80008000;
    prmt.b32 a, $4, 0, 0x1404;
    prmt.b32 b, $4, 0, 0x3424;
    shl.b32 s, a, 4;
    shr.b32 c, a, 2;
    and.b32 c, c, 0x01c001c0;
    lop3.b32 c, s, 0x80008000, c, 0xea;
    fma.rn.bf16x2 $0, c, f, z;
    shl.b32 s, b, 4;
    shr.b32 c, b, 2;
    and.b32 c, c, 0x01c001c0;
    lop3.b32 c, s, 0x80008000, c, 0xea;
    fma.rn.bf16x2 $1, c, f, z;
    shr.b32 c, a, 6;
    and.b32 c, c, 0x01c001c0;
    lop3.b32 c, a, 0x80008000, c, 0xea;
    fma.rn.bf16x2 $2, c, f, z;
    shr.b32 c, b, 6;
    and.b32 c, c, 0x01c001c0;
    lop3.b32 c, b, 0x80008000, c, 0xea;
    fma.rn.bf16x2 $3, c, f, z;
}""")
FLOAT4_TO_FP16 = tl.constexpr("""{
    .reg .b32 a, b, c, s, f;
    mov.b32 f, 0x74007400;
    prmt.b32 a, $4, 0, 0x1404;
    prmt.b32 b, $4, 0, 0x3424;
    shl.b32 s, a, 4;
    shl.b32 c, a, 1;
    and.b32 c, c, 0x0e000e00;
    lop3.b32 c, s, 0x80008000, c, 0xea;
    mul.f16x2 $0, c, f;
    shl.b32 s, b, 4;
    shl.b32 c, b, 1;
    and.b32 c, c, 0x0e000e00;
    lop3.b32 c, s, 0x80008000, c, 0xea;
    mul.f16x2 $1, c, f;
    shr.b32 c, a, 3;
    and.b32 c, c, 0x0e000e00;
    lop3.b32 c, a, 0x80008000, c, 0xea;
    mul.f16x2 $2, c, f;
    shr.b32 c, b, 3;
    and.b32 c, c, 0x0e000e00;
    lop3.b32 c, b, 0x80008000, c, 0xea;
    mul.f16x2 $3, c, f;
}""")
# A 4-bit value becomes the last bits of 128 in bfloat16, and of 1,024 in float16.
INT4_TO_BF16 = tl.constexpr("""{
    .reg .b32 l, h, m;
    mov.b32 m, 0x43434343;
    and.b32 l, $4, 0x0f0f0f0f;
    shr.b32 h, $4, 4;
    and.b32 h, h, 0x0f0f0f0f;
    prmt.b32 $0, l, m, 0x4140;
    prmt.b32 $1, l, m, 0x4342;
    prmt.b32 $2, h, m, 0x4140;
    prmt.b32 $3, h, m, 0x4342;
}""")
INT4_TO_FP16 = tl.constexpr(INT4_TO_BF16.value.replace("0x43434343", "0x64646464"))


@triton.jit
def unpack_bytes(codes, WEIGHT: tl.constexpr, DOT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Convert 8-bit values exactly: float8 e4m3 without NaN ("fp8", raw bytes), or integers ("int8")."""
    if WEIGHT == "int8":
        numbers = codes.to(tl.int8, bitcast=True).to(DOT)
    elif not ASSEMBLY:
        wide = codes.to(tl.int32)
        numbers = ((((wide & 0x7F) << 20) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True) * 2.0**120).to(DOT)
    elif DOT == tl.float16:  # noqa: SIM300
        numbers = tl.inline_asm_elementwise(FLOAT8_TO_FP16, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        numbers = tl.inline_asm_elementwise(FLOAT8_TO_BF16, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    return numbers


@triton.jit
def unpack_pairs(codes, WEIGHT: tl.constexpr, DOT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Convert the low and high four bits of bytes exactly: float4 e2m1 ("mxfp4"), or integers ("int4").

    With ASSEMBLY, 128 is added to integers in bfloat16, and 1,024 in float16.
    """
    if ASSEMBLY:
        if DOT == tl.float16:  # noqa: SIM300
            BODY16: tl.constexpr = INT4_TO_FP16 if WEIGHT == "int4" else FLOAT4_TO_FP16
            low, high = tl.inline_asm_elementwise(
                BODY16, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
        else:
            BODY: tl.constexpr = INT4_TO_BF16 if WEIGHT == "int4" else FLOAT4_TO_BF16
            low, high = tl.inline_asm_elementwise(
                BODY, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
    elif WEIGHT == "int4":
        low, high = (codes & 15).to(DOT), (codes >> 4).to(DOT)
    else:
        wide = codes.to(tl.int32)
        low = (((wide & 7) << 22) | ((wide & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**126
        high = (((wide & 0x70) << 18) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True) * 2.0**126
        low, high = low.to(DOT), high.to(DOT)
    return low, high


# Triton reads annotations at compile time, so they must not be deferred here.


@triton.jit
def wide_scales(scales, WEIGHT: tl.constexpr):
    """Return the scales of a weight as float32. Those of mxfp4 are exponents, and the smallest one needs a subnormal."""
    if WEIGHT == "mxfp4":
        wide = scales.to(tl.int32)
        scales = tl.where(wide == 0, 0x00400000, wide << 23).to(tl.float32, bitcast=True)
    else:
        scales = scales.to(tl.float32)
    return scales


@triton.jit
def dequantize_rows(
    weight_ptr,  # bytes [N, ROW]
    scales_ptr,  # [rows of scales, SCALES], float, or uint8 exponents (mxfp4)
    zeros_ptr,  # uint8 [rows of scales, SCALES] (ZEROS)
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
    """y = the dequantized weight, rounded once. Grid (cdiv(N, BLOCK_N), ROW / SPAN)."""
    DOT: tl.constexpr = y_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = (n < N)[:, None]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    codes = tl.load(weight_ptr + n.to(tl.int64)[:, None] * ROW + byte[None, :], mask=inside, other=0)
    place = (n // SCALE_ROWS * SCALES)[:, None] + (byte // SCALE_SPAN)[None, :]
    scales = wide_scales(tl.load(scales_ptr + place, mask=inside, other=0), WEIGHT)
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
    norm_ptr,  # [K], weight of the RMSNorm of x (NORM)
    y_ptr,  # float8_e4m3fn [rows, K], written
    scales_ptr,  # float32 [groups per row, STRIDE], written
    eps,
    stride,  # elements between scales of adjacent groups
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # a multiple of GROUP, which divides K
    GROUP: tl.constexpr,  # columns per scale: K, or 128
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = norm(x) / scale in FP8. A scale is the largest magnitude in its group divided by 448. Grid (rows)."""
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
