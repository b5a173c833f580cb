"""Pending restores: sequences whose prefix is being copied back into the pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.cache.prefix_lookup import packed
from headway.core.engine.data.page_mover import STATES, PageMover, PageName, Pending, StoredPage
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.offload.costs import OffloadFailures
from headway.core.engine.offload.disk_tier import DiskTier
from headway.core.engine.offload.host_tier import HostTiers


@dataclass(slots=True, eq=False)
class Restore:
    """A sequence whose pages are being restored. The sequence's tables list all of these pages."""

    seq: Sequence
    length: int
    """Number of tokens that the pages will contain."""
    spared: int
    """Number of tokens that need not be recomputed, because the restore brings back pages that are not in the pool."""
    moves: list[tuple[int, int]]
    """(slot of the host tier, page of the pool) for each restored page."""
    states: list[tuple[int, int]]
    """[(slot of the host tier, state slot of the device)] of the restored state. Empty if no state is restored."""
    names: list[PageName]
    """Names of the restored pages and state, locked until the restore ends."""
    to_fetch: list[StoredPage]
    """Pages to read from disk. The reads begin after the step's copies, because one of these copies may still use the same
    slot."""
    fetching: Pending[frozenset[PageName]] | None = None
    """The pending disk read, if any."""
    moving: Pending[object] | None = None
    """The pending copies from host memory, which begin after the disk read."""
    followers: list[Sequence] = field(default_factory=list)
    """Waiting sequences without pages that need some of the restored pages."""


class PendingRestores:
    """The pending restores, oldest first."""

    def __init__(
        self, blocks: BlockManager, tier: HostTiers, disk: DiskTier, stats: EngineStats, failures: OffloadFailures
    ) -> None:
        self._blocks = blocks
        self._tier = tier
        self._disk = disk
        self._stats = stats
        self._failures = failures
        self._restores: list[Restore] = []
        self._returned: list[Sequence] = []  # Sequences that have stopped waiting since the last `take_returned`
        self.failed: set[Sequence] = set()
        """Sequences whose restore failed. They are recomputed, and leave the set when they run."""

    @property
    def pending(self) -> bool:
        """True if any sequence waits outside the scheduler's queues for a restore, or has stopped waiting but has not been
        returned."""
        return bool(self._restores or self._returned)

    @property
    def holders(self) -> list[Sequence]:
        """Sequences that have pages whose content is being restored."""
        return [restore.seq for restore in self._restores]

    def begin(self, seq: Sequence, length: int, spared: int, names: list[PageName]) -> bool:
        """Start restoring the pages and state `names` of a sequence's first `length` tokens. Returns False if pages or slots are
        lacking. spared: see `Restore.spared`."""
        saved = self._blocks.checkpoints
        if saved is not None and not saved.has_slot_for(self._blocks.name_of_start(seq, length)):
            self._failures.count("without a free slot for their state", len(names))
            return False
        on_disk = [name for name in names if name not in self._tier]
        self._tier.lock(names)
        made = self._blocks.attach_pages(seq, length) if not (on_disk and self._tier.overbooked) else None
        if made is None:
            self._tier.unlock(names)
            return False
        place_of = dict(zip(names, made, strict=True))
        to_fetch = []
        for name in on_disk:
            slot = self._tier.put(name)
            assert slot is not None, "there was a slot that is not locked"
            size, place = self._blocks.groups[name[0]].page_size, place_of[name].place
            to_fetch.append(StoredPage(name, packed(seq.token_ids[place * size : (place + 1) * size]), slot))
        moves = [(self._slot(name), each.page) for name, each in zip(names, made, strict=True)]
        num_pages = sum(each.group != STATES for each in made)
        self._restores.append(Restore(seq, length, spared, moves[:num_pages], moves[num_pages:], names, to_fetch))
        return True

    def join(self, seq: Sequence, names: list[PageName]) -> bool:
        """Let a sequence wait for pages that are being restored for another sequence. Returns False if none of `names` is being
        restored."""
        wanted = set(names)
        coming = next((restore for restore in self._restores if not wanted.isdisjoint(restore.names)), None)
        if coming is not None:
            coming.followers.append(seq)
        return coming is not None

    def move(self, mover: PageMover) -> list[PageName]:
        """Start copying back the pages and states of the restores whose contents are in host memory. Returns the names of these
        pages and states."""
        begun = [each for each in self._restores if not each.to_fetch and each.fetching is None and each.moving is None]
        if not begun:
            return []
        moves = [move for restore in begun for move in restore.moves]
        states = [move for restore in begun for move in restore.states]
        try:
            moving = mover.move_back(moves, states)
        except Exception as error:
            for restore in begun:
                self._fail(restore, "not copied back", len(restore.names), error)
            return []
        for restore in begun:
            restore.moving = moving
        return [name for restore in begun for name in restore.names]

    def fetch(self) -> None:
        """Start reading pages from disk."""
        for restore in [restore for restore in self._restores if restore.to_fetch]:
            try:
                restore.fetching = self._disk.fetch(restore.to_fetch)
                restore.to_fetch = []
            except Exception as error:
                self._fail(restore, "not read from disk", len(restore.to_fetch), error)

    def update(self, copying: Set[PageName]) -> None:
        """Process finished reads and copies. copying: names of pages that are still being copied out, so that their slots may be
        incomplete."""
        for restore in list(self._restores):
            if restore.fetching is not None and restore.fetching.done():
                if self._disk.end_fetch(restore.fetching):
                    restore.fetching = None
                    self._cancel(restore)
                    continue
                restore.fetching = None
            if restore.moving is not None and restore.moving.done() and copying.isdisjoint(restore.names):
                try:
                    restore.moving.result()
                except Exception as error:
                    self._fail(restore, "not copied back", len(restore.names), error)
                    continue
                self._came(restore)

    def _came(self, restore: Restore) -> None:
        seq, saved = restore.seq, self._blocks.checkpoints
        seq.num_computed = seq.num_held = restore.length
        seq.num_restored = restore.spared
        self._blocks.advance(seq)
        self._stats.offload_hits += restore.spared
        self._stats.states_restored += len(restore.states)
        if saved is not None and restore.length % saved.interval == 0:
            assert seq.held_state is not None
            digest = self._blocks.name_of_start(seq, restore.length)
            saved.publish_restored(digest, seq.held_state)
        self._end(restore)

    def take_returned(self) -> list[Sequence]:
        """Return the sequences that have stopped waiting since the last call. They have restored pages or, after a failure, no
        pages."""
        returned = self._returned
        self._returned = []
        return returned

    def wait(self) -> None:
        """Wait until the next read or copy of the oldest restore has ended. `update` then processes the result."""
        if self._restores and not self._returned:
            restore = self._restores[0]
            pending = restore.moving if restore.fetching is None else restore.fetching
            assert pending is not None, "flush() first"
            with contextlib.suppress(Exception):
                pending.result()

    def give_up(self) -> bool:
        """Cancel the newest restore, because a running sequence needs its pages. Returns False if no restore is pending."""
        if not self._restores:
            return False
        self._cancel(self._restores[-1])
        return True

    def forget_lost(self, names: Iterable[PageName]) -> None:
        """Cancel the restores that need any of these lost pages."""
        lost = set(names)
        for restore in [restore for restore in self._restores if not lost.isdisjoint(restore.names)]:
            self._cancel(restore)

    def cancel_all(self) -> None:
        """Cancel every restore."""
        for restore in list(self._restores):
            self._cancel(restore)

    def remove_finished(self) -> None:
        """Forget finished sequences."""
        for restore in list(self._restores):
            restore.followers = [seq for seq in restore.followers if not seq.finished]
            if restore.seq.finished:
                self._cancel(restore)
        self._returned = [seq for seq in self._returned if not seq.finished]
        self.failed = {seq for seq in self.failed if not seq.finished}

    def _slot(self, name: PageName) -> int:
        slot = self._tier.find(name)
        assert slot is not None, "a locked name has left the tier"
        return slot

    def _fail(self, restore: Restore, what: str, num_pages: int, error: Exception) -> None:
        """End a restore whose reads or copies failed and would fail again. what, num_pages, error: see
        `OffloadFailures.count`."""
        self._failures.count(what, num_pages, error)
        self.failed.add(restore.seq)
        self._release(restore)

    def _cancel(self, restore: Restore) -> None:
        if restore.moving is not None and restore.moving.done():
            try:
                restore.moving.result()
            except Exception as error:  # an error that `update` has not seen yet
                self._fail(restore, "not copied back", len(restore.names), error)
                return
        self._release(restore)

    def _release(self, restore: Restore) -> None:
        for page in restore.to_fetch:
            self._tier.drop(page.name)
        if restore.fetching is not None:
            self._disk.abandon(restore.fetching)
        self._blocks.release(restore.seq)
        self._end(restore)

    def _end(self, restore: Restore) -> None:
        self._restores.remove(restore)
        self._tier.unlock(restore.names)
        self._returned += [seq for seq in (restore.seq, *restore.followers) if not seq.finished]
