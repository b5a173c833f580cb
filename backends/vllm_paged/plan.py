"""How a decode is cut up: warps of a block of threads, and partitions of a context (v1: one, v2: more)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from headway.backends.vllm_paged.arguments import MAX_WARPS

PARTITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_STAGES = 6
WARPS = (2, 4, MAX_WARPS)


SHARED_KIB = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}
"""Shared memory a block of threads can ask for, nearly all that a multiprocessor has, by architecture; 99 on all others."""
_KERNELS_OWN = 2048
"""What the attention kernel has besides its stages."""


def shared_bytes(arch: str) -> int:
    """Shared memory for the stages of a block of threads. arch: such as sm_90."""
    return SHARED_KIB.get(arch, 99) * 1024 - _KERNELS_OWN


@dataclass(frozen=True, slots=True)
class Machine:
    """What of the device the choice depends on."""

    multiprocessors: int
    bytes_per_us: float
    """Memory bandwidth."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one launch is cut up."""

    warps: int
    partitions: int


def stages_of(tile_bytes: int, arch: str) -> int:
    """Tiles a warp has under way, so many that MAX_WARPS warps fit where they can. tile_bytes: of key and value."""
    return max(2, min(MAX_STAGES, shared_bytes(arch) // (MAX_WARPS * tile_bytes)))


_TILE_US = 1.1
"""Time of one tile of a warp that nobody disturbs: latency."""
_START_US = 3.0
"""What a block of threads takes before its first tile and after its last."""
_TAIL = 0.05
"""Share of a block's time in which, at the end, the memory is not busy any more."""
_WARP_US = 0.17
"""What merging one more warp costs."""
_SECOND_US = 4.6
"""What the second kernel costs, and ..."""
_MERGE_US = 0.09
"""... what one more partition to merge does, and ..."""
_PARTIAL_US = 0.23
"""... what one more block of threads on each multiprocessor does, that leaves a partial result."""


@lru_cache(maxsize=4096)
def choose(items: int, total_tiles: int, longest: int, tile_bytes: int, machine: Machine) -> Cut:
    """The cut that the model below expects to finish first; its constants were fitted to a sweep on an H200.

    items: sequences times kv heads times row tiles; total_tiles: tiles of all items together; longest: tiles of the longest. The
    sizes are rounded by the caller, so that the answers are few and cached.
    """
    busy = min(items, max(1.0, total_tiles / max(longest, 1)))  # items of full length that would be as much work
    shared_tile_us = machine.multiprocessors * tile_bytes / machine.bytes_per_us  # a tile of each multiprocessor at full rate

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
