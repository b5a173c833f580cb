"""Triton GEMM kernels over quantized weights with fused dequantize. With few rows, reading the weight takes most of the time.

A program multiplies BLOCK_N rows of the weight or, with split_k (SPLITS), a range of columns of these rows. BLOCK_N must be
large; otherwise, more bytes of x than of the weight would be read. With split-K, the last program to arrive adds the partial
sums, in a fixed order.

The next chunks are copied to shared memory during the computation, and are unpacked on the way to the tensor cores. These compute
W x^T, with the weight as the operand in registers. Before x is available (PDL, see step_kernels.py), the program reads its first
scales and prefetches its first chunks to L2.

A chunk is divided along K into SLICES, which are distributed over the warps. A slice of a row has one scale. So unscaled values,
which are exact in half precision, are multiplied by x, and scales multiply the float32 sums. Values are scaled first only if
groups have 32 columns. The two 4-bit values in a byte are half a group apart, so one load gives two weight tiles, each for a
different range of x.
"""

# Triton reads annotations at compile time, so they must not be deferred here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.linear.product_kernels import head_norms, rotate_whole_head
from headway.kernels.linear.unpack_kernels import unpack_bytes, unpack_pairs, wide_scales
from headway.kernels.step.step_kernels import activate


@triton.jit(do_not_specialize=["rows"])
def quantized_product(
    x_ptr,  # [rows, K]
    weight_ptr,  # bytes [N, ROW]; GATED: [2 N, ROW], gate over up
    scales_ptr,  # [rows of scales, SCALES], float, or uint8 exponents (mxfp4)
    zeros_ptr,  # uint8 [rows of scales, SCALES] (ZEROS)
    norm_ptr,  # [K], weight of the RMSNorm of x (NORM)
    bias_ptr,  # [N] or [2 N] (BIAS)
    y_ptr,  # [rows, N], written; added to (ADD)
    partial_ptr,  # float32 [tiles, SPLITS, BLOCK_N BLOCK_M, twice that if GATED, and BLOCK_M] (SPLITS > 1)
    splits_ptr,  # int32 [tiles], zero between launches (SPLITS > 1)
    eps,
    cos_ptr,  # float32 [rows, HEAD_DIM / 2] (HEADS > 0, like the following four)
    sin_ptr,
    q_norm_ptr,  # [HEAD_DIM] (QK_NORM)
    k_norm_ptr,
    arrivals_ptr,  # int32 [HEADS + KV_HEADS], zero between launches
    head_eps,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,  # bytes per row, a multiple of SPAN
    WEIGHT: tl.constexpr,  # kind of the weight (kernels/linear/forms.py)
    HALF: tl.constexpr,  # bytes of a group with two values per byte, a multiple of SPAN; 0 means one value per byte
    SCALES: tl.constexpr,  # scales per row
    SCALE_SPAN: tl.constexpr,  # bytes of a row under one scale, a multiple of SPAN
    SCALE_ROWS: tl.constexpr,  # rows that share scales
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPAN: tl.constexpr,  # bytes per slice
    SLICES: tl.constexpr,  # slices per chunk
    STAGES: tl.constexpr,  # chunks in flight, plus one
    PREFETCH: tl.constexpr,  # chunks to prefetch to L2 before x is there (PDL)
    SPLITS: tl.constexpr,  # programs that split a sum over K (split-K)
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # activation of the gate, or of everything; empty means none
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,  # q heads to rotate, in the first rows of the weight, followed by those of k; 0 means no RoPE
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # a multiple of BLOCK_N (if HEADS > 0, which needs all rows in BLOCK_M)
    BLOCK_HALF: tl.constexpr,
    QK_NORM: tl.constexpr,
    DOT: tl.constexpr,  # type of the operands of tl.dot
    ASSEMBLY: tl.constexpr,  # unpack with NVIDIA instructions (inline PTX)
    EARLY: tl.constexpr,  # the next kernel may start at once, not only when x is there
    PDL: tl.constexpr,
):
    """y = W norm(x) + bias (GEMM), optionally activated, gated, or added to y. Sums in float32.

    Grid (cdiv(N, BLOCK_N), SPLITS, cdiv(rows, BLOCK_M)).
    """
    UNITS: tl.constexpr = ROW // SPAN
    CHUNKS: tl.constexpr = ((UNITS + SLICES - 1) // SLICES + SPLITS - 1) // SPLITS
    if PDL and EARLY:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    unit = tl.program_id(1) * (CHUNKS * SLICES)
    if SLICES > 1:
        unit += tl.arange(0, SLICES)
    end = tl.minimum((tl.program_id(1) + 1) * (CHUNKS * SLICES), UNITS)
    i = tl.arange(0, SPAN)
    scales, zeros = _scales(scales_ptr, zeros_ptr, unit, end, n, 0, N, SPAN, SLICES, SCALES, SCALE_SPAN, SCALE_ROWS, ZEROS)
    up_scales, up_zeros = scales, zeros
    if GATED:
        up_scales, up_zeros = _scales(scales_ptr, zeros_ptr, unit, end, n, N, N, SPAN, SLICES, SCALES, SCALE_SPAN, SCALE_ROWS,
                                        ZEROS)  # fmt: skip
    if PDL and PREFETCH > 0:
        _prefetch(weight_ptr, unit, end, tl.minimum(n, N - 1), ROW, SPAN, SLICES, PREFETCH)
        if GATED:
            _prefetch(weight_ptr, unit, end, tl.minimum(n, N - 1) + N, ROW, SPAN, SLICES, PREFETCH)
    low_weight, high_weight = head_norms(q_norm_ptr, k_norm_ptr, BLOCK_N, HEADS, KV_HEADS, HEAD_DIM, BLOCK_HALF, QK_NORM)
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    if SLICES > 1:
        gate = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
        squares = tl.zeros((SLICES, BLOCK_M), tl.float32)
    else:
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        squares = tl.zeros((BLOCK_M,), tl.float32)
    for c in tl.range(0, CHUNKS, num_stages=STAGES):
        u = unit + c * SLICES
        next_scales, next_zeros = _scales(scales_ptr, zeros_ptr, u + SLICES, end, n, 0, N, SPAN, SLICES, SCALES, SCALE_SPAN,
                                          SCALE_ROWS, ZEROS)  # fmt: skip
        codes = _codes(weight_ptr, u, end, n, i, 0, N, ROW, BLOCK_N, SPAN, SLICES)
        low, squares = _inputs(x_ptr, norm_ptr, u, end, i, 0, r, rows, squares, K, SPAN, SLICES, HALF, NORM, DOT)
        high = low
        if HALF > 0:
            high, squares = _inputs(x_ptr, norm_ptr, u, end, i, HALF, r, rows, squares, K, SPAN, SLICES, HALF, NORM, DOT)
        gate = _multiply(codes, scales, zeros, low, high, gate, WEIGHT, HALF, SPAN, SCALE_SPAN, ZEROS, DOT, ASSEMBLY)
        if GATED:
            codes = _codes(weight_ptr, u, end, n, i, N, N, ROW, BLOCK_N, SPAN, SLICES)
            up = _multiply(codes, up_scales, up_zeros, low, high, up, WEIGHT, HALF, SPAN, SCALE_SPAN, ZEROS, DOT, ASSEMBLY)
            up_scales, up_zeros = _scales(scales_ptr, zeros_ptr, u + SLICES, end, n, N, N, SPAN, SLICES, SCALES, SCALE_SPAN,
                                          SCALE_ROWS, ZEROS)  # fmt: skip
        scales, zeros = next_scales, next_zeros
    if SLICES > 1:
        gate_sum = tl.sum(gate, 0)  # [BLOCK_N, BLOCK_M]
        up_sum = tl.sum(up, 0)
        square_sum = tl.sum(squares, 0)
    else:
        gate_sum, up_sum, square_sum = gate, up, squares
    if SPLITS == 1:
        _finish(gate_sum, up_sum, square_sum, bias_ptr, y_ptr, n, r, eps, cos_ptr, sin_ptr, low_weight, high_weight, arrivals_ptr,
                head_eps, rows, N, K, BLOCK_N, BLOCK_M, NORM, GATED, ACTIVATION, ADD, BIAS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_HALF,
                QK_NORM)  # fmt: skip
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        SUMS: tl.constexpr = BLOCK_N * BLOCK_M
        WIDTH: tl.constexpr = (2 * SUMS if GATED else SUMS) + BLOCK_M
        m = tl.arange(0, BLOCK_M)
        at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        parts = partial_ptr + tile.to(tl.int64) * (SPLITS * WIDTH)
        own = parts + tl.program_id(1) * WIDTH
        tl.store(own + at, gate_sum)
        if GATED:
            tl.store(own + SUMS + at, up_sum)
        if NORM:
            tl.store(own + (WIDTH - BLOCK_M) + m, square_sum)
        tl.debug_barrier()  # the atomic below releases the stores of all threads of this program
        arrived = tl.atomic_add(splits_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            gate_sum = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            up_sum = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            square_sum = tl.zeros((BLOCK_M,), tl.float32)
            for other in tl.static_range(SPLITS):
                # .cg bypasses this SM's L1 cache, which may lack what other programs stored
                gate_sum += tl.load(parts + other * WIDTH + at, cache_modifier=".cg")
                if GATED:
                    up_sum += tl.load(parts + (other * WIDTH + SUMS) + at, cache_modifier=".cg")
                if NORM:
                    square_sum += tl.load(parts + (other * WIDTH + WIDTH - BLOCK_M) + m, cache_modifier=".cg")
            tl.store(splits_ptr + tile, 0)
            _finish(gate_sum, up_sum, square_sum, bias_ptr, y_ptr, n, r, eps, cos_ptr, sin_ptr, low_weight, high_weight,
                    arrivals_ptr, head_eps, rows, N, K, BLOCK_N, BLOCK_M, NORM, GATED, ACTIVATION, ADD, BIAS, HEADS, KV_HEADS,
                    HEAD_DIM, BLOCK_HALF, QK_NORM)  # fmt: skip


@triton.jit
def _codes(weight_ptr, u, end, n, i, above, N: tl.constexpr, ROW: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr,
           SLICES: tl.constexpr):  # fmt: skip
    """Load the slices u of rows n + above, up to slice `end`: bytes [SLICES, BLOCK_N, SPAN], or [BLOCK_N, SPAN] if SLICES is
    1."""
    row = (n + above).to(tl.int64) * ROW
    if SLICES > 1:
        at = row[None, :, None] + (u[:, None] * SPAN + i[None, :])[:, None, :]
        inside = (u < end)[:, None, None]
        if N % BLOCK_N != 0:
            inside = inside & (n < N)[None, :, None]
    else:
        at = row[:, None] + (u * SPAN + i)[None, :]
        inside = (n < tl.where(u < end, N, 0))[:, None]
    return tl.load(weight_ptr + at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _scales(scales_ptr, zeros_ptr, u, end, n, above, N: tl.constexpr, SPAN: tl.constexpr, SLICES: tl.constexpr,
            SCALES: tl.constexpr, SCALE_SPAN: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Load the scales and zeros of the slices: [SLICES, BLOCK_N], or [SLICES, BLOCK_N, groups]. The first axis is missing if
    SLICES is 1.
    """
    row = (n + above) // SCALE_ROWS * SCALES
    if SLICES > 1:
        row, inside, u = row[None, :], (u < end)[:, None] & (n < N)[None, :], u[:, None]
    else:
        inside = n < tl.where(u < end, N, 0)
    if SCALE_SPAN >= SPAN:
        place = row + u * SPAN // SCALE_SPAN
    else:
        GROUPS: tl.constexpr = SPAN // SCALE_SPAN
        g = tl.arange(0, GROUPS)
        if SLICES > 1:
            place = row[:, :, None] + (u * GROUPS + g[None, :])[:, None, :]
            inside = inside[:, :, None]
        else:
            place = row[:, None] + (u * GROUPS + g)[None, :]
            inside = inside[:, None]
    scales = tl.load(scales_ptr + place, mask=inside, other=0)
    zeros = scales
    if ZEROS:
        zeros = tl.load(zeros_ptr + place, mask=inside, other=0)
    return scales, zeros


@triton.jit
def _prefetch(weight_ptr, unit, end, n, ROW: tl.constexpr, SPAN: tl.constexpr, SLICES: tl.constexpr, CHUNKS: tl.constexpr):
    """Prefetch the first chunks of rows n to L2, in lines of 128 bytes."""
    LINES: tl.constexpr = triton.next_power_of_2(CHUNKS * SLICES * SPAN // 128 if CHUNKS * SLICES * SPAN > 128 else 1)
    first = tl.min(unit, 0) if SLICES > 1 else unit
    byte = first * SPAN + tl.arange(0, LINES) * 128
    byte = tl.minimum(byte, end * SPAN - 1)
    address = (weight_ptr + n.to(tl.int64)[:, None] * ROW + byte[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _inputs(x_ptr, norm_ptr, u, end, i, beyond, r, rows, squares, K: tl.constexpr, SPAN: tl.constexpr, SLICES: tl.constexpr,
            HALF: tl.constexpr, NORM: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Load x^T [SLICES, SPAN, BLOCK_M] for the slices, and multiply it by the norm's weight. Return the result and the updated
    sums of squares. x^T has shape [SPAN, BLOCK_M] if SLICES is 1."""
    if SLICES > 1:
        column = u[:, None] * SPAN + i[None, :]
    else:
        column = u * SPAN + i
    if HALF > 0:
        column += column // HALF * HALF + beyond
    if SLICES > 1:
        live = (u < end)[:, None, None] & (r < rows)[None, None, :]
        x = tl.load(x_ptr + r.to(tl.int64)[None, None, :] * K + column[:, :, None], mask=live, other=0.0)
    else:
        x = tl.load(
            x_ptr + r.to(tl.int64)[:, None] * K + column[None, :], mask=(r < tl.where(u < end, rows, 0))[:, None], other=0.0
        )
    if NORM:
        weight = tl.load(norm_ptr + column, mask=column < K, other=0.0).to(tl.float32)
        exact = x.to(tl.float32)
        squares += tl.sum(exact * exact, 1)
        if SLICES > 1:
            x = exact * weight[:, :, None]
        else:
            x = exact * weight[None, :]
    x = x.to(DOT)
    if SLICES == 1:
        x = tl.trans(x)
    return x, squares


@triton.jit
def _multiply(codes, scales, zeros, low, high, sums, WEIGHT: tl.constexpr, HALF: tl.constexpr, SPAN: tl.constexpr,
              SCALE_SPAN: tl.constexpr, ZEROS: tl.constexpr, DOT: tl.constexpr, ASSEMBLY: tl.constexpr):  # fmt: skip
    """Return sums + scales * values x^T. Scales multiply the values if groups are shorter than a slice, else the sums."""
    SHORT: tl.constexpr = SCALE_SPAN < SPAN
    scales = wide_scales(scales, WEIGHT)
    if HALF > 0:
        first, second = unpack_pairs(codes, WEIGHT, DOT, ASSEMBLY)
        if WEIGHT == "int4":
            BASE: tl.constexpr = (1024 if DOT == tl.float16 else 128) if ASSEMBLY else 0  # noqa: SIM300
            if ZEROS:  # both terms and their difference are exact
                zero = (zeros.to(tl.float32) + BASE).to(DOT)
                if SHORT:
                    zero = _spread(zero, codes)
                else:
                    zero = tl.expand_dims(zero, -1)
                first, second = first - zero, second - zero
            else:
                first, second = first - (BASE + 8), second - (BASE + 8)
        if SHORT:
            factor = _spread(scales.to(DOT), codes)
            first, second = first * factor, second * factor
        part = tl.dot(second, high, tl.dot(first, low))
    else:
        part = tl.dot(unpack_bytes(codes, WEIGHT, DOT, ASSEMBLY), low)
    if SHORT:
        sums += part
    else:
        sums += part * tl.expand_dims(scales, -1)
    return sums


@triton.jit
def _spread(groups, codes):
    """Expand one number per group [..., groups] to one number per value [..., SPAN]."""
    SHAPE: tl.constexpr = groups.shape
    EACH: tl.constexpr = codes.shape[-1] // SHAPE[-1]
    if len(SHAPE) == 3:
        wide = tl.broadcast_to(groups[:, :, :, None], (SHAPE[0], SHAPE[1], SHAPE[2], EACH))
    else:
        wide = tl.broadcast_to(groups[:, :, None], (SHAPE[0], SHAPE[1], EACH))
    return tl.reshape(wide, codes.shape)


@triton.jit
def _finish(gate, up, squares, bias_ptr, y_ptr, n, r, eps, cos_ptr, sin_ptr, low_weight, high_weight, arrivals_ptr, head_eps,
            rows, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, NORM: tl.constexpr,
            GATED: tl.constexpr, ACTIVATION: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr,
            KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, QK_NORM: tl.constexpr):  # fmt: skip
    """Apply norm, bias and activation to complete sums [BLOCK_N, BLOCK_M], and store them to y."""
    inside = (n < N)[:, None] & (r < rows)[None, :]
    y_at = y_ptr + r.to(tl.int64)[None, :] * N + n[:, None]
    factor = tl.full((BLOCK_M,), 1.0, tl.float32)
    if NORM:
        factor = tl.rsqrt(squares / K + eps)
    y = gate * factor[None, :]
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up *= factor[None, :]
        if BIAS:
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y = activate(y, ACTIVATION) * up
    elif ACTIVATION != "":
        y = activate(y, ACTIVATION)
    if ADD:
        y += tl.load(y_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside)
    if HEADS > 0:
        rotate_whole_head(y_ptr, cos_ptr, sin_ptr, low_weight, high_weight, arrivals_ptr, head_eps, rows, N, BLOCK_N, BLOCK_M,
                        HEADS, KV_HEADS, HEAD_DIM, BLOCK_HALF, QK_NORM)  # fmt: skip
