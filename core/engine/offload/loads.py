"""Sequences whose start is being brought back into the pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.core.engine.blocks import BlockManager
from headway.core.engine.groups import NULL_PAGE
from headway.core.engine.offload.failures import Failures
from headway.core.engine.offload.mover import KeptPage, PageMover, Pending
from headway.core.engine.offload.shelf import Shelf
from headway.core.engine.offload.tier import HostTier, PageName
from headway.core.engine.prefixes import packed
from headway.core.engine.sequence import PageTable, Sequence
from headway.core.engine.stats import EngineStats


class AbsentPage(NamedTuple):
    """A page of a sequence whose content is to be brought into the pool."""

    group: int
    place: int
    """In the sequence's table."""
    page: int
    """Of the pool."""


def attach_pages(blocks: BlockManager, seq: Sequence, length: int) -> list[AbsentPage] | None:
    """Give a sequence without pages those of its first `length` tokens, whole ones in every group: the pool's where it holds
    them, and new ones, which are returned, to be filled by the caller.

    Until the caller sets `num_computed` to length, nothing of it counts as computed. None, and nothing changed: there is no room
    for all of the sequence.
    """
    seq.tables, seq.num_computed = [PageTable(group.page_size) for group in blocks.groups], length
    taken: list[int] = []
    absent: list[tuple[int, int]] = []
    for number, (group, prefixes, table) in enumerate(zip(blocks.groups, blocks.prefixes, seq.tables, strict=True)):
        first, end = group.num_behind(length), length // group.page_size
        table.pages = [NULL_PAGE] * end
        table.num_given_back = table.num_published = first
        for place in range(first, end):
            page = prefixes.find(seq, place)
            if page is None:
                absent.append((number, place))
            else:
                table.pages[place] = page
                taken.append(page)
                blocks.take(page)
    able = blocks.has_room(seq, seq.num_to_compute, beside=len(absent))
    seq.num_computed = 0
    if not able:
        for page in reversed(taken):
            blocks.give(page)
        seq.tables = []
        return None
    made = [AbsentPage(number, place, blocks.hand_out()) for number, place in absent]
    for number, place, page in made:
        seq.tables[number].pages[place] = page
    seq.table_changes = [(number, 0, list(table.pages)) for number, table in enumerate(seq.tables) if table.pages]
    return made


@dataclass(slots=True, eq=False)
class Load:
    """A sequence whose pages are coming back; it holds them all, in its tables."""

    seq: Sequence
    length: int
    """Tokens that its pages will hold."""
    spared: int
    """Tokens of them that the pool did not hold."""
    back: list[tuple[int, int]]
    names: list[PageName]
    """Locked until it ends."""
    to_fetch: list[KeptPage]
    """From the disk. A slot may be one that a page is yet to be copied into, so this comes after the copies of the step."""
    fetching: Pending[frozenset[PageName]] | None = None
    """From the disk; then"""
    moving: Pending[object] | None = None
    """from the host's memory."""
    followers: list[Sequence] = field(default_factory=list)
    """Sequences that wait for some of the same pages, and hold none."""


class Loads:
    """The loads under way, the oldest first."""

    def __init__(self, blocks: BlockManager, tier: HostTier, shelf: Shelf, stats: EngineStats, failures: Failures) -> None:
        self._blocks, self._tier, self._shelf, self._stats, self._failures = blocks, tier, shelf, stats, failures
        self._loads: list[Load] = []
        self._returned: list[Sequence] = []
        """Sequences that wait no longer, until they are asked for."""
        self.unlucky: set[Sequence] = set()
        """Those that a copy failed for, until they run: they are computed."""

    @property
    def holders(self) -> list[Sequence]:
        """Sequences that hold pages while these come back."""
        return [load.seq for load in self._loads]

    def follow(self, seq: Sequence, names: list[PageName]) -> bool:
        """Have a sequence wait for pages that come for another one; False: none of them does."""
        wanted = set(names)
        coming = next((load for load in self._loads if not wanted.isdisjoint(load.names)), None)
        if coming is not None:
            coming.followers.append(seq)
        return coming is not None

    def move(self, mover: PageMover) -> int:
        """Begin to move what is in the host's memory, and has not begun; returns how many pages."""
        begun = [load for load in self._loads if not load.to_fetch and load.fetching is None and load.moving is None]
        back = [each for load in begun for each in load.back]
        if not back:
            return 0
        try:
            moving = mover.move_back(back)
        except Exception as error:
            for load in begun:
                self._fail(load, "not copied back", len(load.back), error)
            return 0
        for load in begun:
            load.moving = moving
        return len(back)

    def fetch(self) -> None:
        """Begin to read from the disk."""
        for load in [load for load in self._loads if load.to_fetch]:
            try:
                load.fetching, load.to_fetch = self._shelf.fetch(load.to_fetch), []
            except Exception as error:
                self._fail(load, "not read from disk", len(load.to_fetch), error)

    def begin(self, seq: Sequence, length: int, spared: int, names: list[PageName]) -> bool:
        """Bring the pages `names` of a sequence's first `length` tokens back; False: there is no room.

        spared: see Load.
        """
        on_disk = [name for name in names if name not in self._tier]
        self._tier.lock(names)
        made = attach_pages(self._blocks, seq, length) if self._tier.num_unlocked >= 0 or not on_disk else None
        if made is None:
            self._tier.unlock(names)
            return False
        place_of = dict(zip(names, made, strict=True))
        to_fetch = []
        for name in on_disk:
            slot = self._tier.put(name)
            assert slot is not None, "there was a slot that is not locked"
            size, place = self._blocks.groups[name[0]].page_size, place_of[name].place
            to_fetch.append(KeptPage(name, packed(seq.token_ids[place * size : (place + 1) * size]), slot))
        back = [(self._slot(name), each.page) for name, each in zip(names, made, strict=True)]
        self._loads.append(Load(seq, length, spared, back, names, to_fetch))
        return True

    def arrived(self) -> list[Sequence]:
        """Sequences that wait no longer: with the pages that came for them, or with none where something failed."""
        returned, self._returned = self._returned, []
        return returned

    def look(self, copying: Set[PageName]) -> None:
        """See what has come. copying: pages on their way into their slots, so that nobody knows yet whether these hold them."""
        for load in list(self._loads):
            if load.fetching is not None and load.fetching.done():
                if self._shelf.fetched(load.fetching):
                    load.fetching = None
                    self._cancel(load)
                    continue
                load.fetching = None
            if load.moving is not None and load.moving.done() and copying.isdisjoint(load.names):
                try:
                    load.moving.result()
                except Exception as error:
                    self._fail(load, "not copied back", len(load.back), error)
                    continue
                load.seq.num_computed = load.length
                self._blocks.advance(load.seq)
                self._stats.offload_hits += load.spared
                self._end(load)

    @property
    def occupied(self) -> bool:
        """Whether a sequence is here that the scheduler's queues do not hold."""
        return bool(self._loads or self._returned)

    def give_up(self) -> bool:
        """Free the pages of the last load that was begun, for a running sequence needs them; False: there is none."""
        if not self._loads:
            return False
        self._cancel(self._loads[-1])
        return True

    def remove_finished(self) -> None:
        """Forget sequences that have ended."""
        for load in list(self._loads):
            load.followers = [seq for seq in load.followers if not seq.finished]
            if load.seq.finished:
                self._cancel(load)
        self._returned = [seq for seq in self._returned if not seq.finished]
        self.unlucky = {seq for seq in self.unlucky if not seq.finished}

    def cancel_all(self) -> None:
        """Let everybody go without the pages."""
        for load in list(self._loads):
            self._cancel(load)

    def lost(self, names: Iterable[PageName]) -> None:
        """Let those go for whom slots are read that do not hold these pages."""
        gone = set(names)
        for load in [load for load in self._loads if not gone.isdisjoint(load.names)]:
            self._cancel(load)

    def wait(self) -> None:
        """Wait until the first load has come a step further; `look` sees how."""
        if self._loads and not self._returned:
            load = self._loads[0]
            pending = load.moving if load.fetching is None else load.fetching
            assert pending is not None, "flush() first"
            with contextlib.suppress(Exception):
                pending.result()

    def _slot(self, name: PageName) -> int:
        slot = self._tier.find(name)
        assert slot is not None, "a locked name has left the tier"
        return slot

    def _fail(self, load: Load, what: str, num_pages: int, error: Exception) -> None:
        """Its copies fail, and would the next time."""
        self._failures.count(what, num_pages, error)
        self.unlucky.add(load.seq)
        self._let_go(load)

    def _cancel(self, load: Load) -> None:
        """Its pages are not wanted any more."""
        if load.moving is not None and load.moving.done():
            try:
                load.moving.result()
            except Exception as error:  # and nobody has looked yet
                self._fail(load, "not copied back", len(load.back), error)
                return
        self._let_go(load)

    def _let_go(self, load: Load) -> None:
        for page in load.to_fetch:
            self._tier.drop(page.name)
        if load.fetching is not None:
            self._shelf.abandon(load.fetching)
        self._blocks.release(load.seq)
        self._end(load)

    def _end(self, load: Load) -> None:
        self._loads.remove(load)
        self._tier.unlock(load.names)
        self._returned += [seq for seq in (load.seq, *load.followers) if not seq.finished]
