"""Reference counts of the pages, and the order in which free ones are handed out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol


class PageKeeper(Protocol):
    """Keeps contents of pages elsewhere before they are overwritten; told of every free page with a content to reuse."""

    def freed(self, page: int, group: int) -> None:
        """Note that no sequence holds the page any more, and that its content can be found in a group."""

    def taken(self, page: int) -> None:
        """Note that a free page is held again for its content."""

    def handed_out(self, page: int) -> None:
        """Note that a free page is about to be overwritten; its content can be found until this returns."""

    def forgotten(self, everywhere: bool) -> None:
        """Forget every content: none can be found any more once this returns, and what was kept in memory must not be used;
        everywhere: nor what is on disk."""


class FreePages:
    """Reference counts, and the free pages in order: first those without a content to reuse, then those freed longest ago."""

    def __init__(self, num_pages: int, first: int = 0) -> None:
        """first: pages before this one are never handed out."""
        self.ref_counts = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(first, num_pages))
        self._first = first

    def __len__(self) -> int:
        return len(self._free)

    def __contains__(self, page: int) -> bool:
        return page in self._free

    def num_among(self, pages: Iterable[int]) -> int:
        """Count the free ones of these pages. The count costs 30 ns per page: it is asked for while requests run."""
        return sum(map(self._free.__contains__, pages))

    def take(self, page: int) -> bool:
        """Hold a page once more. Returns whether it was free."""
        self.ref_counts[page] += 1
        if self.ref_counts[page] > 1:
            return False
        del self._free[page]
        return True

    def give(self, page: int) -> bool:
        """Hold a page once less. Returns whether it is free now; then it is the last to be handed out."""
        self.ref_counts[page] -= 1
        if self.ref_counts[page]:
            return False
        self._free[page] = None
        return True

    def put_first(self, page: int) -> None:
        """Make a free page the next to be handed out: there is nothing in it to reuse."""
        self._free.move_to_end(page, last=False)

    def hand_out(self) -> int:
        """Hand out the next free page, held once."""
        page, _ = self._free.popitem(last=False)
        self.ref_counts[page] = 1
        return page

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that every page is free or held exactly as often as `held` lists the page."""
        counts = [0] * len(self.ref_counts)
        for page in held:
            counts[page] += 1
        assert counts == self.ref_counts, "reference counts differ from what sequences hold"
        free = {page for page, count in enumerate(counts) if count == 0 and page >= self._first}
        assert set(self._free) == free, "a page leaked or is owned and free"
