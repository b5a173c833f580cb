"""All-reduce by copy engines: transfers overlap with other kernels, because they need no multiprocessor.

Each rank copies share r of its tensor into the memory of rank r, for every other rank r. It sums its own share in one short
launch, and copies the other ranks' sums into its tensor. Between these steps, the stream writes flags and waits for them (stream
memory operations of the driver).

Summands have a stream of their own, so that they are sent while the stream of sums still waits for earlier calls. Calls use the
parts ("slots") of the shared memory in turn. A rank sends summands for a slot only after it has copied the sums of the slot's
last call. All ranks have then summed what was in the slot, and they write new sums there only after all ranks have sent summands.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from headway.core.contract.ranks import AllReduceCapabilities, AsyncAllReduceKernel, RankGroup
from headway.kernels.all_reduce.one_shot_kernels import buffer_at
from headway.kernels.all_reduce.peer_memory import WORD, PeerKernel, PeerMemory, call
from headway.kernels.runtime.triton_launch import FixedLauncher


@triton.jit(do_not_specialize=["first", "words", "capacity", "slot", "rank"])
def sum_own_share(
    x_ptr,  # [size], this rank's summand
    y_ptr,  # [size], receives the sum of this rank's share, or the sum is added to it (ONTO)
    buffers_ptr,  # int64 [SIZE]: address of each rank's slots [slots, SIZE + 1, capacity words], the last part for sums
    first,  # first word of this rank's share
    words,  # number of words of this rank's share
    capacity,  # maximum number of words of a share
    slot,
    rank,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # elements per program
    EACH: tl.constexpr,  # elements per 16-byte word
    ONTO: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum one share in float32, in rank order, and round once."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if PDL:
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The multiplications show the compiler that the mask never splits a word; see `sum_over_ranks`.
    inside = at < words * EACH
    start = first.to(tl.int64) * EACH
    part_size = capacity.to(tl.int64) * EACH
    buffer = buffer_at(buffers_ptr + rank, dtype) + slot * (SIZE + 1) * part_size
    total = tl.zeros((BLOCK,), tl.float32)
    for other in tl.static_range(SIZE):
        if other == rank:
            part = tl.load(x_ptr + start + at, mask=inside, other=0.0)
        else:
            part = tl.load(buffer + (other * part_size + at), mask=inside, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    y = total.to(dtype)
    if ONTO:
        y = (y.to(tl.float32) + tl.load(y_ptr + start + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    tl.store(y_ptr + start + at, y, mask=inside)
    tl.store(buffer + (SIZE * part_size + at), y, mask=inside)


CAPACITY: Final = 2**25
"""Maximum size of a tensor, in bytes. A call takes 0.3 ms of the host's time, so smaller tensors are not faster."""
SLOTS: Final = 2
"""Number of calls that can be under way at once."""
_BLOCK_BYTES: Final = 8192
_ENDED: Final = 2**30
"""Number that `abort` adds to the flags, so that no call waits for other ranks any more."""
_FLAG: Final = 4
"""Bytes of a flag."""
_WAIT: Final = 1
_WRITE: Final = 2


class _MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams: a wait until `value` is reached, or a write. The flags 0 mean "at least" and "after a fence"."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


class _Batch:
    """Memory operations of one stream that are enqueued together."""

    def __init__(self, stream: torch.cuda.Stream, operations: Sequence[_MemoryOperation]) -> None:
        self._stream = ctypes.c_void_p(stream.cuda_stream)
        self._count = ctypes.c_uint(len(operations))
        self._operations = (_MemoryOperation * len(operations))(*operations)

    def __call__(self, value: int) -> None:
        """Enqueue the operations, each with this value."""
        for each in self._operations:
            each.value = value
        call("cuStreamBatchMemOp_v2", self._stream, self._count, self._operations, ctypes.c_uint(0))


class ShareSum:
    """Sum of a rank's share of a tensor over all ranks, in one launch."""

    def __init__(self, rank: int, device: torch.device, addresses: Sequence[int]) -> None:
        """addresses: see `CopyAllReduce`."""
        self._rank = rank
        self._size = len(addresses)
        self._device = device
        self._buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._launchers: dict[tuple[torch.dtype, bool], FixedLauncher] = {}

    def __call__(self, x: Tensor, y: Tensor, share: tuple[int, int], slot: int, *, adds: bool) -> None:
        """Write the sum to this rank's share of y and to a slot of its shared memory.

        share: begin and end of the share, in bytes. adds: True to add the sum to y.
        """
        begin, end = share
        launch = self._launchers.get((x.dtype, adds))
        if launch is None:
            constants = {"SIZE": self._size, "BLOCK": _BLOCK_BYTES // x.element_size(), "EACH": WORD // x.element_size()}
            launch = FixedLauncher(sum_own_share, 4, self._device, {**constants, "ONTO": adds})
            self._launchers[x.dtype, adds] = launch
        if end > begin:
            launch(
                (-(-(end - begin) // _BLOCK_BYTES), 1, 1),
                x_ptr=x,
                y_ptr=y,
                buffers_ptr=self._buffers,
                first=begin // WORD,
                words=(end - begin) // WORD,
                capacity=_share_bytes(self._size) // WORD,
                slot=slot,
                rank=self._rank,
            )


class CopyAllReduce(PeerKernel, AsyncAllReduceKernel):
    """All-reduce of large tensors. A sum is rounded before it is added to a residual stream."""

    name = "copies"
    capabilities = AllReduceCapabilities(types=(torch.float32, torch.bfloat16, torch.float16), max_bytes=CAPACITY)

    @classmethod
    def join(cls, group: RankGroup) -> Self:
        memory = PeerMemory(group, cls.name, cls.shared_bytes(group.size), 0)
        return cls(group.rank, group.device, memory.addresses, memory)

    @classmethod
    def shared_bytes(cls, size: int) -> int:
        """Return the number of bytes that each of `size` ranks shares with the other ranks."""
        return _flags_at(size) + 2 * size * _FLAG

    def __init__(self, rank: int, device: torch.device, addresses: Sequence[int], keeps: object) -> None:
        """Prepare the state of a rank.

        addresses: address on this device of every rank's shared memory, filled with zeros. keeps: object that owns the memory.
        :raises RuntimeError: if the driver has no stream memory operations.
        """
        self._rank = rank
        self._size = len(addresses)
        self._device = device
        self._keeps = keeps
        self._addresses = addresses
        self._others = [(rank + step) % self._size for step in range(1, self._size)]
        self._sum = ShareSum(rank, device, addresses)
        self._sends = torch.cuda.Stream(device)
        self._sums = torch.cuda.Stream(device, priority=-1)  # so that sums run before the next linear layer
        self._side = torch.cuda.Stream(device)  # so that `abort` can run while the others wait
        self._ends: list[torch.cuda.Event | None] = [None] * SLOTS
        self._context = ctypes.c_void_p()  # for the thread that aborts
        call("cuCtxGetCurrent", ctypes.byref(self._context))
        self._turn = 0
        sent, summed = self._operations(0), self._operations(1)
        self._tell_summands = _Batch(self._sends, sent[0])
        self._await_summands = _Batch(self._sums, sent[1])
        self._exchange_sums = _Batch(self._sums, [*summed[0], *summed[1]])
        self._await_summands(self._turn)

    def start(self, x: Tensor, onto: Tensor | None = None) -> CopiedSum:
        y = x if onto is None else onto
        share = -(-x.nbytes // (self._size * WORD)) * WORD
        shares = [(min(rank * share, x.nbytes), min((rank + 1) * share, x.nbytes)) for rank in range(self._size)]
        self._turn += 1
        slot = self._turn % SLOTS
        ready = torch.cuda.current_stream(self._device).record_event()
        for stream in (self._sends, self._sums):
            stream.wait_event(ready)
        if (last := self._ends[slot]) is not None:
            self._sends.wait_event(last)
        for other in self._others:
            begin, end = shares[other]
            self._copy(self._sends, self._part(other, slot, self._rank), x.data_ptr() + begin, end - begin)
        self._tell_summands(self._turn)
        self._await_summands(self._turn)
        with torch.cuda.stream(self._sums):
            self._sum(x, y, shares[self._rank], slot, adds=onto is not None)
        self._exchange_sums(self._turn)
        for other in self._others:
            begin, end = shares[other]
            self._copy(self._sums, y.data_ptr() + begin, self._part(other, slot, self._size), end - begin)
        done = self._ends[slot] = self._sums.record_event()
        return CopiedSum(done, self._device, x)

    def abort(self) -> None:
        """Make calls that wait for other ranks go on; their sums are undefined. Any thread may call this, once the other ranks
        have ended: their writes would replace the numbers of this method."""
        call("cuCtxSetCurrent", self._context)
        flags, value = ctypes.c_uint64(self._flag(self._rank, 0, 0)), ctypes.c_uint32(self._turn + _ENDED)
        call("cuMemsetD32Async", flags, value, ctypes.c_size_t(2 * self._size), ctypes.c_void_p(self._side.cuda_stream))

    def _part(self, rank: int, slot: int, part: int) -> int:
        """Return the address of a part of a slot: the summands of one rank, or the sums (`size`)."""
        return self._addresses[rank] + (slot * (self._size + 1) + part) * _share_bytes(self._size)

    def _flag(self, rank: int, part: int, source: int) -> int:
        """Return the address of a flag of `rank`: the last call whose summands (0) or sums (1) rank `source` has provided."""
        return self._addresses[rank] + _flags_at(self._size) + (part * self._size + source) * _FLAG

    def _operations(self, part: int) -> tuple[list[_MemoryOperation], list[_MemoryOperation]]:
        """Return the writes that announce this rank's summands (0) or sums (1) to the other ranks, and the waits for theirs."""
        writes = [_MemoryOperation(_WRITE, self._flag(other, part, self._rank)) for other in self._others]
        return writes, [_MemoryOperation(_WAIT, self._flag(self._rank, part, other)) for other in self._others]

    @staticmethod
    def _copy(stream: torch.cuda.Stream, to: int, source: int, num_bytes: int) -> None:
        if num_bytes:
            size, handle = ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream.cuda_stream)
            call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), size, handle)


class CopiedSum:
    """Sum that copy engines work on."""

    def __init__(self, end: Any, device: torch.device, x: Tensor) -> None:
        """end: event after the last copy. x: summand, whose memory must not be used for anything else before the end."""
        self._end = end
        self._device = device
        self._x = x

    def wait(self) -> None:
        """Make the device's current stream wait for the sum."""
        torch.cuda.current_stream(self._device).wait_event(self._end)


def _share_bytes(size: int) -> int:
    """Return the maximum size of a rank's share of a tensor, in bytes."""
    return -(-CAPACITY // (size * WORD)) * WORD


def _flags_at(size: int) -> int:
    """Return the offset of the flags int32 [2, size] in a rank's shared memory, after the slots."""
    return SLOTS * (size + 1) * _share_bytes(size)
