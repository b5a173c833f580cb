"""Choosing experts from the router's logits, a tile of tokens at a time: a part of the kernels that compute the logits."""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(-1.0e30)
"""Stands for what cannot be ranked (NaN): below every score, above an expert that is not to be chosen."""
_TAKEN = tl.constexpr(-(2**63))
"""Below every key: an expert that is chosen already."""
_TINY = tl.constexpr(1e-20)  # as in routing.py


@triton.jit
def choose(logits_ptr, correction_ptr, experts_ptr, weights_ptr, token, live, NUM_LOGITS: tl.constexpr,
           NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK_S: tl.constexpr,
           SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
           TOP_GROUPS: tl.constexpr, GROUP_SCORE: tl.constexpr, CORRECTION: tl.constexpr,
           SHARED_GATE: tl.constexpr):  # fmt: skip
    """Fill the slots of tokens [T], of which `live` exist, from their logits. Of equal scores the lower expert's comes first.

    Returns which experts were chosen, [T, BLOCK_E].
    """
    e = tl.arange(0, BLOCK_E)[None, :]
    routed = e < NUM_EXPERTS
    # .cg: not from this multiprocessor's own cache, which need not have what the others stored
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
    # One number to compare: the score's bits in the order of their values, below them the expert, lower ones greater. The largest
    # of such numbers is one reduction; that of scores with their places would be two.
    bits = ranked.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (bits.to(tl.int64) << 32) | (BLOCK_E - 1 - e)
    s = tl.arange(0, BLOCK_S)[None, :]
    experts = NUM_EXPERTS + s - TOP_K + tl.zeros_like(token)[:, None].to(tl.int32)  # the shared ones, in every token's last slots
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
    """ranked [T, E], minus infinity outside the best groups, which are those whose GROUP_SCORE best add up to most."""
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
