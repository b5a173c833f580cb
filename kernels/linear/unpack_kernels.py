"""From codes of 8 and 4 bits to numbers in half precision, two in a register, by as few instructions as there are."""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl

# Sign, exponent and mantissa go where the wider type has them; a multiplication corrects the exponent, of subnormals too.
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
# A code is the last bits of 128 in bfloat16 and of 1,024 in float16.
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
    """What codes of 8 bits stand for, exactly: float8 e4m3 without NaN ("fp8", raw bytes), or whole numbers ("int8")."""
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
    """What the lower and the upper four bits of bytes stand for, exactly: floats e2m1 ("mxfp4"), or whole numbers ("int4"),
    those in assembly plus 128 in bfloat16 and plus 1,024 in float16."""
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
