"""Which sequences use the cache: blocks by cache group, and by sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.groups import CacheGroup
from headway.core.engine.data.sequence import PageTable, Sequence
from headway.core.engine.data.state_slots import StateSlots

OWN, SHARED, RESERVED, GIVEN_BACK = "osrg"
"""How a sequence uses a block: it alone holds the block; others hold it too, or the prefix cache gave it; the block holds no
token yet; it lay behind the window and was given back."""


class GroupUsage(NamedTuple):
    """The usage of one cache group. All numbers count its blocks."""

    num_layers: int
    window: int | None
    """Keys that a query of its layers sees, itself included; None: all."""
    blocks_per_page: int
    """Blocks that the pool hands out together."""
    total: int
    """Blocks that the group would have if no other group had any: all groups share the pool."""
    used: int
    cached: int
    """Blocks that no sequence holds and an equal prefix would find again."""
    given_back: int
    """Blocks behind the window that sequences have given back since the engine started."""


class SequenceUsage(NamedTuple):
    """The usage of one sequence."""

    name: str
    num_tokens: int
    blocks: tuple[str, ...]
    """A string for each group, with a letter for each block in the order of the tokens."""


class StateUsage(NamedTuple):
    """The usage of the slots of layers that keep a state."""

    slots: StateSlots
    num_used_rows: int
    """Rows in which sequences run."""
    num_kept: int
    """Checkpoints that an equal prefix would find again."""
    num_offloaded: int
    """States that the host's memory keeps."""


class CacheUsage(NamedTuple):
    """The usage of the whole pool at one moment."""

    block_size: int
    num_pages: int
    page_bytes: int
    num_free_pages: int
    """Pages that no sequence holds, those with a reusable content included."""
    num_offloaded_blocks: int
    """Blocks that the host's memory keeps, whatever the pool holds of them."""
    groups: tuple[GroupUsage, ...]
    sequences: tuple[SequenceUsage, ...]
    states: StateUsage | None = None
    """None: no layer of the model keeps a state."""


def cache_usage(
    blocks: BlockManager,
    block_size: int,
    page_bytes: int,
    running: Items[Sequence],
    num_offloaded_blocks: int = 0,
    slots: StateSlots | None = None,
    num_offloaded_states: int = 0,
) -> CacheUsage:
    """Look at every block; see `CacheUsage`. running: all sequences that hold pages. slots: of layers with a state."""
    kept, rows = blocks.checkpoints, sum(seq.row is not None for seq in running)
    groups = [
        GroupUsage(
            num_layers=len(group.layers),
            window=group.window,
            blocks_per_page=group.blocks_per_page,
            total=blocks.num_pages * group.blocks_per_page,
            used=pages.used * group.blocks_per_page,
            cached=pages.cached * group.blocks_per_page,
            given_back=pages.given_back * group.blocks_per_page,
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
        states=None if slots is None or kept is None else StateUsage(slots, rows, len(kept), num_offloaded_states),
    )


def _letters(blocks: BlockManager, seq: Sequence, group: CacheGroup, table: PageTable, block_size: int) -> str:
    letters = []
    for number, page in enumerate(table.pages):
        found = (number + 1) * group.page_size <= seq.num_cached_tokens
        held = SHARED if found or blocks.num_holders(page) > 1 else OWN
        first = number * group.page_size
        for start in range(first, first + group.page_size, block_size):
            letters.append(GIVEN_BACK if number < table.num_given_back else held if start < seq.num_computed else RESERVED)
    return "".join(letters)
