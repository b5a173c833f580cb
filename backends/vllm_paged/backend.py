"""The attention backend `vllm_paged`: paged attention for vLLM's cache layout, its cache writer and block copies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from numpy import float32, int32
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Options
from headway.core.contract.capabilities import FEATURES, Capabilities
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import VLLM_5D, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.kernels.runtime.nvrtc.compiler import Variant, architecture, find_compiler
from headway.kernels.runtime.nvrtc.launch import Arguments, Launch
from headway.kernels.runtime.nvrtc.store import load
from headway.kernels.runtime.probe import at_least, has_gpu

CSRC = Path(__file__).parent / "csrc"
TILE = 16
"""Number of keys per tile, and number of tokens that a thread block writes: TILE in layout.cuh."""
MAX_WARPS = 8
_LOG2E = math.log2(math.e)


def scoring_of(spec: AttentionSpec) -> tuple[float32, float32, int32]:
    """Return the members of `struct Scoring` in score.cuh for a layer: scale and soft cap in base 2, and the window."""
    scale, cap, window = spec.scale * spec.k_scale, spec.softcap, int32(spec.sliding_window or 0)
    if cap is None:
        return float32(scale * _LOG2E), float32(0.0), window
    return float32(scale / cap), float32(cap * _LOG2E), window


def per_head(values: tuple[float, ...] | None, device: torch.device) -> Tensor | None:
    """Return float32 [num_heads]: values times log2(e). None if `values` is None."""
    if values is None:
        return None
    return torch.tensor([value * _LOG2E for value in values], dtype=torch.float32, device=device)


def address(tensor: Tensor | None) -> int:
    """Return a tensor's address, or a null pointer for None."""
    return 0 if tensor is None else tensor.data_ptr()


_SOURCE = "paged_attention.cu"
_OUT = (0,) * 3  # Placeholders for the output: address, token stride, head stride; set for each layer
_LAYER = (0,) * 5 + _OUT
"""Placeholders for q (address, token stride, head stride), the key and value addresses, and the output; set for each layer."""
_LONG = 64  # Number of tiles from which lengths are rounded when choosing a split


@dataclass(frozen=True, slots=True)
class PagedDecodePlan:
    """Plan of one decode step."""

    cut: Cut
    attention: Launch | None
    """Launch of the attention kernel. None if the step has no sequences."""
    reduction: Launch | None
    """Launch of the reduction kernel. None if contexts are not partitioned."""
    attention_arguments: Arguments
    """Arguments of the attention kernel. Each layer sets the first ones (q, cache and out); the rest point to the metadata's
    tensors."""
    reduction_arguments: Arguments
    kept: tuple[Tensor, ...]
    """Tensors that own the memory to which the arguments point."""


class PagedDecode:
    """Decode for one kind of layer, with one kernel (v1) or two (v2) per call. :raises UnsupportedError: if there is no
    compiler."""

    def __init__(self, spec: AttentionSpec, block_size: int, cut: tuple[int | None, int | None] = (None, None)) -> None:
        self._spec = spec
        warps, partitions = cut
        self._warps = warps
        self._partitions = partitions
        arch = architecture(spec.device)
        properties = torch.cuda.get_device_properties(spec.device)
        self._overlaps = properties.major >= 9
        self._machine = GPUResources(properties.multi_processor_count, 4.2e6 if properties.major >= 9 else 1.5e6)
        self._tile_bytes = tile_bytes(spec.head_dim, spec.cache_dtype)
        self._warp_bytes = stages_of(self._tile_bytes, arch) * self._tile_bytes
        self._most_warps = shared_bytes(arch) // self._warp_bytes
        self._row_tile = 8 if spec.dtype == spec.cache_dtype == torch.float32 else 16  # ROWS of FmaWarp and MmaWarp
        variant = variant_of(spec.dtype, spec.cache_dtype, spec.head_dim, block_size, arch)
        self._attention = load(variant, "paged_attention", spec.device)
        self._reduce = load(variant, "reduce_partitions", spec.device)
        self._slopes = per_head(spec.alibi_slopes, spec.device)
        self._sinks = per_head(spec.sinks, spec.device)
        self._workspace = torch.empty(0, device=spec.device)
        self._outgrown: list[Tensor] = []

    def plan(self, metadata: AttentionMetadata) -> PagedDecodePlan:
        """Return the plan for decode sequences: grid, partitions and buffers."""
        spec = self._spec
        rows = spec.group_size * metadata.max_query_len
        items = spec.num_kv_heads * -(-rows // self._row_tile)
        cut = self._cut(metadata, items)
        results = metadata.num_seqs * items * cut.partitions * self._row_tile if cut.partitions > 1 else 0
        buffer = self._floats(results * (spec.head_dim + 2))
        table, lens, starts = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
        sinks, partial, state = address(self._sinks), buffer.data_ptr(), buffer.data_ptr() + results * spec.head_dim * 4
        scale, cap, window = scoring_of(spec)
        sizes = (int32(spec.num_kv_heads), int32(spec.group_size), int32(cut.partitions), float32(spec.v_scale))
        places = (table.data_ptr(), table.stride(0), lens.data_ptr(), starts.data_ptr(), address(self._slopes))
        attention = reduction = None
        if metadata.num_seqs:
            stage_bytes, grid = cut.warps * self._warp_bytes, (items, cut.partitions, metadata.num_seqs)
            self._attention.allow_shared(stage_bytes)
            attention = Launch(grid, 32 * cut.warps, stage_bytes)
            if cut.partitions > 1:
                grid = (items, min(rows, self._row_tile), metadata.num_seqs)
                reduction = Launch(grid, spec.head_dim, overlaps=self._overlaps)
        return PagedDecodePlan(
            cut=cut,
            attention=attention,
            reduction=reduction,
            attention_arguments=Arguments(*_LAYER, *places, sinks, partial, state, *sizes, scale, cap, window),
            reduction_arguments=Arguments(*_OUT, lens.data_ptr(), starts.data_ptr(), sinks, partial, state, *sizes, window),
            kept=(buffer, table, lens, starts),
        )

    def run(self, q: Tensor, cache: LayerCache, plan: PagedDecodePlan, out: Tensor) -> None:
        """Launch decode for one layer. q, out: [num_tokens, num_heads, head_dim]."""
        if plan.attention is None:
            return
        to = out.data_ptr(), *out.stride()[:2]
        plan.attention_arguments.set(q.data_ptr(), *q.stride()[:2], cache.key.data_ptr(), cache.value.data_ptr(), *to)
        self._attention(plan.attention, plan.attention_arguments)
        if plan.reduction is not None:
            plan.reduction_arguments.set(*to)
            self._reduce(plan.reduction, plan.reduction_arguments)

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """Return the maximum size of partial results in bytes. Steps with many sequences do not partition contexts, and steps
        with few sequences have few partial results."""
        items = min(max_num_seqs * self._spec.num_kv_heads, 8 * self._machine.multiprocessors)
        return items * PARTITIONS[-1] * self._row_tile * (self._spec.head_dim + 2) * 4

    def _cut(self, metadata: AttentionMetadata, items: int) -> Cut:
        longest = max(metadata.kv_lens, default=0)
        if self._spec.sliding_window is not None:
            longest = min(longest, self._spec.sliding_window + metadata.max_query_len + TILE)
        total = items * sum(-(-min(kv_len, longest) // TILE) for kv_len in metadata.kv_lens)
        longest = -(-longest // TILE)
        if longest > _LONG:  # round, so that few results are cached
            step = longest // (_LONG // 2)
            longest, total = -(-longest // step) * step, -(-total // step) * step
        chosen = choose(items * metadata.num_seqs, total, longest, self._tile_bytes, self._machine)
        return Cut(min(self._warps or chosen.warps, self._most_warps), self._partitions or chosen.partitions)

    def _floats(self, count: int) -> Tensor:
        """Return a buffer of at least `count` float32 values. Old buffers stay allocated, because captured graphs may use
        them."""
        if self._workspace.numel() < count:
            self._outgrown.append(self._workspace)
            self._workspace = torch.empty(max(count, 2 * self._workspace.numel()), device=self._spec.device)
        return self._workspace


def tile_bytes(head_dim: int, kv_dtype: torch.dtype) -> int:
    """Return the size in bytes of a tile's key and value."""
    return 2 * TILE * head_dim * kv_dtype.itemsize


def variant_of(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, block_size: int, arch: str) -> Variant:
    """Return the compiled variant for layers with these types and sizes. arch: such as sm_90."""
    stages = stages_of(tile_bytes(head_dim, kv_dtype), arch)
    return Variant.of(CSRC, _SOURCE, dtype, kv_dtype, head_dim, block_size, STAGES=stages)


PARTITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_STAGES = 6
WARPS = (2, 4, MAX_WARPS)


SHARED_KIB = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}
"""Maximum shared memory of a thread block in KiB, keyed by architecture. All other architectures have 99 KiB."""
_KERNELS_OWN = 2048  # Shared memory of the attention kernel besides its stages, in bytes


def shared_bytes(arch: str) -> int:
    """Return the shared memory for a thread block's stages, in bytes. arch: such as sm_90."""
    return SHARED_KIB.get(arch, 99) * 1024 - _KERNELS_OWN


@dataclass(frozen=True, slots=True)
class GPUResources:
    """Properties of the GPU on which the choice of a split depends."""

    multiprocessors: int
    bytes_per_us: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Split of one launch: number of warps per thread block, and number of partitions per context."""

    warps: int
    partitions: int


def stages_of(tile_bytes: int, arch: str) -> int:
    """Return the number of tiles in flight per warp, chosen so that MAX_WARPS warps fit if possible. tile_bytes: size of a tile's
    key and value."""
    return max(2, min(MAX_STAGES, shared_bytes(arch) // (MAX_WARPS * tile_bytes)))


_TILE_US = 1.1  # Time of one tile for a single running warp: latency
_START_US = 3.0  # Time of a thread block before its first and after its last tile
_TAIL = 0.05  # Share of a block's time at its end in which memory is not busy
_WARP_US = 0.17  # Time to merge one more warp
_SECOND_US = 4.6  # Time of the second kernel, plus
_MERGE_US = 0.09
"""Time that the second kernel takes for each partition that it merges, in us."""
_PARTIAL_US = 0.23
"""Additional time for partial results, in us for each thread block per SM."""


@lru_cache(maxsize=4096)
def choose(items: int, total_tiles: int, longest: int, tile_bytes: int, machine: GPUResources) -> Cut:
    """Return the split with the lowest expected time, according to a model fitted to a sweep on an H200.

    items: number of sequences times KV heads times row tiles.
    total_tiles: number of key tiles of all items.
    longest: number of key tiles of the longest item.
    The caller rounds both tile counts, so that few results are cached.
    """
    busy = min(items, max(1.0, total_tiles / max(longest, 1)))  # number of items of full length with the same total work
    shared_tile_us = machine.multiprocessors * tile_bytes / machine.bytes_per_us  # one tile on every SM at full bandwidth

    def time_of(cut: Cut) -> float:
        each = math.ceil(longest / cut.partitions)
        steps = math.ceil(each / cut.warps)
        blocks = busy * math.ceil(longest / max(each, 1)) / machine.multiprocessors
        at_once = min(math.ceil(blocks), MAX_WARPS // cut.warps)
        rounds = max(1.0, math.ceil(blocks) * cut.warps / MAX_WARPS)
        tile_us = max(_TILE_US, at_once * min(cut.warps, each) * shared_tile_us)
        second = _SECOND_US + _MERGE_US * cut.partitions + _PARTIAL_US * blocks if cut.partitions > 1 else 0.0
        return rounds * (steps * tile_us + _START_US) + _TAIL * steps * _TILE_US + _WARP_US * cut.warps + second

    return min((Cut(w, p) for w in WARPS for p in PARTITIONS if p <= max(longest, 1)), key=time_of)


_MANY_TOKENS = 1024  # Number of tokens from which smaller thread blocks, more per SM, are faster
_COPY_THREADS = 256
_COPY_PARTS = 8  # Number of thread blocks that share one cache block


def cache_variant(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, block_size: int) -> Variant:
    """Return the compiled variant of the writer for a cache with these types and sizes."""
    return Variant.of(CSRC, "cache.cu", dtype, kv_dtype, head_dim, block_size)


def write_rows(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write k, v [num_tokens, num_kv_heads, head_dim] to slot_mapping int64 [num_tokens], skipping -1.

    This is one launch without synchronisation, so it can be captured in a CUDA graph. An FP8 cache stores k / k_scale and v /
    v_scale, saturated. Rows of a head must be contiguous and 16-byte aligned.
    """
    geometry = cache.geometry
    reshape_and_cache(k, v, cache.key, cache.value, slot_mapping, geometry.block_size, cache.k_scale, cache.v_scale)


def reshape_and_cache(
    k: Tensor, v: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor, block_size: int, k_scale: float, v_scale: float
) -> None:
    """Write k and v as `write_rows` does, to the cache's tensors.

    key: [num_blocks, kv_heads, head_dim / x, block_size, x]; value: [num_blocks, kv_heads, head_dim, block_size].
    """
    num_tokens, kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    kernel = load(cache_variant(k.dtype, key.dtype, head_dim, block_size), "reshape_and_cache", k.device)
    threads = 128 if num_tokens >= _MANY_TOKENS else 256
    arguments = Arguments(
        *(tensor.data_ptr() for tensor in (k, v, key, value, slot_mapping)),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(int32(num_tokens), int32(kv_heads), float32(k_scale), float32(v_scale)),
    )
    kernel(Launch((kv_heads, -(-num_tokens // TILE), 1), threads), arguments)


def copy_blocks(key: Tensor, value: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks within one cache.

    key, value: tensors in any layout whose outermost axis is the block.
    pairs: int64 [num_pairs, 2] on the device: source and destination blocks. No block may be both a source and a destination.
    """
    swap_blocks(key, value, key, value, pairs)


def swap_blocks(key: Tensor, value: Tensor, to_key: Tensor, to_value: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks between caches of the same geometry. Either cache may be in pinned host memory. pairs: as in
    `copy_blocks`."""
    if pairs.shape[0] == 0:
        return
    block_bytes = key[0].numel() * key.element_size()
    kernel = load(Variant(CSRC, "blocks.cu"), "copy_blocks", pairs.device)
    values = [*(tensor.data_ptr() for tensor in (key, value, to_key, to_value, pairs)), block_bytes // 16]
    arguments = Arguments(*values)
    kernel(Launch((pairs.shape[0], _COPY_PARTS, 2), _COPY_THREADS), arguments)


CAPABILITY = (8, 0)
"""Minimum compute capability: the first with bfloat16 MMAs and asynchronous copies."""
FP8_CAPABILITY = (8, 9)
"""Minimum compute capability for FP8 caches: the first with instructions that convert e4m3."""
_FP8 = torch.float8_e4m3fn


class VllmPagedAttention(AttentionBackend):
    """CUDA C++ paged attention for vLLM's cache layout, single-pass (v1) or partitioned (v2). Only for decode and
    verification."""

    name = "vllm_paged"
    capabilities = Capabilities(
        phases=frozenset({Phase.DECODE}),
        layouts=(VLLM_5D,),
        kv_dtypes=(_FP8,),
        block_multiple=8,
        head_dims=(64, 80, 96, 112, 128, 192, 256),
        features=FEATURES,
        contiguous_blocks=True,
        reads_whole_blocks=True,
    )
    graph_level = GraphLevel.UNIFORM
    options: ClassVar[Mapping[str, str]] = {
        "num_partitions": "partitions of every context, in place of the built-in rule; 1 is the single-pass form",
        "num_warps": f"warps of a block of threads, 1 to {MAX_WARPS}",
    }

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        cut = self.count_option(options, "num_warps", MAX_WARPS), self.count_option(options, "num_partitions", None)
        self._decode = PagedDecode(spec, block_size, cut)

    @classmethod
    def available(cls) -> Support:
        return has_gpu() & find_compiler()[1]

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Return whether the cache is contiguous. The kernels compute addresses from the layout, and do not support strides."""
        support = super().accepts(cache)
        for name, tensor in cache.tensors.items():
            if not tensor.is_contiguous():
                support &= Support.no(f"cache, {name}", "one piece of memory", f"strides {tensor.stride()}", "name triton")
        return support

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        support = super().supports(spec, layout, block_size, phase) & at_least(CAPABILITY, spec.device)
        if block_size != 8 and block_size % 16:
            support &= Support.no("block_size", "8 or a multiple of 16", block_size, "--block-size 16")
        if spec.cache_dtype == _FP8:
            if spec.dtype == torch.float32:
                support &= Support.no("dtype", "bfloat16 or float16 with an fp8 cache", "float32", "choose another --dtype")
            support &= at_least(FP8_CAPABILITY, spec.device)
            if block_size % 16:
                support &= Support.no("block_size", "a multiple of 16 for an fp8 cache", block_size, "--block-size 16")
        return support

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        return "paged_attention (CUDA C++)"

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        return self._decode.workspace_bytes(max_num_seqs)

    def plan(self, metadata: AttentionMetadata) -> PagedDecodePlan:
        return self._decode.plan(metadata)

    def decode(self, q: Tensor, cache: LayerCache, plan: PagedDecodePlan, out: Tensor, lse: Tensor | None = None) -> None:
        assert lse is None, "not declared"
        self._decode.run(q, cache, plan, out)
