"""Shipped kernel configurations by architecture, so that nobody waits for an autotuner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

INVARIANT_SPLITS = 16
"""Splits of every sequence where the answer must be batch invariant: enough that one sequence with 8 kv heads fills 132
multiprocessors. Those that a short sequence has no keys for end at once."""

ANY_PROMPT = 1 << 20
"""Stands for the longest query_len where a configuration must not depend on the query length."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the decode kernel is compiled, and what the split rule assumes of the kernel."""

    block_n: int
    """Keys a tile."""
    num_warps: int
    num_stages: int
    block_m: int = 64
    """Query rows a tile, at most."""
    residents: int = 8
    """Programs that a multiprocessor runs at once, as registers and shared memory allow."""
    tile_us: float = 1.0
    """Time of one tile of a program that has its multiprocessor for itself: latency, not bandwidth."""
    busy_us: float = 0.0
    """Time of one tile of each program that a multiprocessor runs, however much of the memory's rate is left."""
    wave_us: float = 1.0
    """What a program costs beside its tiles."""
    merge_us: float = 0.085
    """What merging one more partial result costs the last to arrive, ..."""
    merge_row_us: float = 0.015
    """... and for each row of the query tile."""
    merge_launch_us: float = 0.0
    """What merging costs beside that where a launch of its own does it; 0: the last program to arrive merges."""
    bytes_per_us: float = 2.0e6
    most_rounds: int = 40
    """Splits stop where each multiprocessor has so many programs: the partial results would cost more than the balance brings."""


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
    residents: int = 1
    """Programs that a multiprocessor runs at once, as registers and shared memory allow."""
    wave_us: float = 4.0
    """What a program costs beside its tiles."""
    merge_us: float = 4.0
    """What merging costs beside moving the partial results: a launch, ..."""
    bytes_per_us: float = 7.0e5
    """... which are written and read at this rate."""
    flops_per_us: float = 5.0e8
    """Rate at which all multiprocessors work through tiles, one program each."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is tuned for one family of GPUs, for rows of up to 256 bytes."""

    name: str
    decode: Mapping[str, DecodeConfig]
    """"few" for any number of programs, "fp8" for an fp8 cache; "many" instead of "few" for many programs of one token each,
    where a tile lies in one block and a row in one piece (not in vllm_5d). "latent" where the value lies in the key, and
    "latent wide" instead for 64 query rows or more."""
    prefill: PrefillConfig
    prefill_short: PrefillConfig
    """Prompts of up to SHORT_PROMPT tokens, where the masked tiles weigh more."""
    extend: PrefillConfig
    """Keys read through the block table by descriptors, where a tile lies in one block."""
    extend_gather: PrefillConfig
    """Keys read through the block table by pointers."""
    wide: PrefillConfig | None = None
    """Rows of more than 256 and up to 512 bytes, read in whichever way; None: half of the keys of the others."""


SHORT_PROMPT = 2048
_PLAIN = PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)
_SMALL = PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
_TINY = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)

SM_90 = Architecture(
    "sm_90",
    decode={
        "few": DecodeConfig(block_n=16, num_warps=1, num_stages=5, tile_us=0.54, wave_us=7.6, bytes_per_us=4.1e6),
        "many": DecodeConfig(
            128, num_warps=4, num_stages=2, residents=3, tile_us=1.5, busy_us=2.02, wave_us=1.7, bytes_per_us=4.1e6
        ),
        "fp8": DecodeConfig(block_n=16, num_warps=1, num_stages=7, tile_us=0.59, wave_us=7.6, bytes_per_us=4.1e6),
        "latent": DecodeConfig(
            32,
            4,
            3,
            32,
            2,
            tile_us=0.92,
            busy_us=1.13,
            wave_us=6.6,
            merge_us=0.137,
            merge_row_us=0,
            merge_launch_us=1.8,
            bytes_per_us=4.1e6,
        ),
        "latent wide": DecodeConfig(
            64, 8, 2, 64, 1, tile_us=3.8, wave_us=6.4, merge_us=0.08, merge_row_us=0, merge_launch_us=2.8, bytes_per_us=4.1e6
        ),
    },
    prefill=PrefillConfig(block_m=128, block_n=128, num_warps=8, num_stages=3, tma=True),
    prefill_short=PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3, tma=True),
    extend=PrefillConfig(block_m=128, block_n=128, num_warps=8, num_stages=3, tma=True),
    # Gathering a row takes the load units as long as multiplying it with 128 queries takes the tensor cores: each row serves 256.
    extend_gather=PrefillConfig(block_m=256, block_n=64, num_warps=16, num_stages=3),
    wide=PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2),
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
)
DEFAULT = Architecture(
    "default", {"few": DecodeConfig(block_n=32, num_warps=4, num_stages=3, residents=3)}, _SMALL, _SMALL, _SMALL, _SMALL
)
"""For architectures nobody has tuned: little shared memory, shallow pipelines."""
INTERPRETER = Architecture(
    "interpreter", {"few": DecodeConfig(block_n=16, num_warps=4, num_stages=1)}, _TINY, _TINY, _TINY, _TINY
)
"""Small tiles, so that small tests meet several of them."""


def architecture(capability: tuple[int, int] | None) -> Architecture:
    """Configurations for a CUDA compute capability; None: the interpreter."""
    if capability is None:
        return INTERPRETER
    if capability[0] == 9:
        return SM_90
    return SM_80 if capability == (8, 0) else DEFAULT


def decode_configs(
    arch: Architecture, block_d: int, itemsize: int, block_size: int, split_rows: bool
) -> tuple[DecodeConfig, ...]:
    """What serves a cache, the one for few programs first, with smaller tiles where a row is longer than the tuned 256 bytes."""
    table, row_bytes = arch.decode, block_d * itemsize
    few = _shrunk(table.get("fp8", table["few"]) if itemsize == 1 else table["few"], row_bytes)
    many = table.get("many")
    if many is None or itemsize == 1 or split_rows or block_size % many.block_n:
        return (few,)
    return few, _shrunk(many, row_bytes)


def latent_config(arch: Architecture, rows: int, itemsize: int) -> DecodeConfig:
    """What serves a cache whose values lie in its keys. rows: query rows of a kv head; itemsize: bytes of what is multiplied."""
    table = arch.decode
    name = "latent wide" if rows >= 64 and itemsize == 2 and "latent wide" in table else "latent"
    config = table.get(name) or replace(table["few"], block_m=16)
    if itemsize == 4:  # twice the memory for a tile of which half the numbers are computed at a time
        block_n = config.block_n if name in table else 16  # shared memory may be 99 KiB
        config = replace(config, block_m=16, block_n=block_n, num_stages=min(config.num_stages, 2))
    return config


def _shrunk(config: DecodeConfig, row_bytes: int) -> DecodeConfig:
    while row_bytes > 256 and config.block_n > 16:
        row_bytes //= 2
        config = replace(config, block_n=config.block_n // 2)
    return config


def prefill_config(arch: Architecture, block_d: int, itemsize: int, query_len: int, group: int, paged: int) -> PrefillConfig:
    """As `decode_config`. query_len: of the longest sequence; paged: the block size, 0 where keys are this step's own k and v."""
    if paged:
        config = arch.extend if paged % 64 == 0 else arch.extend_gather
        if config.tma and paged % config.block_n:
            config = replace(config, block_n=64)
    else:
        config = arch.prefill_short if query_len <= SHORT_PROMPT else arch.prefill
    if arch.wide is not None and 128 < block_d <= 256 and itemsize == 2:
        config = replace(arch.wide, tma=config.tma)
    elif block_d > 128 or itemsize == 4:
        config = _less(config, block_d, itemsize)
    rows = query_len * group
    while rows <= config.block_m // 2 and config.block_m > 64:
        half, warps = config.block_m // 2, max(config.num_warps // 2, 4)
        config = replace(config, block_m=half, block_n=min(config.block_n, 64), num_warps=warps)
    return config


def _less(config: PrefillConfig, block_d: int, itemsize: int) -> PrefillConfig:
    """For longer rows than it was tuned for."""
    if itemsize == 4:  # float32 has no tensor cores at full precision: small tiles, or registers spill
        config = replace(config, block_m=min(config.block_m, 32), block_n=min(config.block_n, 32), num_warps=4, tma=False)
        config = replace(config, num_stages=min(config.num_stages, 2))
    if block_d > 256:  # latent attention: the sums alone take a third of the registers
        config = replace(config, block_m=min(config.block_m, 64), block_n=min(config.block_n, 64), num_warps=8, tma=False)
        if itemsize == 4:  # and shared memory may be 99 KiB
            config = replace(config, block_m=16, num_stages=1)
    if block_d > 128:
        config = replace(config, block_n=max(config.block_n // 2, 16), num_stages=min(config.num_stages, 2), num_warps=8)
    return config
