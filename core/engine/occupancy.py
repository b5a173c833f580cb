"""What an engine's cache holds for whom, in a few numbers a sequence: cheap enough to be asked while requests run."""

from __future__ import annotations

from typing import NamedTuple

from headway.core.engine.loop import EngineLoop
from headway.core.engine.sequence import Sequence
from headway.core.engine.stats import EngineSnapshot


class Holding(NamedTuple):
    """The pages of one sequence, over all cache groups."""

    request_id: str
    completion: int
    """Which of the request's completions, from 0."""
    num_tokens: int
    """Whose keys and values are in the cache."""
    num_prompt_tokens: int
    found: int
    """Pages that the prefix cache gave it when it began; other sequences may hold them, too."""
    computed: int
    """Pages that its own steps have written to."""
    reserved: int
    """Pages that hold no token yet."""


class Occupancy(NamedTuple):
    """An engine at one moment, and the sequences that hold pages."""

    engine: EngineSnapshot
    holdings: tuple[Holding, ...]
    """Of the sequences that began first."""
    num_holding: int
    """Sequences that hold pages; those that are not among `holdings` included."""
    num_decoding: int
    """Sequences whose prompt has been computed."""
    num_decoding_tokens: int
    """In the cache, of those sequences together."""
    num_offloaded_blocks: int
    """Kept in the host's memory."""


def occupancy(engine: EngineLoop, most: int) -> Occupancy:
    """See Occupancy. most: how many sequences are told of one by one.

    It costs about a microsecond per running sequence, and 30 ns per page whose content can be found: `EngineLoop.cache_usage`
    looks at every block instead.
    """
    scheduler = engine.scheduler
    holders, offloader = scheduler.holders, scheduler.offloader
    decoding = [tokens for seq in scheduler.running if (tokens := seq.num_computed) >= seq.num_prompt_tokens]
    return Occupancy(
        engine.snapshot(),
        tuple(_holding(seq) for seq in holders[:most]),
        len(holders),
        len(decoding),
        sum(decoding),
        0 if offloader is None else offloader.num_blocks,
    )


def _holding(seq: Sequence) -> Holding:
    found = written = held = 0
    tokens = seq.num_computed
    for table in seq.tables:
        gone = table.num_given_back
        held += len(table.pages) - gone
        written += max(min(-(-tokens // table.page_size), len(table.pages)) - gone, 0)
        found += max(seq.num_cached_tokens // table.page_size - gone, 0)
    return Holding(seq.request_id, seq.index, tokens, seq.num_prompt_tokens, found, max(written - found, 0), held - written)
