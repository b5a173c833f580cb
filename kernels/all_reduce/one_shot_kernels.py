"""One-shot all-reduce: in one launch, each rank writes its tensor to all other ranks, waits for their tensors, and sums them.

Each rank has three buffers, used in rotation, with room for every other rank's tensor; the other ranks write into them. An
element that has not arrived holds a reserved bit pattern, so the data itself is the flag. Neither a separate flag nor a fence is
needed (Lamport's mailbox, as in low-latency kernels of NCCL and TensorRT-LLM). A rank resets the previous call's buffer to the
reserved pattern. Other ranks write into that buffer two calls later. They can do so only after they have received this rank's
data of the next call, which this rank sends after the reset.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.contract.ranks import AllReduceCapabilities
from headway.kernels.all_reduce.peer_memory import WORD, PeerAllReduce


@triton.jit(do_not_specialize=["words", "rank"])
def sum_over_ranks(
    x_ptr,  # [words * EACH], this rank's summand
    onto_ptr,  # [words * EACH], the sum is added to it in place (ONTO)
    y_ptr,  # [words * EACH], receives the sum (not ONTO)
    buffers_ptr,  # int64 [SIZE]: address of each rank's buffers [3, SIZE, CAPACITY]
    state_ptr,  # int32 [3]: buffer of this call, programs that have ended in it, 16-bit elements of the previous call
    ended_ptr,  # int32 [1]: not 0 means that no rank is waited for
    words,  # number of 16-byte words
    rank,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,  # elements of one rank's tensor in a buffer
    BLOCK: tl.constexpr,  # elements per program
    EACH: tl.constexpr,  # elements per word
    BITS: tl.constexpr,  # integer type of an element's width
    NOTHING: tl.constexpr,  # bit pattern of an element that has not arrived
    INSTEAD: tl.constexpr,  # bit pattern sent instead of NOTHING
    ONTO: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum the ranks' tensors in float32, in rank order, and round once. Grid (cdiv(words * EACH, BLOCK)); all programs must run
    at once."""
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    # The multiplication shows the compiler that the mask never splits a word, so that it copies whole words. tl.multiple_of on an
    # argument has no effect here: single elements were copied, and 512 KB took two H100 18 us.
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
            theirs = buffer_at(buffers_ptr + other, BITS) + (first + rank * CAPACITY)
            tl.store(theirs + at, own, mask=inside)
    mine = buffer_at(buffers_ptr + rank, BITS)
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
    shorts: tl.constexpr = 8 // EACH  # 16-bit units per element
    before = tl.multiple_of(tl.load(state_ptr + 2), 8)
    emptied = buffer_at(buffers_ptr + rank, tl.int16) + (buffer + 2) % 3 * (SIZE * CAPACITY * shorts)
    for start in range(program * BLOCK, before, tl.num_programs(0) * BLOCK):
        short = start + tl.arange(0, BLOCK)
        for other in tl.static_range(SIZE):
            nothing = tl.full((BLOCK,), -32768, tl.int16)
            tl.store(emptied + (other * CAPACITY * shorts + short), nothing, mask=short < before)
    tl.debug_barrier()
    ended = tl.atomic_add(state_ptr + 1, 1, sem="relaxed", scope="gpu")
    if ended == tl.num_programs(0) - 1:  # all programs have read the state
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr + 2, words * 8)
        tl.store(state_ptr, (buffer + 1) % 3)


@triton.jit
def buffer_at(address_ptr, BITS: tl.constexpr):
    """Return a pointer to elements of type BITS at the address that `address_ptr` holds."""
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(BITS), bitcast=True), 16)


CAPACITY: Final = 2**19
"""Maximum size of a tensor, in bytes. NCCL is faster for larger tensors, and all programs of a launch must run at once."""
NOTHING: Final = 0x8000
"""Value that marks 16 bits of shared memory as not yet written."""
_BLOCK_BYTES: Final = 4096
_WIDE: Final = (tl.int32, -0x7FFF8000, -0x7FFF7FFF)  # sends one tiny (denormal) number instead of another
_NARROW: Final = (tl.int16, -0x8000, 0)  # sends 0 instead of -0
_BITS: Final = {torch.float32: _WIDE, torch.bfloat16: _NARROW, torch.float16: _NARROW}


class OneShotAllReduce(PeerAllReduce):
    """All-reduce of small tensors, rounded once."""

    name = "one_shot"
    capabilities = AllReduceCapabilities(types=tuple(_BITS), max_bytes=CAPACITY)
    kernel = sum_over_ranks
    num_warps = 8
    num_states = 3
    initial = NOTHING

    @classmethod
    def shared_bytes(cls, size: int) -> int:
        return 3 * size * CAPACITY

    @classmethod
    def num_programs(cls, size: int, num_bytes: int) -> int:
        return -(-num_bytes // _BLOCK_BYTES)

    @classmethod
    def constants(cls, dtype: torch.dtype) -> dict[str, Any]:
        bits, nothing, instead = _BITS[dtype]
        return {
            "CAPACITY": CAPACITY // dtype.itemsize,
            "BLOCK": _BLOCK_BYTES // dtype.itemsize,
            "EACH": WORD // dtype.itemsize,
            "BITS": bits,
            "NOTHING": nothing,
            "INSTEAD": instead,
        }
