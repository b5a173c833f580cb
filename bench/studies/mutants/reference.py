"""A right backend, written as a kernel is: a plan with host lengths, tiles of keys, an online softmax, addresses of its own.

`grammar` plants its mistakes in this file's text, so each operator, index, mask, type and piece of state stands here once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, GraphLevel
from headway.core.contract.capabilities import ALL_PHASES, FEATURES, Capabilities
from headway.core.contract.layout import HND, NHD, LayerCache
from headway.core.contract.metadata import AttentionMetadata


@dataclass
class TiledPlan:
    """One step: its metadata, and where each sequence's tokens begin."""

    metadata: AttentionMetadata
    starts: list[int]


class TiledAttention(AttentionBackend):
    """Online softmax over tiles of keys, one sequence after the other, in float32."""

    name = "tiled"
    capabilities = Capabilities(
        phases=ALL_PHASES,
        layouts=(NHD, HND),
        kv_dtypes=(torch.float8_e4m3fn,),
        devices=("cpu",),
        v_head_dims=None,
        features=FEATURES,
        dense_prefill=True,
        lse=True,
    )
    graph_level = GraphLevel.UNIFORM
    decode_writes = True
    tile = 32

    def plan(self, metadata: AttentionMetadata) -> TiledPlan:
        """The first token of each sequence."""
        return TiledPlan(metadata, metadata.query_start_loc_cpu.tolist())

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: TiledPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Prompts over this step's keys; what has a context over the cache."""
        lengths = plan.metadata.seq_lens.tolist()
        for number, (start, end) in enumerate(zip(plan.starts[:-1], plan.starts[1:], strict=True)):
            tokens, kv_len = slice(start, end), lengths[number]
            context = kv_len - (end - start)
            if context or self.spec.cache_dtype != self.spec.dtype:
                keys, values = self.rows(cache, plan.metadata.block_table[number], kv_len)
            else:
                keys, values = k[tokens].float(), v[tokens].float()
            self.sequence(q[tokens], keys, values, context, out[tokens], None if lse is None else lse[:, tokens])

    def decode(self, q: Tensor, cache: LayerCache, plan: TiledPlan, out: Tensor, lse: Tensor | None = None) -> None:
        """The newest tokens over the cache; rows of padding are left alone."""
        lengths = plan.metadata.seq_lens.tolist()
        for number, (start, end) in enumerate(zip(plan.starts[:-1], plan.starts[1:], strict=True)):
            tokens, kv_len = slice(start, end), lengths[number]
            if kv_len == 0:
                continue
            keys, values = self.rows(cache, plan.metadata.block_table[number], kv_len)
            context = kv_len - (end - start)
            self.sequence(q[tokens], keys, values, context, out[tokens], None if lse is None else lse[:, tokens])

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: TiledPlan, out: Tensor) -> None:
        """Write this step's rows, then attend."""
        kept = plan.metadata.slot_mapping >= 0
        slots = plan.metadata.slot_mapping[kept]
        blocks, places = slots // self.block_size, slots % self.block_size
        for rows, logical, scale in ((k, cache.logical_key, cache.k_scale), (v, cache.logical_value, cache.v_scale)):
            logical[blocks, places] = self.stored(rows[kept], logical.dtype, scale).unsqueeze(-1)
        self.decode(q, cache, plan, out)

    def stored(self, rows: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
        """Rows as the cache holds them."""
        if rows.dtype == dtype:
            return rows
        limit = torch.finfo(dtype).max
        return (rows.float() / scale).clamp(-limit, limit).to(dtype)

    def rows(self, cache: LayerCache, table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """Cached keys and values of a sequence in float32: [kv_len, num_kv_heads, head_dim and v_head_dim]."""
        at = torch.arange(kv_len, device=table.device)
        blocks, places = table[at // self.block_size].long(), at % self.block_size
        key, value = self.read(cache.logical_key, blocks, places), self.read(cache.logical_value, blocks, places)
        return key * cache.k_scale, value * cache.v_scale

    def read(self, logical: Tensor, blocks: Tensor, places: Tensor) -> Tensor:
        """Rows of a cache tensor, by the strides of its memory."""
        if logical.dtype.itemsize == 1:
            return logical.view(torch.uint8)[blocks, places].view(logical.dtype).flatten(2).float()
        return logical[blocks, places].flatten(2).float()

    def sequence(self, q: Tensor, keys: Tensor, values: Tensor, context: int, out: Tensor, lse: Tensor | None) -> None:
        """One sequence. q: [n, num_heads, head_dim]; keys, values: [kv_len, num_kv_heads, *]; out: [n, num_heads, v_head_dim]."""
        spec = self.spec
        heads = torch.arange(spec.num_heads, device=q.device) // spec.group_size
        queries = q.float().transpose(0, 1)
        positions = torch.arange(context, context + len(q), device=q.device)
        top = torch.full((spec.num_heads, len(q), 1), -math.inf, device=q.device)
        total = torch.zeros(spec.num_heads, len(q), 1, device=q.device)
        done = torch.zeros(spec.num_heads, len(q), spec.v_head_dim, device=q.device)
        if spec.sinks is not None:
            top = torch.tensor(spec.sinks, device=q.device)[:, None, None].expand_as(top).clone()
            total = total + 1.0
        for first in range(0, len(keys), self.tile):
            last = min(first + self.tile, len(keys))
            scores = queries @ keys[first:last, heads].permute(1, 2, 0) * spec.scale
            scores = self.masked(self.capped(scores), positions, first, last)
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            safe = torch.where(new == -math.inf, 0.0, new)
            weights, kept = (scores - safe).exp(), (top - safe).exp()
            total = total * kept + weights.sum(-1, keepdim=True)
            done = done * kept + weights @ values[first:last, heads].transpose(0, 1)
            top = new
        out.copy_((done / total).transpose(0, 1))
        if lse is not None:
            lse.copy_((top + total.log()).squeeze(-1))

    def capped(self, scores: Tensor) -> Tensor:
        """The soft-cap, where the layer has one."""
        cap = self.spec.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def masked(self, scores: Tensor, positions: Tensor, first: int, last: int) -> Tensor:
        """Scores [num_heads, n, tile] with ALiBi's bias; what a query does not see is -inf."""
        ago = positions[:, None] - torch.arange(first, last, device=scores.device)
        if self.spec.alibi_slopes is not None:
            scores = scores - torch.tensor(self.spec.alibi_slopes, device=scores.device)[:, None, None] * ago
        hidden = ago < 0
        if self.spec.sliding_window is not None:
            hidden = hidden | (ago >= self.spec.sliding_window)
        return scores.masked_fill(hidden, -math.inf)
