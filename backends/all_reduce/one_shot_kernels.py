"""One launch in which a rank gives the others what it has, waits for theirs, and sums it.

A program's part of the tensor is the same on every rank, so programs wait for those of their own number alone. The flags that
they wait for count calls. What a rank gives lies in one of two buffers in turn: a rank that writes into one has met the others in
the call before, and they had ended the call that read the buffer when they came there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["count", "rank"])
def sum_over_ranks(
    x_ptr,  # [count], this rank's part of the sum
    onto_ptr,  # [count], added to in place (ONTO)
    y_ptr,  # [count], written (not ONTO)
    flags_ptr,  # int64 [SIZE]: address of each rank's flags, int32 [programs, SIZE]
    buffers_ptr,  # int64 [SIZE]: address of each rank's two buffers of CAPACITY elements
    calls_ptr,  # int32 [2]: calls so far, and programs that have ended in this one
    ended_ptr,  # int32 [1], not 0: nobody is waited for
    count,
    rank,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,  # elements of a buffer
    BLOCK: tl.constexpr,
    ONTO: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum in float32, in the order of ranks, and round once. Grid (programs), at most as many as run at once."""
    program = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    call = tl.load(calls_ptr) + 1
    first_element = (call & 1) * CAPACITY
    element = x_ptr.dtype
    own = tl.load(buffers_ptr + rank).to(element, bitcast=True)
    for first in range(program * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(own + (first_element + at), tl.load(x_ptr + at, mask=at < count, other=0.0), mask=at < count)
    tl.debug_barrier()  # the flags below release what all threads of this program stored
    for other in range(SIZE):
        if other != rank:
            theirs = tl.load(flags_ptr + other).to(calls_ptr.dtype, bitcast=True)
            tl.atomic_xchg(theirs + program * SIZE + rank, call, sem="release", scope="sys")
    mine = tl.load(flags_ptr + rank).to(calls_ptr.dtype, bitcast=True) + program * SIZE
    for other in range(SIZE):
        if other != rank:
            waits = 1
            while waits > 0:
                seen = tl.atomic_add(mine + other, 0, sem="acquire", scope="sys")
                ended = tl.load(ended_ptr, volatile=True)
                waits = tl.where((seen - call < 0) & (ended == 0), 1, 0)  # one that is a call ahead has come, too
    tl.debug_barrier()
    for first in range(program * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for other in range(SIZE):
            theirs = tl.load(buffers_ptr + other).to(element, bitcast=True) + first_element
            total += tl.load(tl.multiple_of(theirs, 16) + at, mask=at < count, other=0.0, volatile=True).to(tl.float32)
        if ONTO:
            total += tl.load(onto_ptr + at, mask=at < count, other=0.0).to(tl.float32)
            tl.store(onto_ptr + at, total.to(element.element_ty), mask=at < count)
        else:
            tl.store(y_ptr + at, total.to(element.element_ty), mask=at < count)
    tl.debug_barrier()
    ended_programs = tl.atomic_add(calls_ptr + 1, 1, sem="acq_rel", scope="gpu")
    if ended_programs == tl.num_programs(0) - 1:  # all have read the number of calls
        tl.store(calls_ptr + 1, 0)
        tl.store(calls_ptr, call)
