"""The seam between who decides which page is kept where, and who has the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from headway.core.engine.offload.costs import LinkRates
from headway.core.engine.offload.tier import PageName

Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """Something that was begun; a `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def result(self) -> Result:
        """Wait for its end. What went wrong is raised here."""


class KeptPage(NamedTuple):
    """A page in a slot of the host tier, as the disk keeps it."""

    name: PageName
    tokens: bytes
    """Packed (`prefixes.packed`): a file is believed only if it has these."""
    slot: int


class PageMover(Protocol):
    """Copies pages between the pool, slots of host memory and files: plain data in, in the order of the calls.

    Whatever overlaps with what, the outcome is as if each call had been done when it returns, before any later step is launched:
    a page that a later step writes is copied out first, and one that it reads has come back; a slot is stored after the copies
    into it, and fetched after those too. Only a slot that is being stored or fetched must be left alone until that has ended.
    """

    @property
    def num_slots(self) -> int:
        """Pages that the host's memory holds."""

    @property
    def rates(self) -> LinkRates:
        """As measured."""

    @property
    def stored(self) -> Sequence[PageName]:
        """Pages on disk at the start, the one used longest ago first."""

    @property
    def max_stored(self) -> int:
        """Pages that the disk may hold; 0: there is no disk."""

    def move_out(self, moves: Sequence[tuple[int, int]]) -> Pending[object]:
        """Copy pages out, (page, slot). Where that fails, at once or at its end, nobody knows what any of the slots holds."""

    def move_back(self, moves: Sequence[tuple[int, int]]) -> Pending[object]:
        """Copy pages back, (slot, page). It fails as `move_out` does."""

    def store(self, pages: Sequence[KeptPage]) -> Pending[frozenset[PageName]]:
        """Write slots to the disk; its result are the pages that could not be written, those included whose copy into the slot
        has failed at its end."""

    def fetch(self, pages: Sequence[KeptPage]) -> Pending[frozenset[PageName]]:
        """Read slots from the disk; its result are the pages that are not there as they should be."""

    def discard(self, names: Sequence[PageName]) -> None:
        """Delete pages from the disk."""
