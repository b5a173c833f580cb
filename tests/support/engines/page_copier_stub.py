"""A mover of pages without a device: what it moves are Python objects, and transfers take as long as a test wants."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from headway.core.engine.data.page_mover import LinkRates, PageName, StoredPage


class Violation(BaseException):
    """The engine has asked for what is wrong. No Exception, for the engine takes those for faults of the device."""


def demand(holds: object, what: str) -> None:
    """:raises Violation: it does not hold."""
    if not holds:
        raise Violation(what)


Result = TypeVar("Result")
Work = Callable[[], frozenset[PageName]]


class PageMemory(Protocol):
    """The pool's memory, by the page."""

    def read_page(self, page: int) -> Any:
        """Return the current content of a page."""

    def write_page(self, page: int, content: Any) -> None:
        """Make it hold that."""


class Later(Generic[Result]):
    """Has ended once it was asked this many times."""

    def __init__(self, result: Result, asked: int, fault: Exception | None = None) -> None:
        self._result, self._left, self._fault = result, asked, fault

    def done(self) -> bool:
        self._left -= 1
        return self._left < 0

    def result(self) -> Result:
        self._left = 0
        if self._fault is not None:
            raise self._fault
        return self._result


class Moving:
    """See PageMover. What a slot or the disk holds changes as late as it may.

    A call that fails may have done half of what it should.
    """

    def __init__(
        self,
        pool: PageMemory,
        num_slots: int,
        random: Random,
        max_stored: int = 0,
        disk: dict[PageName, tuple[bytes, Any]] | None = None,
        faults: float = 0.0,
        rate: float = 1e12,
        latest: int = 4,
        broken: float = 0.0,
    ) -> None:
        """faults: share of the pages that the disk loses. rate: bytes per second of the link. latest: how often a transfer is
        asked at most before it has ended. broken: share of the calls that raise, or whose transfer does."""
        self.num_slots, self.max_stored, self.rates = num_slots, max_stored, LinkRates(rate, rate)
        self.num_state_slots = 0
        self.disk = {} if disk is None else disk
        self.stored = list(self.disk)
        self._pool, self._random, self._faults, self._latest = pool, random, faults, latest
        self.broken = broken
        self._slots: dict[int, Any] = {}
        self._stale: set[int] = set()
        """Slots that hold what they held before a copy that failed."""
        self._queue: deque[OnDisk] = deque()
        """Queued operations of the disk, in order."""
        self._busy: dict[int, OnDisk] = {}
        """Last operation of the disk on each slot."""
        self._fetched: dict[int, OnDisk] = {}
        self.moved_out = self.moved_back = self.num_broken = self.num_not_out = 0

    def move_out(self, moves: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]] = ()) -> Later[None]:
        demand(not states, "nobody here keeps states")
        fault = self._fault()
        for number, (page, slot) in enumerate(moves):
            demand(slot not in self._busy or self._busy[slot].ended, "a slot is overwritten while it is stored or fetched")
            if fault is None or number < len(moves) // 2:
                self._slots[slot] = self._pool.read_page(page)
                self._stale.discard(slot)
            else:
                self._stale.add(slot)
        self.moved_out += len(moves)
        self.num_not_out += 0 if fault is None else len(moves)
        return self._later(fault)

    def move_back(self, moves: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]] = ()) -> Later[None]:
        demand(not states, "nobody here keeps states")
        fault = self._fault()
        for slot, page in moves if fault is None else moves[: len(moves) // 2]:
            demand(slot not in self._fetched or self._fetched[slot].ended, "a slot is read before it was fetched")
            if slot in self._slots:  # else nothing has come into it yet
                self._pool.write_page(page, self._slots[slot])
        self.moved_back += len(moves)
        return self._later(fault)

    def _fault(self) -> RuntimeError | None:
        return RuntimeError("a copy has failed") if self._breaks() else None

    def _later(self, fault: RuntimeError | None) -> Later[None]:
        """A fault shows at once, or when the copies should have been made."""
        if fault is not None and self._random.random() < 0.5:
            raise fault
        return Later(None, self._random.randint(0, self._latest), fault)

    def store(self, pages: Sequence[StoredPage]) -> OnDisk:
        stale = {page.name for page in pages if page.slot in self._stale}

        def work() -> frozenset[PageName]:
            failed = stale | {page.name for page in pages if self._random.random() < self._faults}
            self.disk.update({page.name: (page.tokens, self._slots[page.slot]) for page in pages if page.name not in failed})
            return frozenset(failed)

        return self._begin(pages, work)

    def fetch(self, pages: Sequence[StoredPage]) -> OnDisk:
        def work() -> frozenset[PageName]:
            failed = {page.name for page in pages if page.name not in self.disk or self._random.random() < self._faults}
            for page in pages:
                if page.name not in failed:
                    tokens, self._slots[page.slot] = self.disk[page.name]
                    self._stale.discard(page.slot)
                    demand(tokens == page.tokens, "a file holds other tokens than its name says")
            return frozenset(failed)

        begun = self._begin(pages, work)
        self._fetched.update({page.slot: begun for page in pages})
        return begun

    def discard(self, names: Sequence[PageName]) -> None:
        def work() -> frozenset[PageName]:
            for name in names:
                self.disk.pop(name, None)
            return frozenset()

        self._queue.append(OnDisk(self._queue, work, self._random.randint(0, self._latest)))

    def finish(self) -> None:
        if self._queue:
            self._queue[-1].result()

    def _begin(self, pages: Sequence[StoredPage], work: Work) -> OnDisk:
        if self._breaks():
            raise RuntimeError("the disk's thread has gone")
        begun = OnDisk(self._queue, work, self._random.randint(0, self._latest))
        for page in pages:
            demand(page.slot not in self._busy or self._busy[page.slot].ended, "a slot is used twice")
            self._busy[page.slot] = begun
        self._queue.append(begun)
        return begun

    def _breaks(self) -> bool:
        broken = self._random.random() < self.broken
        self.num_broken += broken
        return broken


class OnDisk:
    """Work that is done when it ends, after all that the disk was asked for before it."""

    def __init__(self, queue: deque[OnDisk], work: Work, asked: int) -> None:
        self.ended = False
        self._queue, self._work, self._left = queue, work, asked
        self._result: frozenset[PageName] = frozenset()

    def done(self) -> bool:
        self._left -= 1
        if self._left < 0:
            self.result()
        return self.ended

    def result(self) -> frozenset[PageName]:
        while not self.ended:
            first = self._queue.popleft()
            first._result, first.ended = first._work(), True
        return self._result
