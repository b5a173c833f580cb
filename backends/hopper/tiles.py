"""Tile sizes per kind of layer, and the compile-time constants of each kernel variant."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.nvrtc.compiler import Variant

ARCH = "sm_90a"
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
WIDE_HEAD_DIM = 512
"""Head size of prompts whose values two warpgroups multiply, 256 columns each."""
UNEQUAL = ((192, 128),)
"""Supported pairs of head_dim and v_head_dim that differ, from the expanded MLA of DeepSeek-V2."""
MAX_GROUP = 64
"""Maximum number of query heads per kv head, which is the number of rows of the narrow tile."""
SHARED_BYTES = 227 * 1024
"""Maximum shared memory of a thread block in bytes."""
_FOLDER = Path(__file__).parent / "csrc"
_PANEL = 64


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Size of a thread block's work per step."""

    groups: int
    """Number of warpgroups that run MMAs, with 64 query rows each."""
    keys: int
    """Number of keys per tile, a multiple of 16."""
    stages: int
    """Number of key tiles, and of value tiles, in shared memory."""
    query_stages: int = 2
    """Number of query tiles in shared memory. With two, the next item's queries are copied during the current item."""
    turns: bool = True
    """True if the warpgroups alternate in using the tensor cores (ping-pong scheduling)."""
    cluster: int = 0
    """Number of thread blocks of a cluster that share a tile and copy keys for each other. In each, two warpgroups have the same
    rows, and half of the value's columns each (latent.cu). 0 means that one thread block has the tile (attention.cu)."""
    padding: int = 0
    """Number of rows of shared memory after a tile of queries, a multiple of 8. With them, a tile may begin and end within a
    token, which is copied completely. Without them, a tile has complete tokens."""

    @property
    def rows(self) -> int:
        """Number of query rows. A row is one query head of a kv head's group, for one of several consecutive tokens."""
        return 64 * (self.cluster or self.groups)

    @property
    def threads(self) -> int:
        """Number of threads per thread block: the warpgroups that run MMAs, and one warpgroup that copies."""
        return 128 * (self.groups // max(self.cluster, 1) + 1)

    def rows_used(self, group: int) -> int:
        """Return the number of rows per thread block that belong to queries. group: number of query heads per kv head."""
        rows = 64 if self.cluster else self.rows
        return rows if self.padding else rows // group * group

    def tokens(self, group: int) -> int:
        """Return the number of tokens that a thread block copies, which are all that its rows may belong to."""
        return (self.rows_used(group) + (group - 1 if self.padding else 0) + group - 1) // group

    def padded(self, group: int, head_dim: int, v_head_dim: int) -> AttentionTile:
        """Return this tile with padding, if complete tokens leave rows unused and the padding fits shared memory."""
        if self.cluster or self.rows % group == 0:
            return self
        copied = (self.rows + 2 * group - 2) // group * group
        tile = replace(self, padding=-(-(copied - self.rows) // 8) * 8)
        return tile if tile.shared_bytes(head_dim, v_head_dim) <= SHARED_BYTES else self

    def shared_bytes(self, head_dim: int, v_head_dim: int) -> int:
        """Return the size of dynamic shared memory in bytes: `struct Layout` of shape.cuh, plus space to align the start of the
        structure."""
        if self.cluster:
            return SHARED_BYTES
        k_row, v_row = (128 * -(-dim // _PANEL) for dim in (head_dim, v_head_dim))
        barriers = 8 * (2 * self.query_stages + 4 + 4 * self.stages)
        queries = self.query_stages * (self.rows + self.padding) * k_row
        return queries + self.stages * self.keys * (k_row + v_row) + 2 * 44 + barriers + 1024


@dataclass(frozen=True, slots=True)
class TilePair:
    """The two tiles for a kind of layer."""

    wide: AttentionTile
    """Tile for many rows. With most head sizes, the warpgroups alternate in using the tensor cores."""
    narrow: AttentionTile
    """Tile for at most 64 rows per sequence and kv head, or too few rows to fill the GPU."""


def tiles_of(spec: AttentionSpec) -> TilePair:
    """Return the tiles for a kind of layer."""
    pair = _largest(spec.head_dim, spec.v_head_dim)
    return TilePair(*(tile.padded(spec.group_size, spec.head_dim, spec.v_head_dim) for tile in (pair.wide, pair.narrow)))


def _largest(head_dim: int, v_head_dim: int) -> TilePair:
    """Return the largest tiles that fit registers and shared memory. Except for head_dim 64, they match FlashAttention-3."""
    longest = max(head_dim, v_head_dim)
    if longest <= 64:
        return TilePair(AttentionTile(3, 128, 3), AttentionTile(1, 128, 4))
    if longest <= 128:
        return TilePair(AttentionTile(2, 128, 2), AttentionTile(1, 128, 2))
    if v_head_dim <= 128:
        return TilePair(AttentionTile(2, 128, 2, 1, turns=False), AttentionTile(1, 128, 2))
    if longest <= 192:
        return TilePair(AttentionTile(2, 96, 2, 1, turns=False), AttentionTile(1, 96, 2))
    if longest <= 256:
        return TilePair(AttentionTile(2, 80, 2, 1), AttentionTile(1, 80, 2))
    return TilePair(*(AttentionTile(2 * cluster, 64, 1, 1, turns=False, cluster=cluster) for cluster in (2, 1)))


def variant_of(spec: AttentionSpec, tile: AttentionTile, block_size: int | None) -> Variant:
    """Return the compiled variant for a layer. block_size: block size of the cache, or None to read this step's k and v."""
    constants = {
        "HALF_IS_BF16": int(spec.dtype == torch.bfloat16),
        "HEAD_DIM": spec.head_dim,
        "V_HEAD_DIM": spec.v_head_dim,
        "GROUPS": tile.groups,
        "KEYS": tile.keys,
        "STAGES": tile.stages,
        "QUERY_STAGES": tile.query_stages,
        "QUERY_PADDING": tile.padding,
        "BOX": box_of(tile, block_size),
        "BLOCK_SIZE": block_size or 0,
        "TURNS": int(tile.turns and tile.groups > 1),
        "CLUSTER": tile.cluster,
        "SOFTCAP": int(spec.softcap is not None),
        "SHARED_BYTES": tile.shared_bytes(spec.head_dim, spec.v_head_dim),
        "WINDOW": int(spec.sliding_window is not None),
    }
    return Variant(_FOLDER, "latent.cu" if tile.cluster else "attention.cu", tuple(constants.items()))


def box_of(tile: AttentionTile, block_size: int | None) -> int:
    """Return the number of slots per copy: the largest part of a tile that never crosses the boundary of a block."""
    return tile.keys if block_size is None else math.gcd(tile.keys, block_size)
