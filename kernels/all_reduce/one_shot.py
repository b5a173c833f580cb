"""Sums over ranks in one launch, for tensors small enough that each rank sends the whole of its own to every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.all_reduce.one_shot_kernels import sum_over_ranks
from headway.kernels.runtime.triton_launch import FixedLauncher

CAPACITY: Final = 2**19
"""Bytes of the largest tensor that is summed: larger ones are faster by NCCL, and all programs of a launch must run at once."""
NOTHING: Final = 0x8000
"""What every 16 bits of shared memory hold at first."""
_BLOCK_BYTES: Final = 4096
_WORD: Final = 16
"""Bytes that are read and written at once: tensors are made of such words."""
_WIDE: Final = (tl.int32, -0x7FFF8000, -0x7FFF7FFF)  # a tiny number for another tiny number
_NARROW: Final = (tl.int16, -0x8000, 0)  # 0 for -0
_BITS: Final = {torch.float32: _WIDE, torch.bfloat16: _NARROW, torch.float16: _NARROW}


def shared_bytes(size: int) -> int:
    """Bytes that each of so many ranks shares with the others."""
    return 3 * size * CAPACITY


class OneShotAllReduce:
    """An all-reduce of one launch, in whose memory every rank writes; it can be captured in a CUDA graph."""

    name = "one_shot"

    def __init__(
        self,
        rank: int,
        device: torch.device,
        addresses: Sequence[int],
        keeps: object,
        side: torch.cuda.Stream | None = None,
        block_bytes: int = _BLOCK_BYTES,
    ) -> None:
        """addresses: of every rank's shared memory, as this device reaches it, filled with NOTHING; keeps: what holds it.

        side: a stream on which nothing else runs, so that `abort` gets through beside a launch that waits; a GPU needs one.
        block_bytes: of a program, a power of two.
        """
        self._block_bytes = block_bytes
        self._rank = rank
        self._size = len(addresses)
        self._device = device
        self._keeps = keeps
        self._buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._state = torch.zeros(3, dtype=torch.int32, device=device)
        self._ended = torch.zeros(1, dtype=torch.int32, device=device)
        self._launchers: dict[tuple[torch.dtype, bool], FixedLauncher] = {}
        self._side = side

    def takes(self, x: Tensor) -> bool:
        """Whether it sums a tensor of this size and type."""
        return 0 < x.nbytes <= CAPACITY and x.nbytes % _WORD == 0 and x.dtype in _BITS and x.is_contiguous()

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the sum of x over ranks; with `onto`, that with the sum added, in place, rounded once."""
        adds = onto is not None
        launch = self._launchers.get((x.dtype, adds))
        if launch is None:
            bits, nothing, instead = _BITS[x.dtype]
            sizes = {
                "SIZE": self._size,
                "CAPACITY": CAPACITY // x.itemsize,
                "BLOCK": self._block_bytes // x.itemsize,
                "EACH": _WORD // x.itemsize,
            }
            given = {"BITS": bits, "NOTHING": nothing, "INSTEAD": instead, "ONTO": adds}
            launch = self._launchers[x.dtype, adds] = FixedLauncher(sum_over_ranks, 8, self._device, **sizes, **given)
        y = x if onto is None else onto
        grid = triton.cdiv(x.nbytes, self._block_bytes), 1, 1
        launch(grid, x, y, y, self._buffers, self._state, self._ended, x.nbytes // _WORD, self._rank)
        return y

    def abort(self) -> None:
        """Have launches that wait for other ranks end, with whatever sum; any thread may do so."""
        with torch.cuda.stream(self._side):
            self._ended.fill_(1)
