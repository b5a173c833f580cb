"""Who owns which block: reference counts, reuse of equal prefixes, and a free list in least-recently-used order."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from headway.core.engine.sequence import Sequence


class BlockManager:
    """Hands blocks of the pool to sequences. A full block is named by the hash of its tokens and of all before it.

    A freed block keeps its content and name until it is handed out again, so an equal prefix finds it; the block that was freed
    longest ago goes first (after vLLM's automatic prefix caching). Shared blocks are full, hence never written again.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, those with a reusable content included."""
        return len(self._free)

    def attach_prefix(self, seq: Sequence) -> int:
        """Give a sequence without blocks those that already hold the start of it. Returns the tokens spared.

        At least the last token is left to compute, since its logits are wanted.
        """
        assert not seq.blocks, "a sequence is given its prefix before anything else"
        if not self.enable_prefix_caching:
            return 0
        for index in range((seq.num_tokens - 1) // self.block_size):
            block = self._block_of.get(self._hash(seq, index))
            if block is None:
                break
            self._take(block)
            seq.blocks.append(block)
        seq.num_computed = len(seq.blocks) * self.block_size
        return seq.num_computed

    def reserve(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Make room for the next tokens of a sequence; False, and nothing changed, if there are too few free blocks."""
        missing = self.blocks_for(seq.num_computed + num_new_tokens) - len(seq.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = next(iter(self._free))
            digest = self._hash_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
            self._take(block)
            seq.blocks.append(block)
        return True

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def publish(self, seq: Sequence) -> None:
        """Name the blocks that the computed tokens have filled, so that others may share them. Call it after every step."""
        if not self.enable_prefix_caching:
            return
        full = min(seq.num_computed, seq.num_tokens) // self.block_size  # a token still being sampled has no name yet
        for index in range(seq.num_published, full):
            block, digest = seq.blocks[index], self._hash(seq, index)
            if block not in self._hash_of and digest not in self._block_of:
                self._hash_of[block], self._block_of[digest] = digest, block
        seq.num_published = full

    def release(self, seq: Sequence) -> None:
        """Take all blocks back, the end of the sequence first: a start is shared more often, so it should be kept longer."""
        for block in reversed(seq.blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:  # nothing to reuse: hand it out first
                    self._free.move_to_end(block, last=False)
        seq.blocks = []
        seq.num_computed = seq.num_published = seq.num_tabled = 0
        seq.newest_at = -1

    def forget_prefixes(self) -> None:
        """Make every cached content unfindable; blocks that sequences hold stay theirs."""
        for block in self._hash_of:
            if block in self._free:  # nothing to reuse any more: hand it out first
                self._free.move_to_end(block, last=False)
        self._hash_of.clear()
        self._block_of.clear()

    def _take(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1

    def _hash(self, seq: Sequence, index: int) -> bytes:
        """Chained hash of a full block, computed once: tokens of a sequence never change. 128 bits: no chance collisions."""
        while len(seq.block_hashes) <= index:
            first = len(seq.block_hashes) * self.block_size
            tokens = array("q", seq.token_ids[first : first + self.block_size]).tobytes()
            parent = seq.block_hashes[-1] if seq.block_hashes else b""
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
        assert {block: digest for digest, block in self._block_of.items()} == self._hash_of, "names of blocks are not one to one"
