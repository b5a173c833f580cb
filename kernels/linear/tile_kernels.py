"""Triton GEMM over dense weights on tensor cores, with fused operations after it: `tiles` for 9 to 128 rows, and `invariant` for
any number of rows in deterministic mode.

At these sizes, latencies matter more than bandwidth. So programs start while the previous kernel still runs (PDL, see
step_kernels.py). If there are too few tiles for the GPU, several programs split the sum over K (split-K). Each of them stores its
partial sums, and the last program to arrive adds the partial sums in a fixed order.

With SWAPPED, the rows of a tile are rows of W, and its columns are rows of x. The tensor cores then process 64 rows of W and 8 or
more rows of x, and read W from shared memory in the layout in which it was copied.

`invariant` gives the same bits for a row of x whatever the number of rows. Its tiles are SWAPPED for any number of rows, so that
the tensor cores run the same instruction with more or fewer columns. K is divided into SEGMENTS by the shape of the weight alone.
Each segment is summed in the order of K, and then the segments are added in their order, by one program or by several.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.contract.linear import FUSED, LinearCapabilities, LinearSpec
from headway.kernels.linear.choice import INVARIANT, TILES
from headway.kernels.linear.forms import Operand
from headway.kernels.linear.product_kernels import DEVICES, ProductCase, TritonProducts
from headway.kernels.runtime.triton_launch import FixedLauncher, shared_memory
from headway.kernels.step.config import Activation
from headway.kernels.step.step_kernels import activate

# Triton reads annotations at compile time, so they must not be deferred here.


@triton.jit(do_not_specialize=["rows"])
def tiled_product(
    x_ptr,  # [rows, K]
    weight_ptr,  # [N, K]; GATED: [2 N, K], gate over up
    bias_ptr,  # [N] or [2 N] (BIAS)
    y_ptr,  # [rows, N], written; added to (ADD)
    partial_ptr,  # float32 [tiles, SPLITS, BLOCK_M * BLOCK_N, twice that if GATED] (SPLITS > 1)
    arrivals_ptr,  # int32 [tiles], zero between launches (SPLITS > 1)
    rows,
    N: tl.constexpr,
    K: tl.constexpr,  # a multiple of BLOCK_K if SEGMENTS > 1
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENTS: tl.constexpr,  # parts of K with sums of their own
    SPLITS: tl.constexpr,  # programs that share the segments: 1 or SEGMENTS
    FLAT: tl.constexpr,  # one loop over all segments
    GROUP: tl.constexpr,  # tiles of rows of x whose programs run together, so that they share W in the L2 cache
    STAGES: tl.constexpr,
    SWAPPED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # activation of the gate, or of everything; empty means none
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    DOT: tl.constexpr,  # type of the operands of tl.dot
    PDL: tl.constexpr,
):
    """y = W x + bias (GEMM), optionally activated, gated, or added to y. Sums in float32.

    Grid (N / BLOCK_N, SPLITS, cdiv(rows, BLOCK_M)).
    """
    split = tl.program_id(1)
    tile_n, tile_m = tl.program_id(0), tl.program_id(2)
    if GROUP > 1:
        columns = tl.num_programs(0)
        place = tile_m * columns + tile_n
        first = place // (GROUP * columns) * GROUP
        height = tl.minimum(tl.num_programs(2) - first, GROUP)
        tile_m = first + place % (GROUP * columns) % height
        tile_n = place % (GROUP * columns) // height
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + r.to(tl.int64)[:, None] * K + k[None, :]
    kept = n
    if N % BLOCK_N != 0:
        kept = tl.minimum(n, N - 1)
    gate_at = weight_ptr + kept.to(tl.int64)[:, None] * K + k[None, :]
    if SWAPPED:
        HEIGHT: tl.constexpr = BLOCK_N
        WIDTH: tl.constexpr = BLOCK_M
        live = (r < rows)[None, :] & (n < N)[:, None]
        n = n[:, None]
        y_at = y_ptr + r.to(tl.int64)[None, :] * N + n
    else:
        HEIGHT: tl.constexpr = BLOCK_M
        WIDTH: tl.constexpr = BLOCK_N
        live = (r < rows)[:, None] & (n < N)[None, :]
        n = n[None, :]
        y_at = y_ptr + r.to(tl.int64)[:, None] * N + n
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.zeros((HEIGHT, WIDTH), tl.float32)
    up = tl.zeros((HEIGHT, WIDTH), tl.float32)
    if SPLITS == SEGMENTS:
        gate, up = _segment(x_at, gate_at, gate, up, split, r < rows, k, N, K, BLOCK_K, SEGMENTS, STAGES, SWAPPED, GATED, DOT)
    elif FLAT:
        # One loop without a pause between segments. Adding 0 changes no bit.
        CHUNKS: tl.constexpr = K // BLOCK_K
        own, own_up = tl.zeros((HEIGHT, WIDTH), tl.float32), tl.zeros((HEIGHT, WIDTH), tl.float32)
        for c in tl.range(0, CHUNKS, num_stages=STAGES):
            own, own_up = _chunk(x_at, gate_at, own, own_up, c, r < rows, k, N, K, BLOCK_K, SWAPPED, GATED, DOT)
            ends = (c + 1) % (CHUNKS // SEGMENTS) == 0
            gate += tl.where(ends, own, 0.0)
            own = tl.where(ends, 0.0, own)
            if GATED:
                up += tl.where(ends, own_up, 0.0)
                own_up = tl.where(ends, 0.0, own_up)
    else:
        for segment in tl.range(SEGMENTS):
            own, own_up = tl.zeros((HEIGHT, WIDTH), tl.float32), tl.zeros((HEIGHT, WIDTH), tl.float32)
            own, own_up = _segment(
                x_at, gate_at, own, own_up, segment, r < rows, k, N, K, BLOCK_K, SEGMENTS, STAGES, SWAPPED, GATED, DOT
            )
            gate += own
            up += own_up
    if SPLITS == 1:
        _finish(gate, up, bias_ptr, y_at, n, live, N, GATED, ACTIVATION, ADD, BIAS)
    else:
        tile = tile_m * tl.num_programs(0) + tile_n
        SIZE: tl.constexpr = HEIGHT * WIDTH
        PARTS: tl.constexpr = 2 * SIZE if GATED else SIZE
        at = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        parts = partial_ptr + tile.to(tl.int64) * (SPLITS * PARTS) + at
        own = parts + split * PARTS
        tl.store(own, gate, mask=live)
        if GATED:
            tl.store(own + SIZE, up, mask=live)
        tl.debug_barrier()  # the atomic below releases the stores of all threads of this program
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            gate = tl.zeros((HEIGHT, WIDTH), tl.float32)
            up = tl.zeros((HEIGHT, WIDTH), tl.float32)
            for other in tl.static_range(SPLITS):
                # .cg bypasses this SM's L1 cache, which may lack what other programs stored
                part = parts + other * PARTS
                gate += tl.load(part, mask=live, other=0.0, cache_modifier=".cg")
                if GATED:
                    up += tl.load(part + SIZE, mask=live, other=0.0, cache_modifier=".cg")
            _finish(gate, up, bias_ptr, y_at, n, live, N, GATED, ACTIVATION, ADD, BIAS)
            tl.store(arrivals_ptr + tile, 0)


@triton.jit
def _segment(x_at, gate_at, gate, up, segment, inside, k, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
             SEGMENTS: tl.constexpr, STAGES: tl.constexpr, SWAPPED: tl.constexpr, GATED: tl.constexpr,
             DOT: tl.constexpr):  # fmt: skip
    """Add the GEMM over a segment of K to `gate` and `up`, in the order of K. inside: [BLOCK_M]: False for rows after the last
    row of x."""
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K // SEGMENTS
    for c in tl.range(segment * CHUNKS, (segment + 1) * CHUNKS, num_stages=STAGES):
        gate, up = _chunk(x_at, gate_at, gate, up, c, inside, k, N, K, BLOCK_K, SWAPPED, GATED, DOT)
    return gate, up


@triton.jit
def _chunk(x_at, gate_at, gate, up, c, inside, k, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, SWAPPED: tl.constexpr,
           GATED: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Add the GEMM over chunk c of K to `gate` and `up`."""
    start = c * BLOCK_K
    if K % BLOCK_K == 0:
        x = tl.load(x_at + start, mask=inside[:, None], other=0.0)
        w = tl.load(gate_at + start)
    else:
        x = tl.load(x_at + start, mask=inside[:, None] & (start + k < K)[None, :], other=0.0)
        w = tl.load(gate_at + start, mask=(start + k < K)[None, :], other=0.0)
    gate = _multiplied(x.to(DOT), w.to(DOT), gate, SWAPPED)
    if GATED:
        if K % BLOCK_K == 0:
            w = tl.load(gate_at + (N * K + start))
        else:
            w = tl.load(gate_at + (N * K + start), mask=(start + k < K)[None, :], other=0.0)
        up = _multiplied(x.to(DOT), w.to(DOT), up, SWAPPED)
    return gate, up


@triton.jit
def _multiplied(x, weight, sums, SWAPPED: tl.constexpr):
    """Return sums + x weight^T, or its transpose."""
    if SWAPPED:
        sums = tl.dot(weight, tl.trans(x), sums)
    else:
        sums = tl.dot(x, tl.trans(weight), sums)
    return sums


@triton.jit
def _finish(gate, up, bias_ptr, y_at, n, live, N: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
            ADD: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Apply bias and activation to complete sums, and store them to y. n: output features, which are columns of the tile, or rows
    if SWAPPED."""
    if BIAS:
        gate += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        if BIAS:
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        gate = activate(gate, ACTIVATION) * up
    elif ACTIVATION != "":
        gate = activate(gate, ACTIVATION)
    if ADD:
        gate += tl.load(y_at, mask=live, other=0.0).to(tl.float32)
    tl.store(y_at, gate.to(y_at.dtype.element_ty), mask=live)


MAX_ROWS = 128
"""Maximum number of rows. This and the following constants were measured on an H200, against cuBLAS (docs/kernels.md)."""
MAX_WEIGHT = 2**23
"""Maximum number of elements of the weight. cuBLAS is equally fast for larger weights."""
MOST_SWAPPED = 16
"""Maximum number of rows for SWAPPED tiles, which are used for weights of up to twice MAX_WEIGHT elements.

With 16 rows on an H100, for 5120 x 2880 and 2880 x 4096, `few_rows` takes 22 to 25 us and cuBLAS 16 us. Reading the bytes of
these weights takes 9.7 and 7.7 us.
"""
BUSY = 0.7
"""Number of programs per SM that keeps the GPU busy. Tiles are made smaller, and sums are split, until there are enough
programs."""
_BLOCK_M, _BLOCK_N = 64, 64
"""Rows and columns of the largest tiles of `tiles`."""
_BLOCK_K, BLOCK_ROWS = 64, 128
"""Columns of W, and maximum number of rows of x, in a tile of `invariant`."""
_SEGMENTS, SEGMENT = 8, 512
"""Maximum number of segments of K of `invariant`, and minimum length of a segment. Shorter sums are not faster in parts."""
_WARPS = 4


@dataclass(frozen=True, slots=True)
class ProductTiling:
    """Tiling of one GEMM."""

    block_n: int
    splits: int
    """Number of programs that split a sum over K (split-K)."""
    block_k: int
    stages: int
    block_m: int = _BLOCK_M
    swapped: bool = False
    """True if the rows of a tile are rows of the weight."""
    segments: int = 0
    """Number of parts of K with sums of their own. 0 means one for each program."""
    group: int = 1
    """Number of tiles of rows of x whose programs run together."""
    warps: int = _WARPS


@cache  # each launch asks for it, and before that the choice between kernels
def swapped_tiling_for(rows: int, out_features: int, in_features: int, multiprocessors: int) -> ProductTiling | None:
    """Return the tiling for up to MOST_SWAPPED rows, or None if the kernel does not support the shape."""
    if rows > MOST_SWAPPED or out_features % _BLOCK_N:
        return None
    tilings = [splits for splits in (1, 2, 3, 4) if in_features % (splits * 64) == 0]
    enough = [splits for splits in tilings if out_features // _BLOCK_N * splits >= BUSY * multiprocessors] or tilings[-1:]
    return ProductTiling(_BLOCK_N, enough[0], 64, 6, MOST_SWAPPED, swapped=True) if enough else None


@cache
def tiling_for(rows: int, out_features: int, in_features: int, multiprocessors: int) -> ProductTiling | None:
    """Return the tiling of a GEMM [rows, in_features] x [in_features, out_features], or None if the kernel does not support the
    shape."""
    tiles_m = -(-rows // _BLOCK_M)
    wanted = BUSY * multiprocessors
    block_n = 64 if out_features % 64 == 0 and out_features // 64 * tiles_m >= wanted else 32
    if out_features % block_n:
        return None
    programs = out_features // block_n * tiles_m
    if programs >= wanted:
        return ProductTiling(block_n, 1, 128, 5 if tiles_m == 1 else 3) if in_features % 128 == 0 else None
    tilings = [splits for splits in (2, 3, 4) if in_features % (splits * 64) == 0]
    enough = [splits for splits in tilings if programs * splits >= wanted] or tilings[-1:]
    return ProductTiling(block_n, enough[0], 64, 5) if enough else None


@cache
def invariant_tiling(
    rows: int, out_features: int, in_features: int, gated: bool, multiprocessors: int, memory: int
) -> ProductTiling:
    """Return the tiling of a GEMM [rows, in_features] x [in_features, out_features] whose segments do not depend on `rows`.

    out_features: half of the rows of a gated weight. memory: maximum shared memory of a thread block, in bytes.
    """
    chunks, tiles_n = triton.cdiv(in_features, _BLOCK_K), triton.cdiv(out_features, _BLOCK_N)
    longest = max(chunks // (SEGMENT // _BLOCK_K), 1)
    divisors = [count for count in range(1, min(_SEGMENTS, longest) + 1) if chunks % count == 0]
    if in_features % _BLOCK_K:
        divisors = [1]
    enough = (BUSY if in_features >= 4 * SEGMENT else BUSY / 2) * multiprocessors
    segments = next((count for count in divisors if tiles_n * count >= enough), divisors[-1])
    few = BUSY * multiprocessors
    block_m, block_n, splits, group, warps = 16, _BLOCK_N, 1, 1, _WARPS
    if rows <= block_m:
        splits = segments
    else:
        fitting = [each for each in (BLOCK_ROWS, 64, 32) if each < 2 * rows and tiles_n * triton.cdiv(rows, each) >= few]
        block_m = fitting[0] if fitting else block_m
        group = 8
        if block_m == BLOCK_ROWS:
            warps = 2 * _WARPS
            # registers hold two sums of each element, and four if there are several segments and the layer is gated
            block_n = _BLOCK_N if gated and segments > 1 else 2 * _BLOCK_N
    # A program that adds segments waits for the tensor cores once per chunk.
    block_k = 2 * _BLOCK_K if splits < segments and block_m < BLOCK_ROWS and chunks // segments % 2 == 0 else _BLOCK_K
    stage = 2 * block_k * (block_m + (2 * block_n if gated else block_n))
    stages = max(2, min(6 if block_m <= 64 else 4, (memory - 4096) // stage))
    return ProductTiling(block_n, splits, block_k, stages, block_m, True, segments, group, warps)


class Tiles(TritonProducts):
    """Split-K GEMM over dense weights in tiles, for up to MAX_ROWS rows in half precision, in one launch.

    The tiling depends on the shape and on whether there are more than 16 or 64 rows. A row's result does not depend on the other
    rows.
    """

    name = TILES
    capabilities = LinearCapabilities(frozenset({"plain"}), devices=DEVICES, fused=frozenset(FUSED) - {"norm", "rotary"})
    arrangement = "plain"

    def __init__(self, spec: LinearSpec, variant: str = "") -> None:
        super().__init__(spec, variant)
        device = spec.device
        self._launcher = cache(partial(_launcher, device))
        self._sums = cache(lambda count: torch.empty(count, device=device))
        self._arrivals = cache(lambda count: torch.zeros(count, dtype=torch.int32, device=device))
        """Number of counters -> int32 arrival counters, which are zero between launches. Like the memory for split-K sums, they
        are never freed, since captured graphs use their addresses."""

    def runs(self, rows: int) -> bool:
        """Return whether there is a tiling for the weight and this number of rows."""
        out, columns = self.spec.out_features, self.spec.in_features
        return rows <= MAX_ROWS and self._tiling_of(rows, out // (2 if self.spec.gated else 1), out, columns) is not None

    def _tiling_of(self, rows: int, out_features: int, weight_rows: int, in_features: int) -> ProductTiling | None:
        """Return the tiling, or None if there is none. weight_rows: `out_features`, or twice that if the layer is gated."""
        size = weight_rows * in_features
        if size <= MAX_WEIGHT:
            return tiling_for(rows, out_features, in_features, self.multiprocessors)
        if size <= 2 * MAX_WEIGHT:
            return swapped_tiling_for(rows, out_features, in_features, self.multiprocessors)
        return None

    def compute(
        self,
        x: Tensor,
        weight: Operand,
        gated: bool = False,
        activation: Activation | None = None,
        add_to: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output for x [rows, in_features]: [rows, out_features], or half of the columns if gated.

        activation: function applied to the output or, if gated, to the first half of its columns, which is then multiplied by the
        second half. add_to: tensor to which the output is added, in place. out: contiguous tensor for the output, unless add_to
        is given.
        """
        rows, in_features = x.shape
        case = ProductCase.of(x, weight, None, gated, activation, add_to, None)
        out_features = case.out_features
        y = add_to if add_to is not None else out if out is not None else x.new_empty(rows, out_features)
        tiling = self._tiling_of(rows, out_features, weight.out_features, in_features)
        assert tiling is not None
        launch = self._launcher(case, tiling)
        grid = -(-out_features // tiling.block_n), tiling.splits, -(-rows // tiling.block_m)
        sums, arrivals = self._workspace(grid, tiling.block_n * tiling.block_m * (2 if gated else 1))
        launch(
            grid,
            x_ptr=x,
            weight_ptr=weight.weight,
            bias_ptr=x if weight.bias is None else weight.bias,
            y_ptr=y,
            partial_ptr=sums,
            arrivals_ptr=arrivals,
            rows=rows,
        )
        return y

    def _workspace(self, grid: tuple[int, int, int], tile: int) -> tuple[Tensor, Tensor]:
        """Return scratch memory for split-K sums, and arrival counters. Both are small, since few tiles are split. tile: number
        of sums of a tile."""
        tiles, splits, tiles_m = grid
        count = tiles * tiles_m if splits > 1 else 0
        return self._sums(count * splits * tile), self._arrivals(count)


class InvariantTiles(Tiles):
    """GEMM over dense weights for any number of rows in half precision, in one launch. A row's bits do not depend on the number
    of rows."""

    name = INVARIANT
    capabilities = LinearCapabilities(
        frozenset({"plain"}), devices=DEVICES, batch_invariant=True, fused=frozenset(FUSED) - {"norm", "rotary"}
    )

    def __init__(self, spec: LinearSpec, variant: str = "") -> None:
        super().__init__(spec, variant)
        self._memory = shared_memory(spec.device)

    def runs(self, rows: int) -> bool:
        """Return True: the kernel runs any number of rows."""
        return True

    def _tiling_of(self, rows: int, out_features: int, weight_rows: int, in_features: int) -> ProductTiling:
        gated = weight_rows != out_features
        return invariant_tiling(rows, out_features, in_features, gated, self.multiprocessors, self._memory)


def _launcher(device: torch.device, case: ProductCase, tiling: ProductTiling) -> FixedLauncher:
    """Return the launcher for a case."""
    # Triton 3.9 does not compile the flat loop for tensor cores of compute capability 10.
    flat = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 10
    stage = 2 * tiling.block_k * (tiling.block_m + tiling.block_n * (2 if case.gated else 1))  # the last needs no memory
    constants = {
        "N": case.out_features,
        "K": case.in_features,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "SEGMENTS": tiling.segments or tiling.splits,
        "SPLITS": tiling.splits,
        "FLAT": flat and tiling.block_m * tiling.block_n <= _BLOCK_M * _BLOCK_N,
        "GROUP": tiling.group,
        "STAGES": min(tiling.stages, 1 + shared_memory(device) // stage),
        "SWAPPED": tiling.swapped,
        "GATED": case.gated,
        "ACTIVATION": case.activation or "",
        "ADD": case.add,
        "BIAS": case.bias,
        "DOT": case.dot,
    }
    return FixedLauncher(tiled_product, tiling.warps, device, constants)
