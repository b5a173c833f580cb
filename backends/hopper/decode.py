"""The attention backend `hopper_decode`: split-KV decode in CUDA C++, with the split schedule of the Triton decode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from struct import Struct
from typing import ClassVar

import torch
from torch import Tensor

from headway.backends.hopper.backend import HopperAttention, HopperBackend, has_rows_of_16_bytes
from headway.backends.hopper.tiles import ARCH, HEAD_DIMS
from headway.backends.triton.backend import GRAPH_CONTEXT, TritonAttention
from headway.backends.triton.configs import DecodeConfig, architecture
from headway.backends.triton.decode import Decode, DecodePlan, NewRows
from headway.backends.triton.layer import KernelSetup, Layer
from headway.core.contract.backend import Options
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.runtime.nvrtc.launch import Arguments, CompiledKernel, Launch
from headway.kernels.runtime.nvrtc.store import load
from headway.kernels.runtime.triton_launch import Workspace

ARGUMENTS = Struct("=13Q16q5i2f4x")
"""Layout of `struct DecodeArguments` in decode.cu."""
TILE = 16
"""Number of keys in a warp's tile."""
_MAX_COLUMNS = 512  # Maximum of (query rows / 8) x head_dim: accumulators are in registers
_LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Ring:
    """Buffers of keys in shared memory: one ring of tiles per warp."""

    warps: int
    """Number of warps per thread block."""
    stages: int
    """Number of tiles in a warp's ring."""

    @classmethod
    def of(cls, head_dim: int) -> Ring:
        """Return the ring that was fastest on an H100 for head_dim 128. With longer rows, shared memory has space for only half
        the warps, or for four tiles of 33 KB, whose keys are replaced while their values are multiplied."""
        return cls(8, 2) if head_dim <= 128 else cls(4, 3) if head_dim <= 256 else cls(4, 1)

    @property
    def keys(self) -> int:
        """Number of keys in a thread block's tile."""
        return self.warps * TILE


def config_of(head_dim: int) -> DecodeConfig:
    """Return the cost model's parameters. They were fitted on an H200 to 8 kv heads of 64, 128 and 256 elements, and are
    estimates for longer rows. tile_us is the time of one warp's tile, because warps do not wait for each other. wave_us grows
    with the bytes in the rings. merge_launch_us is the time to count and read the parts, or of a launch that merges."""
    ring, wide = Ring.of(head_dim), head_dim > HEAD_DIMS[-1]
    return DecodeConfig(
        block_n=32 if wide else ring.keys,
        num_warps=ring.warps,
        num_stages=ring.stages,
        residents=1,
        tile_us=1.17 if wide else 1.6,
        wave_us=3.0 if wide else 6.0 * ring.keys * head_dim / 128**2,
        merge_us=0.03 if wide else 0.28,
        merge_row_us=0.0,
        merge_launch_us=2.0 if wide else 1.6,
        bytes_per_us=4.1e6,
        max_rounds=4,
    )


def row_blocks(rows: int, head_dim: int) -> int:
    """Return the number of 8-row blocks in a tile, for a number of query rows."""
    return next(count for count in (4, 2, 1) if count == 1 or (count * head_dim <= _MAX_COLUMNS and 4 * count < rows))


def variant_of(spec: AttentionSpec, block_size: int, blocks: int) -> Variant:
    """Return the compiled variant for a layer. blocks: result of `row_blocks`."""
    ring = Ring.of(spec.head_dim)
    constants = {
        "HALF_IS_BF16": int(spec.dtype == torch.bfloat16),
        "HEAD_DIM": spec.head_dim,
        "GROUP": spec.group_size,
        "BLOCK_SIZE": block_size,
        "ROW_BLOCKS": blocks,
        "WARPS": ring.warps,
        "STAGES": ring.stages,
        "UNIT": config_of(spec.head_dim).block_n,
        "SOFTCAP": int(spec.softcap is not None),
        "WINDOW": int(spec.sliding_window is not None),
        "SINKS": int(spec.sinks is not None),
    }
    return Variant(Path(__file__).parent / "csrc", "decode.cu", tuple(constants.items()))


def shared_bytes(head_dim: int, blocks: int) -> int:
    """Return the size of dynamic shared memory in bytes. It holds a counter and the rings, whose memory is reused for the
    accumulators of all warps."""
    ring = Ring.of(head_dim)
    rings = ring.warps * ring.stages * (2 * TILE * 16 * (head_dim // 8 | 1) + 16)
    sums = ring.warps * 8 * blocks * (head_dim + 4 + 2) * 4 + 4
    return max(rings, sums)


class HopperDecode(Decode):
    """Decode and verification for one kind of layer, on one stream at a time."""

    def __init__(self, setup: KernelSetup, num_splits: int | None) -> None:
        """Prepare decode.

        :raises UnsupportedError: if no compiler is found.
        :raises BackendError: if a kernel does not compile.
        """
        super().__init__(setup, num_splits)
        spec = setup.spec
        self.configs = (config_of(spec.head_dim),)
        self._merges_apart = spec.head_dim > HEAD_DIMS[-1]
        self._kernel = cache(partial(_kernel, spec, setup.block_size))
        self._arguments = Arguments(bytes(ARGUMENTS.size))
        self._launch = cache(partial(_launch, spec.head_dim))
        cap = spec.softcap
        self._scales = (spec.scale * _LOG2E, 0.0) if cap is None else (spec.scale / cap, cap * _LOG2E)
        self._kernel(row_blocks(spec.group_size, spec.head_dim))

    def tile(self, max_query_len: int) -> tuple[int, int, int]:
        """Return (rows of a tile, rows of a tile's partial results, tiles per kv head). max_query_len: maximum number of query
        tokens per sequence."""
        rows = self._spec.group_size * max_query_len
        tile = 8 * row_blocks(rows, self._spec.head_dim)
        return tile, min(rows, tile), -(-rows // tile)

    def plan(self, metadata: AttentionMetadata) -> DecodePlan:
        """Return the plan of a decode step, and compile the kernel for the step's number of query rows if necessary."""
        plan = super().plan(metadata)
        self._kernel(plan.block_m // 8)
        return plan

    def run(
        self, q: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor, lse: Tensor | None = None, new: NewRows = None
    ) -> None:
        if len(plan.chunks.table) == 0:
            return
        assert new is None or plan.max_query_len == 1
        written = out if _lies_in_words(out, 2) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        q = q if _lies_in_words(q, 2) else q.contiguous()
        k, v = (q, q) if new is None else (each if _lies_in_words(each, 8) else each.contiguous() for each in new)
        key, value = cache.logical_key, cache.logical_value
        packed = ARGUMENTS.pack(
            q.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            0 if new is None else k.data_ptr(),
            0 if new is None else v.data_ptr(),
            written.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            plan.block_table.data_ptr(),
            plan.chunks.table.data_ptr(),
            self._layer.sinks.data_ptr(),
            plan.partial.data_ptr(),
            plan.lse.data_ptr(),
            0 if self._merges_apart else plan.arrivals.data_ptr(),
            *q.stride()[:2],
            *written.stride()[:2],
            0 if lse is None else lse.stride(0),
            *k.stride()[:2],
            *v.stride()[:2],
            *key.stride()[:3],
            *value.stride()[:3],
            plan.block_table.stride(0),
            plan.items,
            self._spec.num_kv_heads,
            plan.rows,
            self._spec.sliding_window or 0,
            int(plan.early),
            *self._scales,
        )
        self._arguments.set(packed)
        blocks = plan.block_m // 8
        self._kernel(blocks)(self._launch(plan.items * len(plan.chunks.table), blocks), self._arguments)
        if self._merges_apart:
            self.merge(plan, written, q, lse)
        if written is not out:
            out.copy_(written)


def _kernel(spec: AttentionSpec, block_size: int, blocks: int) -> CompiledKernel:
    kernel = load(variant_of(spec, block_size, blocks), "decode", spec.device, ARCH)
    kernel.allow_shared(shared_bytes(spec.head_dim, blocks))
    return kernel


def _launch(head_dim: int, programs: int, blocks: int) -> Launch:
    return Launch((programs, 1, 1), 32 * Ring.of(head_dim).warps, shared_bytes(head_dim, blocks), overlaps=True)


def _lies_in_words(rows: Tensor, elements: int) -> bool:
    """Return whether rows of a tensor [.., .., head_dim] are contiguous and begin at multiples of `elements` elements."""
    together = rows.data_ptr() // rows.element_size() | rows.stride(0) | rows.stride(1)
    return rows.stride(2) == 1 and together % elements == 0


def setup_of(spec: AttentionSpec, layout: CacheLayout, block_size: int) -> KernelSetup:
    """Return the objects that the kernels for a layer share."""
    return KernelSetup(
        spec=spec,
        layer=Layer.of(spec),
        layout=layout,
        block_size=block_size,
        arch=architecture(torch.cuda.get_device_capability(spec.device)),
        multiprocessors=torch.cuda.get_device_properties(spec.device).multi_processor_count,
        workspace=Workspace(spec.device),
    )


class SplitDecoding(HopperBackend):
    """Base of H100 and H200 backends whose split schedule is computed by a Triton kernel."""

    graph_level = GraphLevel.UNIFORM
    _decode: Decode

    @classmethod
    def available(cls) -> Support:
        support = HopperAttention.available()
        return support & TritonAttention.available() if support else support

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        return self._decode.workspace_bytes(max_num_seqs)

    def plan(self, metadata: AttentionMetadata) -> DecodePlan:
        """Split the sequences into chunks, once for all layers. An extend is treated as a decode of many tokens."""
        return self._decode.plan(metadata)

    def plan_for_capture(self, metadata: AttentionMetadata) -> DecodePlan:
        """Return the plan for a capture, with tile sizes for contexts of at most GRAPH_CONTEXT."""
        return self.plan(replace(metadata, seq_lens_cpu=metadata.seq_lens_cpu.clamp_max(GRAPH_CONTEXT)))

    def plan_for_replay(self, plan: DecodePlan, metadata: AttentionMetadata) -> None:
        """Split the sequences into chunks for the current lengths on the device."""
        self._decode.split_again(plan, metadata.kv_lens)

    def decode(self, q: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor, lse: Tensor | None = None) -> None:
        self._decode.run(q, cache, plan, out, lse)


class HopperDecoding(SplitDecoding):
    """CUDA C++ decode for H100 and H200: the queries are the narrow operand of the MMAs, and warps do not wait for each other."""

    name = "hopper_decode"
    capabilities = replace(
        HopperAttention.capabilities, phases=frozenset({Phase.DECODE}), v_head_dims=(), max_group_size=None, dense_prefill=False
    )
    options: ClassVar[Mapping[str, str]] = {"num_splits": "splits of every sequence's keys, in place of the built-in rule"}
    decode_writes = True

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        self._decode = HopperDecode(setup_of(spec, layout, block_size), self.count_option(options, "num_splits"))

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Return whether the cache's rows are 16-byte aligned, as the kernel's 16-byte copies require."""
        return has_rows_of_16_bytes("key", cache.logical_key) & has_rows_of_16_bytes("value", cache.logical_value)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        return "decode (CUDA C++, sm_90a)"

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor) -> None:
        self._decode.run(q, cache, plan, out, new=(k, v))
