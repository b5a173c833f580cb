"""Triton kernels for MoE routing: RMSNorm, router GEMM and top-k in one launch, sorting by expert in another.

Sums are float32. The norm, scores and experts of a token do not depend on the other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.contract.experts import ExpertsConfig
from headway.kernels.experts.plain import ExpertOrder, Routed, RouteTokens
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.runtime.triton_launch import INTERPRETED, FixedLauncher, Grid, Launchers
from headway.kernels.step.operations import Norm

_LEAST = tl.constexpr(-1.0e30)
"""Score used instead of NaN: below every other score, but above those of excluded experts."""
_TAKEN = tl.constexpr(-(2**63))
"""Key of an expert that is already selected: below every other key."""
_TINY = tl.constexpr(1e-20)  # TINY of plain.py


@triton.jit
def choose(logits_ptr, correction_ptr, experts_ptr, weights_ptr, token, live, NUM_LOGITS: tl.constexpr,
           NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK_S: tl.constexpr,
           SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
           TOP_GROUPS: tl.constexpr, GROUP_SCORE: tl.constexpr, CORRECTION: tl.constexpr,
           SHARED_GATE: tl.constexpr):  # fmt: skip
    """Fill the slots of tokens [T] from their logits. Ties go to the lower expert id. `live` is the mask of valid tokens.

    Returns [T, BLOCK_E]: True for the selected experts.
    """
    e = tl.arange(0, BLOCK_E)[None, :]
    routed = e < NUM_EXPERTS
    # .cg bypasses this SM's L1 cache, which may lack what other programs stored.
    at = logits_ptr + token[:, None] * NUM_LOGITS + e
    logits = tl.load(at, mask=live[:, None] & (e < NUM_LOGITS), other=0.0, cache_modifier=".cg")
    if SIGMOID:
        ranked = tl.sigmoid(logits)
    else:
        known = tl.where(routed, logits, -float("inf"))
        most = tl.max(known, 1)
        ranked = tl.exp(known - most[:, None])
        total = tl.sum(ranked, 1)
        ranked = ranked / total[:, None]
    if CORRECTION:
        ranked += tl.load(correction_ptr + e, mask=routed, other=0.0)
    ranked = tl.where(ranked == ranked, ranked, _LEAST)
    ranked = tl.where(routed, ranked, -float("inf"))
    if GROUPS > 1:
        ranked = _of_best_groups(ranked, e, NUM_EXPERTS // GROUPS, GROUPS, BLOCK_G, TOP_GROUPS, GROUP_SCORE)
    # One integer key per expert: the score's bits in sortable order above, and the expert below, with lower experts greater. The
    # maximum of such keys is one reduction; scores with separate positions would need two.
    bits = ranked.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (bits.to(tl.int64) << 32) | (BLOCK_E - 1 - e)
    s = tl.arange(0, BLOCK_S)[None, :]
    experts = (
        NUM_EXPERTS + s - TOP_K + tl.zeros_like(token)[:, None].to(tl.int32)
    )  # shared experts, in the last slots of every token
    for j in tl.static_range(TOP_K):
        best = tl.max(keys, 1)[:, None]
        experts = tl.where(s == j, BLOCK_E - 1 - (best & 0xFFFFFFFF).to(tl.int32), experts)
        keys = tl.where(keys == best, _TAKEN, keys)
    first = logits_ptr + token[:, None] * NUM_LOGITS
    weights = tl.load(first + experts, mask=live[:, None] & (s < TOP_K), other=0.0, cache_modifier=".cg")
    weights = tl.sigmoid(weights) if SIGMOID else tl.exp(weights - most[:, None]) / total[:, None]
    if SHARED_GATE:
        gate = tl.load(first + NUM_EXPERTS, mask=live[:, None], other=0.0, cache_modifier=".cg")
        weights = tl.where(s < TOP_K, weights, tl.sigmoid(gate))
    else:
        weights = tl.where(s < TOP_K, weights, 1.0)
    if RENORMALIZE:
        chosen = tl.sum(tl.where(s < TOP_K, weights, 0.0), 1) + _TINY
        weights = tl.where(s < TOP_K, weights / chosen[:, None], weights)
    weights = tl.where(s < TOP_K, weights * SCALE, weights)
    kept = live[:, None] & (s < SLOTS)
    tl.store(experts_ptr + token[:, None] * SLOTS + s, experts, mask=kept)
    tl.store(weights_ptr + token[:, None] * SLOTS + s, weights, mask=kept)
    return keys == _TAKEN


@triton.jit
def _of_best_groups(ranked, e, SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, TOP_GROUPS: tl.constexpr,
                    GROUP_SCORE: tl.constexpr):  # fmt: skip
    """Return ranked [T, E] with minus infinity for experts outside the best groups. Groups are ranked by the sum of their
    GROUP_SCORE best scores."""
    g = tl.arange(0, BLOCK_G)[None, :]
    totals = tl.where(g < GROUPS, 0.0, -float("inf")) + tl.zeros_like(tl.max(ranked, 1))[:, None]
    for group in tl.static_range(GROUPS):
        own = tl.where(e // SIZE == group, ranked, -float("inf"))
        for _ in tl.static_range(GROUP_SCORE):
            best = tl.argmax(own, 1)[:, None]
            totals = tl.where(g == group, totals + tl.max(own, 1)[:, None], totals)
            own = tl.where(e == best, -float("inf"), own)
    allowed = tl.zeros(ranked.shape, tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(totals, 1)[:, None]
        allowed = allowed | (e // SIZE == best)
        totals = tl.where(g == best, -float("inf"), totals)
    return tl.where(allowed, ranked, -float("inf"))


@triton.jit
def route_rows(
    x_ptr,  # [num_tokens, HIDDEN], the residual stream
    norm_ptr,  # [HIDDEN]
    router_ptr,  # [NUM_LOGITS, HIDDEN]
    router_bias_ptr,  # float32 [NUM_LOGITS] (ROUTER_BIAS)
    correction_ptr,  # float32 [NUM_EXPERTS] (CORRECTION)
    normed_ptr,  # [num_tokens, HIDDEN], written
    logits_ptr,  # float32 [num_tokens, NUM_LOGITS], scratch memory between programs
    arrivals_ptr,  # int32 [num_tokens], zero between launches
    experts_ptr,  # int32 [num_tokens, SLOTS], written
    weights_ptr,  # float32 [num_tokens, SLOTS], written
    counts_ptr,  # int32 [cdiv(num_tokens, BLOCK_T), NUM_ALL], written by route_tiles
    eps,
    HIDDEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_L: tl.constexpr,  # logits per program
    NUM_LOGITS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_ALL: tl.constexpr,
    BLOCK_E: tl.constexpr,  # max(NUM_LOGITS, NUM_ALL) rounded up to a power of two
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
    """Route few tokens: a program computes BLOCK_L logits of one token (GEMV); the token's last program selects its experts.

    Grid (cdiv(NUM_LOGITS, BLOCK_L), num_tokens).
    """
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(1).to(tl.int64)
    logit = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    k = tl.arange(0, BLOCK_K)
    tiles = ()
    norms = ()
    for c in tl.static_range(CHUNKS):  # loaded while the previous kernel still runs
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
    tl.debug_barrier()  # the atomic below releases the stores of all threads of this program
    arrived = tl.atomic_add(arrivals_ptr + token, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.store(arrivals_ptr + token, 0)
        tokens = token + tl.arange(0, 1)
        choose(logits_ptr, correction_ptr, experts_ptr, weights_ptr, tokens, tokens >= 0, NUM_LOGITS, NUM_EXPERTS, BLOCK_E,
               TOP_K, SLOTS, BLOCK_S, SIGMOID, RENORMALIZE, SCALE, GROUPS, BLOCK_G, TOP_GROUPS, GROUP_SCORE, CORRECTION,
               SHARED_GATE)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def route_tiles(
    x_ptr,  # parameters as in route_rows
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
    BLOCK_T: tl.constexpr,  # tokens per program
    BLOCK_L: tl.constexpr,  # logits per program
    BLOCK_R: tl.constexpr,  # rows per program that norms
    BLOCK_H: tl.constexpr,  # HIDDEN rounded up to a power of two
    LOGIT_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,  # type of the operands of tl.dot
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
    """Route many tokens: a program computes BLOCK_L logits of BLOCK_T tokens (GEMM); a tile's last program selects the tokens'
    experts.

    The sums are multiplied by the norm's factor. Programs beyond LOGIT_TILES write the normed rows for the experts, BLOCK_R rows
    each. Grid (LOGIT_TILES + BLOCK_T / BLOCK_R, cdiv(num_tokens, BLOCK_T)).
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
        found = found | (e >= NUM_EXPERTS)[None, :]  # every token uses the shared experts
        counts = tl.sum((found & live[:, None]).to(tl.int32), 0)
        tl.store(counts_ptr + tl.program_id(1) * NUM_ALL + e, counts, mask=e < NUM_ALL)


@triton.jit(do_not_specialize=["num_tokens"])
def order_pairs(
    experts_ptr,  # int32 [num_tokens, SLOTS]
    counts_ptr,  # int32 [cdiv(num_tokens, BLOCK_T), NUM_ALL]: pairs of each expert in each tile of tokens
    pairs_ptr,  # int32 [num_tokens * SLOTS], written: the pair at each position
    places_ptr,  # int32 [num_tokens * SLOTS], written: the position of each pair
    ends_ptr,  # int32 [NUM_ALL], written: end of each expert's positions
    num_tokens,
    NUM_ALL: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,  # tiles whose counts are read at a time
    PDL: tl.constexpr,
):
    """Sort many pairs (token, slot) by expert, with a stable sort. Grid (cdiv(num_tokens, BLOCK_T)).

    Each program sums the counts of all tiles by itself, which is faster than another launch.
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
    pairs_ptr,  # int32 [num_pairs], written: the pair at each position
    places_ptr,  # int32 [num_pairs], written: the position of each pair
    ends_ptr,  # int32 [NUM_ALL], written: end of each expert's positions
    num_pairs,
    NUM_ALL: tl.constexpr,
    BLOCK_P: tl.constexpr,  # pairs, or experts, per program
    BLOCK_N: tl.constexpr,  # pairs that are read at a time
    PDL: tl.constexpr,
):
    """Sort few pairs by expert, like `order_pairs`. Grid (cdiv(num_pairs, BLOCK_P) + cdiv(NUM_ALL, BLOCK_P)).

    A pair's position is the number of pairs before it, so each program compares its own pairs with all pairs. No program waits
    for another, and no load depends on the result of another load.
    """
    num_blocks = (num_pairs + BLOCK_P - 1) // BLOCK_P
    at = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    of_experts = at - num_blocks * BLOCK_P  # negative in programs for pairs
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


DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Operand type of tl.dot for each tensor type."""
_ROW_LOGITS = 4
"""Logits per program of route_rows: few, so that many programs read the router."""
_FEW = 64
"""Maximum number of tokens for route_rows. For this many tokens or fewer, reading the router once per token is faster than
routing tiles of tokens."""
_ORDERED = 16
"""Number of pairs or experts per program of order_few_pairs."""
_SCORES = 16384
"""Maximum number of scores (tokens times experts) that one program selects from."""
_NORMED = 8192
"""Number of elements that a program of the norm holds in registers."""
_COUNTERS = 8192
"""Maximum number of token tiles per step, each with a counter."""


def dot_type(dtype: torch.dtype) -> Any:
    """Return the operand type of tl.dot. The interpreter would multiply the raw bits of bfloat16, so it uses float32."""
    return tl.float32 if INTERPRETED else DOT[dtype]


class Router:
    """Norm, router GEMM and top-k in one launch, without synchronising."""

    def __init__(self, config: ExpertsConfig, device: torch.device, batch_invariant: bool = False) -> None:
        """Prepare the router. batch_invariant: True to use one tile size for any number of tokens."""
        self._config = config
        self._device = device
        self._one_size = batch_invariant
        self._launchers: dict[Hashable, FixedLauncher] = {}
        self._arrivals = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)

    def bind(self, weights: RoutedWeights, norm: Norm) -> RouteTokens:
        """Return the function that norms and routes the tokens of one layer; see Front."""
        return lambda x, sorts: (self.tiles if sorts else self.rows)(x, norm, weights)

    def rows(self, x: Tensor, norm: Norm, weights: RoutedWeights) -> Routed:
        """Route a small number of tokens, one by one. x: [num_tokens, hidden_size], the residual stream."""
        num_logits = self._config.num_logits
        arguments, routed = self._arguments(x, norm, weights, 16, counted=False)
        key = "rows", x.dtype, *_biases(weights)

        def make() -> FixedLauncher:
            sizes = {"BLOCK_K": min(triton.next_power_of_2(x.shape[1]), 2048), "BLOCK_L": _ROW_LOGITS}
            return FixedLauncher(route_rows, 4, self._device, {**sizes, **self._constants(weights)})

        self._launch(key, make, (triton.cdiv(num_logits, _ROW_LOGITS), len(x), 1), arguments)
        return routed

    def tiles(self, x: Tensor, norm: Norm, weights: RoutedWeights) -> Routed:
        """Route many tokens, with counts for `sorted_pairs`. x: [num_tokens, hidden_size], the residual stream."""
        if len(x) <= _FEW and not self._one_size:
            return self.rows(x, norm, weights)
        num_logits, num_tokens = self._config.num_logits, len(x)
        block_t, block_l = self._tile(num_tokens)
        logit_tiles = triton.cdiv(num_logits, block_l)
        rows = min(block_t, max(1, _NORMED // triton.next_power_of_2(x.shape[1])))
        arguments, routed = self._arguments(x, norm, weights, block_t, counted=True)
        key = "tiles", block_t, block_l, x.dtype, *_biases(weights)

        def make() -> FixedLauncher:
            block_h = triton.next_power_of_2(x.shape[1])
            sizes = {"BLOCK_T": block_t, "BLOCK_L": block_l, "BLOCK_K": 256 // x.itemsize, "LOGIT_TILES": logit_tiles}
            sizes |= {"BLOCK_H": block_h, "BLOCK_R": rows, "STAGES": 4, "DOT": dot_type(x.dtype)}
            warps = 8 if block_t == 64 else 4
            return FixedLauncher(route_tiles, warps, self._device, {**sizes, **self._constants(weights)})

        grid = logit_tiles + block_t // rows, triton.cdiv(num_tokens, block_t), 1
        self._launch(key, make, grid, {**arguments, "num_tokens": num_tokens})
        return routed

    def _launch(
        self, key: Hashable, make: Callable[[], FixedLauncher], grid: Grid, arguments: Mapping[str, Tensor | float]
    ) -> None:
        if key not in self._launchers:
            self._launchers[key] = make()
        self._launchers[key](grid, **arguments)

    def _tile(self, num_tokens: int) -> tuple[int, int]:
        """Return the numbers of tokens and logits per program: small tiles until there are enough programs to keep the GPU busy.

        A tile's last program holds the scores of all its tokens. Above _SCORES scores, Triton takes minutes to compile.
        """
        most = max(16, _SCORES // _block_of_experts(self._config))
        if num_tokens <= 256 or self._one_size:
            return min(16, most), 16
        block_t, block_l = (
            (32, min(64, _block_of_experts(self._config)))
            if num_tokens <= 2048
            else (64, min(128, _block_of_experts(self._config)))
        )
        return min(block_t, most), block_l

    def _arguments(
        self, x: Tensor, norm: Norm, weights: RoutedWeights, block_t: int, counted: bool
    ) -> tuple[dict[str, Tensor | float], Routed]:
        """Return the arguments that both kernels have, in the order of the parameters, and the result, which consists of some of
        these tensors."""
        config, num_tokens = self._config, len(x)
        logits = torch.empty((num_tokens, config.num_logits), dtype=torch.float32, device=self._device)
        experts = torch.empty((num_tokens, config.num_slots), dtype=torch.int32, device=self._device)
        slot_weights = torch.empty((num_tokens, config.num_slots), dtype=torch.float32, device=self._device)
        counts = None
        if counted:
            counts = torch.empty((triton.cdiv(num_tokens, block_t), config.num_all), dtype=torch.int32, device=self._device)
        normed = torch.empty_like(x)
        arguments: dict[str, Tensor | float] = {
            "x_ptr": x,
            "norm_ptr": norm.weight,
            "router_ptr": weights.router,
            "router_bias_ptr": logits if weights.router_bias is None else weights.router_bias,
            "correction_ptr": logits if weights.correction_bias is None else weights.correction_bias,
            "normed_ptr": normed,
            "logits_ptr": logits,
            "arrivals_ptr": self._arrivals,
            "experts_ptr": experts,
            "weights_ptr": slot_weights,
            "counts_ptr": experts if counts is None else counts,
            "eps": norm.eps,
        }
        return arguments, Routed(normed, experts, slot_weights, counts, block_t)

    def _constants(self, weights: RoutedWeights) -> dict[str, Any]:
        config = self._config
        return {
            "HIDDEN": weights.router.shape[1],
            "NUM_LOGITS": config.num_logits,
            "NUM_EXPERTS": config.num_experts,
            "NUM_ALL": config.num_all,
            "BLOCK_E": _block_of_experts(self._config),
            "TOP_K": config.top_k,
            "SLOTS": config.num_slots,
            "BLOCK_S": triton.next_power_of_2(config.num_slots),
            "SIGMOID": config.scoring == "sigmoid",
            "RENORMALIZE": config.renormalize,
            "SCALE": config.scale,
            "GROUPS": config.num_groups,
            "BLOCK_G": triton.next_power_of_2(config.num_groups),
            "TOP_GROUPS": config.top_k_groups,
            "GROUP_SCORE": config.scores_a_group,
            "ROUTER_BIAS": weights.router_bias is not None,
            "CORRECTION": weights.correction_bias is not None,
            "SHARED_GATE": config.shared_gate,
        }


def _biases(weights: RoutedWeights) -> tuple[bool, bool]:
    return weights.router_bias is not None, weights.correction_bias is not None


def _block_of_experts(config: ExpertsConfig) -> int:
    block: int = triton.next_power_of_2(max(config.num_logits, config.num_all))
    return block


def sorted_pairs(launchers: Launchers, config: ExpertsConfig, routed: Routed) -> ExpertOrder:
    """Sort pairs by expert in one launch, using the router's counts if there are any."""
    num_tokens, device = len(routed.x), routed.x.device
    pairs, places = torch.empty((2, routed.experts.numel()), dtype=torch.int32, device=device).unbind()
    ends = torch.empty(config.num_all, dtype=torch.int32, device=device)
    if routed.counts is None:
        launch = launchers.get(order_few_pairs, 4, {"NUM_ALL": config.num_all, "BLOCK_P": _ORDERED, "BLOCK_N": 1024})
        num_programs = triton.cdiv(len(pairs), _ORDERED) + triton.cdiv(config.num_all, _ORDERED)
        launch(
            (num_programs, 1, 1),
            experts_ptr=routed.experts,
            pairs_ptr=pairs,
            places_ptr=places,
            ends_ptr=ends,
            num_pairs=len(pairs),
        )
        return ExpertOrder(pairs, places, ends)
    sizes = {"NUM_ALL": config.num_all, "SLOTS": config.num_slots, "BLOCK_E": _block_of_experts(config)}
    launch = launchers.get(order_pairs, 4, {**sizes, "BLOCK_T": routed.block_t, "BLOCK_C": 16})
    launch(
        (triton.cdiv(num_tokens, routed.block_t), 1, 1),
        experts_ptr=routed.experts,
        counts_ptr=routed.counts,
        pairs_ptr=pairs,
        places_ptr=places,
        ends_ptr=ends,
        num_tokens=num_tokens,
    )
    return ExpertOrder(pairs, places, ends)
