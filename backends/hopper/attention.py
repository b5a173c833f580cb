"""Plan and launch of the kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from headway.backends.hopper.cut import WAVES, Cut
from headway.backends.hopper.schedule import Problem, choose
from headway.backends.hopper.tiles import ARCH, Tile, box_of, tiles_of, variant_of
from headway.backends.nvrtc.arguments import Arguments
from headway.backends.nvrtc.launch import Kernel, Launch
from headway.backends.nvrtc.store import load
from headway.backends.nvrtc.tensor_map import MAP_BYTES, tensor_map
from headway.core.contract.errors import BackendError
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.transfer import upload

_LOG2E = math.log2(math.e)
_ARGUMENTS = Struct("=9Q4q7i2f4x")
"""struct Arguments of shape.cuh."""
_MOST_MAPS = 1024
"""Tensor maps kept: three for each layer, and new ones where activations lie elsewhere or are more."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step; without a tile there is nothing to do."""

    dense: bool = False
    """Whether no sequence has a context: this step's keys and values are all there are."""
    tile: Tile | None = None
    tokens: int = 0
    """Of a tile of queries."""
    kernel: Any = None
    launch: Any = None
    addresses: tuple[int, ...] = ()
    """Of items, their number, block table, sinks, partial results, tickets and queue."""
    table_row: int = 0
    numbers: tuple[int | float, ...] = ()
    """The arguments after the strides."""
    cut: Cut | None = None
    """What makes the items, where the device does."""
    num_items: int = 0
    """Of each kv head; of a cut, the most."""
    kept: tuple[Tensor, ...] = ()
    """What the addresses point to."""


class Attention:
    """Attention of one layer kind.

    :raises UnsupportedError: no compiler. BackendError: the kernel does not compile.
    """

    def __init__(self, spec: AttentionSpec, block_size: int, num_splits: int | None = None) -> None:
        self._spec, self._block_size, self._num_splits = spec, block_size, num_splits
        self._tiles = tiles_of(spec.head_dim, spec.v_head_dim)
        self._programs = torch.cuda.get_device_properties(spec.device).multi_processor_count
        self._sinks = None
        if spec.sinks is not None:
            self._sinks = torch.tensor([sink * _LOG2E for sink in spec.sinks], dtype=torch.float32, device=spec.device)
        if spec.softcap is None:
            self._scaling = (spec.scale * _LOG2E, 0.0)
        else:
            self._scaling = (spec.softcap * _LOG2E, spec.scale / spec.softcap)
        self._queue = torch.zeros(2, dtype=torch.int32, device=spec.device)
        self._partials = torch.empty(0, dtype=torch.float32, device=spec.device)
        self._tickets = torch.zeros(0, dtype=torch.int32, device=spec.device)
        self._outgrown: list[Tensor] = []
        self._arguments = Arguments(*3 * (bytes(MAP_BYTES),), bytes(_ARGUMENTS.size))
        self._kernels: dict[tuple[Tile, bool], Kernel] = {}
        self._launches: dict[tuple[Tile, int], Launch] = {}
        self._maps: dict[tuple[object, ...], bytes] = {}

    def kernel(self, tile: Tile, dense: bool) -> Kernel:
        """The compiled kernel for a tile; built first if need be."""
        kernel = self._kernels.get((tile, dense))
        if kernel is None:
            variant = variant_of(self._spec, tile, None if dense else self._block_size)
            kernel = load(variant, "attention", self._spec.device, ARCH)
            kernel.allow_shared(tile.shared_bytes(self._spec.head_dim, self._spec.v_head_dim))
            self._kernels[tile, dense] = kernel
        return kernel

    def plan(self, metadata: AttentionMetadata) -> Plan:
        """Cut a view of sequences into items, and fix the launch for all layers."""
        return self._plan_decode(metadata) if metadata.phase is Phase.DECODE else self._plan_prefill(metadata)

    def _plan_prefill(self, metadata: AttentionMetadata) -> Plan:
        """The host cuts: it knows the lengths."""
        spec, tiles = self._spec, self._tiles
        dense = metadata.phase is Phase.PREFILL
        most_rows = metadata.max_query_len * spec.group_size
        if most_rows <= tiles.narrow.rows:
            candidates: tuple[Tile, ...] = (tiles.narrow,)
        elif metadata.num_prefill_tokens * spec.num_heads >= 3 * self._programs * tiles.wide.rows:
            candidates = (tiles.wide,)
        else:
            candidates = (tiles.wide, tiles.narrow)
        schedule = choose(Problem.of(metadata, spec, self._programs), candidates, self._num_splits)
        if len(schedule.items) == 0:
            return Plan()
        tile = schedule.tile
        items = upload(torch.from_numpy(schedule.items), spec.device)
        tokens = tile.rows // spec.group_size
        self._grow(schedule.num_partials, schedule.num_tickets, tile, tokens)
        return self._plan(
            metadata, tile, len(schedule.items), schedule.section, tokens, (items.data_ptr(), 0), (items,), dense=dense
        )

    def _plan_decode(self, metadata: AttentionMetadata) -> Plan:
        """The device cuts: it alone knows the lengths, and in a graph they change from replay to replay."""
        spec, tile = self._spec, self._tiles.narrow
        if metadata.num_seqs == 0:
            return Plan()
        cut = Cut.of(metadata, tile, spec.group_size, spec.num_kv_heads, spec.sliding_window, self._programs)
        cut.make()
        self._grow(cut.most_partials, cut.most_shared, tile, cut.tokens)
        addresses = (cut.items.data_ptr(), cut.count_address)
        return self._plan(metadata, tile, cut.room, spec.num_kv_heads, cut.tokens, addresses, (cut.items,), cut=cut)

    def _plan(
        self,
        metadata: AttentionMetadata,
        tile: Tile,
        num_items: int,
        section: int,
        tokens: int,
        items: tuple[int, int],
        kept: tuple[Tensor, ...],
        *,
        dense: bool = False,
        cut: Cut | None = None,
    ) -> Plan:
        spec, table = self._spec, metadata.block_table
        sinks = 0 if self._sinks is None else self._sinks.data_ptr()
        buffers = (self._partials, self._tickets, self._queue)
        return Plan(
            dense=dense,
            tile=tile,
            tokens=tokens,
            kernel=self.kernel(tile, dense),
            launch=self._launch(tile, min(self._programs, num_items * spec.num_kv_heads)),
            addresses=(*items, table.data_ptr(), sinks, *(buffer.data_ptr() for buffer in buffers)),
            table_row=table.stride(0),
            numbers=(
                num_items,
                spec.num_kv_heads,
                section,
                spec.group_size,
                tokens,
                spec.sliding_window or 0,
                _merge_threads(tile, tokens * spec.group_size),
                *self._scaling,
            ),
            cut=cut,
            num_items=num_items,
            kept=(*kept, table, *buffers),
        )

    def _launch(self, tile: Tile, programs: int) -> Launch:
        launch = self._launches.get((tile, programs))
        if launch is None:
            shared = tile.shared_bytes(self._spec.head_dim, self._spec.v_head_dim)
            launch = self._launches[tile, programs] = Launch((programs, 1, 1), tile.threads, shared)
        return launch

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan, out: Tensor, lse: Tensor | None = None) -> None:
        """q, out: [num_tokens, num_heads, head_dim or v_head_dim]; k, v: the same with num_kv_heads.

        lse: float32 [num_heads, num_tokens], or None.
        """
        tile = plan.tile
        if tile is None:
            return
        keys, values = (k, v) if plan.dense else (cache.key, cache.value)
        address, (token, head, _) = out.data_ptr(), out.stride()
        if address & 15 or (token | head) & 7:
            raise BackendError(f"hopper: out needs rows at multiples of 16 bytes, got strides {out.stride()}")
        arguments = _ARGUMENTS.pack(
            address,
            0 if lse is None else lse.data_ptr(),
            *plan.addresses,
            token,
            head,
            0 if lse is None else lse.stride(0),
            plan.table_row,
            *plan.numbers,
        )
        cached, box = (None, box_of(tile, None)) if plan.dense else (cache, box_of(tile, self._block_size))
        maps = self._query_map(q, plan.tokens), self._map(keys, cached, "key", box), self._map(values, cached, "value", box)
        self._arguments.set(*maps, arguments)
        plan.kernel(plan.launch, self._arguments)

    def workspace_bytes(self) -> int:
        """Most bytes of partial results: a step that fills the GPU is not cut, and a decode leaves two for each item."""
        tile, spec = self._tiles.wide, self._spec
        prefill = 4 * self._programs * tile.groups * 128
        decode = 2 * (self._programs * WAVES + spec.num_kv_heads) * 128
        return max(prefill, decode) * _partial_floats(spec.v_head_dim) * 4

    def _query_map(self, q: Tensor, tokens: int) -> bytes:
        """The tensor map of queries as [token, kv head, head of the group, dim], by tiles of so many tokens."""
        key = (q.data_ptr(), q.shape[0], q.stride(), tokens)
        known = self._maps.get(key)
        if known is None:
            group = self._spec.group_size
            view = q.view(q.shape[0], self._spec.num_kv_heads, group, self._spec.head_dim)
            known = self._keep(key, tensor_map(view, (tokens, 1, group, 64)))
        return known

    def _map(self, tensor: Tensor, cache: LayerCache | None, name: str, box: int) -> bytes:
        """The tensor map of keys or values as [block, head, slot, dim]; cache: None where they are this step's own."""
        key = (tensor.data_ptr(), tensor.shape[0], tensor.stride(), box)
        known = self._maps.get(key)
        if known is None:
            if cache is None:
                view = tensor.transpose(0, 1).unsqueeze(0)
            else:
                view = (cache.logical_key if name == "key" else cache.logical_value).squeeze(4).transpose(1, 2)
            known = self._keep(key, tensor_map(view, (1, 1, box, 64)))
        return known

    def _keep(self, key: tuple[object, ...], encoded: bytes) -> bytes:
        if len(self._maps) >= _MOST_MAPS:
            self._maps.clear()
        self._maps[key] = encoded
        return encoded

    def _grow(self, num_partials: int, num_tickets: int, tile: Tile, tokens: int) -> None:
        """Room for the partial results of so many splits and query tiles of each kv head.

        What was outgrown is kept: a captured graph may still use it.
        """
        spec = self._spec
        floats = _merge_threads(tile, tokens * spec.group_size) * _partial_floats(spec.v_head_dim)
        floats *= num_partials * spec.num_kv_heads * tile.groups
        tickets = num_tickets * spec.num_kv_heads * tile.groups
        if self._partials.numel() < floats:
            self._outgrown.append(self._partials)
            self._partials = torch.empty(floats, dtype=torch.float32, device=spec.device)
        if self._tickets.numel() < tickets:
            self._outgrown.append(self._tickets)
            self._tickets = torch.zeros(2 * tickets, dtype=torch.int32, device=spec.device)


def _merge_threads(tile: Tile, rows: int) -> int:
    """Threads of a warpgroup that hold rows which exist, 16 a warp."""
    return 128 if tile.groups > 1 else 32 * min(-(-rows // 16), 4)


def _partial_floats(v_head_dim: int) -> int:
    """Of a thread: PARTIAL_FLOATS of finish.cuh."""
    return v_head_dim // 2 + 4
