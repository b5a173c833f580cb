"""GPU memory that all ranks can read and write, and the base class of all-reduce kernels that use it.

Processes share the memory through CUDA IPC handles. The driver is called through ctypes, since the signatures of these functions
have not changed since CUDA 4. torch's symmetric memory is not used because it numbers its exchanges per process: a process that
starts its second engine would not find the ranks of new processes.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

from headway.core.contract.kernel import GraphLevel
from headway.core.contract.ranks import AllReduceKernel, RankGroup
from headway.core.contract.support import YES, Support
from headway.kernels.runtime.triton_launch import FixedLauncher

WORD: Final = 16
"""Bytes per load and store. The size of a tensor, in bytes, must be a multiple of this number."""
_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class PeerMemory:
    """GPU memory that all ranks share, mapped at addresses of this rank. The memory is freed when the object is deleted."""

    def __init__(self, group: RankGroup, name: str, num_bytes: int, word: int) -> None:
        """Allocate `num_bytes` on every rank. All ranks must call this, each with a different GPU.

        name: name of the memory, unique within the group. word: initial value of every 16 bits.
        :raises RuntimeError: if the driver cannot allocate or share the memory.
        """
        rank, size, device, store = group.rank, group.size, group.device, group.store
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # creates torch's context
            own, handle = ctypes.c_uint64(), _Handle()
            call("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(num_bytes))
            addresses = [0] * size
            addresses[rank] = own.value
            self._end = weakref.finalize(self, _free, addresses, rank)
            call("cuMemsetD16_v2", own, ctypes.c_ushort(word), ctypes.c_size_t(num_bytes // 2))
            torch.cuda.synchronize(device)
            call("cuIpcGetMemHandle", ctypes.byref(handle), own)
            store.set(_key(name, rank), bytes(handle).hex())
            for other in range(size):
                if other != rank:
                    theirs = _Handle.from_buffer_copy(bytes.fromhex(store.get(_key(name, other)).decode()))
                    address = ctypes.c_uint64()
                    call("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, _LAZY_PEER_ACCESS)
                    addresses[other] = address.value
        self.addresses: Sequence[int] = addresses
        """Address of each rank's memory on this rank's GPU."""


class PeerKernel(AllReduceKernel):
    """All-reduce through memory that every rank can write."""

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

    def takes(self, x: Tensor) -> bool:
        """Return whether a tensor is supported: contiguous, not empty, and with a size that is a multiple of 16 bytes."""
        return super().takes(x) and x.nbytes > 0 and x.nbytes % WORD == 0 and x.is_contiguous()


class PeerAllReduce(PeerKernel):
    """All-reduce in one launch. It can be captured in a CUDA graph."""

    graph_level = GraphLevel.ANY
    kernel: ClassVar[Any]
    """The Triton kernel. Its arguments are the ones of `one_shot_kernels.sum_over_ranks`."""
    num_warps: ClassVar[int]
    num_states: ClassVar[int]
    """Number of int32 elements that the kernel keeps from one call to the next."""
    initial: ClassVar[int] = 0
    """Initial value of every 16 bits of the shared memory."""

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


def _key(name: str, rank: int) -> str:
    return f"headway/peer_memory/{name}/{rank}"


def call(function: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver. arguments: objects of ctypes.

    :raises RuntimeError: if the driver or the function is missing, or if the function fails.
    """
    cuda = _driver()
    if not hasattr(cuda, function):
        raise RuntimeError(f"this GPU driver has no {function}")
    if (result := getattr(cuda, function)(*arguments)) != 0:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"{function}: CUDA error {result}: {(text.value or b'unknown').decode()}")


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"no libcuda.so.1: {error}") from error


def _free(addresses: Sequence[int], rank: int) -> None:
    for number, address in enumerate(addresses):
        if number == rank:
            _driver().cuMemFree_v2(ctypes.c_uint64(address))
        elif address:
            _driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))
