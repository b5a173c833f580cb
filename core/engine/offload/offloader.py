"""Decides which pages are copied out of the pool, and which are brought back for a sequence."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.offload.costs import OffloadCosts, OffloadFailures, PrefillTimer
from headway.core.engine.offload.disk_tier import DiskTier
from headway.core.engine.offload.host_tier import HostTier
from headway.core.engine.offload.pending_restores import PendingRestores
from headway.core.engine.state.config import EngineConfig
from headway.core.engine.state.page_mover import KeptPage, PageMover, PageName, Pending
from headway.core.engine.state.sequence import Sequence
from headway.core.engine.state.stats import EngineStats

RECOMPUTE, SWAP, AUTO = "recompute", "swap", "auto"


class Offloader:
    """Keeps named pages in the host's memory, and perhaps on disk, beyond their time in the pool.

    A free page that is named and not kept is *dirty*. Dirty pages are copied out, those freed longest ago first, as soon as fewer
    than `lookahead` pages could be handed out without losing anything, so that a step seldom waits for a copy; a page that is
    handed out earlier is copied then. A waiting sequence whose start is kept gets pages, and waits beside the queue until its
    start has come back. A preempted sequence is *swapped* by the same means: its pages stay in the pool until they are needed,
    are copied out, locked, and brought back; only the tokens of its last page, if it is not full, are computed again.
    """

    def __init__(
        self,
        blocks: BlockManager,
        mover: PageMover,
        costs: OffloadCosts,
        stats: EngineStats,
        mode: str,
        lookahead: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """mode: of preemption, AUTO, RECOMPUTE or SWAP. lookahead: pages that one step may take. now: the time in seconds."""
        self._blocks, self._mover, self._stats = blocks, mover, stats
        self._costs = costs
        self.timer = PrefillTimer(costs, stats, now)
        """Must be told of every step."""
        self.tier = HostTier(mover.num_slots)
        self._failures = OffloadFailures(stats)
        self._disk = DiskTier(mover, self.tier, stats, self._failures)
        self._mode, self._lookahead = mode, blocks.num_pages if mover.max_stored else lookahead
        self._dirty: OrderedDict[int, int] = OrderedDict()
        """Free pages that are to be copied out, in the order in which they were freed, and their cache groups."""
        self._out: dict[PageName, tuple[int, int]] = {}
        """Pages that are to be copied out before the next step: page of the pool and slot of the tier."""
        self._copying: list[tuple[Pending[object], list[PageName]]] = []
        """Copies under way into slots of the tier."""
        self.restores = PendingRestores(blocks, self.tier, self._disk, stats, self._failures)
        """Sequences that wait for pages, beside the scheduler's queues."""
        self._swapped: dict[Sequence, list[PageName]] = {}
        """The pages that are locked for each sequence that was swapped."""
        blocks.keeper = self

    # Calls of the block manager (`PageKeeper`).

    def freed(self, page: int, group: int) -> None:
        """See PageKeeper."""
        digest = self._blocks.prefixes[group].index.digest_of(page)
        if digest is not None and (group, digest) not in self.tier:
            self._dirty[page] = group

    def taken(self, page: int) -> None:
        """See PageKeeper."""
        self._dirty.pop(page, None)

    def handed_out(self, page: int) -> None:
        """See PageKeeper."""
        group = self._dirty.pop(page, None)
        if group is not None:
            self._keep(page, group)

    def forgotten(self, everywhere: bool) -> None:
        """See PageKeeper. What is on disk may stay: it was written after its step had been read without a fault."""
        self.restores.cancel_all()
        self._dirty.clear()
        self._out = {}
        self.tier.clear()
        self._disk.forget_unwritten()
        if everywhere:
            self._disk.empty()

    # Calls of the scheduler.

    def preempt(self, seq: Sequence) -> str:
        """Take the pages of a sequence that is to wait; returns how it will get them again, SWAP or RECOMPUTE."""
        whole = math.lcm(*(group.page_size for group in self._blocks.groups))
        names = self._names(seq, seq.num_known // whole * whole)
        held = [page for table in seq.tables for page in table.held]
        kind = SWAP if self._swap_pays(seq, names) else RECOMPUTE
        self._blocks.release(seq)
        if kind == SWAP:
            self.tier.lock(names)
            self._swapped[seq] = names
            self._stats.blocks_swapped += sum(self._blocks.groups[number].blocks_per_page for number, _ in names)
        else:
            for page in held:  # computing them again is cheaper than copying them
                self._dirty.pop(page, None)
        return kind

    def restore(self, seq: Sequence) -> bool:
        """Begin to bring back the start of a sequence that is next in the queue and holds nothing; False: it need not wait."""
        if seq.tables or not (self.tier or self._disk) or seq.computes_whole_prompt or seq in self.restores.failed:
            return False
        if self._mode == RECOMPUTE and seq.num_preemptions:
            return False
        length = self._blocks.longest_hit(seq, partly=False, also=self._keeps)
        spared = length - self._blocks.longest_hit(seq, partly=True) if length else 0
        if spared <= 0:
            return False
        names = [each for each in self._names(seq, length) if not self._blocks.prefixes[each[0]].index.knows(each[1])]
        if self.restores.join(seq, names):
            return True
        cost = self._costs.recompute(spared)
        forced = self._mode == SWAP and seq in self._swapped
        if not forced and cost is not None and cost < self._costs.copy_back(len(names)):
            return False
        return self.restores.begin(seq, length, spared, names)

    def take_returned(self) -> list[Sequence]:
        """The sequences that have stopped waiting for pages since the last call."""
        self._finish_copies()
        self.restores.update({name for _, names in self._copying for name in names})
        return self.restores.take_returned()

    def remove_finished(self) -> None:
        """Forget sequences that have ended."""
        self.restores.remove_finished()
        for seq in [seq for seq in self._swapped if seq.finished]:
            self.started(seq)

    def started(self, seq: Sequence) -> None:
        """Stop keeping pages for a sequence, which runs now, or has ended."""
        self.tier.unlock(self._swapped.pop(seq, ()))
        self.restores.failed.discard(seq)

    # Calls of the loop.

    def flush(self, idle: bool = False, wait: bool = False) -> None:
        """Hand the mover what must be copied before the next step.

        idle: every step has been read, and none follows. wait: wait for pages that come back: there is nothing else to do.
        """
        ready = self._blocks.num_free - len(self._dirty)
        if ready < self._lookahead:  # then enough for some steps: one move of many pages costs the host less than many moves
            for _ in range(min(self._lookahead - ready + self._lookahead // 4, len(self._dirty))):
                self._keep(*self._dirty.popitem(last=False))
        self._finish_copies()
        self._move_out()
        self._stats.offload_bytes_in += self.restores.move(self._mover) * self._costs.page_bytes
        self.restores.fetch()
        self._disk.flush(idle)
        if wait:
            self.restores.wait()

    def _move_out(self) -> None:
        names, moves = list(self._out), list(self._out.values())
        self._out = {}
        if not names:
            return
        try:
            self._copying.append((self._mover.move_out(moves), names))
            self._stats.offload_bytes_out += len(names) * self._costs.page_bytes
        except Exception as error:
            self._forget_lost(names, error)

    def _finish_copies(self) -> None:
        """Take note of copies that have ended, and forget the pages of those that have failed."""
        for copying in [each for each in self._copying if each[0].done()]:
            self._copying.remove(copying)
            pending, names = copying
            try:
                pending.result()
            except Exception as error:
                self._forget_lost(names, error)

    def _forget_lost(self, names: list[PageName], error: Exception) -> None:
        """Forget pages that have not come into their slots, so that none is found there."""
        self._failures.count("not copied out", len(names), error)
        self.restores.forget_lost(names)
        self._disk.forget_lost(names)
        for name in names:
            self._out.pop(name, None)  # its slot is free now
            self.tier.drop(name)

    @property
    def num_blocks(self) -> int:
        """Blocks that the host's memory holds."""
        return sum(self._blocks.groups[number].blocks_per_page for number, _ in self.tier)

    def _swap_pays(self, seq: Sequence, names: list[PageName]) -> bool:
        """Whether a sequence should be swapped rather than computed again."""
        if self._mode == RECOMPUTE or not names or len(names) > self.tier.num_unlocked:
            return False
        cost = self._costs.recompute(seq.num_known)
        if self._mode == SWAP or cost is None:
            return True
        absent = sum(name not in self.tier for name in names)
        return self._costs.copy_out(absent) + self._costs.copy_back(len(names)) < cost

    def _keeps(self, group: int, digest: bytes) -> bool:
        name = group, digest
        return (name in self.tier or name in self._disk) and not self._disk.is_abandoned(name)

    def _names(self, seq: Sequence, length: int) -> list[PageName]:
        """The pages that hold the start of a sequence, in the order of `attach_pages`."""
        return [
            (number, prefixes.digest(seq, place))
            for number, (group, prefixes) in enumerate(zip(self._blocks.groups, self._blocks.prefixes, strict=True))
            for place in range(group.num_behind(length), length // group.page_size)
        ]

    def _keep(self, page: int, group: int) -> None:
        """Copy a page out before the next step."""
        index = self._blocks.prefixes[group].index
        digest = index.digest_of(page)
        assert digest is not None, "a page without a name is not dirty"
        name = group, digest
        if name in self.tier:
            return
        slot = self.tier.put(name)
        if slot is None:
            self._failures.count("host tier full of what is locked", 1)
            return
        self._out[name] = page, slot
        self._stats.blocks_offloaded += self._blocks.groups[group].blocks_per_page
        self._disk.keep(KeptPage(name, index.tokens_of(page), slot))


def offloader_of(
    blocks: BlockManager,
    mover: PageMover | None,
    page_bytes: int,
    config: EngineConfig,
    stats: EngineStats,
    now: Callable[[], float] = time.perf_counter,
) -> Offloader | None:
    """The offloader that the options ask for; None: no page is kept beyond the pool. mover: the executor's."""
    if mover is None:
        return None
    costs = OffloadCosts(mover.rates, page_bytes, config.step_tokens)
    step = sum(-(-config.step_tokens // group.page_size) + config.max_num_seqs for group in blocks.groups)
    return Offloader(blocks, mover, costs, stats, config.preemption_mode, min(step, blocks.num_pages), now)
