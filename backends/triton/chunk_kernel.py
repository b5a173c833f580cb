"""The cut of a decode step, made on the device at every step: which program folds which keys of which sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.runtime.triton_launch import BoundKernel, Launcher, launches_early

CHUNK_FIELDS = 8
"""int32 numbers a chunk: its sequence (-1: no chunk) and that one's kv_len, first query token and query_len; its first tile and
the end of its keys; the sequence's first chunk and number of chunks."""
SEQ_FIELDS = 4
"""int32 numbers a sequence: its first query token and query_len, its first chunk and number of chunks."""


@triton.jit(
    do_not_specialize=["num_seqs", "max_chunks", "splits", "window"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_ptr"],
)
def cut_sequences(
    splits,  # of a sequence as long as the mean; where EVEN of every sequence
    seq_lens_ptr,  # int32 [num_seqs]; 0: a padding row, which gets no chunk
    query_start_ptr,  # int32 [num_seqs + 1]
    chunks_ptr,  # int32 [max_chunks, 8], see CHUNK_FIELDS
    seqs_ptr,  # int32 [num_seqs, 4], see SEQ_FIELDS
    num_seqs,
    max_chunks,  # at least num_seqs * splits + num_seqs // 2; num_seqs * splits where EVEN
    window,
    SEQS: tl.constexpr,  # num_seqs or more
    CHUNKS: tl.constexpr,  # a program writes so many
    BLOCK_N: tl.constexpr,  # keys a tile
    HAS_WINDOW: tl.constexpr,
    EVEN: tl.constexpr,  # a sequence's cut hangs on its own length alone
    FENCED: tl.constexpr,  # decode reads the chunks before it waits for the kernels before it
):
    """Grid (cdiv(max_chunks, CHUNKS),). Every program makes the whole cut and writes its part of it.

    Chunks are as even as sequences allow: each gets one for every `share` tiles that it has, rounded to the nearest, where
    share is all tiles over num_seqs * splits. One long sequence among short ones is cut often, equal ones `splits` times.
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
    if EVEN:
        each = tl.cdiv(tiles, splits)
    else:
        total = tl.sum(tiles).to(tl.float32)
        share = tl.maximum(total / tl.maximum(tl.sum(live.to(tl.int32)) * splits, 1).to(tl.float32), 1.0)
        wanted = tl.maximum((tiles.to(tl.float32) / share + 0.5).to(tl.int32), 1)
        if tl.sum(tl.where(live, wanted, 0)) > max_chunks:  # many short ones beside few long: at most one and a half each now
            wanted = tl.maximum((tiles.to(tl.float32) / (2 * share) + 0.5).to(tl.int32), 1)
        each = tl.cdiv(tiles, wanted)
    each = tl.maximum(each, 1)
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

    row = chunks_ptr + chunk * 8
    kept = chunk < max_chunks
    tl.store(row, tl.where(there, seq, -1), mask=kept)
    tl.store(row + 1, kv_len, mask=kept)
    tl.store(row + 2, token, mask=kept)
    tl.store(row + 3, query_len, mask=kept)
    tl.store(row + 4, start, mask=kept)
    tl.store(row + 5, tl.minimum((start + size) * BLOCK_N, kv_len), mask=kept)
    tl.store(row + 6, first, mask=kept)
    tl.store(row + 7, count, mask=kept)
    if FENCED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", args=[seq], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


_WORK = 8192  # Chunks times sequences that a program compares at once


@dataclass(frozen=True, slots=True)
class Chunks:
    """Runs of keys, each for one program (of every kv head and query tile). What they are is decided on the device, from the
    lengths found there: one captured launch serves any lengths, and one long sequence does not keep the others waiting."""

    seq_lens: Tensor
    """int32 [num_seqs]; 0: padding."""
    query_start_loc: Tensor
    """int32 [num_seqs + 1]."""
    splits: int
    """Most chunks of a sequence of mean length."""
    block_n: int
    """Keys a tile; a chunk is whole tiles."""
    window: int | None
    even: bool
    """Every sequence is cut into `splits`, whatever the others are."""
    table: Tensor = field(init=False)
    """int32 [most, CHUNK_FIELDS]; see there."""
    seqs: Tensor = field(init=False)
    """int32 [num_seqs, SEQ_FIELDS]; see there."""
    _bound: list[BoundKernel] = field(init=False, default_factory=list)  # The launch, once made: part of every graph's replay

    def __post_init__(self) -> None:
        most = most_chunks(len(self.seq_lens), self.splits, self.even)
        end = most * CHUNK_FIELDS
        both = torch.empty(end + len(self.seq_lens) * SEQ_FIELDS, dtype=torch.int32, device=self.seq_lens.device)
        object.__setattr__(self, "table", both[:end].view(most, CHUNK_FIELDS))
        object.__setattr__(self, "seqs", both[end:].view(-1, SEQ_FIELDS))

    @property
    def split(self) -> bool:
        """Whether a sequence may have more than one."""
        return len(self.table) > len(self.seq_lens)

    def cut(self, launch: Launcher, splits: int) -> None:
        """Fill the table for the lengths on the device by one launch of `cut_sequences`. splits: at most `self.splits`."""
        assert splits <= self.splits
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
            "HAS_WINDOW": self.window is not None,
            "EVEN": self.even,
            "FENCED": launches_early(self.seq_lens.device),
        }
        key, grid = tuple(constants.values()), (triton.cdiv(most, width), 1, 1)
        rest = (self.seq_lens, self.query_start_loc, self.table, self.seqs, num_seqs, most, self.window or 0)
        bound = launch.bind(key, grid, (splits,), (splits,), rest, constants, num_warps=4)
        if bound is not None:
            self._bound.append(bound)


def most_chunks(num_seqs: int, splits: int, even: bool) -> int:
    """Chunks there can be: rounding to the nearest adds up to half a chunk a sequence."""
    return num_seqs * splits + (0 if even else num_seqs // 2)
