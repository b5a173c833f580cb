"""One step's cut into chunks: how many there may be, and the launch that makes them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from headway.backends.triton.chunk_kernel import CHUNK_FIELDS, SEQ_FIELDS
from headway.kernels.runtime.triton_launch import BoundKernel, Launcher, launches_early

_WORK = 8192
"""Chunks times sequences that a program compares at once."""


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
    _bound: list[BoundKernel] = field(init=False, default_factory=list)
    """The launch, once it has been made: it is a part of every step that is a graph's replay."""

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
        """Fill the table for the lengths that the device has now; one launch, nothing is waited for.

        launch: of `cut_sequences`. splits: this time, at most `self.splits`.
        """
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
