"""One launch in which a rank gives the others what it has, waits for theirs, and sums it.

Each rank has three buffers in turn, with room for every other rank's tensor, into which the others write. An element that has not
come holds a pattern that none is given as, so that what is waited for is the data itself, with no flag and no fence before a flag
(Lamport's mailbox, as in low-latency kernels of NCCL and TensorRT-LLM). A rank fills the buffer of the call before with that
pattern again. Others write there two calls later, for which they need what this rank gives one call later, after it has done so.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.contract.kernel import GraphLevel
from headway.core.contract.ranks import AllReduceCapabilities, AllReduceKernel, RankGroup
from headway.core.contract.support import YES, Support
from headway.kernels.all_reduce.peer_memory import PeerMemory
from headway.kernels.runtime.triton_launch import FixedLauncher


@triton.jit(do_not_specialize=["words", "rank"])
def sum_over_ranks(
    x_ptr,  # [words * EACH], this rank's part of the sum
    onto_ptr,  # likewise, added to in place (ONTO)
    y_ptr,  # likewise, written (not ONTO)
    buffers_ptr,  # int64 [SIZE]: address of each rank's buffers [3, SIZE, CAPACITY]
    state_ptr,  # int32 [3]: buffer of this call, programs that have ended in it, 16 bits of the call before
    ended_ptr,  # int32 [1], not 0: nobody is waited for
    words,  # of 16 bytes
    rank,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,  # elements of one rank's part of a buffer
    BLOCK: tl.constexpr,  # elements of a program
    EACH: tl.constexpr,  # elements of a word
    BITS: tl.constexpr,  # the integers as wide as an element
    NOTHING: tl.constexpr,  # the pattern of what has not come
    INSTEAD: tl.constexpr,  # what is given in its place
    ONTO: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum in float32, in the order of ranks, and round once. Grid (cdiv(words * EACH, BLOCK)), all of which must run at once."""
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    # A product tells the compiler that no word is cut, so that it copies words. Of an argument tl.multiple_of tells it nothing:
    # elements were copied, and 512 KB took two H100 18 us.
    count = words * EACH
    inside = at < count
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    buffer = tl.load(state_ptr)
    first = buffer * (SIZE * CAPACITY)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    own = x.to(BITS, bitcast=True)
    own = tl.where(own == NOTHING, INSTEAD, own).to(BITS)
    for other in tl.static_range(SIZE):
        if other != rank:
            theirs = _buffers(buffers_ptr + other, BITS) + (first + rank * CAPACITY)
            tl.store(theirs + at, own, mask=inside)
    mine = _buffers(buffers_ptr + rank, BITS)
    total = tl.zeros((BLOCK,), tl.float32)
    for other in tl.static_range(SIZE):
        got = own
        if other != rank:
            come = mine + (first + other * CAPACITY)
            got = tl.load(come + at, mask=inside, other=0, volatile=True)
            waits = tl.max((got == NOTHING).to(tl.int32), 0)
            while waits > 0:
                got = tl.load(come + at, mask=inside, other=0, volatile=True)
                waits = tl.where(tl.load(ended_ptr, volatile=True) == 0, tl.max((got == NOTHING).to(tl.int32), 0), 0)
        total += got.to(x.dtype, bitcast=True).to(tl.float32)
    if ONTO:
        total += tl.load(onto_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(onto_ptr + at, total.to(x.dtype), mask=inside)
    else:
        tl.store(y_ptr + at, total.to(x.dtype), mask=inside)
    shorts: tl.constexpr = 8 // EACH  # 16 bits, in an element
    before = tl.multiple_of(tl.load(state_ptr + 2), 8)
    emptied = _buffers(buffers_ptr + rank, tl.int16) + (buffer + 2) % 3 * (SIZE * CAPACITY * shorts)
    for start in range(program * BLOCK, before, tl.num_programs(0) * BLOCK):
        short = start + tl.arange(0, BLOCK)
        for other in tl.static_range(SIZE):
            nothing = tl.full((BLOCK,), -32768, tl.int16)
            tl.store(emptied + (other * CAPACITY * shorts + short), nothing, mask=short < before)
    tl.debug_barrier()
    ended = tl.atomic_add(state_ptr + 1, 1, sem="relaxed", scope="gpu")
    if ended == tl.num_programs(0) - 1:  # all have read the state
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr + 2, words * 8)
        tl.store(state_ptr, (buffer + 1) % 3)


@triton.jit
def _buffers(address_ptr, BITS: tl.constexpr):
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(BITS), bitcast=True), 16)


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


class OneShotAllReduce(AllReduceKernel):
    """An all-reduce of one launch, in whose memory every rank writes; it can be captured in a CUDA graph."""

    name = "one_shot"
    capabilities = AllReduceCapabilities(types=tuple(_BITS), max_bytes=CAPACITY)
    graph_level = GraphLevel.ANY

    @classmethod
    def supports(cls, spec: RankGroup) -> Support:
        """See `AllReduceKernel`: every GPU must reach the memory of every other one."""
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
        memory = PeerMemory(group, shared_bytes(group.size), NOTHING)
        return cls(group.rank, group.device, memory.addresses, memory, torch.cuda.Stream(group.device))

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
        """See `AllReduceKernel`: whole words."""
        return super().takes(x) and x.nbytes > 0 and x.nbytes % _WORD == 0 and x.is_contiguous()

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the sum of x over ranks; with `onto`, that with the sum added, in place, rounded once."""
        adds = onto is not None
        launch = self._launchers.get((x.dtype, adds))
        if launch is None:
            bits, nothing, instead = _BITS[x.dtype]
            constants = {
                "SIZE": self._size,
                "CAPACITY": CAPACITY // x.itemsize,
                "BLOCK": self._block_bytes // x.itemsize,
                "EACH": _WORD // x.itemsize,
                "BITS": bits,
                "NOTHING": nothing,
                "INSTEAD": instead,
                "ONTO": adds,
            }
            launch = self._launchers[x.dtype, adds] = FixedLauncher(sum_over_ranks, 8, self._device, constants)
        y = x if onto is None else onto
        grid = triton.cdiv(x.nbytes, self._block_bytes), 1, 1
        launch(
            grid,
            x_ptr=x,
            onto_ptr=y,
            y_ptr=y,
            buffers_ptr=self._buffers,
            state_ptr=self._state,
            ended_ptr=self._ended,
            words=x.nbytes // _WORD,
            rank=self._rank,
        )
        return y

    def abort(self) -> None:
        """Have launches that wait for other ranks end, with whatever sum; any thread may do so."""
        with torch.cuda.stream(self._side):
            self._ended.fill_(1)
