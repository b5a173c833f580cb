"""Split-KV schedule of a decode step, which the device computes in every step: the sequence and keys of each program, and the
tiles of keys that an attention rule's mask leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.runtime.triton_launch import BoundKernel, Launcher, launches_early

CHUNK_FIELDS = 8
"""Number of int32 fields per chunk. In this order, the fields are the sequence's index (-1 means no chunk), kv_len, first query
token and query_len, the chunk's first tile and the end of its keys, and the sequence's first chunk and number of chunks."""
SEQ_FIELDS = 4
"""Number of int32 fields per sequence: first query token, query_len, first chunk and number of chunks."""


@triton.jit(
    do_not_specialize=["num_seqs", "max_chunks", "splits", "window"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_ptr"],
)
def cut_sequences(
    splits,  # chunks of a sequence of mean length; with EVEN, of every sequence
    seq_lens_ptr,  # int32 [num_seqs]; 0 marks a padding row, which gets no chunk
    query_start_ptr,  # int32 [num_seqs + 1]
    chunks_ptr,  # int32 [max_chunks, 8], see CHUNK_FIELDS
    seqs_ptr,  # int32 [num_seqs, 4], see SEQ_FIELDS
    counts_ptr,  # LISTED: int32 [num_seqs], output of `list_sequences`
    num_seqs,
    max_chunks,  # at least num_seqs * splits + num_seqs // 2; with EVEN, num_seqs * splits
    window,
    SEQS: tl.constexpr,  # power of two >= num_seqs
    CHUNKS: tl.constexpr,  # number of chunks that a program writes
    BLOCK_N: tl.constexpr,  # keys per tile
    HAS_WINDOW: tl.constexpr,
    LISTED: tl.constexpr,  # chunks are runs of a sequence's listed tiles; their first tile and end are places in the list
    EVEN: tl.constexpr,  # the split of a sequence depends only on its own length
    LEAST: tl.constexpr,  # minimum number of tiles of a chunk
    FENCED: tl.constexpr,  # decode reads the chunks before it waits for earlier kernels
):
    """Write the chunk tables. Grid (cdiv(max_chunks, CHUNKS),). Each program computes the whole split, and writes CHUNKS rows of
    the chunk table.

    Chunks have nearly equal sizes. A sequence gets one chunk per `share` tiles, rounded to nearest, with share = all tiles /
    (num_seqs * splits). A long sequence among short ones gets many chunks. Sequences of equal length get `splits` chunks each.
    """
    i = tl.arange(0, SEQS)
    kv_lens = tl.load(seq_lens_ptr + i, mask=i < num_seqs, other=0)
    live = kv_lens > 0
    skipped = tl.zeros([SEQS], tl.int32)
    if HAS_WINDOW:
        starts = tl.load(query_start_ptr + i, mask=i < num_seqs, other=0)
        query_lens = tl.load(query_start_ptr + i + 1, mask=i < num_seqs, other=0) - starts
        skipped = tl.maximum(kv_lens - query_lens - window + 1, 0) // BLOCK_N
    tiles = tl.where(live, tl.cdiv(kv_lens, BLOCK_N) - skipped, 0)
    if LISTED:
        tiles = tl.load(counts_ptr + i, mask=i < num_seqs, other=0)
    if EVEN:
        each = tl.cdiv(tiles, splits)
    else:
        total = tl.sum(tiles).to(tl.float32)
        share = tl.maximum(total / tl.maximum(tl.sum(live.to(tl.int32)) * splits, 1).to(tl.float32), 1.0)
        wanted = tl.maximum((tiles.to(tl.float32) / share + 0.5).to(tl.int32), 1)
        if tl.sum(tl.where(live, wanted, 0)) > max_chunks:  # many short, few long sequences: now at most 1.5 chunks each
            wanted = tl.maximum((tiles.to(tl.float32) / (2 * share) + 0.5).to(tl.int32), 1)
        each = tl.cdiv(tiles, wanted)
    each = tl.maximum(each, LEAST)
    counts = tl.cdiv(tiles, each)
    ends = tl.cumsum(counts, 0)
    if tl.program_id(0) == 0:
        first_tokens = tl.load(query_start_ptr + i, mask=i < num_seqs, other=0)
        end_tokens = tl.load(query_start_ptr + i + 1, mask=i < num_seqs, other=0)
        tl.store(seqs_ptr + i * 4, first_tokens, mask=i < num_seqs)
        tl.store(seqs_ptr + i * 4 + 1, end_tokens - first_tokens, mask=i < num_seqs)
        tl.store(seqs_ptr + i * 4 + 2, ends - counts, mask=i < num_seqs)
        tl.store(seqs_ptr + i * 4 + 3, counts, mask=i < num_seqs)

    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    before = ends[None, :] <= chunk[:, None]
    seq = tl.sum(before.to(tl.int32), 1)
    first = tl.max(tl.where(before, ends[None, :], 0), 1)
    there = seq < SEQS
    own = i[None, :] == seq[:, None]
    kv_len = tl.sum(tl.where(own, kv_lens[None, :], 0), 1)
    size = tl.sum(tl.where(own, each[None, :], 0), 1)
    count = tl.sum(tl.where(own, counts[None, :], 0), 1)
    start = (chunk - first) * size
    if HAS_WINDOW:
        start += tl.sum(tl.where(own, skipped[None, :], 0), 1)
    token = tl.load(query_start_ptr + seq, mask=there, other=0)
    query_len = tl.load(query_start_ptr + seq + 1, mask=there, other=0) - token

    limit = kv_len
    if LISTED:
        limit = tl.sum(tl.where(own, tiles[None, :], 0), 1) * BLOCK_N
    row = chunks_ptr + chunk * 8
    kept = chunk < max_chunks
    tl.store(row, tl.where(there, seq, -1), mask=kept)
    tl.store(row + 1, kv_len, mask=kept)
    tl.store(row + 2, token, mask=kept)
    tl.store(row + 3, query_len, mask=kept)
    tl.store(row + 4, start, mask=kept)
    tl.store(row + 5, tl.minimum((start + size) * BLOCK_N, limit), mask=kept)
    tl.store(row + 6, first, mask=kept)
    tl.store(row + 7, count, mask=kept)
    if FENCED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", args=[seq], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_stride", "window"], do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_ptr"])
def list_sequences(
    seq_lens_ptr,  # int32 [num_seqs]; 0 marks a padding row
    query_start_ptr,  # int32 [num_seqs + 1]
    tiles_ptr,  # int32 [num_seqs, tiles_stride], output
    counts_ptr,  # int32 [num_seqs], output
    floats_ptr,  # the rule's parameters
    ints_ptr,
    tiles_stride,
    window,
    HEADS: tl.constexpr,  # query heads that are compared: 1 if the mask does not depend on the head
    ROWS: tl.constexpr,  # HEADS rounded up to a power of two
    TILES: tl.constexpr,  # tiles that are compared at a time
    BLOCK_N: tl.constexpr,  # keys per tile
    HAS_WINDOW: tl.constexpr,
    RULE: tl.constexpr,  # a rule_code.RuleCode with a mask
):
    """List the tiles of keys that a query of a sequence sees, and the sequence's last tile. Grid (num_seqs,)."""
    seq = tl.program_id(0)
    kv_len = tl.load(seq_lens_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - tl.load(query_start_ptr + seq)
    head = tl.minimum(tl.arange(0, ROWS), HEADS - 1)[:, None]
    num_tiles = tl.cdiv(kv_len, BLOCK_N)
    begin = kv_len * 0
    if HAS_WINDOW:
        begin = tl.maximum(kv_len - query_len - window + 1, 0) // BLOCK_N
    count = kv_len * 0
    for first in range(begin, num_tiles, TILES):
        at = (first * BLOCK_N + tl.arange(0, TILES * BLOCK_N))[None, :]
        found = tl.zeros([TILES * BLOCK_N], tl.int32)
        for token in range(query_len):
            positions = tl.zeros([ROWS, 1], tl.int32) + (kv_len - query_len + token)
            seen = (at <= positions) & RULE.mask(RULE.rows(positions, head, floats_ptr, ints_ptr), at, tl.float32)
            if HAS_WINDOW:
                seen = seen & (at > positions - window)
            found = found | tl.max(seen.to(tl.int32), 0)
        number = first + tl.arange(0, TILES)
        listed = ((tl.max(tl.reshape(found, (TILES, BLOCK_N)), 1) > 0) & (number < num_tiles)) | (number == num_tiles - 1)
        place = count + tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(tiles_ptr + seq.to(tl.int64) * tiles_stride + place, number, mask=listed)
        count += tl.sum(listed.to(tl.int32))
    tl.store(counts_ptr + seq, count)


@dataclass(frozen=True, slots=True)
class SeenTiles:
    """Lists of the tiles of keys that a rule's mask leaves of each sequence."""

    tiles: Tensor
    """int32 [num_seqs, maximum number of tiles]: numbers of the tiles, of which the last tile of a sequence is always listed."""
    counts: Tensor
    """int32 [num_seqs]: number of listed tiles."""
    update: Callable[[], None]
    """Function that fills the lists for the lengths on the device."""


_WORK = 8192  # Number of chunks x sequences that a program compares at once


@dataclass(frozen=True, slots=True)
class Chunks:
    """Runs of keys (chunks), one for each program of a kv head and query tile.

    The device computes the runs from the lengths in its memory. One captured launch therefore works for any lengths, and one long
    sequence does not delay the others.
    """

    seq_lens: Tensor
    """int32 [num_seqs]: length of each sequence. 0 marks padding."""
    query_start_loc: Tensor
    """int32 [num_seqs + 1]: index of each sequence's first query token."""
    splits: int
    """Maximum number of chunks of a sequence of mean length."""
    block_n: int
    """Number of keys per tile. A chunk consists of complete tiles."""
    window: int | None
    even: bool
    """True if every sequence is split into `splits` chunks."""
    least: int = 1
    """Minimum number of tiles of a chunk."""
    seen: SeenTiles | None = None
    """Tiles that are split into chunks. None means all tiles of a sequence, or of its window."""
    table: Tensor = field(init=False)
    """int32 [max_chunks, CHUNK_FIELDS]: description of each chunk."""
    seqs: Tensor = field(init=False)
    """int32 [num_seqs, SEQ_FIELDS]: description of each sequence."""
    # The launch, bound at first use: it is part of every graph's replay
    _bound: list[BoundKernel] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        most = max_chunk_count(len(self.seq_lens), self.splits, self.even)
        end = most * CHUNK_FIELDS
        both = torch.empty(end + len(self.seq_lens) * SEQ_FIELDS, dtype=torch.int32, device=self.seq_lens.device)
        object.__setattr__(self, "table", both[:end].view(most, CHUNK_FIELDS))
        object.__setattr__(self, "seqs", both[end:].view(-1, SEQ_FIELDS))

    @property
    def split(self) -> bool:
        """True if a sequence may have more than one chunk."""
        return len(self.table) > len(self.seq_lens)

    @property
    def listed(self) -> tuple[Tensor | None, int | None]:
        """Lists of tiles and their stride, as arguments of kernels. (None, None) if there are no lists."""
        return (None, None) if self.seen is None else (self.seen.tiles, self.seen.tiles.stride(0))

    def cut(self, launch: Launcher, splits: int) -> None:
        """Fill the tables for the lengths on the device, with one launch of `cut_sequences`. splits: at most `self.splits`."""
        assert splits <= self.splits
        if self.seen is not None:
            self.seen.update()
        if self._bound:
            self._bound[0](splits)
            return
        num_seqs, most = len(self.seq_lens), len(self.table)
        seqs = max(16, triton.next_power_of_2(num_seqs))
        width = max(16, min(64, _WORK // seqs))
        constants = {
            "SEQS": seqs,
            "CHUNKS": width,
            "BLOCK_N": self.block_n,
            "HAS_WINDOW": self.window is not None and self.seen is None,
            "LISTED": self.seen is not None,
            "EVEN": self.even,
            "LEAST": self.least,
            "FENCED": launches_early(self.seq_lens.device),
        }
        key, grid = tuple(constants.values()), (triton.cdiv(most, width), 1, 1)
        counts = None if self.seen is None else self.seen.counts
        rest = (self.seq_lens, self.query_start_loc, self.table, self.seqs, counts, num_seqs, most, self.window or 0)
        bound = launch.bind(key, grid, (splits,), (splits,), rest, constants, num_warps=4)
        if bound is not None:
            self._bound.append(bound)


def max_chunk_count(num_seqs: int, splits: int, even: bool) -> int:
    """Return the maximum number of chunks: rounding to nearest adds up to half a chunk per sequence."""
    return num_seqs * splits + (0 if even else num_seqs // 2)
