"""Which slot of the host's memory holds which page."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

PageName = tuple[int, bytes]
"""A cache group, and the digest of a page: the chained hash of all tokens to its end."""


class HostTier:
    """Names to slots, least recently used first. Bytes are somebody else's business.

    A name may be locked, whether it is here or not: what is locked stays once it is here, for it is being copied, or belongs to a
    sequence that was preempted.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[PageName, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._locks: Counter[PageName] = Counter()
        self._orphans: dict[PageName, list[int]] = {}
        """Slots of names that were forgotten while they were locked."""

    def __contains__(self, name: PageName) -> bool:
        return name in self._slots

    def __iter__(self) -> Iterator[PageName]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_unlocked(self) -> int:
        """Slots that may be overwritten, or will be free to be: those that no locked name has or is to have."""
        return self.num_slots - len(self._locks) - sum(map(len, self._orphans.values()))

    def find(self, name: PageName) -> int | None:
        """The slot of a name, which is now the one used last."""
        slot = self._slots.get(name)
        if slot is not None:
            self._slots.move_to_end(name)
        return slot

    def put(self, name: PageName) -> int | None:
        """A slot for a name that has none; the name used longest ago makes room. None: all are locked."""
        assert name not in self._slots
        if not self._free:
            oldest = next((held for held in self._slots if held not in self._locks), None)
            if oldest is None:
                return None
            self._free.append(self._slots.pop(oldest))
        slot = self._slots[name] = self._free.pop()
        return slot

    def drop(self, name: PageName) -> None:
        """Forget a name."""
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
        """Keep names once more."""
        self._locks.update(names)

    def unlock(self, names: Iterable[PageName]) -> None:
        """Keep names once less."""
        for name in names:
            self._locks[name] -= 1
            if not self._locks[name]:
                del self._locks[name]
                self._free += self._orphans.pop(name, ())

    def check_integrity(self, idle: bool) -> None:
        """Assert that every slot is free or has one name; idle: that no name is locked."""
        orphans = [slot for slots in self._orphans.values() for slot in slots]
        slots = sorted([*self._free, *self._slots.values(), *orphans])
        assert slots == list(range(self.num_slots)), "a slot leaked or has two names"
        assert not idle or not self._locks, "a name is still locked"
