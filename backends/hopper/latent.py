"""The attention backend `hopper_mla`: MLA in CUDA C++, with the split schedule and merge of the Triton MLA decode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from struct import Struct
from typing import ClassVar

import torch
from torch import Tensor
from triton import next_power_of_2

from headway.backends.hopper.backend import has_rows_of_16_bytes
from headway.backends.hopper.decode import SplitDecoding, setup_of
from headway.backends.hopper.tiles import ARCH, SHARED_BYTES
from headway.backends.triton.chunk_kernel import max_chunk_count
from headway.backends.triton.configs import DecodeConfig
from headway.backends.triton.decode import DecodePlan, NewRows
from headway.backends.triton.latent_kernel import LatentDecode
from headway.backends.triton.layer import KernelSetup
from headway.core.contract.backend import Options
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.errors import BackendError
from headway.core.contract.layout import LATENT, CacheLayout, LayerCache
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.runtime.nvrtc.launch import MAP_BYTES, Arguments, Launch, tensor_map
from headway.kernels.runtime.nvrtc.store import load
from headway.kernels.runtime.probe import HALF_DTYPES

HEAD = (576, 512)
"""head_dim and v_head_dim of DeepSeek's absorbed MLA."""
ROWS = 64
"""Number of query rows per tile."""
KEYS = 64
"""Number of keys per tile."""
MAX_ROUNDS = 8
"""Maximum number of programs per SM in a step with splits."""
MAX_PARTS = 10
"""Maximum number of partial results per SM. Each takes 131 KB. Rounding in the split may exceed MAX_ROUNDS by a quarter."""
THREADS = 384
ARGUMENTS = Struct("=6Q4q3if")
"""Layout of `struct LatentArguments` in latent.cuh."""
_PANEL = 64  # Elements of a row per copy: 128 bytes
_LOG2E = math.log2(math.e)
_MEMORY_BYTES_PER_US, _L2_BYTES_PER_US = 4.1e6, 5.5e6


@dataclass(frozen=True, slots=True)
class HeadTile:
    """Division of query rows into tiles. A tile contains several tokens with all their heads if these fit, otherwise some of one
    token's heads."""

    heads: int
    tokens: int
    cluster: int = 1
    """Number of thread blocks that process heads of the same token and copy keys for each other."""

    @classmethod
    def of(cls, num_heads: int, cluster: int | None = None) -> HeadTile | None:
        """Return tiles for a layer, or None if the layer's heads do not divide into equal parts of at most ROWS. cluster: upper
        limit for the cluster size that the rule selects."""
        parts = -(-num_heads // ROWS)
        if num_heads % parts:
            return None
        best = 2 if parts % 2 == 0 else 1
        return cls(num_heads // parts, max(ROWS // num_heads, 1), min(cluster or best, best))

    @property
    def rows(self) -> int:
        """Number of tile rows in use."""
        return self.heads * self.tokens


def variant_of(spec: AttentionSpec, tile: HeadTile, block_size: int) -> Variant:
    """Return the compiled variant for a layer."""
    constants = {
        "HALF_IS_BF16": int(spec.dtype == torch.bfloat16),
        "HEAD_DIM": spec.head_dim,
        "V_HEAD_DIM": spec.v_head_dim,
        "GROUPS": 2 * tile.cluster,
        "KEYS": KEYS,
        "STAGES": 2,
        "QUERY_STAGES": 1,
        "QUERY_PADDING": 0,
        "BOX": math.gcd(KEYS, block_size),
        "BLOCK_SIZE": block_size,
        "TURNS": 0,
        "SOFTCAP": 0,
        "WINDOW": 0,
        "SHARED_BYTES": SHARED_BYTES,
        "HEADS": tile.heads,
        "TOKENS": tile.tokens,
        "CLUSTER": tile.cluster,
    }
    return Variant(Path(__file__).parent / "csrc", "latent.cu", tuple(constants.items()))


class HopperLatentDecode(LatentDecode):
    """Decode, verification and extend for one kind of layer, on one stream at a time."""

    def __init__(self, setup: KernelSetup, num_splits: int | None, tile: HeadTile) -> None:
        """Prepare decode.

        :raises UnsupportedError: if no compiler is found.
        :raises BackendError: if a kernel does not compile.
        """
        super().__init__(setup, num_splits)
        spec, block_size = setup.spec, setup.block_size
        self._tile = tile
        self._kernel = load(variant_of(spec, tile, block_size), "latent", spec.device, ARCH)
        self._kernel.allow_shared(SHARED_BYTES)
        self._arguments = Arguments(*[bytes(MAP_BYTES)] * 3, bytes(ARGUMENTS.size))
        self._launch = cache(partial(_launch, tile.cluster))

    def _configs(self, max_query_len: int) -> tuple[DecodeConfig]:
        """Return the parameters of the split rule. If a sequence has several tiles, they run concurrently and read keys from the
        L2 cache."""
        alone = self.tile(max_query_len)[2] == self._tile.cluster
        return (config_of(_MEMORY_BYTES_PER_US * self._tile.cluster if alone else _L2_BYTES_PER_US * self._tile.cluster),)

    def tile(self, max_query_len: int) -> tuple[int, int, int]:
        """Return (rows of a tile, rows of a tile's partial results, tiles per sequence). max_query_len: maximum number of query
        tokens per sequence."""
        rows = max_query_len * self._spec.num_heads
        return self._tile.rows, min(next_power_of_2(rows), self._tile.rows), -(-rows // self._tile.rows)

    def splits_evenly(self, programs: int, splits: int) -> bool:
        """Return whether every sequence is split into `splits` chunks. This is also true if, without splits, there are enough
        programs per SM that splitting one long sequence would cost more than it gains."""
        many = splits == 1 and 3 * programs > 2 * MAX_PARTS * self.multiprocessors
        return many or super().splits_evenly(programs, splits)

    def workspace_bytes(self, max_num_seqs: int) -> int:
        """Return the maximum size of the partial results, in bytes. Larger steps are not split, unless the number of splits is
        fixed."""
        fixed = max_chunk_count(max_num_seqs, self._num_splits, True) * self.tile(1)[2] if self._num_splits else 0
        most = max(MAX_PARTS * self.multiprocessors, fixed)
        return most * ROWS * (self._spec.v_head_dim + 1) * 4

    def run(
        self, q: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor, lse: Tensor | None = None, new: NewRows = None
    ) -> None:
        """Launch the kernel for one layer. q, out: [num_tokens, num_heads, head_dim or v_head_dim]; lse: float32 [num_heads,
        num_tokens]."""
        assert new is None
        if len(plan.chunks.table) == 0:
            return
        if out.data_ptr() & 15 or (out.stride(0) | out.stride(1)) & 7:
            raise BackendError(f"hopper_mla: out needs rows at multiples of 16 bytes, got strides {out.stride()}")
        packed = ARGUMENTS.pack(
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            plan.block_table.data_ptr(),
            plan.chunks.table.data_ptr(),
            plan.partial.data_ptr(),
            plan.lse.data_ptr(),
            *out.stride()[:2],
            0 if lse is None else lse.stride(0),
            plan.block_table.stride(0),
            self._spec.num_heads,
            plan.items,
            plan.rows,
            self._spec.scale * _LOG2E,
        )
        # [block, slot, head, dim, 1], viewed as [block, head, slot, dim]
        latents = cache.logical_key.squeeze(4).transpose(1, 2)
        keys = tensor_map(latents, (1, 1, math.gcd(KEYS, self._block_size), _PANEL))
        self._arguments.set(self._query_map(q), keys, keys, packed)
        self._kernel(self._launch(plan.items * len(plan.chunks.table)), self._arguments)
        self.merge(plan, out, q, lse)

    def _query_map(self, q: Tensor) -> bytes:
        """Return the tensor map of queries, viewed as [token, kv head, head, dim], with boxes of one tile."""
        return tensor_map(q.unsqueeze(1), (self._tile.tokens, 1, self._tile.heads, _PANEL))


def _launch(cluster: int, programs: int) -> Launch:
    grid = programs // cluster, cluster, 1
    return Launch(grid, THREADS, SHARED_BYTES, overlaps=True, cluster=(1, cluster, 1))


def config_of(bytes_per_us: float) -> DecodeConfig:
    """Return the split rule's cost model, which is derived from the kernel's MMAs. A tile takes 2,176 tensor-core cycles and
    about 600 cycles of waiting."""
    return DecodeConfig(
        KEYS,
        num_warps=THREADS // 32,
        num_stages=2,
        block_m=ROWS,
        residents=1,
        tile_us=1.6,
        wave_us=5.5,
        merge_us=0.08,
        merge_row_us=0,
        merge_launch_us=2.8,
        bytes_per_us=bytes_per_us,
        max_rounds=MAX_ROUNDS,
    )


_HINT = "name triton, which runs on every GPU"


class HopperLatent(SplitDecoding):
    """CUDA C++ MLA for H100 and H200: a tile of keys is copied once, and used as both key and value for 64 query rows."""

    name = "hopper_mla"
    capabilities = Capabilities(
        phases=frozenset({Phase.EXTEND, Phase.DECODE}),
        layouts=(LATENT,),
        dtypes=HALF_DTYPES,
        block_multiple=16,
        head_dims=(),
        v_head_dims=(HEAD,),
        value_in_key=True,
        lse=True,
        shares_plans=True,
    )
    options: ClassVar[Mapping[str, str]] = {
        "num_splits": "splits of every sequence's keys, in place of the built-in rule",
        "cluster": "blocks of threads that copy keys for each other, 1 or 2, in place of 2 where a token has 128 heads",
    }

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        tile = HeadTile.of(spec.num_heads, self.count_option(options, "cluster", 2))
        assert tile is not None, "asked by supports"
        splits = self.count_option(options, "num_splits")
        self._decode = HopperLatentDecode(setup_of(spec, layout, block_size), splits, tile)

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Return whether the backend supports a layer. It needs absorbed MLA, a Hopper GPU, and query heads that divide into
        equal tiles."""
        support = super().supports(spec, layout, block_size, phase)
        if not spec.value_in_key or spec.num_kv_heads != 1:
            got = f"{spec.num_kv_heads} kv heads, value_in_key={spec.value_in_key}"
            support &= Support.no("layer", "absorbed latent attention, of one kv head", got)
        if HeadTile.of(spec.num_heads) is None:
            support &= Support.no("query heads", f"equal parts of at most {ROWS}", spec.num_heads, _HINT)
        return support

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Return whether the cache's rows are 16-byte aligned, as TMA requires."""
        return has_rows_of_16_bytes("key", cache.logical_key)

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        return "latent (CUDA C++, sm_90a)"

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        self._decode.run(q, cache, plan, out, lse)
