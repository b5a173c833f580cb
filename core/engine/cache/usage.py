"""Cache usage: blocks per cache group and per sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.groups import CacheGroup
from headway.core.engine.data.sequence import PageTable, Sequence
from headway.core.engine.data.state_slots import StateSlots

OWN, SHARED, RESERVED, FREED = "osrg"
"""Letters for how a sequence uses a block: held by this sequence only; shared with other sequences or found in the prefix cache;
reserved without a token yet; freed because it left the window."""


class GroupUsage(NamedTuple):
    """Usage of one cache group, in blocks."""

    num_layers: int
    window: int | None
    """Number of keys that a query sees, itself included. None means all."""
    blocks_per_page: int
    """Blocks per page of the pool."""
    total: int
    """Blocks that the group would have if it had the whole pool, which all groups share."""
    used: int
    cached: int
    """Blocks that no sequence holds and that a prefix hit would reuse."""
    num_freed: int
    """Blocks that sequences have freed since the start because they left the window."""


class SequenceUsage(NamedTuple):
    """Usage of one sequence."""

    name: str
    num_tokens: int
    blocks: tuple[str, ...]
    """One string per group, with one letter per block in token order."""


class StateUsage(NamedTuple):
    """Usage of the state slots."""

    slots: StateSlots
    num_used_rows: int
    """Rows of running sequences."""
    num_cached_states: int
    """Checkpoints that a prefix hit would reuse."""
    num_offloaded: int
    """States saved in host memory."""


class CacheUsage(NamedTuple):
    """Usage of the whole pool at one moment."""

    block_size: int
    num_pages: int
    page_bytes: int
    num_free_pages: int
    """Pages that no sequence holds, including those with reusable content."""
    num_offloaded_blocks: int
    """Blocks saved in host memory, including blocks that the pool holds too."""
    groups: tuple[GroupUsage, ...]
    sequences: tuple[SequenceUsage, ...]
    states: StateUsage | None = None
    """None if no layer of the model keeps a state."""


def cache_usage(
    blocks: BlockManager,
    block_size: int,
    page_bytes: int,
    running: Items[Sequence],
    num_offloaded_blocks: int = 0,
    slots: StateSlots | None = None,
    num_offloaded_states: int = 0,
) -> CacheUsage:
    """Return the usage of every block. running: all sequences that hold pages. slots: state slots, or None."""
    store, rows = blocks.checkpoints, sum(seq.row is not None for seq in running)
    groups = [
        GroupUsage(
            num_layers=len(group.layers),
            window=group.window,
            blocks_per_page=group.blocks_per_page,
            total=blocks.num_pages * group.blocks_per_page,
            used=pages.used * group.blocks_per_page,
            cached=pages.cached * group.blocks_per_page,
            num_freed=pages.num_freed * group.blocks_per_page,
        )
        for group, pages in zip(blocks.groups, blocks.usage(running), strict=True)
    ]
    sequences = [
        SequenceUsage(
            name=f"{seq.request_id}.{seq.index}" if seq.params.n > 1 else seq.request_id,
            num_tokens=seq.num_computed,
            blocks=tuple(
                _letters(blocks, seq, group, table, block_size) for group, table in zip(blocks.groups, seq.tables, strict=True)
            ),
        )
        for seq in running
    ]
    return CacheUsage(
        block_size=block_size,
        num_pages=blocks.num_pages,
        page_bytes=page_bytes,
        num_free_pages=blocks.num_free,
        num_offloaded_blocks=num_offloaded_blocks,
        groups=tuple(groups),
        sequences=tuple(sequences),
        states=None if slots is None or store is None else StateUsage(slots, rows, len(store), num_offloaded_states),
    )


def _letters(blocks: BlockManager, seq: Sequence, group: CacheGroup, table: PageTable, block_size: int) -> str:
    letters = []
    for number, page in enumerate(table.pages):
        found = (number + 1) * group.page_size <= seq.num_cached_tokens
        held = SHARED if found or blocks.num_holders(page) > 1 else OWN
        first = number * group.page_size
        for start in range(first, first + group.page_size, block_size):
            letters.append(FREED if number < table.num_freed_pages else held if start < seq.num_computed else RESERVED)
    return "".join(letters)
