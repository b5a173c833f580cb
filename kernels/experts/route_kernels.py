"""Routing on the device: RMSNorm, the router's product and the choice of experts in one launch, the order by expert in another.

Sums are float32. The norm, the scores and the choice of a token do not depend on the other tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.experts.choice_kernels import choose


@triton.jit
def route_rows(
    x_ptr,  # [num_tokens, HIDDEN], the residual stream
    norm_ptr,  # [HIDDEN]
    router_ptr,  # [NUM_LOGITS, HIDDEN]
    router_bias_ptr,  # float32 [NUM_LOGITS] (ROUTER_BIAS)
    correction_ptr,  # float32 [NUM_EXPERTS] (CORRECTION)
    normed_ptr,  # [num_tokens, HIDDEN], written
    logits_ptr,  # float32 [num_tokens, NUM_LOGITS], room for what programs tell each other
    arrivals_ptr,  # int32 [num_tokens], zero between launches
    experts_ptr,  # int32 [num_tokens, SLOTS], written
    weights_ptr,  # float32 [num_tokens, SLOTS], written
    counts_ptr,  # int32 [cdiv(num_tokens, BLOCK_T), NUM_ALL], written by route_tiles
    eps,
    HIDDEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_L: tl.constexpr,  # logits a program
    NUM_LOGITS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_ALL: tl.constexpr,
    BLOCK_E: tl.constexpr,  # the larger of NUM_LOGITS and NUM_ALL, rounded up to a power of two
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,  # SLOTS rounded up to a power of two
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    ROUTER_BIAS: tl.constexpr,
    CORRECTION: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """For few tokens: a program computes BLOCK_L logits of one token; the last of a token chooses for it.

    Grid (cdiv(NUM_LOGITS, BLOCK_L), num_tokens).
    """
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(1).to(tl.int64)
    logit = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    k = tl.arange(0, BLOCK_K)
    tiles = ()
    norms = ()
    for c in tl.static_range(CHUNKS):  # asked for while the kernel before this one still runs
        at = c * BLOCK_K + k
        inside = (logit < NUM_LOGITS)[:, None] & (at < HIDDEN)[None, :]
        tiles = tiles + (tl.load(router_ptr + logit[:, None] * HIDDEN + at[None, :], mask=inside, other=0.0),)
        norms = norms + (tl.load(norm_ptr + at, mask=at < HIDDEN, other=0.0),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = ()
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for c in tl.static_range(CHUNKS):
        x = tl.load(x_ptr + token * HIDDEN + c * BLOCK_K + k, mask=c * BLOCK_K + k < HIDDEN, other=0.0).to(tl.float32)
        squares += x * x
        rows = rows + (x,)
    factor = tl.rsqrt(tl.sum(squares, 0) / HIDDEN + eps)
    products = tl.zeros((BLOCK_L, BLOCK_K), tl.float32)
    for c in tl.static_range(CHUNKS):
        at = c * BLOCK_K + k
        normed = (rows[c] * factor * norms[c].to(tl.float32)).to(normed_ptr.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(normed_ptr + token * HIDDEN + at, normed, mask=at < HIDDEN)
        products += tiles[c].to(tl.float32) * normed.to(tl.float32)[None, :]
    logits = tl.sum(products, 1)
    if ROUTER_BIAS:
        logits += tl.load(router_bias_ptr + logit, mask=logit < NUM_LOGITS, other=0.0)
    tl.store(logits_ptr + token * NUM_LOGITS + logit, logits, mask=logit < NUM_LOGITS)
    tl.debug_barrier()  # the atomic below releases what all threads of this program stored
    arrived = tl.atomic_add(arrivals_ptr + token, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.store(arrivals_ptr + token, 0)
        tokens = token + tl.arange(0, 1)
        choose(logits_ptr, correction_ptr, experts_ptr, weights_ptr, tokens, tokens >= 0, NUM_LOGITS, NUM_EXPERTS, BLOCK_E,
               TOP_K, SLOTS, BLOCK_S, SIGMOID, RENORMALIZE, SCALE, GROUPS, BLOCK_G, TOP_GROUPS, GROUP_SCORE, CORRECTION,
               SHARED_GATE)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def route_tiles(
    x_ptr,  # as above
    norm_ptr,
    router_ptr,
    router_bias_ptr,
    correction_ptr,
    normed_ptr,
    logits_ptr,
    arrivals_ptr,  # int32 [cdiv(num_tokens, BLOCK_T)], zero between launches
    experts_ptr,
    weights_ptr,
    counts_ptr,
    eps,
    num_tokens,
    HIDDEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,  # tokens a program
    BLOCK_L: tl.constexpr,  # logits a program
    BLOCK_R: tl.constexpr,  # rows of a program that norms
    BLOCK_H: tl.constexpr,  # HIDDEN rounded up to a power of two
    LOGIT_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,  # what the matrix units multiply
    NUM_LOGITS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_ALL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,  # SLOTS rounded up to a power of two
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    ROUTER_BIAS: tl.constexpr,
    CORRECTION: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """For many tokens: a program computes BLOCK_L logits of BLOCK_T tokens; the last of a tile of tokens chooses for them.

    The norm is a factor on the sums there; programs beyond those of the logits write what the experts see, BLOCK_R rows each.
    Grid (LOGIT_TILES + BLOCK_T / BLOCK_R, cdiv(num_tokens, BLOCK_T)).
    """
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.program_id(0) >= LOGIT_TILES:
        row = tl.program_id(1).to(tl.int64) * BLOCK_T + (tl.program_id(0) - LOGIT_TILES) * BLOCK_R + tl.arange(0, BLOCK_R)
        h = tl.arange(0, BLOCK_H)
        whole = (row < num_tokens)[:, None] & (h < HIDDEN)[None, :]
        x = tl.load(x_ptr + row[:, None] * HIDDEN + h[None, :], mask=whole, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + h, mask=h < HIDDEN, other=0.0).to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, 1) / HIDDEN + eps)[:, None] * weight[None, :]
        tl.store(normed_ptr + row[:, None] * HIDDEN + h[None, :], normed.to(normed_ptr.dtype.element_ty), mask=whole)
        return
    token = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    logit = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    live = token < num_tokens
    k = tl.arange(0, BLOCK_K)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    logits = tl.zeros((BLOCK_T, BLOCK_L), tl.float32)
    for c in tl.range(0, CHUNKS, num_stages=STAGES):
        at = c * BLOCK_K + k
        here = (logit < NUM_LOGITS)[None, :] & (at < HIDDEN)[:, None]
        weight = tl.load(router_ptr + logit[None, :] * HIDDEN + at[:, None], mask=here, other=0.0)
        norm = tl.load(norm_ptr + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
        inside = live[:, None] & (at < HIDDEN)[None, :]
        x = tl.load(x_ptr + token[:, None] * HIDDEN + at[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
        logits = tl.dot((x * norm[None, :]).to(DOT), weight.to(DOT), logits, input_precision="ieee")
    logits *= tl.rsqrt(squares / HIDDEN + eps)[:, None]
    if ROUTER_BIAS:
        logits += tl.load(router_bias_ptr + logit, mask=logit < NUM_LOGITS, other=0.0)[None, :]
    kept = live[:, None] & (logit < NUM_LOGITS)[None, :]
    tl.store(logits_ptr + token[:, None] * NUM_LOGITS + logit[None, :], logits, mask=kept)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + tl.program_id(1), 1, sem="acq_rel", scope="gpu")
    if arrived == LOGIT_TILES - 1:
        tl.store(arrivals_ptr + tl.program_id(1), 0)
        found = choose(logits_ptr, correction_ptr, experts_ptr, weights_ptr, token, live, NUM_LOGITS, NUM_EXPERTS, BLOCK_E,
                        TOP_K, SLOTS, BLOCK_S, SIGMOID, RENORMALIZE, SCALE, GROUPS, BLOCK_G, TOP_GROUPS, GROUP_SCORE, CORRECTION,
                        SHARED_GATE)  # fmt: skip
        e = tl.arange(0, BLOCK_E)
        found = found | (e >= NUM_EXPERTS)[None, :]  # shared experts are every token's
        counts = tl.sum((found & live[:, None]).to(tl.int32), 0)
        tl.store(counts_ptr + tl.program_id(1) * NUM_ALL + e, counts, mask=e < NUM_ALL)


@triton.jit(do_not_specialize=["num_tokens"])
def order_pairs(
    experts_ptr,  # int32 [num_tokens, SLOTS]
    counts_ptr,  # int32 [cdiv(num_tokens, BLOCK_T), NUM_ALL]: pairs of each expert in each tile of tokens
    pairs_ptr,  # int32 [num_tokens * SLOTS], written: the pair at each place
    places_ptr,  # int32 [num_tokens * SLOTS], written: the place of each pair
    ends_ptr,  # int32 [NUM_ALL], written: where each expert's places end
    num_tokens,
    NUM_ALL: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,  # tiles whose counts are read at a time
    PDL: tl.constexpr,
):
    """Sort many pairs (token, slot) by expert, tokens of one expert in their order. Grid (cdiv(num_tokens, BLOCK_T)).

    Each program adds the counts of all tiles for itself, which takes less time than another launch.
    """
    tile = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    counts = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, tl.num_programs(0), BLOCK_C):
        other = first + tl.arange(0, BLOCK_C)[:, None]
        found = tl.load(counts_ptr + other * NUM_ALL + e, mask=(other < tl.num_programs(0)) & (e < NUM_ALL), other=0)
        counts += tl.sum(found, 0)
        before += tl.sum(tl.where(other < tile, found, 0), 0)
    ends = tl.cumsum(counts, 0)
    if tile == 0:
        at = tl.arange(0, BLOCK_E)
        tl.store(ends_ptr + at, ends, mask=at < NUM_ALL)
    token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    found = tl.zeros((BLOCK_T, BLOCK_E), tl.int32)
    slots = tl.zeros((BLOCK_T, BLOCK_E), tl.int32)
    for j in tl.static_range(SLOTS):
        expert = tl.load(experts_ptr + token * SLOTS + j, mask=live, other=-1)
        here = (e == expert[:, None]).to(tl.int32)
        found += here
        slots += here * j
    place = (ends - counts + before)[None, :] + tl.cumsum(found, 0) - found
    pair = token[:, None] * SLOTS + slots
    chosen = found > 0
    tl.store(pairs_ptr + place, pair, mask=chosen)
    tl.store(places_ptr + pair, place, mask=chosen)


@triton.jit(do_not_specialize=["num_pairs"])
def order_few_pairs(
    experts_ptr,  # int32 [num_pairs]
    pairs_ptr,  # int32 [num_pairs], written: the pair at each place
    places_ptr,  # int32 [num_pairs], written: the place of each pair
    ends_ptr,  # int32 [NUM_ALL], written: where each expert's places end
    num_pairs,
    NUM_ALL: tl.constexpr,
    BLOCK_P: tl.constexpr,  # pairs, or experts, of a program
    BLOCK_N: tl.constexpr,  # pairs that are read at a time
    PDL: tl.constexpr,
):
    """Sort few pairs as `order_pairs` does. Grid (cdiv(num_pairs, BLOCK_P) + cdiv(NUM_ALL, BLOCK_P)).

    A pair's place is the number of pairs before it, so each program compares its own with all: nothing waits for another program,
    and there is no chain of loads.
    """
    num_blocks = (num_pairs + BLOCK_P - 1) // BLOCK_P
    at = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    of_experts = at - num_blocks * BLOCK_P  # below 0: of a program of pairs
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    live = (at < num_pairs) & (of_experts < 0)
    expert = tl.load(experts_ptr + at, mask=live, other=0)
    key = tl.where(of_experts < 0, expert * num_pairs + at, (of_experts + 1) * num_pairs)
    before = tl.zeros((BLOCK_P,), tl.int32)
    for first in range(0, num_pairs, BLOCK_N):
        other = first + tl.arange(0, BLOCK_N)
        others = tl.load(experts_ptr + other, mask=other < num_pairs, other=NUM_ALL) * num_pairs + other
        before += tl.sum((others[None, :] < key[:, None]).to(tl.int32), 1)
    tl.store(pairs_ptr + before, at, mask=live)
    tl.store(places_ptr + at, before, mask=live)
    tl.store(ends_ptr + of_experts, before, mask=(of_experts >= 0) & (of_experts < NUM_ALL))
