"""Which pages lie on disk, as the one who decides sees it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headway.core.engine.offload.failures import Failures
from headway.core.engine.offload.mover import KeptPage, PageMover, Pending
from headway.core.engine.offload.tier import HostTier, PageName
from headway.core.engine.stats import EngineStats


class Shelf:
    """Names of pages on disk, least recently used first. Whatever enters the host tier is written there too.

    A page is written once the steps that computed it have been read without a fault, and its slot is locked until then. A page
    that the disk refuses or returns damaged is forgotten and counted.
    """

    def __init__(self, mover: PageMover, tier: HostTier, stats: EngineStats, failures: Failures) -> None:
        self._mover, self._tier, self._stats, self._failures = mover, tier, stats, failures
        self._names: OrderedDict[PageName, None] = OrderedDict.fromkeys(mover.stored)
        self._unread: list[KeptPage] = []
        """Copied out since the last flush: the step that computed them may not have been read."""
        self._unwritten: list[KeptPage] = []
        self._storing: list[tuple[Pending[frozenset[PageName]], list[PageName]]] = []
        self._fetching: list[tuple[Pending[frozenset[PageName]], list[PageName]]] = []
        self._adrift: set[PageName] = set()
        """Being fetched for nobody any more, so that nobody would wait until they have come."""

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: PageName) -> bool:
        return name in self._names

    def adrift(self, name: PageName) -> bool:
        """Whether a page is on its way from the disk without anybody who waits for it."""
        return name in self._adrift

    def kept(self, page: KeptPage) -> None:
        """A page is being copied into its slot."""
        if not self._mover.max_stored or page.name in self._names:
            return
        if 2 * self._tier.num_unlocked < self._tier.num_slots:
            self._failures.count("disk slower than what is offloaded", 1)
            return
        self._tier.lock([page.name])
        self._unread.append(page)

    def lost(self, names: Iterable[PageName]) -> None:
        """The copies of pages into their slots have failed, so nothing of them is to be written."""
        gone = set(names)
        waiting = [page.name for page in (*self._unread, *self._unwritten) if page.name in gone]
        self._unread = [page for page in self._unread if page.name not in gone]
        self._unwritten = [page for page in self._unwritten if page.name not in gone]
        self._tier.unlock(waiting)

    def fetch(self, pages: Sequence[KeptPage]) -> Pending[frozenset[PageName]]:
        """Begin to read pages into their slots, which stay locked until that has ended. What the mover raises is raised."""
        names = [page.name for page in pages]
        pending = self._mover.fetch(pages)
        self._tier.lock(names)
        for name in names:
            if name in self._names:
                self._names.move_to_end(name)  # used last
        self._fetching.append((pending, names))
        return pending

    def abandon(self, fetching: Pending[frozenset[PageName]]) -> None:
        """Nobody waits any more for what is being fetched."""
        for pending, names in self._fetching:
            if pending is fetching:
                self._adrift.update(names)

    def fetched(self, fetching: Pending[frozenset[PageName]]) -> frozenset[PageName]:
        """End a fetch; returns the pages that did not come."""
        failed: list[PageName] = []
        for pending, names in list(self._fetching):
            if pending is fetching:
                self._fetching.remove((pending, names))
                self._adrift.difference_update(names)
                failed = self._result(pending, names, "not read from disk")
                for name in failed:
                    self._tier.drop(name)
                self._tier.unlock(names)
                self._forget(failed)
        return frozenset(failed)

    def flush(self, idle: bool) -> None:
        """Write what may be written. idle: every step has been read."""
        for pending, names in list(self._storing):
            if pending.done():
                self._storing.remove((pending, names))
                self._stored(names, self._result(pending, names, "not written to disk"))
        for pending, names in list(self._fetching):
            if pending.done() and self._adrift.intersection(names):
                self.fetched(pending)
        pages = self._unwritten + (self._unread if idle else [])
        if pages:
            names = [page.name for page in pages]
            try:
                self._storing.append((self._mover.store(pages), names))
                self._names.update(dict.fromkeys(names))
            except Exception as error:
                self._failures.count("not written to disk", len(names), error)
                self._stored(names, names)
        self._unwritten, self._unread = [] if idle else self._unread, []
        surplus = [name for name, _ in zip(self._names, range(len(self._names) - self._mover.max_stored), strict=False)]
        for name in surplus:
            del self._names[name]
        self._discard(surplus)

    def _result(self, pending: Pending[frozenset[PageName]], names: list[PageName], what: str) -> list[PageName]:
        """The pages of which that is true."""
        error = None
        try:
            result = pending.result()
        except Exception as raised:
            result, error = frozenset(names), raised
        failed = [name for name in names if name in result]
        if failed:
            self._failures.count(what, len(failed), error)
        return failed

    def _forget(self, names: list[PageName]) -> None:
        """Pages have not been written or read. What lies there under their names goes: a later attempt may have written it."""
        for name in names:
            self._names.pop(name, None)
        self._discard(names)

    def _discard(self, names: list[PageName]) -> None:
        if names:
            try:
                self._mover.discard(names)
            except Exception as error:
                self._failures.count("not deleted from disk", len(names), error)

    def _stored(self, names: list[PageName], failed: list[PageName]) -> None:
        self._forget(failed)
        self._tier.unlock(names)
        self._stats.blocks_stored += len(names) - len(failed)

    def forget(self) -> None:
        """Write none of what was copied out since a step that failed."""
        self._tier.unlock(page.name for page in (*self._unread, *self._unwritten))
        self._unread, self._unwritten = [], []

    def empty(self) -> None:
        """Delete every page."""
        names, self._names = list(self._names), OrderedDict()
        self._discard(names)
