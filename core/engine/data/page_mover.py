"""The seam between the offloader, which decides where each page is kept, and the executor, which has the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeVar

from headway.core.contract.layout import LayerCache
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.state_slots import StateMemory
from headway.core.engine.data.step import StepInput

STAGING_BYTES = 32 * 2**20
"""Device memory through which the pages of one direction pass: gathered by a kernel, then copied as one piece, since a page's
parts lie far from each other and single copies of them cost more than the link does."""

PageName = tuple[int, bytes]
"""A cache group, and the digest of a page: the chained hash of all tokens to its end. A state is named in the same way, by STATES
and the hash of all tokens that it has seen."""

STATES: Final = 2**16
"""Stands in a name where a page has its cache group: the name is that of a state."""

Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """The result of work that has been begun; a `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """Whether the work has ended, well or not."""

    def result(self) -> Result:
        """Wait for the end of the work. What went wrong is raised here."""


class KeptPage(NamedTuple):
    """A page in a slot of the host tier, in the form that the disk keeps."""

    name: PageName
    tokens: bytes
    """The page's tokens, packed (`prefix_lookup.packed`): a file is believed only if it has these."""
    slot: int


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes per second between the pool and the host's memory, as copies of pages reach them."""

    out: float
    back: float


class PageMover(Protocol):
    """Copies pages between the pool, slots of host memory and files: plain data in, in the order of the calls.

    Whatever overlaps, the outcome is as if each call had been done when it returns, before any later step is launched: a page
    that a later step writes is copied out first, and a page that it reads has come back; a slot is stored after the copies into
    it, and fetched after those too. Only a slot that is being stored or fetched must be left alone until that has ended.
    """

    @property
    def num_slots(self) -> int:
        """Pages that the host's memory holds."""

    @property
    def num_state_slots(self) -> int:
        """States that the host's memory holds beside the pages; 0: no layer of the model keeps one."""

    @property
    def rates(self) -> LinkRates:
        """The link's speed, as measured at the start."""

    @property
    def stored(self) -> Sequence[PageName]:
        """Pages on disk at the start, the one used longest ago first."""

    @property
    def max_stored(self) -> int:
        """Pages that the disk may hold; 0: there is no disk."""

    def before(self, step: StepInput) -> None:
        """Must be called before a step is launched, so that the step waits for the copies of its pages."""

    def move_out(self, moves: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]] = ()) -> Pending[object]:
        """Copy pages out, given as (page, slot), and states, given as (slot of the device, slot). Where that fails, at once or at
        its end, the slots may hold anything."""

    def move_back(self, moves: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]] = ()) -> Pending[object]:
        """Copy pages and states back, given as (slot, page) and (slot, slot of the device); fails as `move_out` does."""

    def store(self, pages: Sequence[KeptPage]) -> Pending[frozenset[PageName]]:
        """Write slots to the disk; the result names pages that could not be written, or whose copy into the slot failed."""

    def fetch(self, pages: Sequence[KeptPage]) -> Pending[frozenset[PageName]]:
        """Read slots from the disk; the result names the pages that are missing there or damaged."""

    def discard(self, names: Sequence[PageName]) -> None:
        """Delete pages from the disk."""


MakePageMover = Callable[[Sequence[LayerCache], PoolSize, StateMemory | None], PageMover]
"""Makes the mover of a pool's caches and states; given to the executor, so that the device's side imports nothing of it."""
