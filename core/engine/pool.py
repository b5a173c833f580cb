"""The pool: one paged cache a layer, sized from memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import CacheGeometry, CacheLayout, LayerCache
from headway.core.contract.spec import AttentionSpec

GIB = 1024**3
_LARGEST_SHARE = 0.4
"""Of a CPU's free memory, taken unasked."""
_DEFAULT_BYTES = 1 * GIB
"""Taken unasked on a CPU, where the memory is everybody's, unless one sequence needs more."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What the pool holds."""

    num_blocks: int
    block_size: int
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Slots."""
        return self.num_blocks * self.block_size


def bytes_per_block(specs: Sequence[AttentionSpec], layouts: Sequence[CacheLayout], block_size: int) -> int:
    """Bytes that one block takes over all layers, in the element type that each layer's spec asks for."""
    return sum(layout.bytes_per_block(CacheGeometry.of(spec, 1, block_size)) for spec, layout in zip(specs, layouts, strict=True))


def pool_size(
    specs: Sequence[AttentionSpec],
    layouts: Sequence[CacheLayout],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    memory: int | None,
) -> PoolSize:
    """Blocks that fit in `memory` bytes (None: a share of the host's free memory), never more than all sequences could fill.

    :raises ConfigError: not even one sequence of max_model_len fits.
    """
    block_bytes = bytes_per_block(specs, layouts, block_size)
    one = -(-max_model_len // block_size)
    budget = _default_memory(one * block_bytes) if memory is None else memory
    num_blocks = min(budget // block_bytes, one * max_num_seqs)
    if num_blocks < one:
        fits = budget // block_bytes * block_size
        raise ConfigError(
            "kv_cache_memory",
            f"{_size(one * block_bytes, math.ceil)} for one sequence of max_model_len={max_model_len}",
            f"{_size(budget)}, room for {fits} tokens",
            f"raise kv_cache_memory or set max_model_len to at most {fits}" if fits else "raise kv_cache_memory",
        )
    return PoolSize(num_blocks, block_size, num_blocks * block_bytes)


def longest_that_fits(
    specs: Sequence[AttentionSpec], layouts: Sequence[CacheLayout], block_size: int, memory: int | None, at_most: int
) -> int:
    """Longest sequence, up to `at_most` tokens, for which the pool has room: the default of max_model_len."""
    block_bytes = bytes_per_block(specs, layouts, block_size)
    wanted = -(-at_most // block_size) * block_bytes
    budget = _default_memory(wanted) if memory is None else memory
    return min(at_most, budget // block_bytes * block_size)


def allocate(specs: Sequence[AttentionSpec], layouts: Sequence[CacheLayout], size: PoolSize) -> list[LayerCache]:
    """One cache a layer; all have the same blocks, so one block table serves them."""
    return [
        layout.allocate(CacheGeometry.of(spec, size.num_blocks, size.block_size), spec.k_scale, spec.v_scale)
        for spec, layout in zip(specs, layouts, strict=True)
    ]


def _default_memory(one_sequence: int) -> int:
    most = int(psutil.virtual_memory().available * _LARGEST_SHARE)
    return min(most, max(_DEFAULT_BYTES, one_sequence))


def _size(num_bytes: int, rounded: Callable[[float], int] = math.floor) -> str:
    """In the unit that shows it; a need is rounded up, so that asking for what is printed is enough."""
    unit, name = next(
        (unit, name) for unit, name in ((GIB, "GiB"), (1024**2, "MiB"), (1024, "KiB"), (1, "B")) if num_bytes >= unit / 10
    )
    return f"{rounded(num_bytes / unit * 100) / 100:.2f} {name}"
