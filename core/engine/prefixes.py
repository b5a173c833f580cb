"""Which block holds which tokens: names of full blocks, and the longest agreement with a block in part."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy

_WIDTH = array("i").itemsize


def packed(token_ids: Sequence[int]) -> bytes:
    """Tokens as the index compares them: numbers of a fixed width, one after the other."""
    return array("i", token_ids).tobytes()


class PrefixIndex:
    """Finds blocks by their content.

    A full block is named by its digest, the chained hash of its tokens and of all before it. Below the digest of what comes
    before (the parent; b"" at the start of a sequence) the tokens of each block, full or not, stand in order. The block that
    agrees longest with given tokens is then a neighbour of the place where those would stand: a search costs O(log n).
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._children: dict[bytes, list[tuple[bytes, int]]] = {}
        self._place_of: dict[int, tuple[bytes, bytes]] = {}  # block -> its parent and its tokens

    def __contains__(self, block: int) -> bool:
        return block in self._place_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._place_of)

    def find(self, digest: bytes, tokens: bytes) -> int | None:
        """The full block of this name, if it holds these tokens: two contents of one name are not taken for each other."""
        block = self._block_of.get(digest)
        return block if block is not None and self._place_of[block][1] == tokens else None

    def knows(self, digest: bytes) -> bool:
        """Whether a block has this name, whatever it holds."""
        return digest in self._block_of

    def digest_of(self, block: int) -> bytes | None:
        """The name of a block; None: it has none, or is not full."""
        return self._digest_of.get(block)

    def tokens_of(self, block: int) -> bytes:
        """The tokens of a block that can be found, packed."""
        return self._place_of[block][1]

    def longest(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """The block below `parent` that agrees with the most of `tokens`, and with how many; (-1, 0): with none."""
        children = self._children.get(parent, ())
        at = bisect_left(children, (tokens, -1))
        best, most = -1, 0
        for held, block in children[max(at - 1, 0) : at + 1]:
            count = _agreement(held, tokens)
            if count > most:
                best, most = block, count
        return best, most

    def add(self, block: int, parent: bytes, tokens: bytes, digest: bytes | None = None) -> None:
        """Make a block's tokens findable, in place of what was known of the block before; digest: its name, if it is full.

        Where another block holds the same and perhaps more, that one serves, and this one has no name.
        """
        self.discard(block)
        children = self._children.setdefault(parent, [])
        at = bisect_left(children, (tokens, -1))
        if at < len(children) and children[at][0].startswith(tokens):
            return
        children.insert(at, (tokens, block))
        self._place_of[block] = parent, tokens
        if digest is not None:
            self._block_of[digest], self._digest_of[block] = block, digest

    def discard(self, block: int) -> None:
        """Forget a block's content, for it will be overwritten."""
        place = self._place_of.pop(block, None)
        if place is None:
            return
        parent, tokens = place
        children = self._children[parent]
        del children[bisect_left(children, (tokens, block))]
        if not children:
            del self._children[parent]
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def clear(self) -> None:
        """Forget everything."""
        for held in (self._block_of, self._digest_of, self._children, self._place_of):
            held.clear()

    def check_integrity(self) -> None:
        """Assert that names and blocks are one to one, and that what is below each parent is in order."""
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of, "names are not one to one"
        entries = {block: (parent, held) for parent, children in self._children.items() for held, block in children}
        assert entries == self._place_of, "a block stands in two places, or in none"
        assert all(children == sorted(children) and children for children in self._children.values())


def _agreement(held: bytes, tokens: bytes) -> int:
    """Tokens with which both begin."""
    size = min(len(held), len(tokens))
    if held[:size] == tokens[:size]:
        return size // _WIDTH
    differs = numpy.frombuffer(held, numpy.intc, size // _WIDTH) != numpy.frombuffer(tokens, numpy.intc, size // _WIDTH)
    return int(differs.argmax())
