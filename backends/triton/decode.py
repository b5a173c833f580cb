"""Plan and launch of the paged split-KV decode kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from headway.backends.triton.chunk_kernel import Chunks, SeenTiles, cut_sequences, list_sequences, max_chunk_count
from headway.backends.triton.configs import INVARIANT_KEYS, INVARIANT_SPLITS, DecodeConfig, decode_configs
from headway.backends.triton.decode_kernel import split_kv_decode
from headway.backends.triton.layer import NO_SCALES, Addressing, KernelSetup, scales_of
from headway.backends.triton.merge_kernel import merge_chunks
from headway.backends.triton.splits import FAN, choose_split
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.kernels.runtime.triton_launch import INTERPRETED, BoundKernel, Launcher, aligned, launches_early, specialised

EARLY_SEQUENCES, LATE_SEQUENCES = 8, 32
"""Maximum number of sequences for which the kernel after decode may start at once, and for which it may start when the keys have
been read. Early starts slow decode down: on an H200 (Qwen3-0.6B shapes, 768 tokens of context), a step takes 933 us instead of
970 with 8 sequences, but 1349 us instead of 1308 with 16. Late starts make 16 sequences 4 % faster, but 64 sequences 0.5 %
slower."""

AHEAD_TILES, AHEAD_SEQUENCES = 4, 16
"""Number of key tiles that a program prefetches to L2 while the previous kernel runs, and maximum number of sequences for which
keys are prefetched."""

MERGE_WARPS, MERGED = 4, 16
"""Number of warps of a program of `merge_chunks`, and number of partial results per row that it loads at once."""

LISTED_KEYS = 4096
"""Number of keys times query heads that a program of `list_sequences` compares at once."""

SHORTEST_DOT = 16
"""Minimum length of the inner dimension of a `tl.dot`."""

_MAX_STRIDES = (
    256  # Maximum number of cached stride combinations: a paged cache has few, growing dense tensors have new ones each step
)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Plan of one decode step. Its tensors are the tensors of the metadata, so a captured graph reads the values that are later
    copied into them."""

    block_table: Tensor
    chunks: Chunks
    items: int
    """Number of programs per chunk: kv heads x query tiles."""
    max_query_len: int
    block_m: int
    rows: int
    config: DecodeConfig
    partial: Tensor
    """float32: partial results of chunks. All plans of a backend share this buffer. It is freed with the backend, since captured
    graphs store its address."""
    lse: Tensor
    arrivals: Tensor
    """int32 arrival counters, zero between launches."""
    launches: dict[Hashable, Callable[..., None]] = field(default_factory=dict)
    """Bound launches, keyed by all properties in which layers that share this plan may differ."""
    checked: AttentionMetadata | None = None
    """Metadata to check against the cache before a launch, in debug mode. Otherwise None."""

    @property
    def merges_apart(self) -> bool:
        """True if a second launch merges partial results. Without splits, there is seldom anything to merge."""
        return self.config.merge_launch_us > 0 and self.chunks.splits > 1

    @property
    def early(self) -> bool:
        """True if the next kernel may start at once."""
        return len(self.chunks.seq_lens) <= EARLY_SEQUENCES

    @property
    def late(self) -> bool:
        """True if the next kernel may start when the cached keys have been read."""
        return EARLY_SEQUENCES < len(self.chunks.seq_lens) <= LATE_SEQUENCES

    @property
    def ahead(self) -> bool:
        """True if decode prefetches keys before the previous kernel has finished."""
        return len(self.chunks.seq_lens) <= AHEAD_SEQUENCES


NewRows = tuple[Tensor, Tensor] | None
"""k and v [num_seqs, num_kv_heads, head_dim] of one token per sequence, if decode itself writes them to the cache."""


class Decode:
    """Decode for one kind of layer. The sequences are split into chunks once per step, and one kernel is launched per layer."""

    def __init__(self, setup: KernelSetup, num_splits: int | None) -> None:
        spec, layer, layout, block_size = setup.spec, setup.layer, setup.layout, setup.block_size
        self._spec = spec
        self._layer = layer
        self.multiprocessors = setup.multiprocessors
        by_length = spec.batch_invariant and num_splits is None
        self._num_splits = INVARIANT_SPLITS if by_length else num_splits
        self._least_keys = INVARIANT_KEYS if by_length else 1
        self._block_size = block_size
        self._scaled = layout.has_scales
        block_d, split = max(layer.block_d, layer.block_dv), layout.x(spec.cache_dtype) > 1
        self.configs = decode_configs(setup.arch, block_d, spec.cache_dtype.itemsize, block_size, split)
        self.workspace = setup.workspace
        self._scalars = tuple(layer.scalars.values())
        self._own = id(layer)  # Distinguishes launches of layers that share plans but not sinks and scales
        self._constants: dict[Hashable, tuple[dict[str, Any], tuple[int, ...], Hashable]] = {}
        """Compile-time constants, strides and the launcher's key, keyed by all properties that they depend on."""
        self.launch = Launcher(split_kv_decode)
        self.launch_split = Launcher(cut_sequences)
        self._launch_list = Launcher(list_sequences)
        self._launch_merge = Launcher(merge_chunks)

    def _configs(self, max_query_len: int) -> Sequence[DecodeConfig]:
        """Return the candidate configurations for a maximum number of query tokens per sequence."""
        return self.configs if max_query_len == 1 else self.configs[:1]

    def tile(self, max_query_len: int) -> tuple[int, int, int]:
        """Return (BLOCK_M, rows in use rounded up to a power of two, query tiles per kv head). max_query_len: maximum number of
        query tokens per sequence."""
        rows = self._spec.group_size * max_query_len
        used = 1 << (rows - 1).bit_length()  # triton.next_power_of_2 takes 0.1 ms on the host
        block_m = min(max(16, used), 64)
        return block_m, min(used, block_m), -(-rows // block_m)

    def choose(
        self, kv_lens: list[int], max_query_len: int, configs: Sequence[DecodeConfig] | None = None
    ) -> tuple[DecodeConfig, int]:
        """Return the configuration, and the number of chunks of a sequence of average length. configs: candidates. None means all
        configurations."""
        configs = configs or self._configs(max_query_len)
        if self._num_splits is not None:
            return configs[0], self._num_splits
        _, rows, tiles_m = self.tile(max_query_len)
        window = self._spec.sliding_window
        live = [kv_len for kv_len in kv_lens if kv_len > 0]
        if window is not None:
            live = [min(kv_len, window + configs[0].block_n) for kv_len in live]
        mean = sum(live) // max(len(live), 1)
        step = max(16, mean // 32)
        keys = -(-mean // step) * step  # rounded, so that few results are cached
        elements = self._spec.head_dim + (0 if self._spec.value_in_key else self._spec.v_head_dim)
        key_bytes = elements * self._spec.cache_dtype.itemsize
        items = len(live) * self._spec.num_kv_heads * tiles_m
        return choose_split(items, keys, key_bytes, rows, self.multiprocessors, tuple(configs))

    def splits_evenly(self, programs: int, splits: int) -> bool:
        """Return whether every sequence is split into `splits` chunks. programs: number of programs of a step without splits."""
        return self._num_splits is not None

    def plan(self, metadata: AttentionMetadata) -> DecodePlan:
        """Return the plan for decode sequences: configuration, buffers, and chunks for the current lengths."""
        block_m, rows, tiles_m = self.tile(metadata.max_query_len)
        config, splits = self.choose(metadata.kv_lens, metadata.max_query_len)
        items, window = self._spec.num_kv_heads * tiles_m, self._spec.sliding_window
        even = self.splits_evenly(metadata.num_seqs * items, splits)
        least = -(-self._least_keys // config.block_n)
        seen = self._seen_tiles(metadata, config.block_n) if self.skips_tiles else None
        chunks = Chunks(metadata.seq_lens, metadata.query_start_loc, splits, config.block_n, window, even, least, seen)
        results = len(chunks.table) * items * rows if chunks.split else 0
        floats = self.workspace.floats(results * (self._layer.block_dv + 1))
        plan = DecodePlan(
            block_table=metadata.block_table,
            chunks=chunks,
            items=items,
            max_query_len=metadata.max_query_len,
            block_m=block_m,
            rows=rows,
            config=config,
            partial=floats,
            lse=floats[results * self._layer.block_dv :],
            arrivals=self.workspace.counters(items * (len(chunks.table) + metadata.num_seqs) if chunks.split else 0),
        )
        self._cut(plan, splits)
        return plan

    @property
    def skips_tiles(self) -> bool:
        """True if the kernel reads only the tiles of keys that the layer's rule leaves."""
        return self._layer.constants["RULE"].mask is not None

    def _seen_tiles(self, metadata: AttentionMetadata, block_n: int) -> SeenTiles:
        """Return lists for the tiles that the rule's mask leaves, which are not filled yet."""
        spec, rule, device = self._spec, self._layer.constants["RULE"], metadata.seq_lens.device
        most = max(-(-metadata.block_table.shape[1] * metadata.block_size // block_n), 1)
        counts = torch.zeros(metadata.num_seqs, dtype=torch.int32, device=device)
        tiles = torch.zeros((metadata.num_seqs, most), dtype=torch.int32, device=device)
        heads = spec.num_heads if rule.by_head else 1
        rows = 1 << (heads - 1).bit_length()
        constants = {
            "HEADS": heads,
            "ROWS": rows,
            "TILES": max(1, min(LISTED_KEYS // (rows * block_n), 64)),
            "BLOCK_N": block_n,
            "HAS_WINDOW": spec.sliding_window is not None,
            "RULE": rule,
        }
        lengths = metadata.seq_lens, metadata.query_start_loc
        arguments = (*lengths, tiles, counts, *self._layer.parameters, most, spec.sliding_window or 0)
        key, grid = tuple(constants.values()), (metadata.num_seqs, 1, 1)
        return SeenTiles(tiles, counts, lambda: self._launch_list(key, grid, arguments, constants, num_warps=4))

    def split_again(self, plan: DecodePlan, kv_lens: list[int]) -> None:
        """Split the sequences again for the current lengths on the device. kv_lens: the same lengths on the host."""
        splits = plan.chunks.splits
        if splits > 1:  # fewer for short sequences: the captured number suits long ones
            splits = min(splits, self.choose(kv_lens, plan.max_query_len, (plan.config,))[1])
        self._cut(plan, splits)

    def _cut(self, plan: DecodePlan, splits: int) -> None:
        if len(plan.chunks.table):
            plan.chunks.cut(self.launch_split, splits)

    def run(
        self, q: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor, lse: Tensor | None = None, new: NewRows = None
    ) -> None:
        """Launch decode for one layer.

        q, out: [num_tokens, num_heads, head_dim or v_head_dim]; lse: float32 [num_heads, num_tokens].
        """
        if len(plan.chunks.table) == 0:
            return
        assert new is None or plan.max_query_len == 1
        k, v = new or (q, q)  # placeholders if there is nothing to write
        key_cache, value_cache = cache.key, cache.value
        tensors: tuple[Tensor, ...] = (q, key_cache, value_cache, out, k, v, q if lse is None else lse)
        strides = (q.stride(), key_cache.stride(), value_cache.stride(), out.stride(), k.stride(), v.stride())
        key: tuple[Any, ...]
        if self._scaled:
            scales = scales_of(cache)
            tensors += scales
            pointers = [tensor.data_ptr() for tensor in tensors]
            scaled = (*(each.stride() for each in scales), aligned(*pointers[7:]))
            key = (strides, aligned(*pointers[:6]), new is None, lse is None or lse.stride(0), self._own, scaled)
        else:
            pointers = [tensor.data_ptr() for tensor in tensors]
            key = (strides, aligned(*pointers[:6]), new is None, lse is None or lse.stride(0), self._own)
        known = plan.launches.get(key)
        if known is None:
            self._launch_first(key, tensors, pointers, cache, plan, new is not None, lse)
        else:
            known(*pointers)

    def _launch_first(
        self,
        key: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        pointers: list[int],
        cache: LayerCache,
        plan: DecodePlan,
        new: bool,
        lse: Tensor | None,
    ) -> None:
        """Launch the kernel for a step's first layer, and bind the launch for later layers of the same kind."""
        q, _, _, out, k, v, *_ = tensors
        sizes, launch = (plan.block_m, plan.rows, plan.chunks.split), (plan.early, plan.late, plan.ahead, plan.merges_apart)
        compiled_for = key, sizes, launch, plan.max_query_len == 1, plan.config
        known = self._constants.get(compiled_for)
        if known is None:
            if len(self._constants) >= _MAX_STRIDES:
                self._constants.clear()
            addressing = Addressing.of(cache)
            constants = self._compile_time(plan, cache, addressing, new, lse is not None)
            exact, pointers_aligned, *_ = key
            scaled = key[5:]
            classes = specialised(*addressing.strides, *chain(*exact))
            compiled: Hashable = (classes, pointers_aligned, scaled, plan.config, tuple(constants.values()))
            known = self._constants[compiled_for] = (constants, addressing.strides, compiled)
        constants, strides, compiled = known
        rest = (
            *(() if self._scaled else NO_SCALES),
            plan.block_table,
            plan.chunks.table,
            self._layer.slopes,
            self._layer.sinks,
            *self._layer.parameters,
            *plan.chunks.listed,
            plan.partial,
            plan.lse,
            plan.arrivals,
            *self._scalars,
            *q.stride()[:2],
            *out.stride()[:2],
            0 if lse is None else lse.stride(0),
            *k.stride()[:2],
            *v.stride()[:2],
            plan.block_table.stride(0),
            *strides,
        )
        grid = (plan.items, len(plan.chunks.table), 1)
        bound = self.launch.bind(compiled, grid, tensors, pointers, rest, constants, num_warps=self._num_warps(plan))
        merge = self._merge(plan, out, tensors[6], lse, compiled) if plan.merges_apart and plan.chunks.split else None
        if bound is not None:
            plan.launches[key] = bound if merge is None else Launches(bound, merge)

    def merge(self, plan: DecodePlan, out: Tensor, q: Tensor, lse: Tensor | None) -> None:
        """Merge the partial results of a kernel that is not written in Triton, if there are any. q: placeholder for lse."""
        if not plan.chunks.split:
            return
        sums = q if lse is None else lse
        key = out.stride(), aligned(out.data_ptr()), lse is None or lse.stride(0), self._own
        known = plan.launches.get(key)
        if known is not None:
            known(out.data_ptr(), sums.data_ptr())
        elif (bound := self._merge(plan, out, sums, lse, (key, plan.rows))) is not None:
            plan.launches[key] = bound

    def _merge(self, plan: DecodePlan, out: Tensor, sums: Tensor, lse: Tensor | None, key: Hashable) -> BoundKernel | None:
        """Launch the merge of partial results, and return the bound launch. Return None if no launch was bound. key: compile-time
        constants and alignments."""
        sums_stride, v_scale = 0 if lse is None else lse.stride(0), self._layer.scalars["v_scale"]
        rest = (plan.chunks.seqs, self._layer.sinks, plan.partial, plan.lse, v_scale, out.stride(0), out.stride(1), sums_stride)
        grid = (plan.items, plan.rows, len(plan.chunks.seqs))
        constants, pointers = self._layer.merging(plan.block_m, 1, MERGED, lse is not None), (out.data_ptr(), sums.data_ptr())
        constants["TILE_ROWS"] = plan.rows
        return self._launch_merge.bind(key, grid, (out, sums), pointers, rest, constants, num_warps=MERGE_WARPS)

    def _num_warps(self, plan: DecodePlan) -> int:
        """Return the number of warps. It exceeds the configured number if the query tile and the accumulator would otherwise
        overflow the registers."""
        rows = plan.block_m // 16
        if self._spec.dtype == torch.float32:
            rows *= 4
        return max(plan.config.num_warps, min(rows * max(1, self._layer.block_dv // 128), 8))

    def _compile_time(self, plan: DecodePlan, cache: LayerCache, addressing: Addressing, new: bool, lse: bool) -> dict[str, Any]:
        early = launches_early(self._spec.device)
        # Pairs are multiplied in float16, which is not precise enough for float32 layers.
        pairs = cache.key.element_size() == 1 and addressing.pairs and self._spec.dtype != torch.float32
        pairs = pairs and self._layer.equal_tiles and self._layer.block_d >= 2 * SHORTEST_DOT
        constants = {name: value for name, value in self._layer.constants.items() if name != "VALUE_IN_KEY"}
        return {
            **constants,
            "ONE_TOKEN": plan.max_query_len == 1,
            "NEW": new,
            "BLOCK_SIZE": self._block_size,
            "K_X": addressing.k_x,
            "V_X": addressing.v_x,
            "V_SLOTS_INNER": addressing.v_slots_inner,
            "K_PIECES": addressing.k_pieces and self._block_size % plan.config.block_n == 0,
            "HAS_LSE": lse,
            "BLOCK_M": plan.block_m,
            "ROWS": plan.rows,
            "BLOCK_N": plan.config.block_n,
            **addressing.constants,
            "PAIRS": pairs and (not INTERPRETED or self._scaled),  # FP8 is unpacked by inline PTX
            "SPLIT": plan.chunks.split,
            # Independent of the number of warps that hold the rows: more partial results at a time spill with 32 or more rows.
            "MERGED": max(1, min(8, 4096 // (plan.rows * min(self._layer.block_dv, 128)))),
            "FAN": 0 if plan.merges_apart else FAN,
            "STAGES": plan.config.num_stages,
            "PDL": early,
            "EARLY": plan.early,
            "LATE": plan.late,
            "AHEAD": AHEAD_TILES if early and plan.ahead and addressing.whole_rows and not self.skips_tiles else 0,
        }

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """Return the maximum size of the partial results in bytes. The split rule limits the number of programs."""
        items = self._spec.num_kv_heads * max_chunk_count(max_num_seqs, self._num_splits or 1, self._num_splits is not None)
        # Splits, plus at most as many chunks that are not split.
        most = max(items, 2 * self.configs[0].max_rounds * self.multiprocessors)
        return most * self.tile(1)[1] * (self._layer.block_dv + 1) * 4


@dataclass(frozen=True, slots=True)
class Launches:
    """Bound launches of attention and of the merge, if any, for one layer."""

    kernel: Callable[..., None]
    merge: BoundKernel | None

    def __call__(self, *pointers: int) -> None:
        self.kernel(*pointers)
        if self.merge is not None:
            self.merge(pointers[3], pointers[6])
