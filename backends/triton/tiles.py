"""Device functions shared by the decode and prefill kernels: loads of cached rows, scores, and the online softmax.

Scores are in base 2, because exp2 is one instruction: the host multiplies scale, soft cap, ALiBi slopes and sinks by log2(e).
Triton's interpreter computes bf16 on raw bits, so every loaded value is immediately cast to `DOT`: float32 in the interpreter,
the query's type on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.runtime.triton_launch import INTERPRETED as _INTERPRETED

INTERPRETED = tl.constexpr(_INTERPRETED)
LN_2 = tl.constexpr(0.6931471805599453)
"""Factor that converts the kernels' base-2 logarithms to natural logarithms."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def head_offsets(stride_dim, stride_x, X: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the offsets of one head's elements, [BLOCK_D], for axes [dim / X, X] of a cache's logical view."""
    d = tl.arange(0, BLOCK_D)
    if X == 1:
        offsets = d * stride_dim
    else:
        offsets = (d // X) * stride_dim + (d % X) * stride_x
    return offsets


@triton.jit
def block_numbers(table_ptr, first, limit, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the physical block numbers of keys first .. first + BLOCK_N: a scalar if all keys are in one block, else [BLOCK_N].
    first: a multiple of BLOCK_N."""
    if BLOCK_SIZE % BLOCK_N == 0:
        blocks = tl.load(table_ptr + first // BLOCK_SIZE)
    else:
        at = first + tl.arange(0, BLOCK_N)
        # Rounded to 16 slots, the common divisor of block sizes, so that the compiler knows that adjacent slots share a block.
        blocks = tl.load(table_ptr + at // BLOCK_SIZE, mask=at < tl.cdiv(limit, 16) * 16, other=0)
    return blocks.to(tl.int64)


@triton.jit
def peeked_blocks(table_ptr, first, limit, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the same numbers as `block_numbers`, but `peeked`.

    The pipeliner would use half of a loop's stages for block numbers, and leave too few row loads in flight. The table is in the
    L1 cache after its first use, so a synchronous load is fast.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        entries = table_ptr + first // BLOCK_SIZE
    elif BLOCK_N % BLOCK_SIZE == 0:  # same numbers, most of which are then loop-invariant
        place = first // BLOCK_SIZE + tl.arange(0, BLOCK_N) // BLOCK_SIZE
        entries = table_ptr + tl.minimum(place, (limit - 1) // BLOCK_SIZE)
    else:
        entries = table_ptr + tl.minimum(first + tl.arange(0, BLOCK_N), limit - 1) // BLOCK_SIZE
    return peeked(entries).to(tl.int64)


@triton.jit
def peeked(entries):
    """Return int32 numbers from memory, loaded by an instruction that the software pipeliner ignores."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.b32 $0, [$1];", "=r,l", args=[entries.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def listed_tile(tiles_ptr, place, end):
    """Return the number of a tile of keys out of a list. end: end of the list, after which the pipeliner may read ahead."""
    entry = tiles_ptr + tl.minimum(place, end - 1)
    if INTERPRETED:
        tile = tl.load(entry)
    else:
        tile = peeked(entry)
    return tile


@triton.jit
def cached_rows(
    base_ptr,  # the head's first element
    blocks,  # result of `block_numbers`
    offsets,  # result of `head_offsets`
    first,
    limit,
    stride_block,
    stride_slot,
    X: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # rows from `limit` on are not read, except up to a multiple of 16 slots
    ZEROED: tl.constexpr,  # rows from `limit` on are set to zero (free slots may hold NaN, and 0 * NaN is NaN)
    SLOTS_INNER: tl.constexpr,  # adjacent slots are contiguous
    DOT: tl.constexpr,
    STEP: tl.constexpr = 1,  # divisor of stride_block
):
    """Return rows [BLOCK_N, BLOCK_D] of a paged key or value.

    If adjacent slots are contiguous, a mask whose limit is not a multiple of 16 slots would prevent 16-byte loads, so rows beyond
    the limit are zeroed after the load. Otherwise, the load's mask zeroes these rows.
    """
    n = tl.arange(0, BLOCK_N)
    stride_slot = stride_slot // X * X  # a no-op (x is the innermost axis) that tells the compiler about alignment
    if BLOCK_SIZE % BLOCK_N == 0:
        within = (first % BLOCK_SIZE) // BLOCK_N * BLOCK_N  # a no-op that tells the compiler that this is a multiple of BLOCK_N
        start = base_ptr + blocks * stride_block + within * stride_slot
        ptrs = start + (n * stride_slot)[:, None] + offsets[None, :]
    elif BLOCK_N % BLOCK_SIZE == 0 and STEP > 1:
        # A tile begins at a block: the offsets of its keys within their blocks are loop-invariant. Divided by STEP, a block's
        # offset fits 32 bits, whose multiplication takes one instruction instead of four.
        within = base_ptr + (n % BLOCK_SIZE * stride_slot)[:, None] + offsets[None, :]
        places = (blocks.to(tl.int32) * (stride_block // STEP)).to(tl.int64) * STEP
        ptrs = within + places[:, None]
    else:
        rows = blocks * stride_block + ((first + n) % BLOCK_SIZE) * stride_slot
        ptrs = base_ptr + rows[:, None] + offsets[None, :]
    live = n < limit - first
    if ZEROED and not SLOTS_INNER:
        tile = _load(ptrs, live, HEAD_DIM, BLOCK_D, MASKED)
    else:
        tile = _load(ptrs, n < tl.cdiv(limit, 16) * 16 - first, HEAD_DIM, BLOCK_D, MASKED)
    tile = tile.to(DOT)
    if ZEROED and SLOTS_INNER:
        tile = tl.where(live[:, None], tile, 0.0).to(DOT)
    return tile


@triton.jit
def split_rows(
    base_ptr,  # the head's first element
    block,  # result of `block_numbers`: one block contains the whole tile
    first,
    stride_block,
    stride_dim,
    X: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return rows [BLOCK_N, BLOCK_D] of a key split into X-element chunks that are interleaved over slots. No row is masked.

    The tile is loaded in memory order, [chunks, slots * X], and transposed through shared memory. If it were loaded row by row,
    adjacent threads would read distant chunks and reach only three quarters of the bandwidth.
    """
    piece = tl.arange(0, BLOCK_D // X)
    within = (first % BLOCK_SIZE) // BLOCK_N * BLOCK_N * X
    ptrs = base_ptr + block * stride_block + within + (piece * stride_dim)[:, None] + tl.arange(0, BLOCK_N * X)[None, :]
    if HEAD_DIM >= BLOCK_D:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=(piece * X < HEAD_DIM)[:, None], other=0.0)
    tile = tl.permute(tl.reshape(tile, (BLOCK_D // X, BLOCK_N, X)), (1, 0, 2))
    return tl.reshape(tile, (BLOCK_N, BLOCK_D)).to(DOT)


@triton.jit
def key_rows(
    base_ptr,  # the head's first element
    blocks,  # result of `block_numbers`
    first,
    limit,
    stride_block,
    stride_slot,
    stride_dim,
    stride_x,
    X: tl.constexpr,
    PIECES: tl.constexpr,  # True if a tile lies in one block, with X-element chunks interleaved over slots
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return paged keys [BLOCK_N, BLOCK_D], loaded in the fastest order for the layout. Contiguous rows stop at `limit`."""
    if PIECES:
        tile = split_rows(base_ptr, blocks, first, stride_block, stride_dim, X, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, DOT)
    else:
        tile = cached_rows(
            base_ptr, blocks, head_offsets(stride_dim, stride_x, X, BLOCK_D), first, limit, stride_block, stride_slot,
            X, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, X == 1, False, DOT,
        )  # fmt: skip
    return tile


@triton.jit
def row_scales(
    scale_ptr,  # float32, addressed by strides of [block, slot, head]
    kv_head,
    blocks,  # result of `block_numbers`
    first,
    limit,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_SLOT: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the scales [BLOCK_N] of rows first .. first + BLOCK_N of a paged key or value. Scales from `limit` on are 0, since
    their values in the cache may be NaN."""
    n = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        within = (first % BLOCK_SIZE) // BLOCK_N * BLOCK_N + n
    else:
        within = (first + n) % BLOCK_SIZE
    offsets = blocks * STRIDE_BLOCK + within * STRIDE_SLOT
    return tl.load(scale_ptr + kv_head * STRIDE_HEAD + offsets, mask=n < limit - first, other=0.0)


@triton.jit
def add_scaled(acc, weights, v, scales, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Return acc + weights times v, with the rows of v scaled by `scales` [BLOCK_N].

    The weights are multiplied by the scales, which takes fewer multiplications than scaling v and keeps v's integers exact. In
    float16, small scaled weights would lose precision, so the scales are first divided by the tile's largest scale.
    """
    if DOT == tl.float16:
        top = tl.max(scales, 0)
        top = tl.where(top > 0.0, top, 1.0)
        acc += tl.dot((weights * (scales / top)[None, :]).to(DOT), v, input_precision=PRECISION) * top
    else:
        acc = tl.dot((weights * scales[None, :]).to(DOT), v, acc, input_precision=PRECISION)
    return acc


@triton.jit
def dense_rows(
    base_ptr,  # the sequence's and head's first element
    first,
    limit,
    stride_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return rows [BLOCK_N, BLOCK_D] of this step's k or v. MASKED: rows from `limit` on are not read."""
    n = tl.arange(0, BLOCK_N)
    ptrs = base_ptr + (first + n).to(tl.int64)[:, None] * stride_token + tl.arange(0, BLOCK_D)[None, :]
    return _load(ptrs, n < limit - first, HEAD_DIM, BLOCK_D, MASKED).to(DOT)


@triton.jit
def _load(ptrs, live, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    inside = tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM
    if MASKED:
        if HEAD_DIM >= BLOCK_D:
            rows = tl.load(ptrs, mask=live[:, None], other=0.0)
        else:
            rows = tl.load(ptrs, mask=live[:, None] & inside, other=0.0)
    elif HEAD_DIM >= BLOCK_D:
        rows = tl.load(ptrs)
    else:
        rows = tl.load(ptrs, mask=inside, other=0.0)
    return rows


@triton.jit
def tanh(x, DOT: tl.constexpr):
    """Return tanh(x). 16-bit layers use the GPU's instruction, as FlashAttention does, whose relative error is at most 2**-11. In
    float32 layers, the Taylor series is used near 0, because 1 - 2 / (exp(2x) + 1) suffers from cancellation there."""
    if DOT == tl.float32:
        y = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)  # 2 log2(e)
        z = x * x
        series = x * (1.0 + z * (-0.33333333333 + z * (0.13333333333 + z * (-0.05396825397 + z * 0.02186948854))))
        y = tl.where(z < 0.04, series, y)
    else:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def unpack_fp8(pairs):
    """Convert pairs of e4m3 numbers in int16 to two float16 tiles, one of the low bytes and one of the high bytes. The conversion
    is exact and takes one instruction per pair."""
    low, high = tl.inline_asm_elementwise(
        """{
        .reg .b16 a, b;
        .reg .b32 x, y;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 x, a;
        cvt.rn.f16x2.e4m3x2 y, b;
        prmt.b32 $0, x, y, 0x5410;
        prmt.b32 $1, x, y, 0x7632;
        }""",
        "=r,=r,r",
        args=[pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
    return low, high


@triton.jit
def unpack_int8(pairs):
    """Convert pairs of int8 numbers in int16 to two float16 tiles, one of the low bytes and one of the high bytes. The conversion
    is exact, because float16 numbers from 1024 on have a spacing of 1."""
    low = (pairs & 0xFF) ^ 0x6480
    high = ((pairs >> 8) & 0xFF) ^ 0x6480
    low = low.to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    high = high.to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def softmax_step(
    scores,  # [BLOCK_M, BLOCK_N]: q . k
    m,  # [BLOCK_M]: running maximum of the scores, before score_scale
    l,  # [BLOCK_M]: running sum of exp2(score - m)
    at,  # [BLOCK_N]: positions of the keys
    positions,  # [BLOCK_M]: positions of the queries
    newest,  # [BLOCK_M]: position of the newest key in the tile's range that a query may see
    slopes,  # [BLOCK_M]: log2(e) * ALiBi slope
    rule,  # result of `rule_rows`
    score_scale,  # log2(e) * scale; scale / softcap with a soft cap
    cap_log2,  # log2(e) * softcap
    window,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    RULE: tl.constexpr,  # a rule_code.RuleCode
    DOT: tl.constexpr,
):
    """Update (m, l) with a tile of scores by online softmax (Milakov and Gimelshein 2018).

    Returns m, l, the weights [BLOCK_M, BLOCK_N], and the factor [BLOCK_M] by which to scale the accumulator. A rule's gate
    changes the weights only. `scale_of` returns the scale of m.
    """
    if HAS_SOFTCAP or HAS_ALIBI:
        scores = scores * score_scale
    if HAS_SOFTCAP:
        scores = cap_log2 * tanh(scores, DOT)
    if HAS_ALIBI:
        scores = scores - slopes[:, None] * (positions[:, None] - at[None, :]).to(tl.float32)
    if RULE.score is not None:  # the function gets scores in natural units, not in base 2
        natural = LN_2 if HAS_SOFTCAP or HAS_ALIBI else score_scale * LN_2
        scores = RULE.score(scores * natural, rule, at[None, :], DOT)
    score_scale = scale_of(score_scale, HAS_SOFTCAP, HAS_ALIBI, RULE)
    if MASKED:
        seen = at[None, :] <= newest[:, None]
        if HAS_WINDOW:
            seen = seen & (at[None, :] > positions[:, None] - window)
        if RULE.mask is not None:
            seen = seen & RULE.mask(rule, at[None, :], DOT)
        scores = tl.where(seen, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    finite = m_new
    if MASKED or RULE.score is not None:  # before the first visible key, exp2(-inf - 0) is 0 and not NaN
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(scores * score_scale - (finite * score_scale)[:, None])
    shrink = tl.exp2((m - finite) * score_scale)
    l = l * shrink + tl.sum(weights, 1)
    if RULE.gate is not None:
        gated = weights * RULE.gate(rule, at[None, :], DOT)
        weights = tl.where(weights > 0.0, gated, 0.0)  # the gate may be NaN where no query sees the key
    return m_new, l, weights, shrink


@triton.jit
def scale_of(score_scale, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, RULE: tl.constexpr):
    """Return the factor that converts the scores of `softmax_step`, and their maximum m, to base 2."""
    scale = score_scale
    if RULE.score is not None:
        scale = LOG2_E
    elif HAS_SOFTCAP or HAS_ALIBI:
        scale = 1.0
    return scale


@triton.jit
def parameter(entries):
    """Return numbers out of a rule's buffers. Like `peeked` ones, they take no shared memory, in which keys need the space."""
    if INTERPRETED:
        found = tl.load(entries)
    elif entries.dtype.element_ty == tl.float32:
        found = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", args=[entries.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    elif entries.dtype.element_ty == tl.int64:
        found = tl.inline_asm_elementwise(
            "ld.global.nc.b64 $0, [$1];", "=l,l", args=[entries.to(tl.int64)], dtype=tl.int64, is_pure=True, pack=1
        )
    else:
        found = peeked(entries)
    return found


@triton.jit
def rule_rows(positions, head, live, floats_ptr, ints_ptr, RULE: tl.constexpr):
    """Return a rule's values for the rows of a query tile, which no key changes. positions, head: [BLOCK_M]."""
    rule = positions
    if RULE.rows is not None:
        rule = RULE.rows(positions[:, None], tl.where(live, head, 0)[:, None], floats_ptr, ints_ptr)
    return rule


@triton.jit
def query_tile(
    rows,  # pointers [BLOCK_M, 1]
    d,  # tl.arange(0, BLOCK_D)
    inside,  # mask of the first tile's elements
    live,  # [BLOCK_M]: mask of the rows in use
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Load a query tile: a tuple of [BLOCK_M, BLOCK_D] and, if TAIL > 0, [BLOCK_M, TAIL]."""
    q = (tl.load(rows + d[None, :], mask=inside, other=0.0).to(DOT),)
    if TAIL > 0:
        t = BLOCK_D + tl.arange(0, TAIL)
        q = (q[0], tl.load(rows + t[None, :], mask=live[:, None] & (t[None, :] < HEAD_DIM), other=0.0).to(DOT))
    return q


@triton.jit
def alibi_slopes(slopes_ptr, head, live, BLOCK_M: tl.constexpr, HAS_ALIBI: tl.constexpr):
    """Return log2(e) * ALiBi slope of a tile's rows, [BLOCK_M]; zeros without ALiBi."""
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + head, mask=live, other=0.0)
    return slopes


@triton.jit
def normalise(
    acc, m, l,  # results of `softmax_step` over all keys of the rows; m is scaled
    sums_ptr,  # HAS_LSE: float32 [num_heads, num_tokens], output: log-sum-exp
    sinks_ptr,
    first_token,  # index of the sequence's first token
    row,  # [rows]: row in the sequence's query
    head,  # [rows]: query head
    live,  # [rows]: mask of the rows in use
    v_scale, sums_stride_head,
    GROUP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Add the sinks, store the log-sum-exp, and return the attention output [rows, BLOCK_DV]."""
    if HAS_SINKS and HAS_LSE:  # of a row that a rule lets see no key, the sum is the sink
        m = tl.where(m == float("-inf"), 0.0, m)
    if HAS_SINKS:
        l += tl.exp2(tl.load(sinks_ptr + head, mask=live, other=0.0) - m)
    if HAS_LSE:
        tl.store(sums_ptr + head * sums_stride_head + first_token + row // GROUP, (m + tl.log2(l)) * LN_2, mask=live)
    return acc * (v_scale / tl.where(l > 0, l, 1.0))[:, None]
