"""Which experts each token goes to, by torch's operations: right everywhere, and what the kernels are tested against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kernels.experts.config import ExpertsConfig

TINY = 1e-20
"""Added to the sum that weights are divided by, for sigmoids that are all 0 (as DeepSeek-V3 does)."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The slots of every token: the routed experts in the order of their scores, then the shared ones."""

    experts: Tensor
    """int32 [num_tokens, num_slots]"""
    weights: Tensor
    """float32 [num_tokens, num_slots]"""


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """The pairs (token, slot) sorted by expert, tokens of one expert in their order. Pair p is slot p % num_slots of token
    p // num_slots."""

    pairs: Tensor
    """int32 [num_pairs]: which pair stands at each place."""
    places: Tensor
    """int32 [num_pairs]: the place of each pair."""
    ends: Tensor
    """int32 [num_all]: where each expert's pairs end."""


def route(logits: Tensor, config: ExpertsConfig, correction_bias: Tensor | None = None) -> Routing:
    """Choose experts. logits: [num_tokens, num_logits]; correction_bias: float32 [num_experts]. Nothing is read by the host.

    Of equal scores the lower expert's comes first.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits, shared = logits[:, : config.num_experts], logits[:, config.num_experts :]
    scores = logits.softmax(dim=1) if config.scoring == "softmax" else logits.sigmoid()
    ranked = scores if correction_bias is None else scores + correction_bias
    if config.num_groups > 1:
        ranked = ranked.masked_fill(~_allowed(ranked, config), -torch.inf)
    # A stable sort, since topk takes equal scores in any order.
    chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, : config.top_k]
    weights = scores.gather(1, chosen)
    if config.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + TINY)
    weights = weights * config.scale
    if config.num_shared:
        size = (len(logits), config.num_shared)
        always = torch.arange(config.num_experts, config.num_all, device=logits.device).expand(size)
        chosen = torch.cat([chosen, always], dim=1)
        gate = shared.sigmoid().expand(size) if config.shared_gate else weights.new_ones(size)
        weights = torch.cat([weights, gate], dim=1)
    return Routing(chosen.int(), weights)


def _allowed(ranked: Tensor, config: ExpertsConfig) -> Tensor:
    """Experts of the best groups: bool [num_tokens, num_experts]."""
    grouped = ranked.view(-1, config.num_groups, config.group_size)
    best = grouped.topk(config.scores_a_group, dim=2).values.sum(dim=2)
    groups = best.sort(dim=1, descending=True, stable=True).indices[:, : config.top_k_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, value=True)
    return allowed.repeat_interleave(config.group_size, dim=1, output_size=ranked.shape[1])


def sort_by_expert(experts: Tensor, num_all: int) -> ExpertOrder:
    """Sort pairs by expert. experts: int32 [num_tokens, num_slots]. Nothing is read by the host."""
    ordered, pairs = experts.flatten().sort(stable=True)
    numbers = torch.arange(num_all, dtype=ordered.dtype, device=experts.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    places = torch.empty_like(ordered).scatter_(0, pairs, torch.arange(len(pairs), dtype=torch.int32, device=experts.device))
    return ExpertOrder(pairs.int(), places, ends)
