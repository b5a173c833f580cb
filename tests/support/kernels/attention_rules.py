"""Attention rules of many kinds, and what float64 says of a step with one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.core.contract.rule import AttentionRule, PerHead
from headway.core.oracle.cases import Case

LENGTH = 128
"""Entries of the tables by position: more than the longest sequence has keys."""
SLOPES = (0.5, 0.25, 0.125, 0.0625)


class Alibi(AttentionRule):
    slopes: PerHead = SLOPES

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score - params.slopes * (q_pos - k_pos)


class Cap(AttentionRule):
    cap: float = 1.5

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return params.cap * torch.tanh(score / params.cap)


class Distance(AttentionRule):
    table: Tensor

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score + params.table[(q_pos - k_pos).clamp(0, len(params.table) - 1)]


class HeadDistance(AttentionRule):
    table: Tensor

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        near = (q_pos - k_pos + 1).float().log2().floor().long().clamp(0, params.table.shape[1] - 1)
        return score * params.table[head, near] + params.table[0, -1] ** 2


class Document(AttentionRule):
    documents: Tensor

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return params.documents[q_pos] == params.documents[k_pos]


class Allowed(AttentionRule):
    allowed: Tensor

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return params.allowed[k_pos] | torch.logical_not(k_pos != q_pos)


class Dilated(AttentionRule):
    step: int = 3

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return ((k_pos - q_pos) % params.step == 0) & ((k_pos - q_pos) // 5 >= -9)


class Hashed(AttentionRule):
    seed: int = 0x51ED270B

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return ((mixed(q_pos, k_pos, head, params) & 3) != 0) | (q_pos == k_pos)


def mixed(q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
    x = (q_pos * 0x9E3779B97F4A7C1) ^ (k_pos * 0x3F58476D1CE4E5B9) ^ (head * params.seed)
    x = (x ^ (x >> 30)) * 0x14D049BB133111EB
    return (x ^ (x >> 27)) % 1_000_003 - (x << 5) // 977


class Windows(AttentionRule):
    sizes: PerHead = (5, 20, 40, 7)

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return q_pos - k_pos < params.sizes


class Decay(AttentionRule):
    rates: PerHead = SLOPES

    def gate(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return torch.exp(-params.rates * (q_pos - k_pos))


class KeyGate(AttentionRule):
    logits: Tensor

    def gate(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return torch.where(k_pos.remainder(2) == 0, params.logits[k_pos].float().sigmoid(), 0.5)


class Hidden(AttentionRule):
    """Masks by a score of -inf, also the newest key."""

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score.masked_fill((k_pos % 16 > 0) & (k_pos > 0), -torch.inf)


class Everything(AttentionRule):
    documents: Tensor
    slopes: PerHead = SLOPES

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return torch.maximum(score, -2 * torch.ones_like(score)) + torch.sin(k_pos / 7) * params.slopes

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return (params.documents[q_pos] == params.documents[k_pos]) | (k_pos < 4) | (head == 2)

    def gate(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return 1 / (1 + (q_pos - k_pos).float().sqrt())


def new_rules() -> dict[str, AttentionRule]:
    generator = torch.Generator().manual_seed(7)
    documents = torch.randint(2, (LENGTH,), generator=generator).cumsum(0) // 9
    table = torch.randn(40, generator=generator)
    made: list[AttentionRule] = [
        *(Alibi(), Cap(), Distance(table), HeadDistance(torch.randn(4, 5, generator=generator).double()), Document(documents)),
        *(Allowed(torch.rand(LENGTH, generator=generator) < 0.3), Dilated(), Hashed(), Windows(), Decay()),
        *(KeyGate(torch.randn(LENGTH, generator=generator).bfloat16()), Hidden(), Everything(documents.int())),
    ]
    return {rule.name: rule for rule in made}


RULES = new_rules()


def expected(case: Case) -> Tensor:
    """float64 [num_tokens, num_heads, v_head_dim]: dense attention with the rule's own functions."""
    layer, rule, token, outs = case.spec, case.spec.rule, 0, []
    assert rule is not None
    for row, (query_len, kv_len) in enumerate(zip(case.metadata.query_lens, case.metadata.kv_lens, strict=True)):
        at = torch.arange(kv_len)
        size = case.metadata.block_size
        k, v = case.cache.gather(case.metadata.block_table[row].long()[at // size] * size + at % size)
        k, v = (each.double().repeat_interleave(layer.group_size, 1).transpose(0, 1) for each in (k * layer.k_scale, v))
        q = case.q[token : token + query_len].double().transpose(0, 1)
        q_pos, head = torch.arange(kv_len - query_len, kv_len)[None, :, None], torch.arange(layer.num_heads)[:, None, None]
        scores = q @ k.mT * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        if layer.alibi_slopes is not None:
            scores = scores - torch.tensor(layer.alibi_slopes)[:, None, None] * (q_pos - at)
        arguments = q_pos, at[None, None], head, rule.params(head)
        scores = rule.score(scores, *arguments)
        seen = rule.mask(*arguments) & (at <= q_pos)
        if layer.sliding_window is not None:
            seen = seen & (at > q_pos - layer.sliding_window)
        scores = scores.masked_fill(~seen, -torch.inf)
        if layer.sinks is not None:
            sinks = torch.tensor(layer.sinks, dtype=torch.float64)[:, None, None].expand(-1, query_len, 1)
            scores = torch.cat([scores, sinks], 2)
        weights = scores.softmax(2)[..., :kv_len].nan_to_num(0.0) * rule.gate(*arguments).nan_to_num(0.0)
        outs.append((weights @ v).transpose(0, 1))
        token += query_len
    return torch.cat(outs)
