"""Shipped kernel configurations by architecture, so that nobody waits for an autotuner, and the rule that picks a split count."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

MAX_SPLITS = 128
"""Most splits of one sequence: the last arriver merges them one chunk after another."""

MAX_ROUNDS = 40
"""Splits stop where every multiprocessor has this many programs: the partial results would cost more than the balance brings."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the decode kernel is compiled, and what the split rule assumes of it."""

    block_n: int
    """Keys a tile."""
    num_warps: int
    num_stages: int
    tile_us: float = 1.0
    """Time of one tile of a program that has its multiprocessor for itself: latency, not bandwidth."""
    partial_us: float = 1.6
    """What leaving a partial result costs a program, and ..."""
    merge_us: float = 0.2
    """... what merging one more costs the last to arrive."""
    bytes_per_us: float = 2.0e6
    """Memory bandwidth."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the prefill kernel is compiled."""

    block_m: int
    """Query rows (tokens times the heads of a group) a tile."""
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    """Read k and v by tensor descriptors where their strides allow it."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is tuned for one family of GPUs: 16-bit layers with heads of up to 128 elements."""

    name: str
    decode: DecodeConfig
    prefill: PrefillConfig
    extend: PrefillConfig
    """For keys read through the block table by pointers."""


SM_90 = Architecture(
    "sm_90",
    decode=DecodeConfig(block_n=64, num_warps=4, num_stages=7, bytes_per_us=4.2e6),
    prefill=PrefillConfig(block_m=128, block_n=128, num_warps=8, num_stages=3, tma=True),
    extend=PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
)
SM_80 = Architecture(
    "sm_80",
    decode=DecodeConfig(block_n=64, num_warps=4, num_stages=3, bytes_per_us=1.5e6),
    prefill=PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
    extend=PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
)
DEFAULT = Architecture(
    "default",
    decode=DecodeConfig(block_n=32, num_warps=4, num_stages=2),
    prefill=PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2),
    extend=PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2),
)
"""For architectures nobody has tuned: little shared memory, shallow pipelines."""
INTERPRETER = Architecture(
    "interpreter",
    decode=DecodeConfig(block_n=16, num_warps=4, num_stages=1),
    prefill=PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=1),
    extend=PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=1),
)
"""Small tiles, so that small tests meet several of them."""


def architecture(capability: tuple[int, int] | None) -> Architecture:
    """Configurations for a CUDA compute capability; None: the interpreter."""
    if capability is None:
        return INTERPRETER
    if capability[0] == 9:
        return SM_90
    return SM_80 if capability == (8, 0) else DEFAULT


def decode_config(arch: Architecture, block_d: int, itemsize: int) -> DecodeConfig:
    """The tuned configuration, with smaller tiles where a row is longer than the 256 bytes it was tuned for."""
    config = arch.decode
    row_bytes = block_d * itemsize
    while row_bytes > 256 and config.block_n > 16:
        row_bytes //= 2
        config = replace(config, block_n=config.block_n // 2)
    return config


def prefill_config(arch: Architecture, block_d: int, itemsize: int, rows: int, dense: bool) -> PrefillConfig:
    """As `decode_config`; rows: query rows of the longest sequence, so that short prompts do not pay for empty tiles."""
    config = arch.prefill if dense else arch.extend
    if itemsize == 4:  # float32 has no tensor cores at full precision: small tiles, or registers spill
        config = replace(config, block_m=min(config.block_m, 32), block_n=min(config.block_n, 32), num_warps=4, tma=False)
        config = replace(config, num_stages=min(config.num_stages, 2))
    if block_d > 128:
        config = replace(config, block_n=max(config.block_n // 2, 16), num_stages=min(config.num_stages, 2))
    if rows <= config.block_m // 2 and config.block_m >= 128:
        config = replace(config, block_m=64, num_warps=4)
    return config


@lru_cache(maxsize=4096)
def choose_splits(items: int, total_tiles: int, longest: int, tile_bytes: int, multiprocessors: int, config: DecodeConfig) -> int:
    """The number of splits that the model below expects to finish first.

    items: programs without a split, sequences times kv heads times query tiles; total_tiles: tiles of all items together;
    longest: tiles of the longest. The sizes are rounded by the caller, so that the answers are few and cached.
    """
    if longest <= 1 or items == 0:
        return 1
    busy = max(1.0, total_tiles / longest)  # items of full length that would be as much work
    shared_tile_us = multiprocessors * tile_bytes / config.bytes_per_us  # a tile where all multiprocessors compete for memory

    def time_of(splits: int) -> float:
        each = math.ceil(longest / splits)
        rounds = math.ceil(busy * math.ceil(longest / each) / multiprocessors)
        merge = config.partial_us * rounds + config.merge_us * splits if splits > 1 else 0.0
        return each * max(config.tile_us, rounds * shared_tile_us) + merge

    most = max(1, min(MAX_SPLITS, longest, MAX_ROUNDS * multiprocessors // items))
    return min(range(1, most + 1), key=time_of)
