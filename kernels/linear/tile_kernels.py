"""Products of 9 to 128 rows: tiles on the matrix units, with what comes after them in the same launch.

At these sizes a product is a chain of latencies more than a stream of weights. So its programs start while the kernel before it
still runs (PDL, see step_kernels.py), and where the tiles are too few for the GPU, several programs share the sum over K
(split-K): each leaves its part, and the last to arrive adds them, in one order.

SWAPPED: up to 16 rows are the columns of a tile whose rows are those of W. The matrix units take 64 of the one and 8 or more of
the other, and read W out of shared memory as it was copied.
"""

# Triton reads annotations when it compiles: no deferred ones here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.step.step_kernels import activate


@triton.jit(do_not_specialize=["rows"])
def tiled_product(
    x_ptr,  # [rows, K]
    weight_ptr,  # [N, K]; GATED: [2 N, K], gate over up
    bias_ptr,  # [N] or [2 N] (BIAS)
    y_ptr,  # [rows, N], written; added to (ADD)
    partial_ptr,  # float32 [tiles, SPLITS, BLOCK_M * BLOCK_N, twice that if GATED] (SPLITS > 1)
    arrivals_ptr,  # int32 [tiles], zero between launches (SPLITS > 1)
    rows,
    N: tl.constexpr,  # a multiple of BLOCK_N
    K: tl.constexpr,  # a multiple of SPLITS * BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    SWAPPED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of the gate, or of all; empty: none
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    DOT: tl.constexpr,  # what the matrix units multiply
    PDL: tl.constexpr,
):
    """y = W x + bias, then activated, activation(gate) * up, or added to y. Sums in float32.

    Grid (N / BLOCK_N, SPLITS, cdiv(rows, BLOCK_M)).
    """
    CHUNKS: tl.constexpr = K // SPLITS // BLOCK_K
    split = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = split * (K // SPLITS) + tl.arange(0, BLOCK_K)
    x_at = x_ptr + r.to(tl.int64)[:, None] * K + k[None, :]
    gate_at = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    if SWAPPED:
        HEIGHT: tl.constexpr = BLOCK_N
        WIDTH: tl.constexpr = BLOCK_M
        live = (r < rows)[None, :]
        n = n[:, None]
        y_at = y_ptr + r.to(tl.int64)[None, :] * N + n
    else:
        HEIGHT: tl.constexpr = BLOCK_M
        WIDTH: tl.constexpr = BLOCK_N
        live = (r < rows)[:, None]
        n = n[None, :]
        y_at = y_ptr + r.to(tl.int64)[:, None] * N + n
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.zeros((HEIGHT, WIDTH), tl.float32)
    up = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for c in tl.range(0, CHUNKS, num_stages=STAGES):
        x = tl.load(x_at + c * BLOCK_K, mask=(r < rows)[:, None], other=0.0).to(DOT)
        gate = _multiplied(x, tl.load(gate_at + c * BLOCK_K).to(DOT), gate, SWAPPED)
        if GATED:
            up = _multiplied(x, tl.load(gate_at + (N * K + c * BLOCK_K)).to(DOT), up, SWAPPED)
    if SPLITS == 1:
        _finish(gate, up, bias_ptr, y_at, n, live, N, GATED, ACTIVATION, ADD, BIAS)
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        SIZE: tl.constexpr = HEIGHT * WIDTH
        PARTS: tl.constexpr = 2 * SIZE if GATED else SIZE
        at = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        parts = partial_ptr + tile.to(tl.int64) * (SPLITS * PARTS) + at
        own = parts + split * PARTS
        tl.store(own, gate, mask=live)
        if GATED:
            tl.store(own + SIZE, up, mask=live)
        tl.debug_barrier()  # the atomic below releases what all threads of this program stored
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            gate = tl.zeros((HEIGHT, WIDTH), tl.float32)
            up = tl.zeros((HEIGHT, WIDTH), tl.float32)
            for other in tl.static_range(SPLITS):
                # .cg: not from this multiprocessor's own cache, which need not have what the others stored
                part = parts + other * PARTS
                gate += tl.load(part, mask=live, other=0.0, cache_modifier=".cg")
                if GATED:
                    up += tl.load(part + SIZE, mask=live, other=0.0, cache_modifier=".cg")
            _finish(gate, up, bias_ptr, y_at, n, live, N, GATED, ACTIVATION, ADD, BIAS)
            tl.store(arrivals_ptr + tile, 0)


@triton.jit
def _multiplied(x, weight, sums, SWAPPED: tl.constexpr):
    """Sums of x weight^T, or of the transpose, and of what is there."""
    if SWAPPED:
        sums = tl.dot(weight, tl.trans(x), sums)
    else:
        sums = tl.dot(x, tl.trans(weight), sums)
    return sums


@triton.jit
def _finish(gate, up, bias_ptr, y_at, n, live, N: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
            ADD: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """From whole sums to y. n: of their columns, or of their rows."""
    if BIAS:
        gate += tl.load(bias_ptr + n).to(tl.float32)
    if GATED:
        if BIAS:
            up += tl.load(bias_ptr + N + n).to(tl.float32)
        gate = activate(gate, ACTIVATION) * up
    elif ACTIVATION != "":
        gate = activate(gate, ACTIVATION)
    if ADD:
        gate += tl.load(y_at, mask=live, other=0.0).to(tl.float32)
    tl.store(y_at, gate.to(y_at.dtype.element_ty), mask=live)
