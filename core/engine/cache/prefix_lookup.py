"""Prefix lookup: finds the longest prefix of a sequence that is still cached in one cache group."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy

from headway.core.engine.data.groups import CacheGroup
from headway.core.engine.data.sequence import Sequence

_WIDTH = array("i").itemsize


class BooksError(AssertionError):
    """Bookkeeping of cache pages that does not balance. The message names a page and its owners. It is an error of Headway."""


def packed(token_ids: Items[int]) -> bytes:
    """Return the tokens as bytes of fixed-width integers, the format that the index compares."""
    return array("i", token_ids).tobytes()


class PrefixIndex:
    """Index of blocks by their content.

    A full block is named by its digest, the chained hash of its tokens and of all earlier ones. The tokens of each block, full or
    not, are stored sorted under its parent: the digest of everything before the block (`Sequence.prefix_root` at the start of a
    sequence). The block with the longest match is then next to the insertion point of the given tokens, so a search takes O(log
    n).
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._children: dict[bytes, list[tuple[bytes, int]]] = {}
        self._place_of: dict[int, tuple[bytes, bytes]] = {}  # parent and tokens of each block

    def __contains__(self, block: int) -> bool:
        return block in self._place_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._place_of)

    def find(self, digest: bytes, tokens: bytes) -> int | None:
        """Return the full block with this name if it contains these tokens, or None. Comparing tokens detects hash collisions."""
        block = self._block_of.get(digest)
        return block if block is not None and self._place_of[block][1] == tokens else None

    def knows(self, digest: bytes) -> bool:
        """Return whether any block has this name, without comparing tokens."""
        return digest in self._block_of

    def digest_of(self, block: int) -> bytes | None:
        """Return the name of a block, or None if the block has no name or is not full."""
        return self._digest_of.get(block)

    @property
    def named(self) -> dict[int, tuple[bytes, bytes, bytes]]:
        """Parent, packed tokens and name of each block that has a name."""
        return {block: (*self._place_of[block], digest) for block, digest in self._digest_of.items()}

    def tokens_of(self, block: int) -> bytes:
        """Return the packed tokens of an indexed block."""
        return self._place_of[block][1]

    def longest(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """Return the block under `parent` with the longest match of `tokens`, and the match's length; (-1, 0) if none matches."""
        children = self._children.get(parent, ())
        at = bisect_left(children, (tokens, -1))
        best, most = -1, 0
        for held, block in children[max(at - 1, 0) : at + 1]:
            count = _agreement(held, tokens)
            if count > most:
                best, most = block, count
        return best, most

    def add(self, block: int, parent: bytes, tokens: bytes, digest: bytes | None = None) -> None:
        """Index a block by its tokens, and by its digest if the block is full. The block's old content is forgotten. A block is
        not indexed if an indexed block under the same parent begins with the same tokens."""
        self.discard(block)
        children = self._children.setdefault(parent, [])
        at = bisect_left(children, (tokens, -1))
        if at < len(children) and children[at][0].startswith(tokens):
            return
        children.insert(at, (tokens, block))
        self._place_of[block] = parent, tokens
        if digest is not None:
            self._block_of[digest], self._digest_of[block] = block, digest

    def discard(self, block: int) -> bytes | None:
        """Forget the content of a block that will be overwritten. Returns the block's name, or None if it had none."""
        place = self._place_of.pop(block, None)
        if place is None:
            return None
        parent, tokens = place
        children = self._children[parent]
        del children[bisect_left(children, (tokens, block))]
        if not children:
            del self._children[parent]
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
        return digest

    def clear(self) -> None:
        """Forget everything."""
        for held in (self._block_of, self._digest_of, self._children, self._place_of):
            held.clear()

    def check_integrity(self) -> None:
        """Check that names and blocks correspond one to one, and that the entries below each parent are sorted."""
        named = {block: digest for digest, block in self._block_of.items()}
        entries = {block: (parent, held) for parent, children in self._children.items() for held, block in children}
        for what, found, kept in (("name", named, self._digest_of), ("place", entries, self._place_of)):
            for block in () if found == kept else found.keys() | kept.keys():
                if found.get(block) != kept.get(block):
                    raise BooksError(f"page {block}: its {what} is indexed twice, or not at all")
        assert all(children == sorted(children) and children for children in self._children.values())


def _agreement(held: bytes, tokens: bytes) -> int:
    size = min(len(held), len(tokens))
    if held[:size] == tokens[:size]:
        return size // _WIDTH
    differs = numpy.frombuffer(held, numpy.intc, size // _WIDTH) != numpy.frombuffer(tokens, numpy.intc, size // _WIDTH)
    return int(differs.argmax())


StoredElsewhere = Callable[[int, bytes], bool]
"""Function (group, digest) that returns whether a page is saved outside the pool; for a state, the group is STATES."""


class PrefixHit(NamedTuple):
    """The pages of one group that contain a prefix."""

    first: int
    """Index of the first page that is needed. Earlier pages are outside the window."""
    pages: list[int]
    """Whole pages from `first` on."""
    source: int
    """Page whose first `num_tokens` tokens continue the prefix. These tokens must be copied."""
    num_tokens: int
    """Number of tokens to copy. 0 means none."""


class GroupPrefixes:
    """Index of one group's pages by content.

    A page is named by the chained hash of all tokens up to its end, so one chain over the blocks names the pages of every group.
    A group without a window has a prefix cached if all of the prefix's pages are indexed. A windowed group needs only the pages
    that the next token sees.
    """

    def __init__(self, group: CacheGroup, block_size: int) -> None:
        self.group = group
        self.index = PrefixIndex()
        self._block_size = block_size
        self._blocks_per_page = group.page_size // block_size

    def longest(self, seq: Sequence, at_most: int, partly: bool, also: Callable[[bytes], bool] | None = None) -> int:
        """Return the length of the longest cached prefix in tokens, up to `at_most`.

        partly: True if the last page may be partial. also: function that returns whether the page with a digest is saved outside
        the pool.
        """

        def lacks(page: int) -> bool:
            return self.find(seq, page) is None and (also is None or not also(self.digest(seq, page)))

        size, group = self.group.page_size, self.group
        end = at_most // size
        if group.window is None:  # forward from the start, to the first missing page
            end = next((page for page in range(end) if lacks(page)), end)
            return end * size + self._part(seq, end, at_most - end * size, partly)[1]
        while True:  # backward from the end, to the first place whose whole window is held
            length = end * size + self._part(seq, end, at_most - end * size, partly)[1]
            held = range(end - 1, group.num_pages_before_window(length) - 1, -1)
            missing = next((page for page in held if lacks(page)), None)
            if missing is None:
                return length
            end = missing

    def hit(self, seq: Sequence, length: int) -> PrefixHit:
        """Return the pages of a prefix of this length, which must be cached."""
        first, end = self.group.num_pages_before_window(length), length // self.group.page_size
        pages = [self.find(seq, page) for page in range(first, end)]
        rest = length - end * self.group.page_size
        source, count = self._part(seq, end, rest, True)
        assert count == rest, "the start of a sequence is no longer held"
        assert None not in pages
        return PrefixHit(first, [page for page in pages if page is not None], source, count)

    def check_integrity(self) -> None:
        """Check that every named page contains the tokens of its name. :raises BooksError: if one does not."""
        self.index.check_integrity()
        for page, (name, tokens, digest) in self.index.named.items():
            for first in range(0, len(tokens), self._block_size * _WIDTH):
                name = _chained(name, tokens[first : first + self._block_size * _WIDTH])
            if name != digest:
                raise BooksError(f"page {page}: its tokens need the name {name.hex()}, got {digest.hex()}")

    def name(self, seq: Sequence, number: int, page: int, count: int) -> None:
        """Publish the first `count` tokens of a sequence's page, unless an equal page is published."""
        size, digest = self.group.page_size, None
        first, parent = number * size, self.digest(seq, number - 1)
        tokens = packed(seq.token_ids[first : first + count])
        if count == size:
            if size == self._block_size and len(seq.block_hashes) == number:  # packed once: this runs for each block
                seq.block_hashes.append(_chained(parent, tokens))
            digest = self.digest(seq, number)
            if self.index.knows(digest):
                return
        self.index.add(page, parent, tokens, digest)

    def find(self, seq: Sequence, number: int) -> int | None:
        """Return the pool's page with the content of a sequence's whole page at index `number`, or None if there is none."""
        size = self.group.page_size
        return self.index.find(self.digest(seq, number), packed(seq.token_ids[number * size : (number + 1) * size]))

    def _part(self, seq: Sequence, number: int, most: int, partly: bool) -> tuple[int, int]:
        """Return the indexed page with the longest match of the sequence's page at index `number`, and the match's length, which
        is at most `most` tokens."""
        first, most = number * self.group.page_size, min(most, self.group.page_size)
        if not partly or most <= 0:
            return -1, 0
        return self.index.longest(self.digest(seq, number - 1), packed(seq.token_ids[first : first + most]))

    def digest(self, seq: Sequence, number: int) -> bytes:
        """Return the chained 128-bit hash of a sequence up to the end of its full page at index `number`. For index -1, the hash
        is `prefix_root`."""
        return self._hash_of(seq, (number + 1) * self._blocks_per_page)

    def digest_of_start(self, seq: Sequence, length: int) -> bytes:
        """Return the chained hash of a sequence's first `length` tokens, which need not be whole blocks."""
        num_blocks, rest = divmod(length, self._block_size)
        parent = self._hash_of(seq, num_blocks)
        return _chained(parent, packed(seq.token_ids[length - rest : length])) if rest else parent

    def _hash_of(self, seq: Sequence, num_blocks: int) -> bytes:
        hashes = seq.block_hashes
        while len(hashes) < num_blocks:
            size = self._block_size
            first = len(hashes) * size
            parent = hashes[-1] if hashes else seq.prefix_root
            tokens = packed(seq.token_ids[first : first + size])
            hashes.append(_chained(parent, tokens))
        return hashes[num_blocks - 1] if num_blocks else seq.prefix_root


def _chained(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()
