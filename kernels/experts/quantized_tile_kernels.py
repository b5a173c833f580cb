"""Experts of many tokens over quantised weights: as tile_kernels.py, whose tiles and order these are.

Codes are unpacked in registers and multiplied as the left side, W x^T, so that scales of weights are those of the sums' rows.
"""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.experts.tile_kernels import find_tile, input_rows, store_tile
from headway.kernels.linear.quantized_kernels import _multiply as multiply_codes


@triton.jit(do_not_specialize=["num_blocks"])
def grouped_quantized_product(
    x_ptr,  # [num_tokens, K] (GATHER), else [num_pairs, K], in the order of experts (WHOLE: of tokens)
    weight_ptr,  # bytes [NUM_ALL * N, ROW]; GATED: [NUM_ALL * 2 N, ROW], gate over up
    scales_ptr,  # [rows of scales, SCALES], float; exponents, uint8 (mxfp4)
    zeros_ptr,  # uint8, likewise (ZEROS)
    bias_ptr,  # [NUM_ALL, N] or [NUM_ALL, 2 N] (BIAS)
    pairs_ptr,  # int32 [num_pairs]: of the row of token p // SLOTS (GATHER); WHOLE: the expert of each pair
    ends_ptr,  # int32 [NUM_ALL]; not WHOLE
    y_ptr,  # [num_pairs, N], in the order of x, written
    num_blocks,  # of BLOCK_M rows, at most; WHOLE: tokens
    N: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,  # bytes of a row
    WEIGHT: tl.constexpr,  # kind of the weight (quantization/forms.py)
    HALF: tl.constexpr,  # bytes of a group of two codes a byte; 0: a byte is a code
    SCALES: tl.constexpr,  # scales of a row
    SCALE_SPAN: tl.constexpr,  # bytes of a row under one scale: a multiple of SPAN, or a divisor
    SCALE_ROWS: tl.constexpr,  # rows that share scales
    ZEROS: tl.constexpr,
    NUM_ALL: tl.constexpr,
    BLOCK_E: tl.constexpr,  # NUM_ALL rounded up to a power of two
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,  # bytes of a row that are multiplied at a time
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,  # as in grouped_product, and so are the others
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DOT: tl.constexpr,
    ASSEMBLY: tl.constexpr,  # codes are unpacked by instructions of NVIDIA's
    PDL: tl.constexpr,
):
    """y = W_e x + bias, or its activation. Grid (cdiv(N, BLOCK_N) * num_blocks), WHOLE: * NUM_ALL. Sums in float32."""
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    CHUNKS: tl.constexpr = (ROW + SPAN - 1) // SPAN
    WIDTH: tl.constexpr = 2 * N if GATED else N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, column, row, live, wanted = find_tile(
        pairs_ptr, ends_ptr, num_blocks, NUM_N, NUM_ALL, BLOCK_E, SLOTS, BLOCK_M, GROUP_M, WHOLE, BLOCK_S
    )
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    if wanted:
        x_rows = x_ptr + input_rows(pairs_ptr, row, live, SLOTS, GATHER, WHOLE).to(tl.int64)[:, None] * K
        i = tl.arange(0, SPAN)
        first = expert * WIDTH  # of the expert's rows
        weight_at = weight_ptr + first.to(tl.int64) * ROW + n[:, None] * ROW + i[None, :]
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        scales, zeros = _scales(scales_ptr, zeros_ptr, first, n, 0, N, ROW, SPAN, SCALES, SCALE_SPAN, SCALE_ROWS, ZEROS)
        up_scales, up_zeros = scales, zeros
        if GATED:
            up_scales, up_zeros = _scales(scales_ptr, zeros_ptr, first + N, n, 0, N, ROW, SPAN, SCALES, SCALE_SPAN, SCALE_ROWS,
                                          ZEROS)  # fmt: skip
        for c in tl.range(0, CHUNKS, num_stages=STAGES):
            byte = c * SPAN + i
            held = (n < N)[:, None] & (byte < ROW)[None, :]
            codes = tl.load(weight_at + c * SPAN, mask=held, other=0)
            at = byte
            if HALF > 0:
                at += byte // HALF * HALF
            inside = live[:, None] & (byte < ROW)[None, :]
            low = tl.trans(tl.load(x_rows + at[None, :], mask=inside, other=0.0).to(DOT))
            high = low
            if HALF > 0:
                high = tl.trans(tl.load(x_rows + (at + HALF)[None, :], mask=inside, other=0.0).to(DOT))
            # A chunk ahead, since what feeds no product by itself is not asked for early.
            next_scales, next_zeros = _scales(scales_ptr, zeros_ptr, first, n, c + 1, N, ROW, SPAN, SCALES, SCALE_SPAN,
                                              SCALE_ROWS, ZEROS)  # fmt: skip
            gate = multiply_codes(codes, scales, zeros, low, high, gate, WEIGHT, HALF, SPAN, SCALE_SPAN, ZEROS, DOT, ASSEMBLY)
            scales, zeros = next_scales, next_zeros
            if GATED:
                codes = tl.load(weight_at + (N * ROW + c * SPAN), mask=held, other=0)
                next_scales, next_zeros = _scales(scales_ptr, zeros_ptr, first + N, n, c + 1, N, ROW, SPAN, SCALES, SCALE_SPAN,
                                                  SCALE_ROWS, ZEROS)  # fmt: skip
                up = multiply_codes(codes, up_scales, up_zeros, low, high, up, WEIGHT, HALF, SPAN, SCALE_SPAN, ZEROS, DOT,
                                    ASSEMBLY)  # fmt: skip
                up_scales, up_zeros = next_scales, next_zeros
        store_tile(gate, up, bias_ptr, y_ptr, expert, n, row, live, N, WIDTH, GATED, SQUARED, ALPHA, LIMIT, BIAS, True)


@triton.jit
def _scales(scales_ptr, zeros_ptr, first, n, c, N: tl.constexpr, ROW: tl.constexpr, SPAN: tl.constexpr, SCALES: tl.constexpr,
            SCALE_SPAN: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Scales and zeros of chunk c of rows first + n [BLOCK_N], or of the groups in it [BLOCK_N, groups]."""
    row = (first + n) // SCALE_ROWS * SCALES
    if SCALE_SPAN >= SPAN:
        inside = n < tl.where(c * SPAN < ROW, N, 0)
        place = row + c * SPAN // SCALE_SPAN
    else:
        group = c * (SPAN // SCALE_SPAN) + tl.arange(0, SPAN // SCALE_SPAN)
        inside = (n < N)[:, None] & (group < SCALES)[None, :]
        place = row[:, None] + group[None, :]
    scales = tl.load(scales_ptr + place, mask=inside, other=0)
    zeros = scales
    if ZEROS:
        zeros = tl.load(zeros_ptr + place, mask=inside, other=0)
    return scales, zeros
