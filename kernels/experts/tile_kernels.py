"""Triton kernels for MoE layers with many tokens: grouped_gemm over pairs sorted by expert, and the sum over a token's slots.

A program computes a tile of one expert's rows. Only the device knows the number of rows of each expert, so the grid has the
maximum number of tiles. Each program finds its tile from the ends of the experts' rows; programs beyond the last tile do nothing.
Quantized values are unpacked in registers and are the left operand (W x^T), so the weight's scales multiply rows of the sums.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.experts.row_kernels import activated
from headway.kernels.linear.quantized_kernels import _multiply as multiply_codes

# Triton reads annotations at compile time, so they must not be deferred here.


@triton.jit(do_not_specialize=["num_blocks"])
def grouped_product(
    x_ptr,  # [num_tokens, K] (GATHER), else [num_pairs, K], sorted by expert (WHOLE: in token order)
    weight_ptr,  # bytes, or elements if WEIGHT is plain, [NUM_ALL * N, ROW]; GATED: [NUM_ALL * 2 N, ROW], gate over up
    scales_ptr,  # [rows of scales, SCALES], float, or uint8 exponents (mxfp4); not read if WEIGHT is plain
    zeros_ptr,  # uint8 [rows of scales, SCALES] (ZEROS)
    bias_ptr,  # [NUM_ALL, N] or [NUM_ALL, 2 N] (BIAS)
    pairs_ptr,  # int32 [num_pairs]: pair p, of token p // SLOTS, at each sorted position (GATHER); WHOLE: the expert of each pair
    ends_ptr,  # int32 [NUM_ALL]; not WHOLE
    y_ptr,  # [num_pairs, N], in the order of x, written
    num_blocks,  # maximum number of row blocks; WHOLE: number of tokens
    N: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,  # bytes (plain: elements) per row
    WEIGHT: tl.constexpr,  # kind of the weight (kernels/linear/forms.py), or plain
    HALF: tl.constexpr,  # bytes of a group with two values per byte; 0 means one value per byte
    SCALES: tl.constexpr,  # scales per row
    SCALE_SPAN: tl.constexpr,  # bytes of a row under one scale: a multiple of SPAN, or a divisor
    SCALE_ROWS: tl.constexpr,  # rows that share scales
    ZEROS: tl.constexpr,
    NUM_ALL: tl.constexpr,
    BLOCK_E: tl.constexpr,  # NUM_ALL rounded up to a power of two
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,  # bytes (plain: elements) of a row per iteration
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,  # row blocks that are computed side by side to share one read of the weights
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,  # squared ReLU
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    SWAPPED: tl.constexpr,  # compute W x^T: for few rows, so that weights fill the tensor cores' longer side, and for bytes
    WHOLE: tl.constexpr,  # at most BLOCK_M tokens: a tile's rows are all tokens, in their own order
    BLOCK_S: tl.constexpr,  # SLOTS rounded up to a power of two
    DOT: tl.constexpr,  # type of the operands of tl.dot
    ASSEMBLY: tl.constexpr,  # unpack with NVIDIA instructions (inline PTX)
    PDL: tl.constexpr,
):
    """y = W_e x + bias (grouped GEMM) or its activation, summed in float32.

    Grid (cdiv(N, BLOCK_N) * num_blocks), or (cdiv(N, BLOCK_N) * NUM_ALL) if WHOLE.
    """
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
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
        gate = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), tl.float32)
        if WEIGHT == "plain":
            gate, up = _plain_sums(gate, up, x_rows, weight_ptr, expert, n, live, N, K, WIDTH, BLOCK_N, SPAN, STAGES, GATED,
                                   SWAPPED, DOT)  # fmt: skip
        else:
            gate, up = _quantized_sums(gate, up, x_rows, weight_ptr, scales_ptr, zeros_ptr, expert, n, live, N, WIDTH, ROW,
                                       WEIGHT, HALF, SCALES, SCALE_SPAN, SCALE_ROWS, ZEROS, SPAN, STAGES, GATED, DOT,
                                       ASSEMBLY)  # fmt: skip
        store_tile(gate, up, bias_ptr, y_ptr, expert, n, row, live, N, WIDTH, GATED, SQUARED, ALPHA, LIMIT, BIAS, SWAPPED)


@triton.jit
def _plain_sums(gate, up, x_rows, weight_ptr, expert, n, live, N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, SWAPPED: tl.constexpr,
                DOT: tl.constexpr):  # fmt: skip
    """Return gate + x W^T of a tile's rows and the expert's plain weight, and the same for up (GATED)."""
    k = tl.arange(0, BLOCK_K)
    x_at = x_rows + k[None, :]
    weight_at = weight_ptr + expert.to(tl.int64) * (WIDTH * K) + n[:, None] * K + k[None, :]
    for c in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            weight = tl.load(weight_at + c * BLOCK_K)
            if GATED:
                weight_up = tl.load(weight_at + (N * K + c * BLOCK_K))
            x = tl.load(x_at + c * BLOCK_K, mask=live[:, None], other=0.0)
        else:
            inside = (c * BLOCK_K + k < K)[None, :]
            weight = tl.load(weight_at + c * BLOCK_K, mask=(n < N)[:, None] & inside, other=0.0)
            if GATED:
                weight_up = tl.load(weight_at + (N * K + c * BLOCK_K), mask=(n < N)[:, None] & inside, other=0.0)
            x = tl.load(x_at + c * BLOCK_K, mask=live[:, None] & inside, other=0.0)
        gate = _multiplied(x, weight, gate, SWAPPED, DOT)
        if GATED:
            up = _multiplied(x, weight_up, up, SWAPPED, DOT)
    return gate, up


@triton.jit
def _quantized_sums(gate, up, x_rows, weight_ptr, scales_ptr, zeros_ptr, expert, n, live, N: tl.constexpr, WIDTH: tl.constexpr,
                    ROW: tl.constexpr, WEIGHT: tl.constexpr, HALF: tl.constexpr, SCALES: tl.constexpr, SCALE_SPAN: tl.constexpr,
                    SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
                    DOT: tl.constexpr, ASSEMBLY: tl.constexpr):  # fmt: skip
    """Return gate + W x^T of a tile's rows and the expert's quantized weight, and the same for up (GATED)."""
    i = tl.arange(0, SPAN)
    first = expert * WIDTH  # first row of the expert
    weight_at = weight_ptr + first.to(tl.int64) * ROW + n[:, None] * ROW + i[None, :]
    scales, zeros = _scales(scales_ptr, zeros_ptr, first, n, 0, N, ROW, SPAN, SCALES, SCALE_SPAN, SCALE_ROWS, ZEROS)
    up_scales, up_zeros = scales, zeros
    if GATED:
        up_scales, up_zeros = _scales(scales_ptr, zeros_ptr, first + N, n, 0, N, ROW, SPAN, SCALES, SCALE_SPAN, SCALE_ROWS,
                                      ZEROS)  # fmt: skip
    for c in tl.range(0, (ROW + SPAN - 1) // SPAN, num_stages=STAGES):
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
        # One chunk ahead, since Triton does not prefetch loads that do not feed a tl.dot directly.
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
    return gate, up


@triton.jit
def find_tile(pairs_ptr, ends_ptr, num_blocks, NUM_N: tl.constexpr, NUM_ALL: tl.constexpr, BLOCK_E: tl.constexpr,
              SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, WHOLE: tl.constexpr,
              BLOCK_S: tl.constexpr):  # fmt: skip
    """Return a program's tile: expert, block of outputs, rows [BLOCK_M] in x's order, mask of valid rows, and True if there is
    work to do."""
    if WHOLE:
        expert = tl.program_id(0) // NUM_N
        column = tl.program_id(0) % NUM_N
        row = _pairs_of(expert, pairs_ptr, num_blocks, SLOTS, BLOCK_M, BLOCK_S)
        live = row >= 0
        wanted = tl.max(row, 0) >= 0
    else:
        group = tl.program_id(0) // (GROUP_M * NUM_N)
        side = tl.minimum(num_blocks - group * GROUP_M, GROUP_M)
        block = group * GROUP_M + tl.program_id(0) % (GROUP_M * NUM_N) % side
        column = tl.program_id(0) % (GROUP_M * NUM_N) // side
        e = tl.arange(0, BLOCK_E)
        ends = tl.load(ends_ptr + e, mask=e < NUM_ALL, other=0)
        starts = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < NUM_ALL), other=0)
        tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
        last = tl.cumsum(tiles, 0)
        expert = tl.sum(((last <= block) & (e < NUM_ALL)).to(tl.int32), 0)
        own = e == expert
        row = tl.sum(tl.where(own, starts + (block - last + tiles) * BLOCK_M, 0), 0) + tl.arange(0, BLOCK_M)
        live = row < tl.sum(tl.where(own, ends, 0), 0)
        wanted = expert < NUM_ALL
    return expert, column, row, live, wanted


@triton.jit
def input_rows(pairs_ptr, row, live, SLOTS: tl.constexpr, GATHER: tl.constexpr, WHOLE: tl.constexpr):
    """Return the indices [BLOCK_M] of the rows of x that belong to rows of y."""
    if GATHER and WHOLE:
        x_row = tl.where(live, row // SLOTS, 0)
    elif GATHER:
        x_row = tl.load(pairs_ptr + row, mask=live, other=0) // SLOTS
    else:
        x_row = tl.where(live, row, 0)
    return x_row


@triton.jit
def store_tile(gate, up, bias_ptr, y_ptr, expert, n, row, live, N: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr,
               SQUARED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr,
               SWAPPED: tl.constexpr):  # fmt: skip
    """Apply bias and activation to complete sums, and store them to y."""
    if SWAPPED:
        n_at = n[:, None]
        y_at = y_ptr + row.to(tl.int64)[None, :] * N + n_at
        kept = live[None, :] & (n_at < N)
    else:
        n_at = n[None, :]
        y_at = y_ptr + row.to(tl.int64)[:, None] * N + n_at
        kept = live[:, None] & (n_at < N)
    if BIAS:
        bias_at = bias_ptr + expert.to(tl.int64) * WIDTH + n_at
        gate += tl.load(bias_at, mask=n_at < N, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_at + N, mask=n_at < N, other=0.0).to(tl.float32)
    if GATED:
        gate = activated(gate, up, ALPHA, LIMIT)
    if SQUARED:
        gate = tl.where(gate > 0.0, gate * gate, gate * 0.0)  # keeps a NaN
    tl.store(y_at, gate.to(y_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _pairs_of(expert, experts_ptr, num_tokens, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return [BLOCK_M]: for each token, its pair with the expert, or -1 if the token did not select the expert."""
    token = tl.arange(0, BLOCK_M)[:, None]
    slot = tl.arange(0, BLOCK_S)[None, :]
    pair = token * SLOTS + slot
    chosen = tl.load(experts_ptr + pair, mask=(token < num_tokens) & (slot < SLOTS), other=-1)
    return tl.max(tl.where(chosen == expert, pair, -1), 1)


@triton.jit
def _multiplied(x, weight, sums, SWAPPED: tl.constexpr, DOT: tl.constexpr):
    """Return sums + x W^T [BLOCK_M, BLOCK_N], or its transpose."""
    if SWAPPED:
        sums = tl.dot(weight.to(DOT), tl.trans(x).to(DOT), sums, input_precision="ieee")
    else:
        sums = tl.dot(x.to(DOT), tl.trans(weight).to(DOT), sums, input_precision="ieee")
    return sums


@triton.jit
def activate_rows(
    x_ptr,  # [rows, 2 INNER], gate before up
    bias_ptr,  # [NUM_ALL, 2 INNER] (BIAS)
    ends_ptr,  # int32 [NUM_ALL]
    y_ptr,  # [rows, INNER], written
    NUM_ALL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Apply bias and activation to the output rows of a library's GEMM. Grid (rows, cdiv(INNER, BLOCK))."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x_at = x_ptr + row.to(tl.int64) * (2 * INNER) + at
    gate = tl.load(x_at, mask=at < INNER, other=0.0).to(tl.float32)
    up = tl.load(x_at + INNER, mask=at < INNER, other=0.0).to(tl.float32)
    if BIAS:
        own = bias_ptr + _expert_of(row, ends_ptr, NUM_ALL, BLOCK_E).to(tl.int64) * (2 * INNER) + at
        gate += tl.load(own, mask=at < INNER, other=0.0).to(tl.float32)
        up += tl.load(own + INNER, mask=at < INNER, other=0.0).to(tl.float32)
    y = activated(gate, up, ALPHA, LIMIT)
    tl.store(y_ptr + row.to(tl.int64) * INNER + at, y.to(y_ptr.dtype.element_ty), mask=at < INNER)


@triton.jit
def _expert_of(row, ends_ptr, NUM_ALL: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the expert of a row, where rows are pairs sorted by expert."""
    e = tl.arange(0, BLOCK_E)
    return tl.sum((tl.load(ends_ptr + e, mask=e < NUM_ALL, other=2147483647) <= row).to(tl.int32), 0)


@triton.jit
def gather_rows(
    x_ptr,  # [num_tokens, HIDDEN]
    pairs_ptr,  # int32 [rows]
    y_ptr,  # [rows, HIDDEN], written
    HIDDEN: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy, for every pair, the row of its token. Pairs are sorted by expert. Grid (rows, cdiv(HIDDEN, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = (tl.load(pairs_ptr + row) // SLOTS).to(tl.int64)
    x = tl.load(x_ptr + token * HIDDEN + at, mask=at < HIDDEN, other=0.0)
    tl.store(y_ptr + row * HIDDEN + at, x, mask=at < HIDDEN)


@triton.jit
def add_slots(
    x_ptr,  # [num_pairs, HIDDEN], sorted by expert
    bias_ptr,  # [NUM_ALL, HIDDEN] (BIAS), if the GEMM did not add it
    experts_ptr,  # int32 [num_tokens * SLOTS]
    weights_ptr,  # float32 [num_tokens * SLOTS]
    places_ptr,  # int32 [num_tokens * SLOTS]
    y_ptr,  # [num_tokens, HIDDEN], added to
    HIDDEN: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """y += the weighted sum of the experts' outputs, in the order of a token's slots. Grid (num_tokens, cdiv(HIDDEN, BLOCK))."""
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HIDDEN
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y_at = y_ptr + token.to(tl.int64) * HIDDEN + at
    y = tl.load(y_at, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        place = tl.load(places_ptr + pair).to(tl.int64)
        x = tl.load(x_ptr + place * HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            expert = tl.load(experts_ptr + pair).to(tl.int64)
            x += tl.load(bias_ptr + expert * HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
        y += x * tl.load(weights_ptr + pair)
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scales(scales_ptr, zeros_ptr, first, n, c, N: tl.constexpr, ROW: tl.constexpr, SPAN: tl.constexpr, SCALES: tl.constexpr,
            SCALE_SPAN: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Load the scales and zeros of chunk c of rows first + n: [BLOCK_N], or [BLOCK_N, groups] for the groups in the chunk."""
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
