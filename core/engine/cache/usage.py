"""Cache usage: blocks per cache group and per sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.groups import CacheGroup
from headway.core.engine.data.sequence import PageTable, Sequence
from headway.core.engine.data.state_slots import StateSlots
from headway.core.engine.data.stats import EngineSnapshot

OWN, SHARED, RESERVED, FREED = "osrg"
"""Letters for the use of a block: referenced only by this sequence; shared with other sequences or found in the prefix cache;
reserved for future tokens; freed because it left the window."""


class GroupUsage(NamedTuple):
    """Usage of one cache group, in blocks."""

    num_layers: int
    window: int | None
    """Number of keys that a query sees, its own included. None means all."""
    blocks_per_page: int
    """Number of blocks per page of the pool."""
    total: int
    """Number of blocks that the group would have if it had the whole pool. All groups share the pool."""
    used: int
    cached: int
    """Number of blocks that no sequence references and that a prefix hit would reuse."""
    num_freed: int
    """Number of blocks that sequences have freed since the engine's start because the blocks left the window."""


class SequenceUsage(NamedTuple):
    """Cache usage of one sequence."""

    name: str
    num_tokens: int
    blocks: tuple[str, ...]
    """One string per group, with one letter per block in token order."""


class StateUsage(NamedTuple):
    """Usage of the state slots."""

    slots: StateSlots
    num_used_rows: int
    """Number of rows that running sequences use."""
    num_cached_states: int
    """Number of checkpoints that a prefix hit would reuse."""
    num_offloaded: int
    """Number of states saved in host memory."""


class CacheUsage(NamedTuple):
    """Usage of the whole pool at one moment."""

    block_size: int
    num_pages: int
    page_bytes: int
    num_free_pages: int
    """Number of pages that no sequence references, including pages with reusable content."""
    num_offloaded_blocks: int
    """Number of blocks saved in host memory, including blocks that are also in the pool."""
    groups: tuple[GroupUsage, ...]
    sequences: tuple[SequenceUsage, ...]
    states: StateUsage | None = None
    """Usage of the state slots. None if no layer of the model has a state."""


def cache_usage(
    blocks: BlockManager,
    block_size: int,
    page_bytes: int,
    running: Items[Sequence],
    num_offloaded_blocks: int = 0,
    slots: StateSlots | None = None,
    num_offloaded_states: int = 0,
) -> CacheUsage:
    """Return the usage of every block. running: all sequences that reference pages. slots: state slots, or None."""
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


class Holding(NamedTuple):
    """Page counts of one sequence, over all cache groups."""

    request_id: str
    completion: int
    """Index of the completion within its request."""
    num_tokens: int
    """Number of tokens whose keys and values are in the cache."""
    num_prompt_tokens: int
    found: int
    """Number of pages found in the prefix cache when the sequence began; other sequences may also reference these pages."""
    computed: int
    """Number of pages that the sequence's own steps have written."""
    reserved: int
    """Number of pages that contain no token yet."""


class Occupancy(NamedTuple):
    """Snapshot of an engine, with the sequences that reference pages."""

    engine: EngineSnapshot
    holdings: tuple[Holding, ...]
    """Page counts of the sequences in order of their start, at most as many as requested."""
    num_holding: int
    """Number of sequences that reference pages, including sequences that `holdings` does not list."""
    num_decoding: int
    """Number of sequences whose prompt has been computed."""
    num_decoding_tokens: int
    """Total number of cached tokens of the decoding sequences."""


def occupancy(engine: EngineSnapshot, holders: Items[Sequence], running: Items[Sequence], most: int) -> Occupancy:
    """Return an engine's occupancy. holders: sequences that reference pages. most: maximum length of `holdings`."""
    decoding = [tokens for seq in running if (tokens := seq.num_computed) >= seq.num_prompt_tokens]
    return Occupancy(
        engine=engine,
        holdings=tuple(_holding(seq) for seq in holders[:most]),
        num_holding=len(holders),
        num_decoding=len(decoding),
        num_decoding_tokens=sum(decoding),
    )


def _holding(seq: Sequence) -> Holding:
    found = written = held = 0
    tokens = seq.num_computed
    for table in seq.tables:
        gone = table.num_freed_pages
        held += len(table.pages) - gone
        written += max(min(-(-tokens // table.page_size), len(table.pages)) - gone, 0)
        found += max(seq.num_cached_tokens // table.page_size - gone, 0)
    return Holding(
        request_id=seq.request_id,
        completion=seq.index,
        num_tokens=tokens,
        num_prompt_tokens=seq.num_prompt_tokens,
        found=found,
        computed=max(written - found, 0),
        reserved=held - written,
    )
