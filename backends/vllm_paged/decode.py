"""Plan and launch of the paged attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from headway.backends.vllm_paged.driver import Argument, shared_limit
from headway.backends.vllm_paged.kernels import Variant, load
from headway.backends.vllm_paged.launch import TILE, Attention, per_head, scoring_of
from headway.backends.vllm_paged.plan import MAX_PARTITIONS, Cut, Machine, choose, stages_of
from headway.core.layout import LayerCache
from headway.core.metadata import AttentionMetadata
from headway.core.spec import AttentionSpec

_SOURCE = "paged_attention.cu"
_LONG = 64
"""Tiles from which lengths are rounded for the choice of a cut."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One step's decode."""

    grid: tuple[int, int, int]
    rows: int
    """Rows in use of a tile of query rows: the second kernel's grid."""
    cut: Cut
    shared_bytes: int
    argument: Argument
    """All but q, key, value and out. It points into the metadata's tensors, so a captured graph reads what is copied into them."""
    kept: tuple[Tensor, ...]
    """What `argument` points to."""


class Decode:
    """Decode of one layer kind: chooses v1 or v2 once a step, then launches one or two kernels a layer.

    :raises UnsupportedError: no compiler.
    """

    def __init__(self, spec: AttentionSpec, block_size: int, cut: tuple[int | None, int | None] = (None, None)) -> None:
        self._spec = spec
        self._warps, self._partitions = cut
        self._machine = machine_of(spec.device)
        self._tile_bytes = 2 * TILE * spec.head_dim * spec.cache_dtype.itemsize
        self._stages = stages_of(self._tile_bytes, self._machine.shared_bytes)
        self._row_tile = 8 if spec.dtype == spec.cache_dtype == torch.float32 else 16  # ROWS of FmaWarp and MmaWarp
        variant = variant_of(spec, block_size)
        self._attention = load(variant, "paged_attention", spec.device)
        self._reduce = load(variant, "reduce_partitions", spec.device)
        self._slopes, self._sinks = per_head(spec.alibi_slopes, spec.device), per_head(spec.sinks, spec.device)
        self._workspace = torch.empty(0, device=spec.device)
        self._outgrown: list[Tensor] = []

    def plan(self, metadata: AttentionMetadata) -> DecodePlan:
        """Fix grid, partitions and buffers for a view of decoding sequences."""
        spec = self._spec
        rows = spec.group_size * metadata.max_query_len
        items = spec.num_kv_heads * -(-rows // self._row_tile)
        cut = self._cut(metadata, items)
        results = metadata.num_seqs * items * cut.partitions * self._row_tile if cut.partitions > 1 else 0
        buffer = self._floats(results * (spec.head_dim + 2))
        kept = (buffer, metadata.block_table, metadata.seq_lens, metadata.query_start_loc)
        value = Attention(
            block_table=metadata.block_table.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            query_start_loc=metadata.query_start_loc.data_ptr(),
            slopes=None if self._slopes is None else self._slopes.data_ptr(),
            sinks=None if self._sinks is None else self._sinks.data_ptr(),
            partial=buffer.data_ptr(),
            state=buffer.data_ptr() + results * spec.head_dim * 4,
            table_stride=metadata.block_table.stride(0),
            kv_heads=spec.num_kv_heads,
            group=spec.group_size,
            partitions=cut.partitions,
            v_scale=spec.v_scale,
            scoring=scoring_of(spec),
        )
        shared_bytes = cut.warps * self._stages * self._tile_bytes
        self._attention.allow_shared(shared_bytes)
        grid = (items, cut.partitions, metadata.num_seqs)
        return DecodePlan(grid, min(rows, self._row_tile), cut, shared_bytes, Argument(value), kept)

    def run(self, q: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor) -> None:
        """q, out: [num_tokens, num_heads, head_dim]."""
        items, partitions, num_seqs = plan.grid
        if num_seqs == 0:
            return
        value = plan.argument.value
        assert isinstance(value, Attention)
        value.q, value.out = q.data_ptr(), out.data_ptr()
        value.key, value.value = cache.key.data_ptr(), cache.value.data_ptr()
        value.q_stride_token, value.q_stride_head = q.stride(0), q.stride(1)
        value.out_stride_token, value.out_stride_head = out.stride(0), out.stride(1)
        device = self._spec.device
        self._attention(plan.grid, 32 * plan.cut.warps, plan.shared_bytes, plan.argument, device)
        if partitions > 1:
            self._reduce((items, plan.rows, num_seqs), self._spec.head_dim, 0, plan.argument, device)

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """Most bytes the partial results take; many sequences are not partitioned, few need little."""
        items = min(max_num_seqs * self._spec.num_kv_heads, 8 * self._machine.multiprocessors)
        return items * MAX_PARTITIONS * self._row_tile * (self._spec.head_dim + 2) * 4

    def _cut(self, metadata: AttentionMetadata, items: int) -> Cut:
        longest = max(metadata.kv_lens, default=0)
        if self._spec.sliding_window is not None:
            longest = min(longest, self._spec.sliding_window + metadata.max_query_len + TILE)
        total = items * sum(-(-min(kv_len, longest) // TILE) for kv_len in metadata.kv_lens)
        longest = -(-longest // TILE)
        if longest > _LONG:  # round to keep the cached answers few
            step = longest // (_LONG // 2)
            longest, total = -(-longest // step) * step, -(-total // step) * step
        chosen = choose(items * metadata.num_seqs, total, longest, self._tile_bytes, self._machine)
        return Cut(self._warps or chosen.warps, self._partitions or chosen.partitions)

    def _floats(self, count: int) -> Tensor:
        """At least so many float32. Outgrown buffers are kept: a captured graph may still use them."""
        if self._workspace.numel() < count:
            self._outgrown.append(self._workspace)
            self._workspace = torch.empty(max(count, 2 * self._workspace.numel()), device=self._spec.device)
        return self._workspace


def variant_of(spec: AttentionSpec, block_size: int) -> Variant:
    """The compilation that serves a layer."""
    tile_bytes = 2 * TILE * spec.head_dim * spec.cache_dtype.itemsize
    stages = stages_of(tile_bytes, machine_of(spec.device).shared_bytes)
    return Variant.of(_SOURCE, spec.dtype, spec.cache_dtype, spec.head_dim, block_size, STAGES=stages)


@lru_cache
def machine_of(device: torch.device) -> Machine:
    """Read off the device."""
    properties = torch.cuda.get_device_properties(device)
    bytes_per_us = 4.2e6 if properties.major >= 9 else 1.5e6
    return Machine(properties.multi_processor_count, shared_limit(device) - _STATIC_SHARED, bytes_per_us)


_STATIC_SHARED = 2048
"""What a block of threads has besides its stages."""
