"""Steps as vLLM describes them, made up on a CPU: its metadata, its memory in both shapes, and what float64 says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.contract.layout import LayerCache, write_rows
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.oracle import attend as exact
from headway_vllm.cache import content_views, layer_cache, packed_views

SIZE = 16
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
MEMORY = {
    "0.24": ((40, 2, SIZE, 2, 8), None, packed_views),
    "0.29": ((40, SIZE, 2, 16), (0, 2, 1, 3), content_views),  # as it lies in memory, and how vLLM shows it
}


@dataclass
class Common:
    """The fields of vLLM's CommonAttentionMetadata that are read."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    seq_lens_cpu_upper_bound: Tensor | None
    causal: bool | Tensor = True


@dataclass
class VllmStep:
    """A step of sequences (query_len, kv_len) in vLLM's order, over a cache that holds their contexts."""

    common: Common
    cache: LayerCache
    tensors: tuple[Tensor, Tensor, Tensor]
    spec: AttentionSpec

    @classmethod
    def of(
        cls, lens: list[tuple[int, int]], memory: str = "0.24", padding: int = 0, extra: int = 0, spec: AttentionSpec = SPEC
    ) -> VllmStep:
        """padding: sequences of length 0 after the others, with a token each, as in a CUDA graph. extra: rows of the tensors
        after the step's tokens.
        """
        generator = torch.Generator().manual_seed(0)
        shape, order, views = MEMORY[memory]
        kv_cache = torch.full(shape, torch.nan)
        cache = layer_cache(*views(kv_cache if order is None else kv_cache.permute(order)), spec)
        queries, ends = [q for q, _ in lens] + [1] * padding, [kv for _, kv in lens] + [0] * padding
        table, slots, at = torch.zeros(len(queries), 12, dtype=torch.int32), [], 1
        blocks = torch.randperm(39, generator=generator) + 1
        for row, (query, end) in enumerate(zip(queries, ends, strict=True)):
            count = -(-end // SIZE)
            table[row, :count] = blocks[at - 1 : at - 1 + count].int()
            at += count
            places = torch.arange(end)
            each = table[row, places // SIZE].long() * SIZE + places % SIZE
            context = end - query if end else 0
            write_rows(*(torch.randn(context, 2, 8, generator=generator) for _ in "kv"), cache, each[:context])
            slots.append(each[context:] if end else torch.full((query,), -1))
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        num_tokens, lengths = int(starts[-1]), torch.tensor(ends, dtype=torch.int32)
        common = Common(
            starts, starts.clone(), lengths, len(queries), num_tokens, max(queries), max(ends), table, torch.cat(slots), lengths
        )
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        tensors = tuple(torch.randn(num_tokens + extra, each, 8, generator=generator) for each in heads)
        return cls(common, cache, tensors, spec)  # type: ignore[arg-type]

    def expected(self) -> Tensor:
        """float64 [num_actual_tokens, num_heads, head_dim], from the cache as the step leaves it; padding is NaN."""
        common, (q, _, _) = self.common, self.tensors
        out = torch.full((common.num_actual_tokens, *q.shape[1:]), torch.nan, dtype=torch.float64)
        for row in range(common.num_reqs):
            first, last = common.query_start_loc[row : row + 2].tolist()
            end = int(common.seq_lens[row])
            if end:
                places = torch.arange(end)
                slots = common.block_table_tensor[row, places // SIZE].long() * SIZE + places % SIZE
                keys, values = (each.double() for each in self.cache.gather(slots))
                out[first:last] = exact(self.spec, q[first:last], keys, values, end - (last - first))[0]
        return out

    def without_host_lengths(self) -> VllmStep:
        """Return the step as vLLM passes it without lengths on the host."""
        return dataclasses.replace(self, common=dataclasses.replace(self.common, seq_lens_cpu_upper_bound=None))
