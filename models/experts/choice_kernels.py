"""Choosing experts from the router's logits, a tile of tokens at a time: a part of the kernels that compute the logits."""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(-1.0e30)
"""Stands for what cannot be ranked (NaN): below every score, above an expert that is not to be chosen."""
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
        scores = tl.sigmoid(logits)
    else:
        known = tl.where(routed, logits, -float("inf"))
        scores = tl.exp(known - tl.max(known, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    ranked = scores
    if CORRECTION:
        ranked += tl.load(correction_ptr + e, mask=routed, other=0.0)
    ranked = tl.where(ranked == ranked, ranked, _LEAST)
    ranked = tl.where(routed, ranked, -float("inf"))
    if GROUPS > 1:
        ranked = _of_best_groups(ranked, e, NUM_EXPERTS // GROUPS, GROUPS, BLOCK_G, TOP_GROUPS, GROUP_SCORE)
    s = tl.arange(0, BLOCK_S)[None, :]
    experts = NUM_EXPERTS + s - TOP_K + tl.zeros_like(token)[:, None].to(tl.int32)  # the shared ones, in every token's last slots
    weights = tl.full(experts.shape, 1.0, tl.float32)
    if SHARED_GATE:
        gate = tl.sum(tl.where(e == NUM_EXPERTS, logits, 0.0), 1)
        weights = tl.where(s >= TOP_K, tl.sigmoid(gate)[:, None], weights)
    found = tl.zeros(ranked.shape, tl.int1)
    for j in tl.static_range(TOP_K):
        best = tl.argmax(ranked, 1)[:, None]
        found = found | (e == best)
        weight = tl.sum(tl.where(e == best, scores, 0.0), 1)
        experts = tl.where(s == j, best, experts)
        weights = tl.where(s == j, weight[:, None], weights)
        ranked = tl.where(e == best, -float("inf"), ranked)
    if RENORMALIZE:
        total = tl.sum(tl.where(s < TOP_K, weights, 0.0), 1) + _TINY
        weights = tl.where(s < TOP_K, weights / total[:, None], weights)
    weights = tl.where(s < TOP_K, weights * SCALE, weights)
    kept = live[:, None] & (s < SLOTS)
    tl.store(experts_ptr + token[:, None] * SLOTS + s, experts, mask=kept)
    tl.store(weights_ptr + token[:, None] * SLOTS + s, weights, mask=kept)
    return found


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
