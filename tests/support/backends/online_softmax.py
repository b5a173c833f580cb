"""Paged attention as a walk over blocks with an online softmax, in plain PyTorch: the reference our kernels are explained by.

Nothing is gathered: each block of the table is read where it lies, and three running numbers a query row are enough to forget it
again: the largest score m, the sum l of exp(score - m), and the output o, which is rescaled whenever m grows. This is the
recurrence of Milakov and Gimelshein (2018), as FlashAttention (Dao et al. 2022) and PagedAttention (Kwon et al. 2023) use it. A
split-KV kernel runs the same walk over parts of the table and merges their (m, l, o) by `merge`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.backends.sdpa import alibi, visible
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec

State = tuple[Tensor, Tensor, Tensor]
"""m, l [num_heads, query_len, 1] and o [num_heads, query_len, v_head_dim], float32."""


def paged_attention(q: Tensor, cache: LayerCache, metadata: AttentionMetadata, spec: AttentionSpec) -> Tensor:
    """Attention of every sequence of the step over its blocks. q: [num_tokens, num_heads, head_dim]; result: v_head_dim."""
    out = q.new_zeros((*q.shape[:2], spec.v_head_dim))
    for row, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        start = int(metadata.query_start_loc_cpu[row])
        if kv_len == 0:  # a padding row
            continue
        queries = q[start : start + query_len]
        blocks = metadata.block_table_cpu[row, : -(-kv_len // cache.block_size)]
        m, l, o = walk(queries, blocks.tolist(), kv_len, 0, cache, spec)
        if spec.sinks is not None:  # a key without a value, seen once by every query
            l = l + torch.exp(torch.tensor(spec.sinks, device=q.device)[:, None, None] - m)
        out[start : start + query_len] = (o / l).transpose(0, 1).to(q.dtype)
    return out


def walk(queries: Tensor, blocks: list[int], kv_len: int, first: int, cache: LayerCache, spec: AttentionSpec) -> State:
    """The state after the given blocks. queries: [query_len, num_heads, head_dim]; first: logical number of blocks[0]."""
    query_len, num_heads, _ = queries.shape
    q = queries.transpose(0, 1).float()  # [num_heads, query_len, head_dim]
    query_positions = torch.arange(kv_len - query_len, kv_len, device=q.device)[:, None]
    m = torch.full((num_heads, query_len, 1), -torch.inf, device=q.device)
    l = torch.zeros_like(m)
    o = torch.zeros((num_heads, query_len, spec.v_head_dim), device=q.device)
    for number, block in enumerate(blocks, start=first):
        begin = number * cache.block_size
        filled = min(cache.block_size, kv_len - begin)  # slots past the end hold anything, NaN included: never touch them
        slots = block * cache.block_size + torch.arange(filled, device=q.device)
        k, v = (_heads(rows, spec) for rows in cache.gather(slots))  # [num_heads, filled, head_dim]
        key_positions = torch.arange(begin, begin + filled, device=q.device)[None]
        scores = q @ k.transpose(1, 2) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if spec.alibi_slopes is not None:
            scores = scores + alibi(query_positions, key_positions, spec)
        scores = scores.masked_fill(~visible(query_positions, key_positions, spec), -torch.inf)
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        finite = m_new.masked_fill(m_new == -torch.inf, 0.0)  # a row that has seen nothing yet: exp(-inf - 0) = 0, not NaN
        weights = torch.exp(scores - finite)
        shrink = torch.exp(m - finite)
        l = l * shrink + weights.sum(-1, keepdim=True)
        o = o * shrink + weights @ v
        m = m_new
    return m, l, o


def merge(a: State, b: State) -> State:
    """Combine the states of two disjoint sets of keys; associative, so splits may be merged in any order."""
    m = torch.maximum(a[0], b[0])
    finite = m.masked_fill(m == -torch.inf, 0.0)
    weight_a, weight_b = torch.exp(a[0] - finite), torch.exp(b[0] - finite)
    return m, a[1] * weight_a + b[1] * weight_b, a[2] * weight_a + b[2] * weight_b


def _heads(rows: Tensor, spec: AttentionSpec) -> Tensor:
    """[slots, num_kv_heads, head_dim] to float32 [num_heads, slots, head_dim]."""
    return rows.transpose(0, 1).float().repeat_interleave(spec.group_size, 0)
