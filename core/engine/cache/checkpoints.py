"""Checkpoints: states that were kept at the ends of prompts and where prompts part, found by the name of what led to them."""

from __future__ import annotations

from collections import OrderedDict

from headway.core.engine.state.state_slots import StateSlots
from headway.core.engine.state.stats import EngineStats


class Checkpoints:
    """Finds kept states, and hands out slots for new ones, the one that was used longest ago first.

    A prefix hit of a model with states needs every group's pages and a checkpoint at its end. A checkpoint may outlive its pages
    and is then found by nobody until they are computed again.
    """

    def __init__(self, slots: StateSlots, interval: int, stats: EngineStats) -> None:
        """interval: tokens; a checkpoint lies at a multiple of it, where whole pages end in every group."""
        self.interval, self.slot_bytes, self._stats = interval, slots.bytes_per_slot, stats
        self._free = list(range(slots.num_slots - 1, slots.first_checkpoint - 1, -1))
        self._first, self._count = slots.first_checkpoint, slots.num_checkpoints
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        """Checkpoints that can be found."""
        return len(self._slot_of)

    def knows(self, digest: bytes) -> bool:
        """Whether there is a checkpoint of this name."""
        return digest in self._slot_of

    def use(self, digest: bytes) -> int:
        """The slot of a checkpoint, which becomes the last to be overwritten."""
        self._slot_of.move_to_end(digest)
        self._stats.num_checkpoint_hits += 1
        return self._slot_of[digest]

    def hand_out(self, evict: bool) -> int | None:
        """Hand out a slot; None: none is free, and evict does not allow to take that of the oldest checkpoint."""
        if self._free:
            return self._free.pop()
        if not (evict and self._slot_of):
            return None
        self._stats.num_checkpoint_evictions += 1
        return self._slot_of.popitem(last=False)[1]

    def name(self, digest: bytes, slot: int) -> None:
        """Make a slot that was handed out findable; where an equal checkpoint is, the slot is free again."""
        if digest in self._slot_of:
            self._free.append(slot)
        else:
            self._slot_of[digest] = slot
            self._stats.num_checkpoints += 1

    def give_back(self, slot: int) -> None:
        """Take a slot back that no step has written."""
        self._free.append(slot)

    def clear(self) -> None:
        """Forget every checkpoint."""
        self._free += self._slot_of.values()
        self._slot_of.clear()

    def check_integrity(self, reserved: list[int]) -> None:
        """Assert that every slot is free, named, or reserved by a sequence for its next step."""
        held = sorted([*self._free, *self._slot_of.values(), *reserved])
        assert held == list(range(self._first, self._first + self._count)), "a slot of a checkpoint leaked or has two owners"
