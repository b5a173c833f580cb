"""KV cache offloading: decides which pages and states to copy to host memory, and which to restore for a sequence."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.page_mover import STATES, PageMover, PageName, Pending, StoredPage
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.offload.costs import OffloadCosts, OffloadFailures, PrefillTimer
from headway.core.engine.offload.disk_tier import DiskTier
from headway.core.engine.offload.host_tier import HostTiers
from headway.core.engine.offload.pending_restores import PendingRestores

log = logging.getLogger("headway")


RECOMPUTE, SWAP, AUTO = "recompute", "swap", "auto"


class _Swapped(NamedTuple):
    length: int  # Number of tokens held by the pages and, if layers keep states, by the state
    names: list[PageName]


class Offloader:
    """Saves copies of named pages in host memory, and optionally on disk, before the pool overwrites them.

    A free page is *dirty* if it has a name and no copy. Dirty pages are copied out, least recently freed first, once fewer than
    `lookahead` pages could be allocated without loss, so a step seldom waits for a copy. If a dirty page is allocated before
    that, it is copied out at the allocation.

    A waiting sequence with a saved prefix gets pages, and waits outside the queue until the prefix is restored. A preempted
    sequence can be *swapped*: its pages are copied out when the pool needs them, and their copies are locked until the sequence
    is restored. Only the tokens of a partial last page are recomputed.

    With state layers, a prefix is restored together with a checkpoint, the state at the prefix's end. A checkpoint is copied out
    when the device evicts it. The state of a preempted sequence cannot be rewound to the end of a page. So the state and the
    partial last page are copied out at once, and the sequence continues from them.
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
        """mode: preemption mode AUTO, RECOMPUTE or SWAP. lookahead: maximum number of pages per step. now: clock, in seconds."""
        self._blocks = blocks
        self._mover = mover
        self._stats = stats
        self.costs = costs
        """Estimates used to compare copying with recomputing."""
        self.timer = PrefillTimer(costs, stats, now)
        """Timer that must be notified of every step."""
        self.tier = HostTiers(mover.num_slots, mover.num_state_slots)
        self._failures = OffloadFailures(stats)
        self._disk = DiskTier(mover, self.tier, stats, self._failures)
        self._mode = mode
        self._lookahead = blocks.num_pages if mover.max_stored else lookahead
        self._dirty: OrderedDict[int, int] = OrderedDict()  # Free pages to copy out, in the order freed -> cache group
        self._out: dict[PageName, tuple[int, int]] = {}
        """Copies to make before the next step: name -> (page of the pool or state slot of the device, slot of the host tier)."""
        self._copying: list[tuple[Pending[object], list[PageName]]] = []  # Pending copies into slots of the tier
        self.restores = PendingRestores(blocks, self.tier, self._disk, stats, self._failures)
        """Sequences that wait, outside the scheduler's queues, for their pages to be restored."""
        self._swapped: dict[Sequence, _Swapped] = {}
        blocks.keeper = self
        if blocks.checkpoints is not None:
            blocks.checkpoints.evicted = lambda digest, slot: self._put((STATES, digest), slot)

    # Calls of the block manager (`PageKeeper`).

    def freed(self, page: int, group: int) -> None:
        digest = self._blocks.prefixes[group].index.digest_of(page)
        if digest is not None and (group, digest) not in self.tier:
            self._dirty[page] = group

    def acquired(self, page: int) -> None:
        self._dirty.pop(page, None)

    def allocated(self, page: int) -> None:
        group = self._dirty.pop(page, None)
        if group is not None:
            self._mark_to_store(page, group)

    def forgotten(self, everywhere: bool) -> None:
        """Forget all contents; see `PageKeeper`. Pages on disk stay unless `everywhere` is True, because the steps that computed
        them were read without an error."""
        self.restores.cancel_all()
        self._dirty.clear()
        self._out = {}
        self.tier.clear()
        self._disk.forget_unwritten()
        if everywhere:
            self._disk.empty()

    # Calls of the scheduler.

    def preempt(self, seq: Sequence) -> str:
        """Release the pages of a sequence that is being preempted. Returns SWAP or RECOMPUTE, the method by which its tokens will
        be restored."""
        length = self._length_to_swap(seq)
        names = self._names(seq, length)
        held = [page for table in seq.tables for page in table.held]
        kind = SWAP if self._swap_pays(seq, names) else RECOMPUTE
        if kind == SWAP:
            self.tier.lock(names)
            self._swapped[seq] = _Swapped(length, names)
            self._stats.blocks_swapped += self._count_blocks(names)
            if self._blocks.checkpoints is not None:
                self._put_state(seq, length)
        self._blocks.release(seq)
        if kind == RECOMPUTE:
            for page in held:  # recomputing is cheaper than copying
                self._dirty.pop(page, None)
        return kind

    def restore(self, seq: Sequence) -> bool:
        """Start restoring the prefix of the next queued sequence, which has no pages. Returns False if the sequence need not wait
        for a restore."""
        if seq.tables or not (self.tier or self._disk) or seq.computes_whole_prompt or seq in self.restores.failed:
            return False
        if self._mode == RECOMPUTE and seq.num_preemptions:
            return False
        length = self._swapped_length(seq) or self._blocks.longest_hit(seq, partly=False, also=self._is_stored)
        spared = length - self._blocks.longest_hit(seq, partly=True) if length else 0
        if spared <= 0:
            return False
        names = [each for each in self._names(seq, length) if not self._is_in_pool(each)]
        if self.restores.join(seq, names):
            return True
        cost = self.costs.recompute(spared)
        forced = self._mode == SWAP and seq in self._swapped
        if not forced and cost is not None and cost < self.costs.copy_back(names):
            return False
        return self.restores.begin(seq, length, spared, names)

    def take_returned(self) -> list[Sequence]:
        """Return the sequences that have stopped waiting for pages since the last call."""
        self._finish_copies()
        self.restores.update({name for _, names in self._copying for name in names})
        return self.restores.take_returned()

    def remove_finished(self) -> None:
        """Forget finished sequences."""
        self.restores.remove_finished()
        for seq in [seq for seq in self._swapped if seq.finished]:
            self.started(seq)

    def started(self, seq: Sequence) -> None:
        """Unlock the pages of a sequence that has started to run or has ended."""
        swapped = self._swapped.pop(seq, None)
        if swapped is not None:
            self.tier.unlock(swapped.names)
        self.restores.failed.discard(seq)

    # Calls of the loop.

    def flush(self, idle: bool = False, wait: bool = False) -> None:
        """Start the copies that must precede the next step.

        idle: True if all launched steps have been read. wait: True to wait for pages that are being restored.
        """
        ready = self._blocks.num_free - len(self._dirty)
        if ready < self._lookahead:  # enough for some steps: one move of many pages costs the host less than many moves
            for _ in range(min(self._lookahead - ready + self._lookahead // 4, len(self._dirty))):
                self._mark_to_store(*self._dirty.popitem(last=False))
        self._finish_copies()
        self._move_out()
        self._stats.offload_bytes_in += self.costs.bytes_of(self.restores.move(self._mover))
        self.restores.fetch()
        self._disk.flush(idle)
        if wait:
            self.restores.wait()

    def _move_out(self) -> None:
        names = list(self._out)
        pages = [move for (group, _), move in self._out.items() if group != STATES]
        states = [move for (group, _), move in self._out.items() if group == STATES]
        self._out = {}
        if not names:
            return
        try:
            self._copying.append((self._mover.move_out(pages, states), names))
            self._stats.offload_bytes_out += self.costs.bytes_of(names)
        except Exception as error:
            self._forget_lost(names, error)

    def _finish_copies(self) -> None:
        for copying in [each for each in self._copying if each[0].done()]:
            self._copying.remove(copying)
            pending, names = copying
            try:
                pending.result()
            except Exception as error:
                self._forget_lost(names, error)

    def _forget_lost(self, names: list[PageName], error: Exception) -> None:
        """Forget pages whose copies into their slots failed, so that no lookup finds them."""
        self._failures.count("not copied out", len(names), error)
        self.restores.forget_lost(names)
        self._disk.forget_lost(names)
        for name in names:
            self._out.pop(name, None)  # its slot is free now
            self.tier.drop(name)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in host memory."""
        return self._count_blocks(self.tier.pages)

    @property
    def num_states(self) -> int:
        """Number of states in host memory."""
        return len(self.tier.states)

    def _count_blocks(self, names: Iterable[PageName]) -> int:
        return sum(self._blocks.groups[number].blocks_per_page for number, _ in names if number != STATES)

    def _length_to_swap(self, seq: Sequence) -> int:
        """Return the number of tokens that need not be recomputed if the sequence is swapped, or 0 if it cannot be swapped."""
        if self._blocks.checkpoints is None:
            whole = math.lcm(*(group.page_size for group in self._blocks.groups))
            return seq.num_known // whole * whole
        # The row's state is after all launched tokens, which must be known; and no failed launch may have left work.
        stands = seq.num_computed == seq.num_known and not (seq.num_unverified or seq.checkpoints)
        return seq.num_computed if stands and seq.restored_from is None and seq.row is not None else 0

    def _swapped_length(self, seq: Sequence) -> int:
        """Return the number of tokens to restore together with a swapped sequence's state. 0 if the model has no state layers, or
        a page or the state is lost."""
        swapped = self._swapped.get(seq)
        if swapped is None or self._blocks.checkpoints is None:
            return 0
        return swapped.length if all(self._is_in_pool(name) or self._is_stored(*name) for name in swapped.names) else 0

    def _put_state(self, seq: Sequence, length: int) -> None:
        """Copy out a sequence's state and its partial last pages into locked slots. No prefix lookup finds these pages."""
        store = self._blocks.checkpoints
        assert store is not None
        assert seq.row is not None
        name = self._blocks.name_of_start(seq, length)
        for number, (group, table) in enumerate(zip(self._blocks.groups, seq.tables, strict=True)):
            if length % group.page_size:
                self._put((number, name), table.pages[length // group.page_size])
        self._put((STATES, name), store.slots.of_row(seq.row)[seq.state_index])
        self._stats.states_swapped += 1

    def _swap_pays(self, seq: Sequence, names: list[PageName]) -> bool:
        if self._mode == RECOMPUTE or not names or not self.tier.have_room(names):
            return False
        cost = self.costs.recompute(seq.num_known)
        if self._mode == SWAP or cost is None:
            return True
        absent = [name for name in names if name not in self.tier]
        return self.costs.copy_out(absent) + self.costs.copy_back(names) < cost

    def _is_in_pool(self, name: PageName) -> bool:
        group, digest = name
        if group == STATES:
            return self._blocks.checkpoints is not None and self._blocks.checkpoints.knows(digest)
        return self._blocks.prefixes[group].index.knows(digest)

    def _is_stored(self, group: int, digest: bytes) -> bool:
        name = group, digest
        return (name in self.tier or name in self._disk) and not self._disk.is_abandoned(name)

    def _names(self, seq: Sequence, length: int) -> list[PageName]:
        """Return the names of the pages and the state of a sequence's first `length` tokens, in the order of `attach_pages`."""
        names: list[PageName] = []
        for number, (group, prefixes) in enumerate(zip(self._blocks.groups, self._blocks.prefixes, strict=True)):
            whole = length // group.page_size
            names += [(number, prefixes.digest(seq, place)) for place in range(group.num_pages_before_window(length), whole)]
            if length % group.page_size:
                names.append((number, self._blocks.name_of_start(seq, length)))
        if length and self._blocks.checkpoints is not None:
            names.append((STATES, self._blocks.name_of_start(seq, length)))
        return names

    def _mark_to_store(self, page: int, group: int) -> None:
        index = self._blocks.prefixes[group].index
        digest = index.digest_of(page)
        assert digest is not None, "a page without a name is not dirty"
        slot = self._put((group, digest), page)
        if slot is not None:
            self._disk.keep(StoredPage((group, digest), index.tokens_of(page), slot))

    def _put(self, name: PageName, page: int) -> int | None:
        """Schedule a page, or the state in a slot, to be copied out before the next step. Returns the host tier's slot, or None
        if no copy is made."""
        if name in self.tier:
            return None
        slot = self.tier.put(name)
        if slot is None:
            self._failures.count("host tier full of what is locked", 1)
            return None
        self._out[name] = page, slot
        self._stats.blocks_offloaded += self._count_blocks([name])
        self._stats.states_offloaded += name[0] == STATES
        return slot


def offloader_of(
    blocks: BlockManager,
    mover: PageMover | None,
    page_bytes: int,
    config: EngineConfig,
    stats: EngineStats,
    now: Callable[[], float] = time.perf_counter,
) -> Offloader | None:
    """Return the offloader for the options, or None without offloading. mover: the executor's page mover."""
    if mover is None:
        return None
    state_bytes = 0 if blocks.checkpoints is None else blocks.checkpoints.slots.bytes_per_slot
    costs = OffloadCosts(mover.rates, page_bytes, config.step_tokens, state_bytes)
    step = sum(-(-config.step_tokens // group.page_size) + config.max_num_seqs for group in blocks.groups)
    return Offloader(blocks, mover, costs, stats, config.preemption_mode, min(step, blocks.num_pages), now)
