"""Shipped kernel configurations for each GPU architecture, with which no autotuning is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

INVARIANT_SPLITS, INVARIANT_KEYS = 16, 128
"""Number of splits of every sequence in batch-invariant mode. With this number, one sequence with 8 kv heads nearly fills 132
SMs. Programs of splits without keys end immediately."""

ANY_PROMPT = 1 << 20
"""Query length to pass to `prefill_config` if the configuration must not depend on the query length."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Compile-time configuration of the decode kernel, and parameters of its cost model in the split rule."""

    block_n: int
    """Number of keys per tile."""
    num_warps: int
    num_stages: int
    block_m: int = 64
    """Maximum number of query rows per tile."""
    residents: int = 8
    """Number of programs that an SM runs at a time, limited by registers and shared memory."""
    tile_us: float = 1.0
    """Time of one tile, in us, in a program that does not share its SM. Latency, not bandwidth, is the limit."""
    busy_us: float = 0.0
    """Time of one tile, in us per resident program, if the SM and not memory bandwidth is the limit."""
    wave_us: float = 1.0
    """Time that a program takes in addition to its tiles, in us."""
    merge_us: float = 0.085
    """Time in us for the last program to merge one partial result, in addition to the time for the rows of the result."""
    merge_row_us: float = 0.015
    """Time to merge one row of a partial result, in us."""
    merge_launch_us: float = 0.0
    """Overhead of a separate merge launch, in us. 0 means that the last program to arrive merges the partial results."""
    bytes_per_us: float = 2.0e6
    max_rounds: int = 40
    """Maximum number of programs per SM in a step with splits. With more programs, merging costs more time than the better load
    balance saves."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Compile-time configuration of the prefill kernel, and parameters of its cost model."""

    block_m: int
    """Number of query rows (tokens x heads of a group) per tile."""
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    """True if k and v are read by TMA tensor descriptors when their strides allow it."""
    start_us: float = 4.0
    """Time that a program takes in addition to its tiles, in us."""
    partial_us: float = 2.0
    """Time that a program takes to write a partial result, in us."""
    merge_us: float = 6.0
    """Time of the launch that merges partial results, in us."""
    flops_per_us: float = 5.3e8
    """Throughput of all SMs together, with one program per SM, in FLOP per us."""

    def for_few_rows(self) -> PrefillConfig:
        """Return a configuration for few query rows in which a row has the same bits: each warp keeps its 16 rows."""
        if self.block_m <= 64 or self.block_m != 16 * self.num_warps:
            return self
        return replace(self, block_m=64, num_warps=4)


@dataclass(frozen=True, slots=True)
class Architecture:
    """Tuned configurations for one GPU architecture, for rows of up to 256 bytes."""

    name: str
    decode: Mapping[str, DecodeConfig]
    """Decode configurations, keyed by use:

    - "few": for any number of programs.
    - "fp8": for FP8 caches.
    - "many": alternative to "few" for many programs of one token each, if a tile is within one block and rows are contiguous (not
      in vllm_5d).
    - "wide": replaces "few" for rows of more than 256 elements.
    - "latent": for layers whose value is in the key (MLA).
    - "latent wide": replaces "latent" for 64 or more query rows.
    """
    prefill: PrefillConfig
    prefill_short: PrefillConfig
    """Configuration for prompts of up to SHORT_PROMPT tokens, in which a larger fraction of the tiles is masked. Also for rows of
    up to 64 elements, because two programs then fit an SM."""
    extend: PrefillConfig
    """Configuration for keys that are read through the block table by descriptors, if a tile is within one block."""
    extend_gather: PrefillConfig
    """Configuration for keys that are read through the block table by pointers."""
    wide: PrefillConfig | None = None
    """Configuration for rows of 257 to 512 bytes. None means that the other configurations are used with half the keys per
    tile."""
    widest: PrefillConfig | None = None
    """Configuration for rows of 257 to 512 elements. None means that smaller tiles of the other configurations are used."""
    shared_memory: int = 101_376
    """Bytes of shared memory that a program may use (CUDA C++ Programming Guide, Technical Specifications)."""


SHORT_PROMPT = 2048
_PLAIN = PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)
_SMALL = PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
_TINY = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
_DECODE_90 = partial(DecodeConfig, bytes_per_us=4.1e6)

SM_90 = Architecture(
    "sm_90",
    decode={
        "few": _DECODE_90(block_n=16, num_warps=1, num_stages=5, tile_us=0.54, wave_us=7.6),
        "many": _DECODE_90(128, num_warps=4, num_stages=2, residents=3, tile_us=1.5, busy_us=2.02, wave_us=1.7),
        "fp8": _DECODE_90(block_n=16, num_warps=1, num_stages=7, tile_us=0.59, wave_us=7.6),
        "wide": _DECODE_90(16, 4, 5, residents=1, tile_us=1.3, wave_us=5.0, merge_us=0.05, merge_row_us=0, merge_launch_us=2),
        "latent": _DECODE_90(
            32, 4, 3, 32, 2, tile_us=0.92, busy_us=1.13, wave_us=6.6, merge_us=0.137, merge_row_us=0, merge_launch_us=1.8
        ),
        "latent wide": _DECODE_90(64, 8, 2, 64, 1, tile_us=3.8, wave_us=6.4, merge_us=0.08, merge_row_us=0, merge_launch_us=2.8),
    },
    prefill=PrefillConfig(block_m=128, block_n=128, num_warps=8, num_stages=3, tma=True),
    prefill_short=PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3, tma=True),
    extend=PrefillConfig(block_m=128, block_n=128, num_warps=8, num_stages=3, tma=True),
    # Gathering a row occupies the load units as long as the tensor cores need for 128 queries: use each row for 256 queries.
    extend_gather=PrefillConfig(block_m=256, block_n=64, num_warps=16, num_stages=3),
    wide=PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2),
    widest=PrefillConfig(block_m=64, block_n=64, num_warps=8, num_stages=1, tma=True),
    shared_memory=232_448,
)
SM_80 = Architecture(
    "sm_80",
    {
        "few": DecodeConfig(block_n=64, num_warps=4, num_stages=5, residents=1, bytes_per_us=1.5e6),
        "latent": DecodeConfig(block_n=32, num_warps=4, num_stages=3, block_m=16, residents=1, bytes_per_us=1.5e6),
    },
    _PLAIN,
    _PLAIN,
    _PLAIN,
    _PLAIN,
    wide=PrefillConfig(block_m=64, block_n=32, num_warps=8, num_stages=2),  # 128 rows spill 200 bytes per thread
    shared_memory=166_912,
)
DEFAULT = Architecture(
    "default", {"few": DecodeConfig(block_n=32, num_warps=4, num_stages=3, residents=3)}, _SMALL, _SMALL, _SMALL, _SMALL
)
"""Configurations for architectures without tuning: little shared memory and shallow pipelines."""
_TINY_DECODE = DecodeConfig(block_n=16, num_warps=4, num_stages=1)
INTERPRETER = Architecture(
    "interpreter", {"few": _TINY_DECODE, "wide": replace(_TINY_DECODE, merge_launch_us=1)}, _TINY, _TINY, _TINY, _TINY
)
"""Configurations for Triton's interpreter: small tiles, so that small tests cover several tiles."""


def architecture(capability: tuple[int, int] | None) -> Architecture:
    """Return the configurations for a CUDA compute capability. None means Triton's interpreter."""
    if capability is None:
        return INTERPRETER
    return SM_90 if capability[0] == 9 else SM_80 if capability == (8, 0) else DEFAULT


def decode_configs(
    arch: Architecture, block_d: int, itemsize: int, block_size: int, split_rows: bool
) -> tuple[DecodeConfig, ...]:
    """Return the decode configurations for a cache. The configuration for launches with few programs comes first. Rows of more
    than 256 bytes get smaller tiles."""
    table, row_bytes = arch.decode, block_d * itemsize
    name = "fp8" if itemsize == 1 else "wide" if block_d > 256 else "few"
    few = _shrunk(table.get(name, table["few"]), row_bytes, arch.shared_memory)
    many = table.get("many")
    if many is None or itemsize == 1 or split_rows or block_size % many.block_n:
        return (few,)
    return few, _shrunk(many, row_bytes, arch.shared_memory)


def latent_config(arch: Architecture, rows: int, itemsize: int) -> DecodeConfig:
    """Return the MLA decode configuration. rows: number of query rows per kv head. itemsize: size of an element of tl.dot's
    operands, in bytes."""
    table = arch.decode
    name = "latent wide" if rows >= 64 and itemsize == 2 and "latent wide" in table else "latent"
    config = table.get(name) or replace(table["few"], block_m=16)
    if itemsize == 4:  # twice the memory per tile, and half the throughput
        block_n = config.block_n if arch is SM_90 else 16  # shared memory may be 99 KiB, and on sm_80 32 keys spill 7 KB
        config = replace(config, block_m=16, block_n=block_n, num_stages=min(config.num_stages, 2))
    return config


def _shrunk(config: DecodeConfig, row_bytes: int, shared_memory: int) -> DecodeConfig:
    """Return a configuration with smaller tiles and fewer stages, whose keys and values fit in shared memory."""
    size = row_bytes
    while size > 256 and config.block_n > 16:
        size //= 2
        config = replace(config, block_n=config.block_n // 2)
    tile = 2 * row_bytes * config.block_n
    most = 1 + max(0, (shared_memory - tile // 4) // tile)  # Triton keeps num_stages - 1 tiles
    return replace(config, num_stages=min(config.num_stages, most))


def prefill_config(arch: Architecture, block_d: int, itemsize: int, query_len: int, group: int, paged: int) -> PrefillConfig:
    """Return the prefill configuration for a row size and query length.

    query_len: number of query tokens of the longest sequence.
    paged: block size of the cache, or 0 if keys are this step's k and v.
    """
    if paged:
        config = arch.extend if paged % 64 == 0 else arch.extend_gather
        if config.tma and paged % config.block_n:
            config = replace(config, block_n=64)
    else:
        config = arch.prefill_short if query_len <= SHORT_PROMPT or block_d <= 64 else arch.prefill
    if arch.wide is not None and 128 < block_d <= 256 and itemsize == 2:
        config = replace(arch.wide, tma=config.tma)
    elif arch.widest is not None and 256 < block_d <= 512 and itemsize == 2 and (not paged or paged % 64 == 0):
        config = arch.widest
    elif block_d > 128 or itemsize == 4:
        config = _less(config, block_d, itemsize)
    rows = query_len * group
    while rows <= config.block_m // 2 and config.block_m > 64:
        half, warps = config.block_m // 2, max(config.num_warps // 2, 4)
        config = replace(config, block_m=half, block_n=min(config.block_n, 64), num_warps=warps)
    return config


def _less(config: PrefillConfig, block_d: int, itemsize: int) -> PrefillConfig:
    """Return a smaller configuration, for rows longer than the 256 bytes for which configurations were tuned."""
    if itemsize == 4:  # float32 has no tensor cores at full precision: small tiles, or registers spill
        config = replace(config, block_m=min(config.block_m, 32), block_n=min(config.block_n, 32), num_warps=4, tma=False)
        config = replace(config, num_stages=min(config.num_stages, 2))
    if block_d > 256:  # latent attention (MLA): accumulators take a third of the registers
        config = replace(config, block_m=min(config.block_m, 64), block_n=min(config.block_n, 64), num_warps=8, tma=False)
        if itemsize == 4:  # and shared memory may be 99 KiB
            config = replace(config, block_m=16, num_stages=1)
    if block_d > 128:
        config = replace(config, block_n=max(config.block_n // 2, 16), num_stages=min(config.num_stages, 2), num_warps=8)
    return config
