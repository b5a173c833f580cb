"""Plan and launch of the latent kernel: cut and merged as Triton's latent decode is, by its kernels; computed by ours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from headway.backends.hopper.tiles import ARCH, SHARED_BYTES
from headway.backends.nvrtc.arguments import Arguments
from headway.backends.nvrtc.launch import Launch
from headway.backends.nvrtc.store import load
from headway.backends.nvrtc.tensor_map import MAP_BYTES, tensor_map
from headway.backends.nvrtc.variant import Variant
from headway.backends.triton.configs import Architecture, DecodeConfig
from headway.backends.triton.decode import DecodePlan
from headway.backends.triton.latent import LatentDecode
from headway.backends.triton.launch import Bound, aligned
from headway.backends.triton.layer import Layer
from headway.backends.triton.workspace import Workspace
from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.contract.spec import AttentionSpec

HEAD = (576, 512)
"""head_dim and v_head_dim: DeepSeek's."""
ROWS = 64
"""Query rows of a tile."""
KEYS = 64
_PANEL = 64
"""Elements of a row that one copy takes, 128 bytes."""
_THREADS = 384
_LOG2E = math.log2(math.e)
_ARGUMENTS = Struct("=6Q4qif")
"""struct LatentArguments of latent.cu."""
_MOST_MAPS = 1024
CONFIG = DecodeConfig(
    KEYS, 12, 2, ROWS, 1, tile_us=1.6, wave_us=6.4, merge_us=0.08, merge_row_us=0, merge_launch_us=2.8, bytes_per_us=4.1e6
)
"""What the split rule assumes."""


@dataclass(frozen=True, slots=True)
class HeadTile:
    """How query rows are divided into tiles: several tokens where their heads fit together, else part of a token's heads."""

    heads: int
    tokens: int

    @classmethod
    def of(cls, num_heads: int) -> HeadTile | None:
        """None: no tiles of equal size are small enough and cover the heads."""
        parts = -(-num_heads // ROWS)
        return None if num_heads % parts else cls(num_heads // parts, max(ROWS // num_heads, 1))

    @property
    def rows(self) -> int:
        """In use."""
        return self.heads * self.tokens


def variant_of(spec: AttentionSpec, tile: HeadTile, block_size: int) -> Variant:
    """The compilation that serves a layer."""
    constants = {
        "HALF_IS_BF16": int(spec.dtype == torch.bfloat16),
        "HEAD_DIM": spec.head_dim,
        "V_HEAD_DIM": spec.v_head_dim,
        "GROUPS": 1,
        "KEYS": KEYS,
        "STAGES": 2,
        "QUERY_STAGES": 1,
        "BOX": math.gcd(KEYS, block_size),
        "BLOCK_SIZE": block_size,
        "TURNS": 0,
        "SOFTCAP": 0,
        "WINDOW": 0,
        "SHARED_BYTES": SHARED_BYTES,
        "HEADS": tile.heads,
        "TOKENS": tile.tokens,
    }
    return Variant(Path(__file__).parent / "csrc", "latent.cu", tuple(constants.items()))


class HopperLatentDecode(LatentDecode):
    """Decode, verification and extend of one layer kind, on one stream at a time."""

    def __init__(
        self,
        spec: AttentionSpec,
        layer: Layer,
        layout: CacheLayout,
        block_size: int,
        arch: Architecture,
        multiprocessors: int,
        num_splits: int | None,
        workspace: Workspace,
    ) -> None:
        """:raises UnsupportedError: no compiler. BackendError: the kernel does not compile."""
        super().__init__(spec, layer, layout, block_size, arch, multiprocessors, num_splits, workspace)
        tile = HeadTile.of(spec.num_heads)
        assert tile is not None, "asked by supports"
        self._tile = tile
        self._kernel = load(variant_of(spec, tile, block_size), "latent", spec.device, ARCH)
        self._kernel.allow_shared(SHARED_BYTES)
        self._arguments = Arguments(bytes(MAP_BYTES), bytes(MAP_BYTES), bytes(_ARGUMENTS.size))
        self._grids: dict[tuple[int, int], Launch] = {}
        self._maps: dict[tuple[object, ...], bytes] = {}

    def _configs(self, max_query_len: int) -> tuple[DecodeConfig]:
        return (CONFIG,)

    def tile(self, max_query_len: int) -> tuple[int, int, int]:
        """(Rows in use, ROWS, tiles of a sequence) for so many query tokens."""
        return self._tile.rows, ROWS, -(-max_query_len * self._spec.num_heads // self._tile.rows)

    def run(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: DecodePlan,
        out: Tensor,
        lse: Tensor | None = None,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """q, out: [num_tokens, num_heads, head_dim or v_head_dim]; lse: float32 [num_heads, num_tokens]."""
        assert new is None
        if len(plan.chunks.table) == 0:
            return
        size = plan.items, len(plan.chunks.table)
        launch = self._grids.get(size)
        if launch is None:
            launch = self._grids[size] = Launch((*size, 1), _THREADS, SHARED_BYTES)
        addresses = (plan.block_table, plan.chunks.table, plan.partial, plan.lse)
        packed = _ARGUMENTS.pack(
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            *(tensor.data_ptr() for tensor in addresses),
            out.stride(0),
            out.stride(1),
            0 if lse is None else lse.stride(0),
            plan.block_table.stride(0),
            self._spec.num_heads,
            self._spec.scale * _LOG2E,
        )
        self._arguments.set(self._query_map(q), self._key_map(cache), packed)
        self._kernel(launch, self._arguments)
        if not plan.chunks.split:
            return
        sums = q if lse is None else lse
        key = out.stride(), aligned(out.data_ptr()), lse is None or lse.stride(0)
        known = plan.launches.get(key)
        if known is not None:
            known(out.data_ptr(), sums.data_ptr())
            return
        bound: Bound | None = self._merge(plan, out, sums, lse, (key, plan.config))
        if bound is not None:
            plan.launches[key] = bound

    def _query_map(self, q: Tensor) -> bytes:
        """Queries as [token, kv head, head, dim], by tiles."""
        box = self._tile.tokens, 1, self._tile.heads, _PANEL
        return self._map(q.view(q.shape[0], 1, *q.shape[1:]), box)

    def _key_map(self, cache: LayerCache) -> bytes:
        """Latents as [block, head, slot, dim]."""
        return self._map(cache.key.transpose(1, 2), (1, 1, math.gcd(KEYS, self._block_size), _PANEL))

    def _map(self, view: Tensor, box: tuple[int, ...]) -> bytes:
        key = view.data_ptr(), view.shape, view.stride(), box
        known = self._maps.get(key)
        if known is None:
            if len(self._maps) >= _MOST_MAPS:
                self._maps.clear()
            known = self._maps[key] = tensor_map(view, box)
        return known
