"""Checkpoints: states saved at the ends of prompts and where prompts diverge, found by the name of their prefix."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from headway.core.engine.data.state_slots import StateSlots
from headway.core.engine.data.stats import EngineStats


class Checkpoints:
    """Index of saved states, and allocator of slots for new ones. The least recently used state is evicted first.

    A prefix hit of a model with states needs every group's pages and a checkpoint at its end. A checkpoint may outlive its pages;
    it is then unused until the pages are computed again.

    A slot may be held for waiting sequences that will start from its state. Such a slot may have no name yet.
    """

    def __init__(self, slots: StateSlots, interval: int, stats: EngineStats) -> None:
        """interval: number of tokens between possible checkpoints. In every group, a page ends at each multiple of this
        number."""
        self.interval = interval
        self.slots = slots
        self._stats = stats
        self._free = list(range(slots.num_slots - 1, slots.first_checkpoint - 1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._references: Counter[int] = Counter()
        self._unnamed: set[int] = set()  # Held slots that have no name
        self.evicted: Callable[[bytes, int], object] | None = None
        """Function that saves a state, given its name and slot, before the next step may overwrite the slot. None means that
        evicted states are not saved."""

    def __len__(self) -> int:
        return len(self._slot_of)

    def knows(self, digest: bytes) -> bool:
        """Return whether a checkpoint with this name exists."""
        return digest in self._slot_of

    def use(self, digest: bytes) -> int:
        """Return the slot of a checkpoint, and mark it as the most recently used."""
        self._slot_of.move_to_end(digest)
        self._stats.num_checkpoint_hits += 1
        return self._slot_of[digest]

    def allocate(self, evict: bool) -> int | None:
        """Return a newly allocated slot, or None if none is available. evict: True to evict the least recently used checkpoint
        that is not held, if no slot is free."""
        if self._free:
            return self._free.pop()
        oldest = next((digest for digest, slot in self._slot_of.items() if slot not in self._references), None) if evict else None
        if oldest is None:
            return None
        self._stats.num_checkpoint_evictions += 1
        self._stats.evictions["state"] += 1
        slot = self._slot_of.pop(oldest)
        if self.evicted is not None:
            self.evicted(oldest, slot)
        return slot

    def name(self, digest: bytes, slot: int) -> None:
        """Publish the state in an allocated slot. If an equal checkpoint exists, free the slot."""
        if digest in self._slot_of:
            self._free.append(slot)
        else:
            self._slot_of[digest] = slot
            self._stats.num_checkpoints += 1

    def free(self, slot: int) -> None:
        """Free a slot that no step has written."""
        self._free.append(slot)

    def hold(self, digest: bytes) -> int | None:
        """Hold the slot of a checkpoint, or a new slot for this name. Returns None if no slot is available."""
        slot = self._slot_of.get(digest)
        if slot is None:
            slot = self.allocate(evict=True)
            if slot is None:
                return None
            self._unnamed.add(slot)
        self._references[slot] += 1
        return slot

    def has_slot_for(self, digest: bytes) -> bool:
        """Return whether `hold` would return a slot for this name."""
        return digest in self._slot_of or bool(self._free) or any(slot not in self._references for slot in self._slot_of.values())

    def publish_restored(self, digest: bytes, slot: int) -> None:
        """Publish a held slot to which a saved checkpoint has been restored for a waiting sequence."""
        self._stats.num_checkpoint_hits += 1
        if digest not in self._slot_of and slot in self._unnamed:
            self._unnamed.discard(slot)
            self._slot_of[digest] = slot

    def unhold(self, slot: int) -> None:
        """Undo one `hold` of a slot."""
        self._references[slot] -= 1
        if not self._references[slot]:
            del self._references[slot]
            if slot in self._unnamed:
                self._unnamed.discard(slot)
                self._free.append(slot)

    def clear(self) -> None:
        """Forget every checkpoint."""
        for slot in self._slot_of.values():
            if slot in self._references:
                self._unnamed.add(slot)
            else:
                self._free.append(slot)
        self._slot_of.clear()

    def check_integrity(self, reserved: list[int], held: Iterable[int]) -> None:
        """Assert that every slot is free, named, reserved by a sequence for its next step, or held as many times as it occurs in
        `held`."""
        owned = sorted([*self._free, *self._slot_of.values(), *reserved, *self._unnamed])
        own = range(self.slots.first_checkpoint, self.slots.num_slots)
        assert owned == list(own), "a slot of a checkpoint leaked or has two owners"
        assert self._references == Counter(held), "slots are held by nobody, or not by those who need them"
        assert self._unnamed <= self._references.keys(), "a slot without a name is held by nobody"
