"""Which tiles serve a layer, and the compilation that each of them is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.nvrtc.compiler import Variant

ARCH = "sm_90a"
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
UNEQUAL = ((192, 128),)
"""Pairs (head_dim, v_head_dim): the expanded attention of DeepSeek-V2."""
MAX_GROUP = 64
"""Most query heads that share a kv head: the rows of the narrow tile."""
SHARED_BYTES = 227 * 1024
"""Shared memory that a block of threads can ask for."""
_FOLDER = Path(__file__).parent / "csrc"
_PANEL = 64


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """How large the work of one step of a block of threads is."""

    groups: int
    """Warpgroups that multiply, 64 query rows each."""
    keys: int
    """Keys of a tile; a multiple of 16."""
    stages: int
    """Tiles of keys, and of values, that shared memory holds."""
    query_stages: int = 2
    """Tiles of queries: with two, those of the next item are copied while this one is worked on."""
    turns: bool = True
    """Whether the warpgroups take turns at the tensor cores."""

    @property
    def rows(self) -> int:
        """Query rows: heads that share a kv head, of neighbouring tokens."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroups that multiply and the one that copies."""
        return 128 * (self.groups + 1)

    def shared_bytes(self, head_dim: int, v_head_dim: int) -> int:
        """Dynamic shared memory: struct Layout of shape.cuh, and what aligning its beginning may take."""
        k_row, v_row = (128 * -(-dim // _PANEL) for dim in (head_dim, v_head_dim))
        barriers = 8 * (2 * self.query_stages + 4 + 4 * self.stages)
        return self.query_stages * self.rows * k_row + self.stages * self.keys * (k_row + v_row) + 2 * 48 + barriers + 1024


@dataclass(frozen=True, slots=True)
class TilePair:
    """The two tiles of a layer kind."""

    wide: AttentionTile
    """For many rows: the warpgroups take turns at the tensor cores."""
    narrow: AttentionTile
    """For at most 64 rows a sequence and kv head, or too few to occupy the GPU."""


def tiles_of(head_dim: int, v_head_dim: int) -> TilePair:
    """The largest tiles that registers and shared memory hold: FlashAttention-3's, but for heads of 64."""
    longest = max(head_dim, v_head_dim)
    if longest <= 64:
        return TilePair(AttentionTile(3, 128, 3), AttentionTile(1, 128, 4))
    if longest <= 128:
        return TilePair(AttentionTile(2, 128, 2), AttentionTile(1, 128, 2))
    if v_head_dim <= 128:
        return TilePair(AttentionTile(2, 128, 2, 1, turns=False), AttentionTile(1, 128, 2))
    if longest <= 192:
        return TilePair(AttentionTile(2, 96, 2, 1, turns=False), AttentionTile(1, 96, 2))
    return TilePair(AttentionTile(2, 80, 2, 1), AttentionTile(1, 80, 2))


def variant_of(spec: AttentionSpec, tile: AttentionTile, block_size: int | None) -> Variant:
    """The compilation that serves a layer. block_size: of the cache that keys are read from; None: this step's own are read."""
    constants = {
        "HALF_IS_BF16": int(spec.dtype == torch.bfloat16),
        "HEAD_DIM": spec.head_dim,
        "V_HEAD_DIM": spec.v_head_dim,
        "GROUPS": tile.groups,
        "KEYS": tile.keys,
        "STAGES": tile.stages,
        "QUERY_STAGES": tile.query_stages,
        "BOX": box_of(tile, block_size),
        "BLOCK_SIZE": block_size or 0,
        "TURNS": int(tile.turns and tile.groups > 1),
        "SOFTCAP": int(spec.softcap is not None),
        "SHARED_BYTES": tile.shared_bytes(spec.head_dim, spec.v_head_dim),
        "WINDOW": int(spec.sliding_window is not None),
    }
    return Variant(_FOLDER, "attention.cu", tuple(constants.items()))


def box_of(tile: AttentionTile, block_size: int | None) -> int:
    """Slots that one copy takes: as many of a tile as lie in one block."""
    return tile.keys if block_size is None else math.gcd(tile.keys, block_size)
