"""Host memory for pages and states: the assignment of slots (`HostTier`), and the bytes of the slots (`HostSlots`)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import psutil
import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.page_mover import STATES, PageName


class HostTier:
    """Maps names of pages, or of states, to slots, least recently used first. It never accesses the slots' bytes.

    A name may be locked, with or without a slot. A locked page is not evicted, because it is being copied or belongs to a
    preempted sequence.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[PageName, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._locks: Counter[PageName] = Counter()
        self._orphans: dict[PageName, list[int]] = {}  # Slots of names that were forgotten while locked

    def __contains__(self, name: PageName) -> bool:
        return name in self._slots

    def __iter__(self) -> Iterator[PageName]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_unlocked(self) -> int:
        """Number of slots that remain if one slot is reserved for every locked name."""
        return self.num_slots - len(self._locks) - sum(map(len, self._orphans.values()))

    def find(self, name: PageName) -> int | None:
        """Return the slot of a name, or None, and mark the name as most recently used."""
        slot = self._slots.get(name)
        if slot is not None:
            self._slots.move_to_end(name)
        return slot

    def put(self, name: PageName) -> int | None:
        """Assign a slot to a name that has none, evicting the least recently used unlocked name if necessary. Returns None if all
        names are locked."""
        assert name not in self._slots
        if not self._free:
            oldest = next((held for held in self._slots if held not in self._locks), None)
            if oldest is None:
                return None
            self._free.append(self._slots.pop(oldest))
        slot = self._slots[name] = self._free.pop()
        return slot

    def drop(self, name: PageName) -> None:
        """Remove a name from the tier. Its slot becomes free, or becomes free when the name is unlocked."""
        slot = self._slots.pop(name, None)
        if slot is None:
            return
        if name in self._locks:
            self._orphans.setdefault(name, []).append(slot)
        else:
            self._free.append(slot)

    def clear(self) -> None:
        """Forget every name."""
        for name in list(self._slots):
            self.drop(name)

    def lock(self, names: Iterable[PageName]) -> None:
        """Lock each name. A name that is locked several times must be unlocked as often."""
        self._locks.update(names)

    def unlock(self, names: Iterable[PageName]) -> None:
        """Undo one call of `lock` for each name."""
        for name in names:
            self._locks[name] -= 1
            if not self._locks[name]:
                del self._locks[name]
                self._free += self._orphans.pop(name, ())

    def check_integrity(self, idle: bool) -> None:
        """Assert that every slot is either free or assigned to one name. idle: True to also assert that no name is locked."""
        orphans = [slot for slots in self._orphans.values() for slot in slots]
        slots = sorted([*self._free, *self._slots.values(), *orphans])
        assert slots == list(range(self.num_slots)), "a slot leaked or has two names"
        assert not idle or not self._locks, "a name is still locked"


class HostTiers:
    """One tier for pages and one for states, selected by the kind of a name."""

    def __init__(self, num_slots: int, num_state_slots: int = 0) -> None:
        self.pages = HostTier(num_slots)
        self.states = HostTier(num_state_slots)

    def __contains__(self, name: PageName) -> bool:
        return name in self.of(name)

    def __len__(self) -> int:
        return len(self.pages) + len(self.states)

    def of(self, name: PageName) -> HostTier:
        """Return the tier for names of this name's kind."""
        return self.states if name[0] == STATES else self.pages

    @property
    def overbooked(self) -> bool:
        """True if, for pages or for states, more names are locked than the tier has slots."""
        return self.pages.num_unlocked < 0 or self.states.num_unlocked < 0

    def have_room(self, names: Sequence[PageName]) -> bool:
        """Return whether the tiers have enough slots to lock these names in addition to all locked names."""
        pages, states = _by_kind(names)
        return len(pages) <= self.pages.num_unlocked and len(states) <= self.states.num_unlocked

    def find(self, name: PageName) -> int | None:
        """Return the slot of a name, or None; see `HostTier.find`."""
        return self.of(name).find(name)

    def put(self, name: PageName) -> int | None:
        """Assign a slot to a name; see `HostTier.put`."""
        return self.of(name).put(name)

    def drop(self, name: PageName) -> None:
        """Remove a name from its tier."""
        self.of(name).drop(name)

    def lock(self, names: Iterable[PageName]) -> None:
        """Lock each name in its tier; see `HostTier.lock`."""
        pages, states = _by_kind(names)
        self.pages.lock(pages)
        self.states.lock(states)

    def unlock(self, names: Iterable[PageName]) -> None:
        """Undo one call of `lock` for each name."""
        pages, states = _by_kind(names)
        self.pages.unlock(pages)
        self.states.unlock(states)

    def clear(self) -> None:
        """Forget every name."""
        self.pages.clear()
        self.states.clear()

    def check_integrity(self, idle: bool) -> None:
        """Assert that both tiers are consistent; see `HostTier.check_integrity`."""
        self.pages.check_integrity(idle)
        self.states.check_integrity(idle)


def _by_kind(names: Iterable[PageName]) -> tuple[list[PageName], list[PageName]]:
    every = list(names)
    states = [name for name in every if name[0] == STATES]
    return [name for name in every if name[0] != STATES] if states else every, states


_LARGEST_SLAB = 256 * 2**20  # Bytes per allocation: torch pins a power of two


class HostSlots:
    """Host memory with room for one page, or one state, per slot. Pinned if a GPU copies to it."""

    def __init__(self, memory: Sequence[Tensor], num_slots: int) -> None:
        """memory: result of `page_memory` or `StateMemory.views`. :raises ConfigError: if the host lacks memory for `num_slots`
        slots."""
        self.num_slots = num_slots
        page_bytes = sum(view[:, 0].nbytes for view in memory)
        free = psutil.virtual_memory().available
        if num_slots * page_bytes > free:
            raise ConfigError(
                "kv_offload_size", f"at most what the host has free, {free // 2**20} MiB", f"{num_slots * page_bytes}"
            )
        pinned = memory[0].device.type == "cuda"
        self._per_slab = max(_LARGEST_SLAB // page_bytes, 1)
        self._slabs: list[list[Tensor]] = []  # For each view of the memory: uint8 [slots per slab, count, bytes]
        try:
            for view in memory:
                shape = view.shape[0], view.shape[2]
                counts = [min(self._per_slab, num_slots - first) for first in range(0, num_slots, self._per_slab)]
                self._slabs.append([torch.empty((count, *shape), dtype=torch.uint8, pin_memory=pinned) for count in counts])
        except RuntimeError as error:
            raise ConfigError(
                "kv_offload_size", "memory that can be pinned for the GPU", f"{num_slots * page_bytes} bytes: {error}", "lower it"
            ) from error

    def write(self, slots: Sequence[int], staging: Sequence[Tensor]) -> None:
        """Copy the first pages of the staging memory into slots, on the current stream."""
        for slabs, staged in zip(self._slabs, staging, strict=True):
            for number, first, at, count in self._runs(slots):
                slabs[number][first : first + count].view(staged.dtype).copy_(staged[at : at + count], non_blocking=True)

    def read(self, slots: Sequence[int], staging: Sequence[Tensor]) -> None:
        """Copy slots into the first pages of the staging memory, on the current stream."""
        for slabs, staged in zip(self._slabs, staging, strict=True):
            for number, first, at, count in self._runs(slots):
                staged[at : at + count].copy_(slabs[number][first : first + count].view(staged.dtype), non_blocking=True)

    def parts(self, slot: int) -> list[memoryview]:
        """Return the bytes of a slot, for the host to read or write."""
        number, place = divmod(slot, self._per_slab)
        return [slabs[number][place].numpy().data.cast("B") for slabs in self._slabs]

    def _runs(self, slots: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """Yield runs of consecutive slots, each as (index of the slab, first slot in the slab, first index into `slots`,
        length)."""
        at = 0
        while at < len(slots):
            number, first = divmod(slots[at], self._per_slab)
            count = 1
            while at + count < len(slots) and slots[at + count] == slots[at] + count and first + count < self._per_slab:
                count += 1
            yield number, first, at, count
            at += count
