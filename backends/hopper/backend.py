"""The attention backend `hopper`: prefill and extend in CUDA C++ for compute capability 9.0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from typing import ClassVar

import torch
from torch import Tensor

from headway.backends.hopper.schedule import Problem, Schedule, choose
from headway.backends.hopper.tiles import (
    ARCH,
    HEAD_DIMS,
    MAX_GROUP,
    UNEQUAL,
    WIDE_HEAD_DIM,
    AttentionTile,
    box_of,
    tiles_of,
    variant_of,
)
from headway.backends.split_kv import MAX_PARTIALS
from headway.core.contract.backend import AttentionBackend, Options
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.errors import BackendError
from headway.core.contract.kernel import GraphLevel, upload
from headway.core.contract.layout import HND, NHD, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support
from headway.kernels.runtime.nvrtc.compiler import find_compiler
from headway.kernels.runtime.nvrtc.launch import MAP_BYTES, Arguments, CompiledKernel, Launch, tensor_map
from headway.kernels.runtime.nvrtc.store import load
from headway.kernels.runtime.probe import HALF_DTYPES, capability, has_gpu

_LOG2E = math.log2(math.e)
ARGUMENTS = Struct("=8Q4q5i2f4x")
"""Layout of `struct Arguments` in shape.cuh."""
_MAX_MAPS = 1024  # Maximum number of cached tensor maps: three per layer, and more if activations have several addresses or sizes


@dataclass(frozen=True, slots=True)
class HopperPlan:
    """Plan of one step."""

    dense: bool
    """True if no sequence has a context, so that all keys and values are this step's k and v."""
    kernel: CompiledKernel | None
    """Compiled kernel. None if the step has no work."""
    launch: Launch | None
    box: int
    """Number of slots per copy of keys."""
    addresses: tuple[int, int, int, int, int]
    """Device addresses of items, block table, partial results, tickets and queue."""
    table_row: int
    numbers: tuple[int | float, ...]
    """Kernel arguments after the strides."""
    schedule: Schedule
    kept: tuple[Tensor, ...]
    """Tensors that own the memory at `addresses`."""


class HopperKernels:
    """Prefill and extend for one kind of layer. All launches must be on one stream, because they share a queue.

    :raises UnsupportedError: if no compiler is found.
    :raises BackendError: if the kernel cannot be compiled.
    """

    def __init__(self, spec: AttentionSpec, block_size: int, num_splits: int | None = None) -> None:
        self._spec = spec
        self._block_size = block_size
        self._num_splits = num_splits
        self._tiles = tiles_of(spec)
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
        blank = bytes(MAP_BYTES)
        self._arguments = Arguments(blank, blank, blank, bytes(ARGUMENTS.size))
        self._kernels: dict[tuple[AttentionTile, bool], CompiledKernel] = {}
        self._launches: dict[tuple[AttentionTile, int], Launch] = {}
        self._maps: dict[tuple[object, ...], bytes] = {}

    def kernel(self, tile: AttentionTile, dense: bool) -> CompiledKernel:
        """Return the compiled kernel for a tile, compiling it at first use."""
        kernel = self._kernels.get((tile, dense))
        if kernel is None:
            variant = variant_of(self._spec, tile, None if dense else self._block_size)
            kernel = load(variant, variant.source.removesuffix(".cu"), self._spec.device, ARCH)
            kernel.allow_shared(tile.shared_bytes(self._spec.head_dim, self._spec.v_head_dim))
            self._kernels[tile, dense] = kernel
        return kernel

    def plan(self, metadata: AttentionMetadata) -> HopperPlan:
        """Split the sequences of a prefill or extend into items, and return the plan for all layers."""
        spec, tiles = self._spec, self._tiles
        dense = metadata.phase is Phase.PREFILL
        most_rows = metadata.max_query_len * spec.group_size
        if most_rows <= tiles.narrow.rows:
            candidates: tuple[AttentionTile, ...] = (tiles.narrow,)
        elif metadata.num_prefill_tokens * spec.num_heads >= 3 * self._programs * tiles.wide.rows:
            candidates = (tiles.wide,)
        else:
            candidates = (tiles.wide, tiles.narrow)
        table = metadata.block_table
        schedule = choose(Problem.of(metadata, spec, self._programs), candidates, self._num_splits)
        if len(schedule.items) == 0:
            return HopperPlan(dense, None, None, 0, (0, 0, 0, 0, 0), 0, (), schedule, ())
        tile = schedule.tile
        items = upload(torch.from_numpy(schedule.items), spec.device)
        self._grow(schedule)
        partials, tickets, queue = self._partials, self._tickets, self._queue
        return HopperPlan(
            dense=dense,
            kernel=self.kernel(tile, dense),
            launch=self._launch(tile, len(schedule.items)),
            box=box_of(tile, None if dense else self._block_size),
            addresses=(items.data_ptr(), table.data_ptr(), partials.data_ptr(), tickets.data_ptr(), queue.data_ptr()),
            table_row=table.stride(0),
            numbers=(
                len(schedule.items),
                spec.group_size,
                tile.rows_used(spec.group_size),
                tile.tokens(spec.group_size),
                spec.sliding_window or 0,
                *self._scaling,
            ),
            schedule=schedule,
            kept=(items, table, partials, tickets, queue),
        )

    def _launch(self, tile: AttentionTile, programs: int) -> Launch:
        if not tile.cluster:
            programs = min(self._programs, programs)
        launch = self._launches.get((tile, programs))
        if launch is None:
            shared, blocks = tile.shared_bytes(self._spec.head_dim, self._spec.v_head_dim), max(tile.cluster, 1)
            launch = Launch((programs, blocks, 1), tile.threads, shared, cluster=(1, blocks, 1))
            self._launches[tile, programs] = launch
        return launch

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: HopperPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Launch the kernel for one layer.

        q, out: [num_tokens, num_heads, head_dim or v_head_dim]; k, v: the same with num_kv_heads; lse: float32 [num_heads,
        num_tokens].
        """
        if plan.kernel is None or plan.launch is None:
            return
        keys, values = (k, v) if plan.dense else (cache.key, cache.value)
        address, (token, head, _) = out.data_ptr(), out.stride()
        if address & 15 or (token | head) & 7:
            raise BackendError(f"hopper: out needs rows at multiples of 16 bytes, got strides {out.stride()}")
        arguments = ARGUMENTS.pack(
            address,
            0 if lse is None else lse.data_ptr(),
            *plan.addresses[:2],
            0 if self._sinks is None else self._sinks.data_ptr(),
            *plan.addresses[2:],
            token,
            head,
            0 if lse is None else lse.stride(0),
            plan.table_row,
            *plan.numbers,
        )
        cached = None if plan.dense else cache
        key_map, value_map = self._map(keys, cached, "key", plan.box), self._map(values, cached, "value", plan.box)
        self._arguments.set(self._query_map(q, plan.schedule.tile), key_map, value_map, arguments)
        plan.kernel(plan.launch, self._arguments)

    def workspace_bytes(self) -> int:
        """Return the maximum size of partial results, in bytes. With the option `num_splits`, it may be larger."""
        return MAX_PARTIALS * self._programs * self._tiles.wide.groups * _partial_floats(self._spec.v_head_dim) * 4

    def _query_map(self, q: Tensor, tile: AttentionTile) -> bytes:
        """Return the tensor map of queries, viewed as [token, kv head, head of the group, dim], with boxes of one tile."""
        key = (q.data_ptr(), q.shape[0], q.stride(), tile.rows)
        known = self._maps.get(key)
        if known is None:
            group = self._spec.group_size
            view = q.view(q.shape[0], self._spec.num_kv_heads, group, self._spec.head_dim)
            known = self._keep(key, tensor_map(view, (tile.tokens(group), 1, group, 64)))
        return known

    def _map(self, tensor: Tensor, cache: LayerCache | None, name: str, box: int) -> bytes:
        """Return the tensor map of keys or values, viewed as [block, head, slot, dim]. cache: None for this step's k and v."""
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
        if len(self._maps) >= _MAX_MAPS:
            self._maps.clear()
        self._maps[key] = encoded
        return encoded

    def _grow(self, schedule: Schedule) -> None:
        """Allocate the buffers for partial results at the first split. They grow only with the option `num_splits`; old buffers
        then stay allocated, since earlier steps or graphs may use them."""
        results = schedule.num_partials * schedule.tile.groups
        if results > self._tickets.numel():
            size = _partial_floats(self._spec.v_head_dim)
            results = max(results, self.workspace_bytes() // (4 * size))
            self._outgrown += (self._partials, self._tickets)
            self._partials = torch.empty(results * size, dtype=torch.float32, device=self._spec.device)
            self._tickets = torch.zeros(results, dtype=torch.int32, device=self._spec.device)


def _partial_floats(v_head_dim: int) -> int:
    """Return the number of floats in a warpgroup's partial result: PARTIAL_FLOATS in finish.cuh."""
    return 128 * (v_head_dim // (4 if v_head_dim > 256 else 2) + 4)


CAPABILITY = (9, 0)
"""Compute capability whose instructions the kernels need (wgmma, setmaxnreg). No other capability has them."""
_HINT = "name triton, which runs on every GPU"


class HopperBackend(AttentionBackend):
    """Base of the backends for H100 and H200."""

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Return whether the backend's capabilities and the GPU allow a layer. The layer's scale must be positive, because the
        kernels take the softmax maximum before scaling."""
        support = super().supports(spec, layout, block_size, phase) & is_hopper(spec.device)
        if spec.scale <= 0:
            support &= Support.no("scale", "a positive number", spec.scale)
        return support


class HopperAttention(HopperBackend):
    """CUDA C++ prefill and extend for H100 and H200: warp-specialised, persistent, and split-KV if there are few query rows."""

    name = "hopper"
    capabilities = Capabilities(
        phases=frozenset({Phase.PREFILL, Phase.EXTEND}),
        layouts=(NHD, HND),
        dtypes=HALF_DTYPES,
        block_multiple=16,
        head_dims=(*HEAD_DIMS, WIDE_HEAD_DIM),
        v_head_dims=UNEQUAL,
        max_group_size=MAX_GROUP,
        lse=True,
        shares_plans=True,
        features=frozenset({"sliding_window", "softcap", "sinks"}),
        dense_prefill=True,
    )
    graph_level = GraphLevel.UNIFORM  # items depend on the prompt's length, which is fixed in a captured graph
    options: ClassVar[Mapping[str, str]] = {"num_splits": "splits of the longest sequence's keys, in place of the built-in rule"}

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        self._attention = HopperKernels(spec, block_size, self.count_option(options, "num_splits"))

    @classmethod
    def available(cls) -> Support:
        support = has_gpu()
        if support:
            support &= is_hopper(torch.device("cuda"))
        return support & find_compiler()[1]

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Return whether the cache's rows are 16-byte aligned, as TMA requires of a cache that is read."""
        if cache.layout not in (cls.capabilities.layouts or ()):
            return YES  # only prompts without context run, which do not read the cache
        return has_rows_of_16_bytes("key", cache.logical_key) & has_rows_of_16_bytes("value", cache.logical_value)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        return "attention (CUDA C++, sm_90a)"

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        return self._attention.workspace_bytes()

    def plan(self, metadata: AttentionMetadata) -> HopperPlan:
        """Split the step into items and select the tile, once for all layers."""
        return self._attention.plan(metadata)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: HopperPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        self._attention.run(q, k, v, cache, plan, out, lse)


def is_hopper(device: torch.device) -> Support:
    """Return whether a device has the required instructions. Return YES without a device to check."""
    found = capability(device)
    if found is None or found == CAPABILITY:
        return YES
    return Support.no("compute capability", "9.0 (H100, H200), whose instructions it uses", "{}.{}".format(*found), _HINT)


def has_rows_of_16_bytes(name: str, logical: Tensor) -> Support:
    """Return whether rows of a cache tensor, viewed as [block, slot, head, dim, 1], can be copied in 16-byte units."""
    size = logical.element_size()
    if logical.stride(3) == 1 and not logical.data_ptr() % 16 and not any(s * size % 16 for s in logical.stride()[:3]):
        return YES
    got = f"strides {logical.stride()[:4]} at address ...{logical.data_ptr() % 16:x}"
    return Support.no(f"cache, {name}", "rows in one piece, at multiples of 16 bytes", got, _HINT)
