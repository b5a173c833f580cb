"""Plan and launch of the prefill and extend kernel."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headway.backends.split_kv import MAX_PARTIALS, Ints, Programs, Split
from headway.backends.triton.configs import ANY_PROMPT, PrefillConfig, prefill_config
from headway.backends.triton.layer import NO_SCALES, Addressing, KernelSetup, scales_of
from headway.backends.triton.merge_kernel import merge_tiles
from headway.backends.triton.prefill_kernel import list_tiles, varlen_attention
from headway.backends.triton.splits import TileColumn, TileSchedule, schedule_tiles
from headway.core.contract.kernel import upload
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.triton_launch import INTERPRETED, BoundKernel, Launcher, aligned, launches_early

FEW_TOKENS = 1024
"""Maximum number of prompt tokens that are read through pointers instead of descriptors. Making descriptors takes the host 6 us,
which is too long for a 20 us kernel."""
MERGE_ELEMENTS = 256
"""Number of elements of a partial result that a one-warp program merges. The number is small, so that many programs share the
work."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Plan of one prefill or extend step."""

    dense: bool
    """True if no sequence has a context: all keys are this step's k and v."""
    schedule: TileSchedule
    rows: Tensor
    """`schedule.rows` on the device."""
    block_table: Tensor
    seq_lens: Tensor
    config: PrefillConfig
    tiles: Tensor | None
    """int32 [programs, 1 or num_kv_heads, stride]: lists of key tiles (`list_tiles`). None if all tiles are read."""
    partial: Tensor
    """float32: partial results of programs that share the keys of a query tile. All plans of a backend share this buffer."""
    lse: Tensor
    launches: dict[Hashable, tuple[BoundKernel, BoundKernel | None, bool]] = field(default_factory=dict)
    """Bound launches (attention kernel, merge kernel, True if keys are read by TMA), keyed by all properties in which layers that
    share this plan may differ."""
    checked: AttentionMetadata | None = None
    """Metadata to check against the cache before a launch, in debug mode. Otherwise None."""


class Prefill:
    """Prefill and extend for one kind of layer."""

    def __init__(self, setup: KernelSetup, num_splits: int | None) -> None:
        spec, layer = setup.spec, setup.layer
        self._spec = spec
        self._layer = layer
        self._block_size = setup.block_size
        self._arch = setup.arch
        self.multiprocessors = setup.multiprocessors
        self._num_splits = 1 if spec.batch_invariant and num_splits is None else num_splits
        self.workspace = setup.workspace
        self._merge_rows = max(1, min(MERGE_ELEMENTS // layer.block_dv, 8))
        self._scalars = tuple(layer.scalars.values())
        self._own = id(layer)  # See `Decode`
        self._launch = Launcher(varlen_attention)
        self._launch_merge = Launcher(merge_tiles)
        self._launch_tiles = Launcher(list_tiles)
        self._pdl = launches_early(spec.device)
        self._variants: dict[Hashable, _Variant] = {}
        self._descriptors = Descriptors(layer.block_d)

    def plan(self, metadata: AttentionMetadata) -> PrefillPlan:
        """Return the plan of a prefill or extend step: configuration, schedule and buffers."""
        spec = self._spec
        dense = metadata.phase is Phase.PREFILL and not rereads(spec)
        paged = 0 if dense else self._block_size
        block_d = max(self._layer.block_d + self._layer.constants["TAIL"], self._layer.block_dv)
        longest = ANY_PROMPT if spec.batch_invariant else metadata.max_query_len
        config = prefill_config(self._arch, block_d, spec.dtype.itemsize, longest, spec.group_size, paged)
        kv_lens = metadata.seq_lens_cpu.numpy()
        if metadata.phase is Phase.DECODE:  # in deterministic mode
            config = config.for_few_rows()
            kv_lens = numpy.maximum(kv_lens, 1)  # a captured step also runs with longer sequences
        if dense and metadata.num_prefill_tokens <= FEW_TOKENS:
            config = replace(config, tma=False)
        schedule = schedule_tiles(
            metadata.query_start_loc_cpu.numpy(),
            kv_lens,
            spec.group_size,
            config.block_m,
            config.block_n,
            spec.sliding_window,
            partial(self._split, config),
            spec.causal,
        )
        rows = upload(torch.from_numpy(schedule.rows), metadata.seq_lens.device)
        results = schedule.slots * spec.num_kv_heads * config.block_m
        floats = self.workspace.floats(results * (self._layer.block_dv + 1))
        return PrefillPlan(
            dense=dense,
            schedule=schedule,
            rows=rows,
            block_table=metadata.block_table,
            seq_lens=metadata.seq_lens,
            config=config,
            tiles=self._list_tiles(schedule, rows, config),
            partial=floats,
            lse=floats[results * self._layer.block_dv :],
        )

    def _list_tiles(self, schedule: TileSchedule, rows: Tensor, config: PrefillConfig) -> Tensor | None:
        """Return the lists of key tiles that the rule's mask leaves. Return None if the layer's rule has no mask, or if all tiles
        must be read in their order, so that decode gives the same bits."""
        rule, spec, ends = self._layer.constants["RULE"], self._spec, schedule.rows[: schedule.programs, TileColumn.KEY_END]
        if rule.mask is None or schedule.programs == 0 or spec.invariance >= Invariance.PHASE:
            return None
        most = int((-(-ends // config.block_n) - schedule.rows[: schedule.programs, TileColumn.FIRST_KEY_TILE]).max())
        grid = (spec.num_kv_heads if rule.by_head else 1, schedule.programs, 1)
        tiles = torch.zeros((schedule.programs, grid[0], 2 + most), dtype=torch.int32, device=rows.device)
        tokens = -(-config.block_m // spec.group_size) + (config.block_m % spec.group_size > 0)
        constants = {
            "GROUP": spec.group_size,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "TOKENS": 1 << (tokens - 1).bit_length(),
            "HAS_WINDOW": spec.sliding_window is not None,
            "RULE": rule,
        }
        arguments = (rows, tiles, tiles.stride(1), *self._layer.parameters, spec.sliding_window or 0)
        self._launch_tiles(tuple(constants.values()), grid, arguments, constants, num_warps=8)
        return tiles

    def _split(self, config: PrefillConfig, tiles: Ints) -> Split:
        """Return how to split query tiles. tiles: number of key tiles of each."""
        spec, heads = self._spec, self._spec.num_kv_heads
        if self._num_splits is not None:
            return Split(0, -(-int(tiles.max()) // self._num_splits))
        flops = 2 * config.block_m * config.block_n * (spec.head_dim + spec.v_head_dim)
        tile_us = flops * self.multiprocessors / config.flops_per_us
        start, partials, launch = (each / tile_us for each in (config.start_us, config.partial_us, config.merge_us))
        split, _ = Programs(self.multiprocessors, start, partials, launch=launch).split(tiles.repeat(heads), heads)
        return replace(split, whole=split.whole // heads)

    def workspace_bytes(self) -> int:
        """Return the maximum size of the partial results in bytes. With the option `extend_splits`, the partial results may be
        larger."""
        if self._num_splits == 1:
            return 0
        configs = (self._arch.prefill, self._arch.prefill_short, self._arch.extend, self._arch.extend_gather)
        rows = MAX_PARTIALS * self.multiprocessors * max(config.block_m for config in configs)
        return rows * (self._layer.block_dv + 1) * 4

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: PrefillPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Launch prefill or extend for one layer.

        q, out: [num_tokens, num_heads, head_dim or v_head_dim]; lse: float32 [num_heads, num_tokens].
        k, v: [num_tokens, num_kv_heads, head_dim or v_head_dim], read if no sequence has a context.
        """
        if plan.schedule.programs == 0:
            return
        keys, values = (k, v) if plan.dense else (cache.key, cache.value)
        sums = q if lse is None else lse  # a placeholder if no lse is requested
        tensors: tuple[Tensor, ...] = (q, keys, values, out, sums)
        if not plan.dense and cache.layout.has_scales:
            tensors += scales_of(cache)
        pointers = [tensor.data_ptr() for tensor in tensors]
        key: Hashable = (
            q.stride(),
            keys.stride(),
            values.stride(),
            out.stride(),
            aligned(*pointers[:4]),
            lse is None or lse.stride(0),
            self._own,
        )
        if len(tensors) > 5:
            key = (key, *(each.stride() for each in tensors[5:]), aligned(*pointers[5:]))
        known = plan.launches.get(key)
        if known is None:
            self._launch_first(key, tensors, pointers, cache, plan, lse)
            return
        kernel, merge, tma = known
        if tma:
            pointers[1], pointers[2] = self._descriptors.of(keys, values, None if plan.dense else cache, plan.config.block_n)
        kernel(*pointers)
        if merge is not None:
            merge(*pointers[3:5])

    def _launch_first(
        self,
        key: Hashable,
        tensors: tuple[Tensor, ...],
        pointers: list[Any],
        cache: LayerCache,
        plan: PrefillPlan,
        lse: Tensor | None,
    ) -> None:
        """Launch the kernel for a step's first layer, and bind the launch for later layers of the same kind."""
        q, keys, values, out, sums, *scales = tensors
        config, split = plan.config, plan.schedule.slots > 0
        compiled_for = (plan.dense, split, config, key)
        variant = self._variants.get(compiled_for)
        if variant is None:
            variant = self._variants[compiled_for] = self._variant(keys, values, cache, plan, lse is not None)
        read: tuple[Any, Any] = (keys, values)
        if variant.tma:
            read = self._descriptors.of(keys, values, None if plan.dense else cache, config.block_n)
            pointers[1], pointers[2] = read
        sums_stride = 0 if lse is None else lse.stride(0)
        rest = (
            *(() if scales else NO_SCALES),
            plan.rows,
            plan.partial,
            plan.lse,
            plan.block_table,
            plan.seq_lens,
            self._layer.slopes,
            self._layer.sinks,
            *self._layer.parameters,
            plan.tiles,
            None if plan.tiles is None else plan.tiles.stride(1),
            *self._scalars,
            *q.stride()[:2],
            *out.stride()[:2],
            sums_stride,
            plan.block_table.stride(0),
            *variant.strides,
        )
        grid = (self._spec.num_kv_heads, plan.schedule.programs, 1)
        first, warps, stages = (q, *read, out, sums, *scales), config.num_warps, config.num_stages
        constants = variant.constants
        kernel = self._launch.bind(compiled_for, grid, first, pointers, rest, constants, num_warps=warps, num_stages=stages)
        merge = None
        if split:
            v_scale, strides = self._layer.scalars["v_scale"], (out.stride(0), out.stride(1), sums_stride)
            rest = (plan.rows[plan.schedule.programs :], self._layer.sinks, plan.partial, plan.lse, v_scale, *strides)
            grid = (self._spec.num_kv_heads, config.block_m // self._merge_rows, plan.schedule.merges)
            merged = max(1, min(8, 2048 // (self._merge_rows * self._layer.block_dv)))
            constants = self._layer.merging(config.block_m, self._merge_rows, merged, lse is not None)
            merge = self._launch_merge.bind(compiled_for, grid, (out, sums), pointers[3:5], rest, constants, num_warps=1)
        if kernel is not None:
            plan.launches[key] = (kernel, merge, variant.tma)

    def _variant(self, keys: Tensor, values: Tensor, cache: LayerCache, plan: PrefillPlan, lse: bool) -> _Variant:
        """Return strides and compile-time constants that depend on how a plan reads keys (dense, paged, TMA)."""
        config = plan.config
        if plan.dense:
            strides = tuple(s for t in (keys, values) for s in (0, t.stride(0), t.stride(1), 1, 1))
            scaled: dict[str, Any] = {"SCALED": False, "SCALE_STRIDES": ()}
            k_x = v_x = 1
            views = one_block(keys, values)
        else:
            addressing = Addressing.of(cache)
            strides, k_x, v_x, scaled = addressing.strides, addressing.k_x, addressing.v_x, addressing.constants
            views = blocks(cache) if k_x == v_x == 1 else []
        whole = plan.dense or self._block_size % config.block_n == 0
        tma = config.tma and whole and self._layer.equal_tiles and bool(views) and all(map(describable, views))
        constants = {
            **self._layer.constants,
            "BLOCK_SIZE": self._block_size,
            "K_X": k_x,
            "V_X": v_x,
            "V_SLOTS_INNER": not plan.dense and cache.logical_value.stride(1) == 1,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "PAGED": not plan.dense,
            "STEP": 16 if all(stride % 16 == 0 for stride in (strides[0], strides[5])) else 1,
            "PEEK": not INTERPRETED and cache.logical_value.stride(1) != 1,
            "TMA": tma,
            **scaled,
            "CAUSAL": self._spec.causal,
            "HAS_LSE": lse,
            "LISTED": plan.tiles is not None,
            "STAGES": config.num_stages,
            "SPLIT": plan.schedule.slots > 0,
            "ONE_PATH": self._spec.invariance >= Invariance.PHASE,
            "PDL": self._pdl,
        }
        return _Variant(tma, strides, constants)


def rereads(spec: AttentionSpec) -> bool:
    """Return whether prompts without context read their k and v back from the cache.

    This is true for quantized caches, because results would otherwise depend on how a prompt is divided into chunks. It is also
    true in batch-invariant mode, because all sequences of a step together determine whether the step is PREFILL or EXTEND.
    """
    return not spec.dense and (spec.cache_dtype != spec.dtype or spec.batch_invariant)


@dataclass(frozen=True, slots=True)
class _Variant:
    """Strides and compile-time constants of one compiled kernel variant."""

    tma: bool
    strides: tuple[int, ...]
    constants: Mapping[str, Any]


_MOST = 256  # Maximum number of cached descriptors: those for a large model's caches, and for buffers of k and v


class Descriptors:
    """Tensor descriptors for one kind of layer. Caches stay in place and buffers are reused, so few descriptors are made."""

    def __init__(self, block_d: int) -> None:
        self._block_d = block_d
        self._known: dict[Hashable, tuple[TensorDescriptor, TensorDescriptor]] = {}

    def of(
        self, keys: Tensor, values: Tensor, cache: LayerCache | None, block_n: int
    ) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Return descriptors with boxes of block_n rows for a cache. If `cache` is None, they are for k and v [num_tokens,
        num_kv_heads, head_dim]."""
        key = (keys.data_ptr(), values.data_ptr(), cache is None, block_n, keys.shape[0], keys.stride(), values.stride())
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            views = one_block(keys, values) if cache is None else blocks(cache)
            box = [1, 1, block_n, self._block_d]
            first, second = (TensorDescriptor(_memory(t), list(t.shape), list(t.stride()), box) for t in views)
            known = self._known[key] = first, second
        return known


def one_block(k: Tensor, v: Tensor) -> list[Tensor]:
    """Return views [1, head, token, dim] of k and v: one block that contains all tokens."""
    return [t.transpose(0, 1).unsqueeze(0) for t in (k, v)]


def blocks(cache: LayerCache) -> list[Tensor]:
    """Return views [block, head, slot, dim] of a cache whose head_dim is not split."""
    return [t.squeeze(4).transpose(1, 2) for t in (cache.logical_key, cache.logical_value)]


def describable(view: Tensor) -> bool:
    """Return whether the tensor memory accelerator (TMA) can address a view: 16-byte aligned rows of contiguous elements."""
    size = view.element_size()
    return view.stride(3) == 1 and view.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in view.stride()[:3])


class _Memory:
    """Stand-in for a tensor in a descriptor. A descriptor with the tensor itself would keep the tensor alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr()

    def data_ptr(self) -> int:
        """Return the address of the memory."""
        return self._address


def _memory(tensor: Tensor) -> Any:
    return tensor if INTERPRETED else _Memory(tensor)
