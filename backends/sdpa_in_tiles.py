"""Attention of one sequence in tiles at fixed positions: a row's bits depend only on its query, its position and its keys.

Queries and keys are cut into tiles at multiples of `QUERIES` and `KEYS` positions, whatever part of the sequence a step computes.
Every product has the same shape, and a row always has the same place in it. Tiles of keys are added in order, with the online
softmax of Milakov and Gimelshein (2018). A tile that a row does not see changes none of its bits. Prompts, chunks, decodes and
verifications therefore give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.core.contract.spec import AttentionSpec

QUERIES, KEYS = 16, 128
"""Number of positions in a tile of queries and in a tile of keys."""


def attend_in_tiles(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return attention of a sequence's last tokens over all its keys, computed in float32, and the logarithm of the sums.

    q: [query_len, num_heads, head_dim]; k: [kv_len, num_kv_heads, head_dim]; v: [kv_len, num_kv_heads, v_head_dim].
    Returns [query_len, num_heads, v_head_dim] in q's element type, and float32 [num_heads, query_len]. A row that sees no key has
    zeros and -inf.
    """
    query_len, kv_len = q.shape[0], k.shape[0]
    first = kv_len - query_len
    lead = first % QUERIES
    queries = _padded(q.float(), lead, QUERIES).unflatten(0, (-1, QUERIES))  # [tiles, QUERIES, heads, head_dim]
    keys, values = (_padded(rows.float(), 0, KEYS).unflatten(0, (-1, KEYS)).transpose(1, 2) for rows in (k, v))
    heads = None if spec.rule is None else tuple(range(spec.num_heads))
    by_row = [None if each is None else _by_row(each, spec, q.device) for each in (spec.alibi_slopes, spec.sinks, heads)]
    out, sums = [], []
    for number, tile in enumerate(queries):
        start = first - lead + number * QUERIES
        rows = tile.unflatten(1, (spec.num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2).contiguous()  # [kv heads, rows, dim]
        result, logs = _tile(rows, start, keys, values, kv_len, spec, by_row)
        out.append(result.unflatten(1, (-1, QUERIES)).flatten(0, 1).transpose(0, 1))  # [QUERIES, heads, v_head_dim]
        sums.append(logs.unflatten(1, (-1, QUERIES)).flatten(0, 1))  # [heads, QUERIES]
    here = slice(lead, lead + query_len)
    return torch.cat(out)[here].to(q.dtype), torch.cat(sums, 1)[:, here]


def _padded(rows: Tensor, lead: int, size: int) -> Tensor:
    """Return rows [n, ...] with `lead` rows of zeros before them, and as many after them as fill tiles of `size` rows."""
    whole = rows.new_zeros((-(-(lead + len(rows)) // size) * size, *rows.shape[1:]))
    whole[lead : lead + len(rows)] = rows
    return whole


def _tile(
    rows: Tensor, start: int, keys: Tensor, values: Tensor, kv_len: int, spec: AttentionSpec, by_row: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return the attention of one tile of queries: [num_kv_heads, rows, v_head_dim] and [num_kv_heads, rows].

    rows: [num_kv_heads, group_size * QUERIES, head_dim]. start: position of the tile's first query. by_row: ALiBi slopes,
    sinks, and numbers of heads for a layer with a rule, as `_by_row` returns them."""
    device, window, rule, (slopes, sinks, heads) = rows.device, spec.sliding_window, spec.rule, by_row
    ahead = 0 if rule is None or start >= rule.ahead else min(rule.ahead, kv_len)
    positions = (start + torch.arange(QUERIES, device=device)).repeat(spec.group_size)[:, None]
    place = torch.arange(KEYS, device=device)
    shape = (*rows.shape[:2], 1)
    most, total = (torch.full(shape, fill, device=device) for fill in (-torch.inf, 0.0))
    acc = rows.new_zeros((*rows.shape[:2], values.shape[-1]))
    for begin, key, value in zip(range(0, kv_len, KEYS), keys, values, strict=True):
        later = 0 if spec.causal else math.inf if window is None else window - 1
        if begin > max(start + QUERIES - 1 + later, ahead - 1) or (window is not None and begin + KEYS <= start - window + 1):
            continue  # no row of the tile sees these keys
        distance = positions - (begin + place)
        seen = distance >= 0 if spec.causal else (begin + place < kv_len).expand(distance.shape)
        if ahead:
            seen = seen | (torch.maximum(positions, begin + place) < ahead)
        if window is not None:
            seen = seen & (distance.abs() < window if not spec.causal else distance < window)
        scores = torch.bmm(rows, key.transpose(1, 2).contiguous()) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if slopes is not None:
            scores = scores - slopes * distance.float()
        gate = None
        if rule is not None and heads is not None:  # padding rows and keys may have any result
            scores, gate = rule.changed(scores, positions.clamp(max=kv_len - 1), begin + place, heads.long())
        scores = scores.masked_fill(~seen, -torch.inf)
        higher = torch.maximum(most, scores.amax(-1, keepdim=True))
        base = higher.masked_fill(higher == -torch.inf, 0.0)
        weights, shrink = torch.exp(scores - base), torch.exp(most - base)
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc = acc * shrink + torch.bmm(weights if gate is None else weights * gate, value.contiguous())
        most = higher
    if sinks is not None:
        higher = torch.maximum(most, sinks)
        shrink = torch.exp(most - higher)
        total, acc, most = total * shrink + torch.exp(sinks - higher), acc * shrink, higher
    return acc / total.masked_fill(total == 0.0, 1.0), (most + torch.log(total)).squeeze(-1)


def _by_row(of_heads: Sequence[float], spec: AttentionSpec, device: torch.device) -> Tensor:
    """Return a number per query head for each row of a tile, float32 [num_kv_heads, rows, 1]."""
    numbers = torch.tensor(of_heads, dtype=torch.float32, device=device).view(spec.num_kv_heads, spec.group_size)
    return numbers.repeat_interleave(QUERIES, 1)[..., None]
