"""Shipped kernel configurations by architecture, so that nobody waits for an autotuner, and the rule that picks a split count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

MAX_SPLITS = 128
"""Most splits of one sequence: the last arriver merges them one chunk after another."""

MAX_ROUNDS = 40
"""Splits stop where every multiprocessor has this many programs: the partial results would cost more than the balance brings."""

INVARIANT_SPLITS = 16
"""Splits of every sequence where the answer must be batch invariant: enough that one sequence with 8 kv heads fills 132
multiprocessors. Those that a short sequence has no keys for end at once."""

ANY_PROMPT = 1 << 20
"""Stands for the longest query_len where a configuration must not hang on it."""


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
    """What is tuned for one family of GPUs, for rows of up to 256 bytes."""

    name: str
    decode: Mapping[str, DecodeConfig]
    """"few" and "many" by the number of programs, "many small" for rows in pieces (vllm_5d) and for blocks that a tile of "many"
    does not divide, "fp8" for an fp8 cache. What is missing falls back to "few"."""
    prefill: PrefillConfig
    prefill_short: PrefillConfig
    """Prompts of up to SHORT_PROMPT tokens, where the masked tiles weigh more."""
    extend: PrefillConfig
    """Keys read through the block table by descriptors, where a tile lies in one block."""
    extend_gather: PrefillConfig
    """Keys read through the block table by pointers."""


SHORT_PROMPT = 2048
_PLAIN = PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)
_SMALL = PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
_TINY = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)

SM_90 = Architecture(
    "sm_90",
    decode={
        "few": DecodeConfig(block_n=16, num_warps=1, num_stages=7, tile_us=0.8, bytes_per_us=4.2e6),
        "many": DecodeConfig(block_n=64, num_warps=4, num_stages=5, bytes_per_us=4.2e6),
        "many small": DecodeConfig(block_n=16, num_warps=1, num_stages=5, tile_us=0.8, bytes_per_us=4.2e6),
        "fp8": DecodeConfig(block_n=16, num_warps=1, num_stages=7, tile_us=0.8, bytes_per_us=4.2e6),
    },
    prefill=PrefillConfig(block_m=128, block_n=128, num_warps=8, num_stages=3, tma=True),
    prefill_short=PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3, tma=True),
    extend=PrefillConfig(block_m=128, block_n=64, num_warps=4, num_stages=3, tma=True),
    extend_gather=PrefillConfig(block_m=128, block_n=128, num_warps=8, num_stages=2),
)
SM_80 = Architecture(
    "sm_80",
    {"few": DecodeConfig(block_n=64, num_warps=4, num_stages=5, bytes_per_us=1.5e6)},
    _PLAIN,
    _PLAIN,
    _PLAIN,
    _PLAIN,
)
DEFAULT = Architecture("default", {"few": DecodeConfig(block_n=32, num_warps=4, num_stages=3)}, _SMALL, _SMALL, _SMALL, _SMALL)
"""For architectures nobody has tuned: little shared memory, shallow pipelines."""
INTERPRETER = Architecture(
    "interpreter", {"few": DecodeConfig(block_n=16, num_warps=4, num_stages=1)}, _TINY, _TINY, _TINY, _TINY
)
"""Small tiles, so that small tests meet several of them."""
MANY_PROGRAMS = 12
"""Programs a multiprocessor from which "many" applies: enough that uneven last waves no longer matter."""


def architecture(capability: tuple[int, int] | None) -> Architecture:
    """Configurations for a CUDA compute capability; None: the interpreter."""
    if capability is None:
        return INTERPRETER
    if capability[0] == 9:
        return SM_90
    return SM_80 if capability == (8, 0) else DEFAULT


def decode_config(
    arch: Architecture, block_d: int, itemsize: int, block_size: int, split_rows: bool, many: bool = False
) -> DecodeConfig:
    """The tuned configuration, with smaller tiles where a row is longer than the 256 bytes it was tuned for."""
    table = arch.decode
    if itemsize == 1:
        name = "fp8"
    elif many:
        fits = "many" in table and block_size % table["many"].block_n == 0 and not split_rows
        name = "many" if fits else "many small"
    else:
        name = "few"
    config = table.get(name, table["few"])
    row_bytes = block_d * itemsize
    while row_bytes > 256 and config.block_n > 16:
        row_bytes //= 2
        config = replace(config, block_n=config.block_n // 2)
    return config


def prefill_config(arch: Architecture, block_d: int, itemsize: int, query_len: int, group: int, paged: int) -> PrefillConfig:
    """As `decode_config`. query_len: of the longest sequence; paged: the block size, 0 where keys are this step's own k and v."""
    if paged:
        config = arch.extend if paged % arch.extend.block_n == 0 else arch.extend_gather
    else:
        config = arch.prefill_short if query_len <= SHORT_PROMPT else arch.prefill
    if itemsize == 4:  # float32 has no tensor cores at full precision: small tiles, or registers spill
        config = replace(config, block_m=min(config.block_m, 32), block_n=min(config.block_n, 32), num_warps=4, tma=False)
        config = replace(config, num_stages=min(config.num_stages, 2))
    if block_d > 128:
        config = replace(config, block_n=max(config.block_n // 2, 16), num_stages=min(config.num_stages, 2), num_warps=8)
    rows = query_len * group
    while rows <= config.block_m // 2 and config.block_m > 64:
        config = replace(config, block_m=config.block_m // 2, num_warps=4)
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
