"""Interface between the offloader, which decides where pages are stored, and the executor, which moves the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeVar

from headway.core.contract.layout import LayerCache
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.state_slots import StateMemory
from headway.core.engine.data.step import StepInput

STAGING_BYTES = 32 * 2**20
"""Size of the device staging memory per direction, in bytes. A kernel gathers pages in this memory for one large copy. The parts
of a page are scattered, so copying them one by one would not use the link's full bandwidth."""

PageName = tuple[int, bytes]
"""A cache group, and the digest of a page: the chained hash of all tokens up to its end. A state's name is STATES and the hash of
all tokens that it has seen."""

STATES: Final = 2**16
"""Value of the cache group in the name of a state."""

Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """Result of work that has begun, for example a `concurrent.futures.Future`."""

    def done(self) -> bool:
        """Return whether the work has ended, successfully or not."""

    def result(self) -> Result:
        """Return the result, waiting for the work to end. Raises the work's error."""


class StoredPage(NamedTuple):
    """A page in a slot of the host tier, in the format of the disk tier."""

    name: PageName
    tokens: bytes
    """Packed tokens of the page (`prefix_lookup.packed`). A file is used only if it contains the same tokens."""
    slot: int


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Measured copy rates of pages between the pool and host memory, in bytes per second."""

    out: float
    back: float


class PageMover(Protocol):
    """Copies pages between the pool, slots of host memory and files. Input is plain data, and calls take effect in order.

    However copies overlap, the outcome is as if each call had finished when it returns, before any later step is launched. A page
    that a later step writes is copied out first; a page that the step reads has been restored. A slot is stored or fetched only
    after earlier copies into it. While a slot is being stored or fetched, the caller must not use it otherwise.
    """

    @property
    def num_slots(self) -> int:
        """Number of pages that fit in host memory."""

    @property
    def num_state_slots(self) -> int:
        """Number of states that fit in host memory in addition to the pages. 0 if no layer has a state."""

    @property
    def rates(self) -> LinkRates:
        """Link rates, measured when the engine starts."""

    @property
    def stored(self) -> Sequence[PageName]:
        """Names of the pages on disk when the engine starts, least recently used first."""

    @property
    def max_stored(self) -> int:
        """Maximum number of pages on disk. 0 means no disk tier."""

    def before(self, step: StepInput) -> None:
        """Make a step wait for the copies of its pages. Must be called before the step is launched."""

    def move_out(self, moves: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]] = ()) -> Pending[object]:
        """Copy pages, given as (page, slot), and states, given as (device slot, slot), to host memory.

        If the copy fails, at once or later, the slots' contents are undefined.
        """

    def move_back(self, moves: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]] = ()) -> Pending[object]:
        """Copy pages, given as (slot, page), and states, given as (slot, device slot), from host memory back to the pool.

        If the copy fails, at once or later, the contents of the pages and device slots are undefined.
        """

    def store(self, pages: Sequence[StoredPage]) -> Pending[frozenset[PageName]]:
        """Write slots to disk. The result names pages that could not be written, or whose copy into the slot failed."""

    def fetch(self, pages: Sequence[StoredPage]) -> Pending[frozenset[PageName]]:
        """Read slots from disk. The result names pages that are missing or damaged on disk."""

    def discard(self, names: Sequence[PageName]) -> None:
        """Delete pages from disk."""


MakePageMover = Callable[[Sequence[LayerCache], PoolSize, StateMemory | None], PageMover]
"""Function that makes the mover for a pool's caches and states. The executor gets this function as an argument, so it need not
import the mover."""
