"""How a decode is cut up: warps of a block of threads, and partitions of a context (v1: one, v2: more)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from headway.backends.vllm_paged.launch import MAX_WARPS

MAX_PARTITIONS = 64
MAX_STAGES = 6
WARPS = (1, 2, 4, MAX_WARPS)


@dataclass(frozen=True, slots=True)
class Machine:
    """What of the device the choice depends on."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory a block of threads can have, nearly all that a multiprocessor has."""
    bytes_per_us: float
    """Memory bandwidth."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one launch is cut up."""

    warps: int
    partitions: int


def stages_of(tile_bytes: int, shared_bytes: int) -> int:
    """Tiles a warp has under way, of which MAX_WARPS warps must fit. tile_bytes: of key and value."""
    return max(2, min(MAX_STAGES, shared_bytes // (MAX_WARPS * tile_bytes)))


_TILE_US = 0.35
"""Time of one tile of a warp that nobody disturbs: latency, with its other tiles under way."""
_PARTITION_US = 1.5
"""What a launch of the second kernel costs, and ..."""
_MERGE_US = 0.03
"""... what merging one more partition does."""
_WARP_US = 0.1
"""What merging one more warp costs."""


@lru_cache(maxsize=4096)
def choose(items: int, total_tiles: int, longest: int, tile_bytes: int, machine: Machine) -> Cut:
    """The cut that the model below expects to finish first.

    items: sequences times kv heads times row tiles; total_tiles: tiles of all items together; longest: tiles of the longest. The
    sizes are rounded by the caller, so that the answers are few and cached.
    """
    busy = max(1.0, total_tiles / max(longest, 1))  # items of full length that would be as much work
    shared_tile_us = machine.multiprocessors * tile_bytes / machine.bytes_per_us  # a tile of each multiprocessor at full rate

    def time_of(cut: Cut) -> float:
        each = math.ceil(longest / cut.partitions)
        steps = math.ceil(each / cut.warps)
        rounds = math.ceil(busy * math.ceil(longest / each) / machine.multiprocessors)
        merge = _PARTITION_US + _MERGE_US * cut.partitions if cut.partitions > 1 else 0.0
        return steps * max(_TILE_US, rounds * min(cut.warps, each) * shared_tile_us) + _WARP_US * cut.warps + merge

    most = max(1, min(MAX_PARTITIONS, longest))
    cuts = (Cut(warps, partitions) for warps in WARPS for partitions in range(1, most + 1))
    return min(cuts, key=time_of)
