"""A mover of pages without a device: what it moves are Python objects, and transfers take as long as a test wants."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping, Sequence
from random import Random
from typing import Generic, TypeVar

from headway.core.engine.offload.costs import LinkRates
from headway.core.engine.offload.mover import KeptPage
from headway.core.engine.offload.tier import PageName

Result = TypeVar("Result")
Work = Callable[[], frozenset[PageName]]
Content = dict[int, Hashable]
"""What the slots (places) of a page hold."""


class Later(Generic[Result]):
    """Has ended once it was asked this many times."""

    def __init__(self, result: Result, asked: int) -> None:
        self._result, self._left = result, asked

    def done(self) -> bool:
        self._left -= 1
        return self._left < 0

    def result(self) -> Result:
        self._left = 0
        return self._result


class Moving:
    """See PageMover. The pool is given as (page, place) -> what is there; what a slot holds changes as late as it may."""

    def __init__(
        self,
        pool: MutableMapping[tuple[int, int], Hashable],
        num_slots: int,
        random: Random,
        max_stored: int = 0,
        disk: dict[PageName, tuple[bytes, Content]] | None = None,
        faults: float = 0.0,
        rate: float = 1e12,
    ) -> None:
        """faults: share of the pages that the disk loses. rate: bytes per second of the link."""
        self.num_slots, self.max_stored, self.rates = num_slots, max_stored, LinkRates(rate, rate)
        self.disk = {} if disk is None else disk
        self.stored = list(self.disk)
        self._pool, self._random, self._faults = pool, random, faults
        self._slots: dict[int, Content] = {}
        self._busy: dict[int, Fetching] = {}
        """What the disk did last with a slot."""
        self._fetched: dict[int, Fetching] = {}
        self.moved_out = self.moved_back = 0

    def move(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> Later[None]:
        for page, slot in out:
            assert slot not in self._busy or self._busy[slot].ended, "a slot is overwritten while it is stored or fetched"
            self._slots[slot] = {place: held for (number, place), held in self._pool.items() if number == page}
        for slot, page in back:
            assert slot not in self._fetched or self._fetched[slot].ended, "a slot is read before it was fetched"
            for place, held in self._slots[slot].items():
                self._pool[page, place] = held
        self.moved_out += len(out)
        self.moved_back += len(back)
        return Later(None, self._random.randrange(4))

    def store(self, pages: Sequence[KeptPage]) -> Fetching:
        def work() -> frozenset[PageName]:
            failed = {page.name for page in pages if self._random.random() < self._faults}
            self.disk.update({page.name: (page.tokens, self._slots[page.slot]) for page in pages if page.name not in failed})
            return frozenset(failed)

        return self._begin(pages, work)

    def fetch(self, pages: Sequence[KeptPage]) -> Fetching:
        def work() -> frozenset[PageName]:
            failed = {page.name for page in pages if page.name not in self.disk or self._random.random() < self._faults}
            for page in pages:
                if page.name not in failed:
                    tokens, self._slots[page.slot] = self.disk[page.name]
                    assert tokens == page.tokens
            return frozenset(failed)

        begun = self._begin(pages, work)
        self._fetched.update({page.slot: begun for page in pages})
        return begun

    def _begin(self, pages: Sequence[KeptPage], work: Work) -> Fetching:
        begun = Fetching(work, self._random.randrange(5), {page.name for page in pages})
        for page in pages:
            assert page.slot not in self._busy or self._busy[page.slot].ended, "a slot is used twice"
            self._busy[page.slot] = begun
        return begun

    def discard(self, names: Sequence[PageName]) -> None:
        for begun in self._busy.values():
            if not begun.names.isdisjoint(names):  # the disk works in order
                begun.result()
        for name in names:
            self.disk.pop(name, None)


class Fetching:
    """Work that is done when it ends."""

    def __init__(self, work: Work, asked: int, names: set[PageName]) -> None:
        self.names = names
        self._work, self._left, self.ended = work, asked, False
        self._result: frozenset[PageName] = frozenset()

    def done(self) -> bool:
        self._left -= 1
        if self._left < 0:
            self.result()
        return self.ended

    def result(self) -> frozenset[PageName]:
        if not self.ended:
            self._result, self.ended = self._work(), True
        return self._result
