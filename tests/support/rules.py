"""Attention rules as their authors write them, in at most 15 lines each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.contract import AttentionRule, PerHead

SHARE = 3


def far(q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Return the distance of a key, for rules that share it."""
    return q_pos - k_pos


def highest(scores: Tensor, count: int) -> Tensor:
    """Return True for the `count` blocks with the highest scores, for rules that share it."""
    best = scores.topk(min(count, scores.shape[-1])).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)


class Documents(AttentionRule):
    """Documents of equal length do not see each other."""

    length: int = 24

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return q_pos // params.length == k_pos // params.length


class DocumentTable(AttentionRule):
    """Documents by a table of ids."""

    ids: Tensor

    @property
    def max_len(self) -> int:  # type: ignore[override]
        return len(self.ids)

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return params.ids[q_pos] == params.ids[k_pos]


class PrefixLM(AttentionRule):
    """The first 20 tokens see each other."""

    causal = False
    ahead = 20

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return (k_pos <= q_pos) | (k_pos < 20)


class Dilated(AttentionRule):
    """Every third key, and the nearest four."""

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return (far(q_pos, k_pos) % SHARE == 0) | (far(q_pos, k_pos) < 4)


class RandomKeys(AttentionRule):
    """Three quarters of the keys, by a hash of seed, head and positions."""

    seed: int = 7

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        mixed = (q_pos * 2654435761 + k_pos * 40503 + head * 97 + params.seed) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
        return ((mixed >> 13) % 4 != 0) | (q_pos == k_pos)


class CappedAlibi(AttentionRule):
    """ALiBi whose distance is capped."""

    slopes: PerHead
    most: int = 32

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score - params.slopes * far(q_pos, k_pos).clamp(max=params.most)


class TanhCap(AttentionRule):
    """Scores between -2 and 2."""

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return 2.0 * torch.tanh(score / 2.0)


class LearnedBias(AttentionRule):
    """A learned bias for each head and distance."""

    table: Tensor

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score + params.table[head, far(q_pos, k_pos).clamp(max=params.table.shape[1] - 1)]


class HeadWindows(AttentionRule):
    """A window for each head."""

    sizes: PerHead

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return far(q_pos, k_pos) < params.sizes


class TopBlocks(AttentionRule):
    """The two blocks of 16 keys with the highest scores, for each kv head."""

    block_keys = 16

    def blocks(self, q: Tensor, summaries: Tensor, q_pos: Tensor, params: Any) -> Tensor:
        grouped = q.unflatten(1, (summaries.shape[1], -1)).mean(2)
        return highest(torch.einsum("qhd,bhd->qhb", grouped, summaries), 2)


class NSABlocks(AttentionRule):
    """The selected blocks of Native Sparse Attention (Yuan et al. 2025): the first, the last two, and the most important."""

    block_keys = 8
    top: int = 5

    def blocks(self, q: Tensor, summaries: Tensor, q_pos: Tensor, params: Any) -> Tensor:
        grouped = q.unflatten(1, (summaries.shape[1], -1)) * q.shape[-1] ** -0.5
        importance = torch.einsum("qhgd,bhd->qhgb", grouped, summaries).softmax(-1).sum(2)
        importance[..., [0, -1]] = torch.inf
        return highest(importance, params.top - 1)


class MoBA(AttentionRule):
    """Mixture of Block Attention (Lu et al. 2025): the query's block and those with the best mean keys, for each query head."""

    block_keys = 8
    top: int = 3

    def blocks(self, q: Tensor, summaries: Tensor, q_pos: Tensor, params: Any) -> Tensor:
        grouped = q.unflatten(1, (summaries.shape[1], -1))
        return highest(torch.einsum("qhgd,bhd->qhgb", grouped, summaries).flatten(1, 2), params.top - 1)


class KeyDecay(AttentionRule):
    """Values of keys decay with their position in a period."""

    def gate(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return torch.exp(-0.2 * (k_pos % 11))


class LogDecay(AttentionRule):
    """Scores decay with the logarithm of the distance, the faster the later the head."""

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score - 0.3 * (head + 1) * torch.log1p(far(q_pos, k_pos).float())


class StreamingSinks(AttentionRule):
    """The first four keys, and a window of 16."""

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return (k_pos < 4) | (far(q_pos, k_pos) < 16)


class OddKeys(AttentionRule):
    """Keys at odd positions, so that the first query sees none; keys of the other half of a pair of heads are doubled."""

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score * (1 + head % 2)

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return k_pos % 2 == 1


class LogLength(AttentionRule):
    """Scores grow with the logarithm of the query's position."""

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score * torch.log2(q_pos + 2.0) / 5.0


def every_rule() -> dict[str, AttentionRule]:
    """A rule of each class, for layers with four query heads and sequences of at most 128 tokens."""
    random = torch.Generator().manual_seed(3)
    rules = [
        *(Documents(), DocumentTable(torch.arange(128) ** 2 // 700), PrefixLM(), Dilated(), RandomKeys()),
        *(CappedAlibi((0.5, 0.25, 0.1, 0.0)), TanhCap(), LearnedBias(torch.randn(4, 40, generator=random))),
        *(HeadWindows((1, 7, 30, 100)), TopBlocks(), NSABlocks(), MoBA()),
        *(KeyDecay(), LogDecay(), StreamingSinks(), OddKeys(), LogLength()),
    ]
    return {rule.name: rule for rule in rules}
