"""The backend `hopper_decode`: its kernel in CUDA C++; the keys are cut by the kernel that cuts those of Triton's decode."""

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
from headway.backends.options import Options, count_of
from headway.backends.triton.backend import GRAPH_CONTEXT, TritonAttention
from headway.backends.triton.configs import DecodeConfig, architecture
from headway.backends.triton.decode import Decode, DecodePlan, NewRows
from headway.backends.triton.layer import KernelSetup, Layer
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import HND, NHD, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.runtime.nvrtc.launch import Arguments, CompiledKernel, Launch
from headway.kernels.runtime.nvrtc.store import load
from headway.kernels.runtime.probe import HALF_DTYPES
from headway.kernels.runtime.triton_launch import Workspace

ARGUMENTS = Struct("=13Q16q5i2f4x")
"""struct DecodeArguments of decode.cu."""
TILE = 16
"""Keys of a warp's tile."""
_MOST_COLUMNS = 512
"""Eights of query rows times elements of a head, at most: the sums lie in registers."""
_LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Ring:
    """How keys get into shared memory."""

    warps: int
    """Warps of a block of threads."""
    stages: int
    """Tiles of a warp's ring."""

    @classmethod
    def of(cls, head_dim: int) -> Ring:
        """The fastest of those tried on an H100 for heads of 128; of longer rows half the warps have room."""
        return cls(8, 2) if head_dim <= 128 else cls(4, 3)

    @property
    def keys(self) -> int:
        """Keys of a tile of a block of threads."""
        return self.warps * TILE


def config_of(ring: Ring) -> DecodeConfig:
    """What the split rule assumes: fitted to 16/8 heads of 128 on an H100, in steps of a model (docs/notes/kernels.md).

    merge_launch_us: of counting arrivals, and of reading what other blocks of threads have left.
    """
    return DecodeConfig(
        block_n=ring.keys,
        num_warps=ring.warps,
        num_stages=ring.stages,
        residents=1,
        tile_us=1.17 * ring.keys / 128,
        wave_us=0.9,
        merge_us=0.28,
        merge_row_us=0.0,
        merge_launch_us=1.6,
        bytes_per_us=4.1e6,
        most_rounds=4,
    )


def row_blocks(rows: int, head_dim: int) -> int:
    """Eights of query rows that a tile holds, for so many rows."""
    return next(count for count in (4, 2, 1) if count == 1 or (count * head_dim <= _MOST_COLUMNS and 4 * count < rows))


def variant_of(spec: AttentionSpec, block_size: int, blocks: int) -> Variant:
    """The compilation that serves a layer. blocks: of `row_blocks`."""
    ring = Ring.of(spec.head_dim)
    constants = {
        "HALF_IS_BF16": int(spec.dtype == torch.bfloat16),
        "HEAD_DIM": spec.head_dim,
        "GROUP": spec.group_size,
        "BLOCK_SIZE": block_size,
        "ROW_BLOCKS": blocks,
        "WARPS": ring.warps,
        "STAGES": ring.stages,
        "SOFTCAP": int(spec.softcap is not None),
        "WINDOW": int(spec.sliding_window is not None),
        "SINKS": int(spec.sinks is not None),
    }
    return Variant(Path(__file__).parent / "csrc", "decode.cu", tuple(constants.items()))


def shared_bytes(head_dim: int, blocks: int) -> int:
    """Dynamic shared memory: the rings, and in their place the sums of all warps, and a number."""
    ring = Ring.of(head_dim)
    rings = ring.warps * ring.stages * 2 * TILE * 16 * (head_dim // 8 | 1)
    sums = ring.warps * 8 * blocks * (head_dim + 4 + 2) * 4 + 4
    return max(rings, sums)


class HopperDecode(Decode):
    """Decode and verification of one layer kind, on one stream at a time."""

    def __init__(self, setup: KernelSetup, num_splits: int | None) -> None:
        """:raises UnsupportedError: no compiler. BackendError: the kernel does not compile."""
        super().__init__(setup, num_splits)
        spec = setup.spec
        self.configs = (config_of(Ring.of(spec.head_dim)),)
        self._kernel = cache(partial(_kernel, spec, setup.block_size))
        self._arguments = Arguments(bytes(ARGUMENTS.size))
        self._launch = cache(partial(_launch, spec.head_dim))
        cap = spec.softcap
        self._scales = (spec.scale * _LOG2E, 0.0) if cap is None else (spec.scale / cap, cap * _LOG2E)
        self._kernel(row_blocks(spec.group_size, spec.head_dim))

    def tile(self, max_query_len: int) -> tuple[int, int, int]:
        """(Rows of a tile, rows of its partial results, tiles of a kv head) for so many query tokens."""
        rows = self._spec.group_size * max_query_len
        tile = 8 * row_blocks(rows, self._spec.head_dim)
        return tile, min(rows, tile), -(-rows // tile)

    def plan(self, metadata: AttentionMetadata) -> DecodePlan:
        """As `Decode.plan`; the kernel for so many query rows is compiled now, if it has not been."""
        plan = super().plan(metadata)
        self._kernel(plan.block_m // 8)
        return plan

    def run(
        self, q: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor, lse: Tensor | None = None, new: NewRows = None
    ) -> None:
        """As `Decode.run`."""
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
            plan.arrivals.data_ptr(),
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
        if written is not out:
            out.copy_(written)


def _kernel(spec: AttentionSpec, block_size: int, blocks: int) -> CompiledKernel:
    kernel = load(variant_of(spec, block_size, blocks), "decode", spec.device, ARCH)
    kernel.allow_shared(shared_bytes(spec.head_dim, blocks))
    return kernel


def _launch(head_dim: int, programs: int, blocks: int) -> Launch:
    return Launch((programs, 1, 1), 32 * Ring.of(head_dim).warps, shared_bytes(head_dim, blocks), overlaps=True)


def _lies_in_words(rows: Tensor, elements: int) -> bool:
    """Whether rows of a tensor [.., .., head_dim] begin at multiples of so many elements, and lie in one piece."""
    together = rows.data_ptr() // rows.element_size() | rows.stride(0) | rows.stride(1)
    return rows.stride(2) == 1 and together % elements == 0


def setup_of(spec: AttentionSpec, layout: CacheLayout, block_size: int) -> KernelSetup:
    """Return what kernels on a layer's GPU share."""
    return KernelSetup(
        spec=spec,
        layer=Layer.of(spec),
        layout=layout,
        block_size=block_size,
        arch=architecture(torch.cuda.get_device_capability(spec.device)),
        multiprocessors=torch.cuda.get_device_properties(spec.device).multi_processor_count,
        workspace=Workspace(spec.device),
    )


class CutDecoding(HopperBackend):
    """Base of our backends for H100 and H200 whose keys are cut by Triton's kernel."""

    graph_level = GraphLevel.UNIFORM
    _decode: Decode

    @classmethod
    def available(cls) -> Support:
        """What `hopper` needs, and Triton, whose kernel cuts keys."""
        support = HopperAttention.available()
        return support & TritonAttention.available() if support else support

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Partial results where keys are split."""
        return self._decode.workspace_bytes(max_num_seqs)

    def plan(self, metadata: AttentionMetadata) -> DecodePlan:
        """Cut the sequences into chunks, once for all layers; an extend is cut as a decode of many tokens."""
        return self._decode.plan(metadata)

    def plan_for_capture(self, metadata: AttentionMetadata) -> DecodePlan:
        """As `plan`, for contexts of at most GRAPH_CONTEXT."""
        return self.plan(replace(metadata, seq_lens_cpu=metadata.seq_lens_cpu.clamp_max(GRAPH_CONTEXT)))

    def plan_for_replay(self, plan: DecodePlan, metadata: AttentionMetadata) -> None:
        """Cut the sequences into chunks for the lengths that the device has now."""
        self._decode.cut_again(plan, metadata.kv_lens)

    def decode(self, q: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention of the newest tokens over the cache."""
        self._decode.run(q, cache, plan, out, lse)


class HopperDecoding(CutDecoding):
    """Our CUDA C++ decode for H100 and H200: queries are the narrow side of the products, and a warp waits for no other."""

    name = "hopper_decode"
    capabilities = Capabilities(
        phases=frozenset({Phase.DECODE}),
        layouts=(NHD, HND),
        dtypes=HALF_DTYPES,
        block_multiple=16,
        head_dims=HEAD_DIMS,
        lse=True,
        shares_plans=True,
        features=frozenset({"sliding_window", "softcap", "sinks"}),
    )
    options: ClassVar[Mapping[str, str]] = {"num_splits": "splits of every sequence's keys, in place of the built-in rule"}
    decode_writes = True

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        self._decode = HopperDecode(setup_of(spec, layout, block_size), count_of(self.name, options, "num_splits"))

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Rows must lie at multiples of 16 bytes, which are copied at once."""
        return has_rows_of_16_bytes("key", cache.logical_key) & has_rows_of_16_bytes("value", cache.logical_value)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        """Name of the kernel that will really run."""
        return "decode (CUDA C++, sm_90a)"

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor) -> None:
        """Attention of one new token a sequence over the cache, which gets its k and v."""
        self._decode.run(q, cache, plan, out, new=(k, v))
