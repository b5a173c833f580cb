"""What the cache of one group of layers still holds of a sequence: the longest start of it that can be reused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from headway.core.engine.groups import CacheGroup
from headway.core.engine.prefixes import PrefixIndex, packed
from headway.core.engine.sequence import Sequence

Elsewhere = Callable[[int, bytes], bool]
"""(group, digest of a page) -> whether its content is kept somewhere else than in the pool."""


class Hit(NamedTuple):
    """The pages of one group that hold the start of a sequence."""

    first: int
    """Pages before the first that is needed: they lie behind the window."""
    pages: list[int]
    """Whole pages from there on."""
    source: int
    """A page of which the first `num_tokens` tokens go on where those end; they must be copied."""
    num_tokens: int
    """0: none."""


class GroupPrefixes:
    """Finds the pages of one group by their content.

    A page is named by the chained hash of all tokens to its end, so one chain, by the block, names the pages of every group. A
    group that keeps every token holds a prefix if it holds all of its pages; a windowed one, if it holds those that the next
    token sees.
    """

    def __init__(self, group: CacheGroup, block_size: int) -> None:
        self.group = group
        self.index = PrefixIndex()
        self._block_size = block_size
        self._blocks_per_page = group.page_size // block_size

    def longest(self, seq: Sequence, at_most: int, partly: bool, also: Callable[[bytes], bool] | None = None) -> int:
        """Tokens of the longest start of a sequence, up to `at_most`, that is held; partly: its last page need not be whole.

        also: whether a page of this digest counts as held although it is not in the pool.
        """

        def lacks(page: int) -> bool:
            return self.find(seq, page) is None and (also is None or not also(self.digest(seq, page)))

        size, group = self.group.page_size, self.group
        end = at_most // size
        if group.window is None:  # from the start on, to the first page that is missing
            end = next((page for page in range(end) if lacks(page)), end)
            return end * size + self._part(seq, end, at_most - end * size, partly)[1]
        while True:  # from the end back, to the first place before which all that its query sees is held
            length = end * size + self._part(seq, end, at_most - end * size, partly)[1]
            held = range(end - 1, group.num_behind(length) - 1, -1)
            missing = next((page for page in held if lacks(page)), None)
            if missing is None:
                return length
            end = missing

    def hit(self, seq: Sequence, length: int) -> Hit:
        """The pages of a start that is held."""
        first, end = self.group.num_behind(length), length // self.group.page_size
        pages = [self.find(seq, page) for page in range(first, end)]
        rest = length - end * self.group.page_size
        source, count = self._part(seq, end, rest, True)
        assert count == rest, "the start of a sequence is no longer held"
        assert None not in pages
        return Hit(first, [page for page in pages if page is not None], source, count)

    def name(self, seq: Sequence, number: int, page: int, count: int) -> None:
        """Make the first `count` tokens of a sequence's page findable, unless an equal page is already."""
        size, digest = self.group.page_size, None
        first, parent = number * size, self.digest(seq, number - 1)
        tokens = packed(seq.token_ids[first : first + count])
        if count == size:
            if size == self._block_size and len(seq.block_hashes) == number:  # packed once: this is done for each block
                seq.block_hashes.append(_chained(parent, tokens))
            digest = self.digest(seq, number)
            if self.index.knows(digest):
                return
        self.index.add(page, parent, tokens, digest)

    def find(self, seq: Sequence, number: int) -> int | None:
        """The page of the pool that holds the `number`-th whole page of a sequence."""
        size = self.group.page_size
        return self.index.find(self.digest(seq, number), packed(seq.token_ids[number * size : (number + 1) * size]))

    def _part(self, seq: Sequence, number: int, most: int, partly: bool) -> tuple[int, int]:
        """The page that agrees longest with a sequence's page, for at most so many tokens, and for how many."""
        first, most = number * self.group.page_size, min(most, self.group.page_size)
        if not partly or most <= 0:
            return -1, 0
        return self.index.longest(self.digest(seq, number - 1), packed(seq.token_ids[first : first + most]))

    def digest(self, seq: Sequence, number: int) -> bytes:
        """Chained hash of a sequence to the end of a full page, b"" before the first.

        Computed once for each block: tokens of a sequence never change. 128 bits: no chance collisions.
        """
        index, hashes = (number + 1) * self._blocks_per_page - 1, seq.block_hashes
        while len(hashes) <= index:
            size = self._block_size
            first = len(hashes) * size
            parent = hashes[-1] if hashes else b""
            tokens = packed(seq.token_ids[first : first + size])
            hashes.append(_chained(parent, tokens))
        return hashes[index] if index >= 0 else b""


def _chained(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()
