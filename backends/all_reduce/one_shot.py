"""Sums over ranks in one launch, for tensors small enough that each rank reads the whole of every other's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
from torch import Tensor

from headway.backends.all_reduce.one_shot_kernels import sum_over_ranks
from headway.backends.triton.launch import FixedLauncher

CAPACITY: Final = 2**23
"""Bytes of the largest tensor that is summed. Each rank holds two buffers of this size that the others read."""
MAX_PROGRAMS: Final = 64
"""Programs of a launch: all must run at once, since they wait for others."""
FLAG_BYTES: Final = 2**16
"""Bytes of the flags, which lie before the buffers: room for as many ranks as programs have flags for."""
NUM_BYTES: Final = FLAG_BYTES + 2 * CAPACITY
"""Bytes that each rank shares with the others."""
_BLOCK_BYTES: Final = 4096
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class OneShotAllReduce:
    """An all-reduce of one launch, in whose memory every rank reads; it can be captured in a CUDA graph."""

    name = "one_shot"

    def __init__(self, rank: int, device: torch.device, addresses: Sequence[int], keeps: object) -> None:
        """addresses: of every rank's NUM_BYTES of memory, zeros, as this device reaches them; keeps: what holds that memory."""
        self._rank, self._size, self._device, self._keeps = rank, len(addresses), device, keeps
        self._flags = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._buffers = self._flags + FLAG_BYTES
        self._calls = torch.zeros(2, dtype=torch.int32, device=device)
        self._ended = torch.zeros(1, dtype=torch.int32, device=device)
        self._launchers: dict[tuple[torch.dtype, bool], FixedLauncher] = {}
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def takes(self, x: Tensor) -> bool:
        """Whether it sums a tensor of this size and type."""
        return 0 < x.nbytes <= CAPACITY and x.dtype in _DTYPES and x.is_contiguous()

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the sum of x over ranks; with `onto`, that with the sum added, in place, rounded once."""
        adds = onto is not None
        launch = self._launchers.get((x.dtype, adds))
        if launch is None:
            sizes = {"SIZE": self._size, "CAPACITY": CAPACITY // x.itemsize, "BLOCK": _BLOCK_BYTES // x.itemsize}
            launch = self._launchers[x.dtype, adds] = FixedLauncher(sum_over_ranks, 8, self._device, ONTO=adds, **sizes)
        y = x if onto is None else onto  # x is read whole before anything is written over it, by the program that writes
        programs = min(triton.cdiv(x.nbytes, _BLOCK_BYTES), MAX_PROGRAMS)
        arguments = x, y, y, self._flags, self._buffers, self._calls, self._ended
        launch((programs, 1, 1), *arguments, x.numel(), self._rank)
        return y

    def abort(self) -> None:
        """Have launches that wait for other ranks end, with whatever sum; any thread may do so."""
        with torch.cuda.stream(self._side):
            self._ended.fill_(1)
