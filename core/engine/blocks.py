"""Who owns which block: reference counts, reuse of equal prefixes, and a free list in least-recently-used order."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from headway.core.engine.prefixes import PrefixIndex, packed
from headway.core.engine.sequence import Sequence

SHORTEST_FIRST_HIT = 8
"""Tokens that a hit must spare where no whole block is shared. With a hit a prompt extends a context instead of being a plain
prefill, and that costs more than the few tokens which any two prompts share by chance or through their template."""


class BlockManager:
    """Hands blocks of the pool to sequences. A full block is named by the hash of its tokens and of all before it.

    A freed block keeps its content and name until it is handed out again, so an equal prefix finds it; the block that was freed
    longest ago goes first (after vLLM's automatic prefix caching). Shared blocks are full, hence never written again. Of a block
    that agrees only in part, the part is copied into a block of the sequence's own (copy on write; SGLang's radix cache splits
    its nodes instead), so hits are counted by the token, whatever the block size.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, those with a reusable content included."""
        return len(self._free)

    def num_holders(self, block: int) -> int:
        """Sequences that hold a block."""
        return self._ref_counts[block]

    def attach_prefix(self, seq: Sequence) -> int:
        """Give a sequence without blocks those that already hold the start of it. Returns the tokens spared.

        The part of a further block that agrees is noted in `seq.prefix_copy`, and is spared as well: it must be copied before
        the step that computes the rest. At least the last token is left to compute, since its logits are wanted.
        """
        assert not seq.blocks, "a sequence is given its prefix before anything else"
        if not self.enable_prefix_caching or seq.computes_whole_prompt:
            return 0
        most, size, parent = seq.num_tokens - 1, self.block_size, b""
        for index in range(most // size):
            digest = self._hash(seq, index)
            block = self._index.find(digest)
            if block is None:
                break
            self._take(block)
            seq.blocks.append(block)
            parent = digest
        seq.num_computed = first = len(seq.blocks) * size
        source, count = self._index.longest(parent, packed(seq.token_ids[first : min(first + size, most)]))
        if count >= (1 if first else SHORTEST_FIRST_HIT):
            seq.prefix_copy = source, count
            seq.num_computed += count
            if source in self._free:  # used again, so others are given up before it
                self._free.move_to_end(source)
        return seq.num_computed

    def reserve(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Make room for the next tokens of a sequence; False, and nothing changed, if there are too few free blocks."""
        missing = self.blocks_for(seq.num_computed + num_new_tokens) - len(seq.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = next(iter(self._free))
            self._index.discard(block)
            self._take(block)
            seq.blocks.append(block)
        return True

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def publish(self, seq: Sequence, partly: bool = False) -> None:
        """Name the blocks that the computed tokens have filled, so that others may share them. Call it after every step.

        partly: name the last block as well, as far as it is filled; call it so after a part of a prompt.
        """
        if not self.enable_prefix_caching:
            return
        known = min(seq.num_computed, len(seq.token_ids))  # a token still being sampled has no name yet
        full = known // self.block_size
        while seq.num_published < full:
            self._name(seq, seq.num_published, self.block_size)
            seq.num_published += 1
        if partly and known % self.block_size:
            self._name(seq, full, known % self.block_size)

    def release(self, seq: Sequence) -> None:
        """Take all blocks back, the end of the sequence first: a start is shared more often, so it should be kept longer."""
        self.drop_prefix_copy(seq)
        if seq.error is None:
            self.publish(seq, partly=True)
        for block in reversed(seq.blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._index:  # nothing to reuse: hand it out first
                    self._free.move_to_end(block, last=False)
        seq.blocks = []
        seq.prefix_copy = None
        seq.num_computed = seq.num_published = seq.num_blocks_sent = seq.num_unverified = 0
        seq.newest_at = -1

    def drop_prefix_copy(self, seq: Sequence) -> None:
        """Let a sequence compute what was to be copied for it, because the copy may not have been made."""
        if seq.prefix_copy is not None:
            seq.num_computed -= seq.prefix_copy[1]
            seq.num_cached_tokens = min(seq.num_cached_tokens, seq.num_computed)
            seq.prefix_copy = None

    def forget_prefixes(self) -> None:
        """Make every cached content unfindable; blocks that sequences hold stay theirs."""
        for block in self._index:
            if block in self._free:  # nothing to reuse any more: hand it out first
                self._free.move_to_end(block, last=False)
        self._index.clear()

    def _take(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1

    def _name(self, seq: Sequence, index: int, count: int) -> None:
        """Make the first `count` tokens of a sequence's block findable, unless an equal block is already."""
        first, block = index * self.block_size, seq.blocks[index]
        digest = self._hash(seq, index) if count == self.block_size else None
        parent = self._hash(seq, index - 1) if index else b""
        if digest is None or self._index.find(digest) is None:
            self._index.add(block, parent, packed(seq.token_ids[first : first + count]), digest)

    def _hash(self, seq: Sequence, index: int) -> bytes:
        """Chained hash of a full block, computed once: tokens of a sequence never change. 128 bits: no chance collisions."""
        while len(seq.block_hashes) <= index:
            first = len(seq.block_hashes) * self.block_size
            parent = seq.block_hashes[-1] if seq.block_hashes else b""
            tokens = packed(seq.token_ids[first : first + self.block_size])
            seq.block_hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
        return seq.block_hashes[index]

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Assert that every block is free or held exactly as often as `holders` (all sequences with blocks) hold it."""
        counts = [0] * self.num_blocks
        for seq in holders:
            assert len(set(seq.blocks)) == len(seq.blocks), f"{seq.request_id} holds a block twice"
            for block in seq.blocks:
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts differ from what sequences hold"
        assert set(self._free) == {block for block, count in enumerate(counts) if count == 0}, (
            "a block leaked or is owned and free"
        )
        self._index.check_integrity()
