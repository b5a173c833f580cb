"""Who uses the cache: blocks by cache group, and by sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from headway.core.engine.blocks import BlockManager
from headway.core.engine.groups import CacheGroup
from headway.core.engine.sequence import PageTable, Sequence

OWN, SHARED, RESERVED, GIVEN_BACK = "osrg"
"""What a sequence has to do with a block: it alone holds it; others do too, or the prefix cache gave it; it holds no token yet;
it lay behind the window."""


class GroupUsage(NamedTuple):
    """One cache group. All numbers count its blocks."""

    num_layers: int
    window: int | None
    """Keys that a query of its layers sees, itself included; None: all."""
    blocks_per_page: int
    """Those that the pool hands out together."""
    total: int
    """As many as there were if no other group had any: all groups share the pool."""
    used: int
    """Held by sequences."""
    cached: int
    """Held by nobody, and found again by an equal prefix."""
    given_back: int
    """By sequences, behind the window, since the engine started."""


class SequenceUsage(NamedTuple):
    """The blocks of one sequence."""

    name: str
    num_tokens: int
    """In the cache."""
    blocks: tuple[str, ...]
    """For each group a letter for each block, in the order of the tokens."""


class CacheUsage(NamedTuple):
    """The whole pool at one moment."""

    block_size: int
    num_pages: int
    page_bytes: int
    num_free_pages: int
    """Those with a content that can be found included."""
    num_offloaded_blocks: int
    """Kept in the host's memory, whatever the pool holds of them."""
    groups: tuple[GroupUsage, ...]
    sequences: tuple[SequenceUsage, ...]


def cache_usage(
    blocks: BlockManager, block_size: int, page_bytes: int, running: Items[Sequence], num_offloaded_blocks: int = 0
) -> CacheUsage:
    """See CacheUsage. running: all sequences that hold pages."""
    groups = [
        GroupUsage(
            len(group.layers),
            group.window,
            group.blocks_per_page,
            *(pages * group.blocks_per_page for pages in (blocks.num_pages, *used)),
        )
        for group, used in zip(blocks.groups, blocks.usage(running), strict=True)
    ]
    sequences = [
        SequenceUsage(
            f"{seq.request_id}.{seq.index}" if seq.params.n > 1 else seq.request_id,
            seq.num_computed,
            tuple(_letters(blocks, seq, *both, block_size) for both in zip(blocks.groups, seq.tables, strict=True)),
        )
        for seq in running
    ]
    pool = block_size, blocks.num_pages, page_bytes, blocks.num_free
    return CacheUsage(*pool, num_offloaded_blocks, tuple(groups), tuple(sequences))


def _letters(blocks: BlockManager, seq: Sequence, group: CacheGroup, table: PageTable, block_size: int) -> str:
    letters = []
    for number, page in enumerate(table.pages):
        found = (number + 1) * group.page_size <= seq.num_cached_tokens
        held = SHARED if found or blocks.num_holders(page) > 1 else OWN
        first = number * group.page_size
        for start in range(first, first + group.page_size, block_size):
            letters.append(GIVEN_BACK if number < table.num_given_back else held if start < seq.num_computed else RESERVED)
    return "".join(letters)
