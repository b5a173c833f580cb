"""Two-shot all-reduce: in one launch, each rank sums its share of the elements for all ranks and sends them the sums.

A program works on one tile after the other: it writes each rank's share of the tile to that rank, waits for its own share from
the other ranks, sums it, writes the sums to the other ranks, and waits for theirs. The n-th program of each rank works on the
same tiles, has its own part of the shared memory, and meets only the n-th programs of the other ranks.

A part is written again only after its reader has ended: a rank sends its sums after it has read the summands, and sends summands
of the next tile after it has read the sums.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.contract.ranks import AllReduceCapabilities
from headway.kernels.all_reduce.one_shot_kernels import buffer_at
from headway.kernels.all_reduce.peer_memory import WORD, PeerAllReduce


@triton.jit(do_not_specialize=["words", "rank"])
def sum_by_shares(
    x_ptr,  # [words * EACH], this rank's summand
    onto_ptr,  # [words * EACH], the sum is added to it in place (ONTO)
    y_ptr,  # [words * EACH], receives the sum (not ONTO)
    buffers_ptr,  # int64 [SIZE]: address of each rank's buffers [2, PROGRAMS, SIZE, BLOCK] and flags int32 [2, PROGRAMS, SIZE]
    state_ptr,  # int32 [PROGRAMS]: number of tiles that a program has worked on
    ended_ptr,  # int32 [1]: not 0 means that no rank is waited for
    words,  # number of 16-byte words
    rank,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,  # maximum number of programs
    BLOCK: tl.constexpr,  # elements of a rank's share of a tile
    EACH: tl.constexpr,  # elements per word
    ONTO: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum the ranks' tensors in float32, in rank order, and round once. Grid (at most PROGRAMS); all must run at once."""
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    # The multiplication shows the compiler that the mask never splits a word; see `sum_over_ranks`.
    count = words * EACH
    parts = program * (SIZE * BLOCK)  # this program's part of a buffer
    sums: tl.constexpr = PROGRAMS * SIZE * BLOCK  # start of the buffer for sums
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first_flag: tl.constexpr = 2 * PROGRAMS * SIZE * BLOCK * (16 // EACH) // 4  # in int32 elements from the buffers on
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    turn = tl.load(state_ptr + program)
    own_buffer = buffer_at(buffers_ptr + rank, dtype)
    own_flags = buffer_at(buffers_ptr + rank, tl.int32) + (first_flag + program * SIZE)
    for start in range(program * (SIZE * BLOCK), count, tl.num_programs(0) * (SIZE * BLOCK)):
        turn += 1
        for step in tl.static_range(1, SIZE):
            other = (rank + step) % SIZE
            at = start + other * BLOCK + lanes
            x = tl.load(x_ptr + at, mask=at < count, other=0.0)
            tl.store(buffer_at(buffers_ptr + other, dtype) + (parts + rank * BLOCK + lanes), x)
        _announce(buffers_ptr, rank, first_flag + program * SIZE + rank, turn, SIZE)
        at = start + rank * BLOCK + lanes
        x = tl.load(x_ptr + at, mask=at < count, other=0.0)
        total = tl.zeros((BLOCK,), tl.float32)
        for other in tl.static_range(SIZE):
            part = x
            if other != rank:
                _await(own_flags + other, ended_ptr, turn)
                part = tl.load(own_buffer + (parts + other * BLOCK + lanes), cache_modifier=".cg")
            total += part.to(tl.float32)
        total = total.to(dtype)
        for step in tl.static_range(1, SIZE):
            other = (rank + step) % SIZE
            tl.store(buffer_at(buffers_ptr + other, dtype) + (sums + parts + rank * BLOCK + lanes), total)
        _announce(buffers_ptr, rank, first_flag + (PROGRAMS + program) * SIZE + rank, turn, SIZE)
        for step in tl.static_range(SIZE):
            other = (rank + step) % SIZE
            at = start + other * BLOCK + lanes
            if step > 0:
                _await(own_flags + (PROGRAMS * SIZE + other), ended_ptr, turn)
                total = tl.load(own_buffer + (sums + parts + other * BLOCK + lanes), cache_modifier=".cg")
            y = total
            if ONTO:
                y = (y.to(tl.float32) + tl.load(onto_ptr + at, mask=at < count, other=0.0).to(tl.float32)).to(dtype)
                tl.store(onto_ptr + at, y, mask=at < count)
            else:
                tl.store(y_ptr + at, y, mask=at < count)
    tl.store(state_ptr + program, turn)


@triton.jit
def _announce(buffers_ptr, rank, flag, turn, SIZE: tl.constexpr):
    """Set this program's flag on all other ranks, after all its stores."""
    tl.debug_barrier()  # orders the stores of all threads before the release by one thread
    for step in tl.static_range(1, SIZE):
        flags = buffer_at(buffers_ptr + (rank + step) % SIZE, tl.int32)
        tl.atomic_xchg(flags + flag, turn, sem="release", scope="sys")


@triton.jit
def _await(flag_ptr, ended_ptr, turn):
    """Wait until a flag has reached `turn`. The difference stays right when numbers overflow."""
    late = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") - turn
    while late < 0:
        late = tl.where(tl.load(ended_ptr, volatile=True) == 0, tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") - turn, 0)
    tl.debug_barrier()


PROGRAMS: Final = 128
_BLOCK_BYTES: Final = 32768


class TwoShotAllReduce(PeerAllReduce):
    """All-reduce of large tensors. A sum is rounded before it is added to a residual stream."""

    name = "two_shot"
    capabilities = AllReduceCapabilities(types=(torch.float32, torch.bfloat16, torch.float16))
    kernel = sum_by_shares
    num_warps = 16
    num_states = PROGRAMS
    block_bytes = _BLOCK_BYTES
    """Bytes of a rank's share of a tile."""

    @classmethod
    def shared_bytes(cls, size: int) -> int:
        return 2 * cls.num_states * size * (cls.block_bytes + 4)

    @classmethod
    def num_programs(cls, size: int, num_bytes: int) -> int:
        return min(cls.num_states, -(-num_bytes // (size * cls.block_bytes)))

    @classmethod
    def constants(cls, dtype: torch.dtype) -> dict[str, Any]:
        return {"PROGRAMS": cls.num_states, "BLOCK": cls.block_bytes // dtype.itemsize, "EACH": WORD // dtype.itemsize}
