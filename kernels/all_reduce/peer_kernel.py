"""Base class of all-reduce kernels in which each rank writes into the other GPUs' memory."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

from headway.core.contract.kernel import GraphLevel
from headway.core.contract.ranks import AllReduceKernel, RankGroup
from headway.core.contract.support import YES, Support
from headway.kernels.all_reduce.peer_memory import PeerMemory
from headway.kernels.runtime.triton_launch import FixedLauncher

WORD: Final = 16
"""Bytes per load and store. The size of a tensor, in bytes, must be a multiple of this number."""


class PeerAllReduce(AllReduceKernel):
    """All-reduce in one launch through memory that every rank can write. It can be captured in a CUDA graph."""

    graph_level = GraphLevel.ANY
    kernel: ClassVar[Any]
    """The Triton kernel. Its arguments are the ones of `one_shot_kernels.sum_over_ranks`."""
    num_warps: ClassVar[int]
    num_states: ClassVar[int]
    """Number of int32 elements that the kernel keeps from one call to the next."""
    initial: ClassVar[int] = 0
    """Initial value of every 16 bits of the shared memory."""

    @classmethod
    def supports(cls, spec: RankGroup) -> Support:
        """Return whether every GPU of the group can access the memory of all other GPUs."""
        if not (claimed := super().supports(spec)):
            return claimed
        if (disabled := os.environ.get("NCCL_P2P_DISABLE", "0")) != "0":
            return Support.no("NCCL_P2P_DISABLE", "0, so that GPUs may reach each other's memory", disabled)
        own, there = spec.device.index, torch.cuda.device_count()
        others = (other for other in range(spec.size) if other != own)
        unreached = [other for other in others if other >= there or not torch.cuda.can_device_access_peer(spec.device, other)]
        return (
            Support.no("peer memory", "GPUs that reach each other's", f"GPU {own} without GPU {unreached[0]}")
            if unreached
            else YES
        )

    @classmethod
    def join(cls, group: RankGroup) -> Self:
        memory = PeerMemory(group, cls.name, cls.shared_bytes(group.size), cls.initial)
        return cls(group.rank, group.device, memory.addresses, memory, torch.cuda.Stream(group.device))

    def __init__(
        self, rank: int, device: torch.device, addresses: Sequence[int], keeps: object, side: torch.cuda.Stream | None = None
    ) -> None:
        """Prepare the state of a rank.

        addresses: address on this device of every rank's shared memory, filled with `initial`. keeps: object that owns the
            memory. side: a stream without other work, so that `abort` can run while a launch waits; required on a GPU.
        """
        self._rank = rank
        self._size = len(addresses)
        self._device = device
        self._keeps = keeps
        self._buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._state = torch.zeros(self.num_states, dtype=torch.int32, device=device)
        self._ended = torch.zeros(1, dtype=torch.int32, device=device)
        self._launchers: dict[tuple[torch.dtype, bool], FixedLauncher] = {}
        self._side = side

    @classmethod
    @abstractmethod
    def shared_bytes(cls, size: int) -> int:
        """Return the number of bytes that each of `size` ranks shares with the other ranks."""

    @classmethod
    @abstractmethod
    def num_programs(cls, size: int, num_bytes: int) -> int:
        """Return the number of programs that sum a tensor. All must run at once."""

    @classmethod
    @abstractmethod
    def constants(cls, dtype: torch.dtype) -> dict[str, Any]:
        """Return the kernel's compile-time constants for an element type, besides SIZE, ONTO and PDL."""

    def takes(self, x: Tensor) -> bool:
        """Return whether a tensor is supported: contiguous, not empty, and with a size that is a multiple of 16 bytes."""
        return super().takes(x) and x.nbytes > 0 and x.nbytes % WORD == 0 and x.is_contiguous()

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the sum of x over ranks, in place. With `onto`, add the sum to `onto` in place and return it."""
        adds = onto is not None
        launch = self._launchers.get((x.dtype, adds))
        if launch is None:
            constants = {"SIZE": self._size, **self.constants(x.dtype), "ONTO": adds}
            launch = self._launchers[x.dtype, adds] = FixedLauncher(self.kernel, self.num_warps, self._device, constants)
        y = x if onto is None else onto
        launch(
            (self.num_programs(self._size, x.nbytes), 1, 1),
            x_ptr=x,
            onto_ptr=y,
            y_ptr=y,
            buffers_ptr=self._buffers,
            state_ptr=self._state,
            ended_ptr=self._ended,
            words=x.nbytes // WORD,
            rank=self._rank,
        )
        return y

    def abort(self) -> None:
        """End launches that wait for other ranks; their sums are undefined. Thread-safe."""
        with torch.cuda.stream(self._side):
            self._ended.fill_(1)
