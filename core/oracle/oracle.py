"""float64 attention of one sequence. This is the reference for every backend, and shares no code with any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.contract.layout import LayerCache
from headway.core.contract.spec import AttentionSpec

_SCORES = 2**24
"""Maximum number of float64 scores in memory at a time (128 MiB)."""


@dataclass(frozen=True)
class StepSequence:
    """One sequence of a step in one layer: queries, context and cache."""

    spec: AttentionSpec
    q: Tensor
    """[query_len, num_heads, head_dim]: queries of the new tokens."""
    context: int
    """Number of cached tokens before this step."""
    blocks: tuple[int, ...]
    """Physical block number of each logical block."""
    cache: LayerCache
    """Expected content of the cache, written only by the layout's writer."""

    @property
    def query_len(self) -> int:
        """Number of new tokens."""
        return len(self.q)

    @property
    def kv_len(self) -> int:
        """Total number of cached and new tokens."""
        return self.context + self.query_len

    def slots(self, blocks: Tensor, count: int) -> Tensor:
        """Return int64 [count]: slots of the first `count` positions in these blocks."""
        size = self.cache.block_size
        at = torch.arange(count, device=self.q.device)
        return blocks.to(self.q.device)[at // size] * size + at % size

    def kv(self, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return float64 keys [kv_len, num_kv_heads, head_dim] and values [kv_len, num_kv_heads, v_head_dim] of the sequence."""
        slots = self.slots(torch.tensor(self.blocks, dtype=torch.int64), self.kv_len) if slots is None else slots
        k, v = self.cache.gather(slots)
        return k.double() * self.spec.k_scale, v.double() * self.spec.v_scale


def attend(spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, first: int, *, future: int = 0) -> tuple[Tensor, Tensor]:
    """Return the attention of queries at positions first, first + 1, ... over keys at 0, 1, ...
    q: [n, num_heads, head_dim]; keys, values: float64 [m, num_kv_heads, *]. future: number of later positions that a query sees
        (-1 excludes its own). Returns float64 out [n, num_heads, v_head_dim] and the natural log-sum-exp [num_heads, n], sinks
        included."""
    groups, kv_heads = spec.group_size, spec.num_kv_heads
    keys, values = keys.permute(1, 2, 0), values.transpose(0, 1)  # [kv_heads, head_dim, m], [kv_heads, m, v_head_dim]
    slopes, sinks = (_per_head(spec, each, q.device) for each in (spec.alibi_slopes, spec.sinks))
    ago_of = torch.arange(keys.shape[2], device=q.device)
    outs, lses = [], []
    rows = max(1, _SCORES // (spec.num_heads * max(1, keys.shape[2])))
    for start in range(0, len(q), rows):
        part = q[start : start + rows].double().transpose(0, 1)
        n = part.shape[1]
        scores = (part.reshape(kv_heads, groups * n, -1) @ keys).mul_(spec.scale).view(kv_heads, groups, n, -1)
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        ago = torch.arange(first + start, first + start + n, device=q.device)[:, None] - ago_of
        if slopes is not None:
            scores = scores - slopes * ago
        if not spec.causal:
            ago = ago.abs()
        hidden = ago < -future
        gate = None
        if spec.rule is not None:
            scores, hidden, gate = _with_rule(spec, part, keys, scores, hidden, first + start)
        if spec.sliding_window is not None:
            hidden = hidden | (ago >= spec.sliding_window)
        scores = scores.masked_fill(hidden, -torch.inf)
        top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float64).min)
        weights = scores.sub_(top).exp_()
        lse = (weights.sum(-1, keepdim=True).log_() + top).squeeze(-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.squeeze(-1))
        weights = weights.mul_((top - lse[..., None]).exp_()).nan_to_num_(0.0)
        weights = weights if gate is None else weights * gate
        outs.append((weights.flatten(1, 2) @ values).view(spec.num_heads, n, -1).transpose(0, 1))
        lses.append(lse.reshape(spec.num_heads, n))
    return torch.cat(outs), torch.cat(lses, 1)


def _with_rule(
    spec: AttentionSpec, q: Tensor, keys: Tensor, scores: Tensor, hidden: Tensor, first: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return scores by the layer's rule, True for the keys that are not seen, and the factors of the values, or None.

    q: [num_heads, n, head_dim], from position `first`. keys: [kv_heads, head_dim, m]. scores: [kv_heads, group_size, n, m].
    hidden: bool [n, m], without the rule."""
    rule, shape, n = spec.rule, scores.shape, q.shape[1]
    assert rule is not None
    q_pos, k_pos = torch.arange(first, first + n, device=q.device)[:, None], torch.arange(shape[3], device=q.device)
    head = torch.arange(spec.num_heads, device=q.device)[:, None, None]
    if rule.ahead:
        hidden = hidden & ((q_pos >= rule.ahead) | (k_pos >= rule.ahead))
    seen_at = torch.where(k_pos < rule.ahead, k_pos, torch.minimum(k_pos, q_pos))  # the positions that a rule may be called with
    params = rule.params(head)
    scores = rule.score(scores.flatten(0, 1), q_pos, seen_at, head, params).view(shape)
    hidden = (hidden | ~rule.mask(q_pos, seen_at, head, params)).expand(spec.num_heads, n, shape[3])
    if "blocks" in rule.parts:
        hidden = hidden | torch.stack([_unseen_by_blocks(spec, q[:, row], keys, first + row) for row in range(n)], 1)
    if "gate" not in rule.parts:
        return scores, hidden.reshape(shape), None
    gate = rule.gate(q_pos, seen_at, head, params).double().expand(spec.num_heads, n, shape[3])
    return scores, hidden.reshape(shape), gate.reshape(shape)


def _unseen_by_blocks(spec: AttentionSpec, q: Tensor, keys: Tensor, position: int) -> Tensor:
    """Return bool [num_heads, m]: True for keys in blocks that the query at a position does not see. q: [num_heads, head_dim]."""
    rule, unseen = spec.rule, torch.zeros(spec.num_heads, keys.shape[2], dtype=torch.bool, device=q.device)
    assert rule is not None
    before = min(position, keys.shape[2]) // rule.block_keys
    if before:
        blocks = keys[:, :, : before * rule.block_keys].unflatten(2, (before, -1)).permute(2, 0, 3, 1)
        at, heads = torch.tensor([position], device=q.device), torch.arange(spec.num_heads, device=q.device)[:, None]
        chosen = rule.blocks(q[None].float(), rule.summary(blocks.float()), at, rule.params(heads))[0]
        of_head = torch.arange(spec.num_heads, device=q.device) * len(chosen) // spec.num_heads
        unseen[:, : before * rule.block_keys] = ~chosen[of_head].repeat_interleave(rule.block_keys, 1)
    return unseen


def _per_head(spec: AttentionSpec, values: Sequence[float] | None, device: torch.device) -> Tensor | None:
    """Return the values, one number per query head, as a float64 tensor [num_kv_heads, group_size, 1, 1], or None if there are
    none."""
    if values is None:
        return None
    return torch.tensor(values, dtype=torch.float64, device=device).view(spec.num_kv_heads, spec.group_size, 1, 1)


def expected(row: StepSequence) -> tuple[Tensor, Tensor]:
    """Return the correct output, float64 [query_len, num_heads, v_head_dim], and log-sum-exp, [num_heads, query_len]."""
    keys, values = row.kv()
    return attend(row.spec, row.q, keys, values, row.context)


def distance(out: Tensor, right: Tensor) -> float:
    """Return ||out - right|| / ||right||; NaN if any element of `out` is NaN."""
    size = float(right.norm())
    return float((out.double() - right).norm()) / size if size else float(out.double().norm())
