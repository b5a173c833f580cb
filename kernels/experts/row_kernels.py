"""Triton GEMV kernels for MoE layers with few tokens. Each pair of token and expert is computed separately, and the expert's
weights are streamed through registers.

Reading the selected experts' weights takes most of the time of a decode step. Nothing is sorted. If two tokens selected the same
expert, its weights are read twice, the second time mostly from the L2 cache. Sums are not split across programs (split-K), so
every run gives the same bits. Quantized weights are read in slices of 16 bytes, which a thread loads at once and which have a
common scale. The thread adds up the products of a slice's values and x in float32, and multiplies the sum by the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.core.contract.experts import ExpertsCapabilities, ExpertsConfig, ExpertsSpec, ExpertsWeights
from headway.core.contract.support import Support
from headway.core.contract.weights import QuantizedWeight
from headway.kernels.experts.builtin import ROW_WARPS, TOKENS
from headway.kernels.experts.plain import Routed, RoutedKernel
from headway.kernels.experts.route_kernels import dot_type
from headway.kernels.experts.weights import examples_of, reads_form
from headway.kernels.linear.forms import WeightBytes, tensors_of, weight_bytes
from headway.kernels.linear.unpack_kernels import unpack_bytes, unpack_pairs, wide_scales
from headway.kernels.runtime.triton_launch import INTERPRETED, FixedLauncher, Grid, Launchers, can_launch


@triton.jit
def activated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return gate * sigmoid(ALPHA gate) * up. If there is a LIMIT, gate and up are clamped and 1 is added to up (see
    ExpertsConfig)."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # unlike minimum, this keeps a NaN
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    return gate * tl.sigmoid(ALPHA * gate) * up


@triton.jit
def gate_up_rows(
    x_ptr,  # [num_tokens, HIDDEN], normed
    weight_ptr,  # bytes, or elements if WEIGHT is plain, [NUM_ALL * 2 INNER, ROW], gate over up
    scales_ptr,  # [rows of scales, SCALES], float, or uint8 exponents (mxfp4); not read if WEIGHT is plain
    zeros_ptr,  # uint8 [rows of scales, SCALES] (ZEROS)
    bias_ptr,  # [NUM_ALL, 2 INNER] (BIAS)
    experts_ptr,  # int32 [num_tokens * SLOTS]
    y_ptr,  # [num_tokens * SLOTS, INNER], written
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SLOTS: tl.constexpr,
    ROW: tl.constexpr,  # bytes (plain: elements) per row
    WEIGHT: tl.constexpr,  # kind of the weight (kernels/linear/forms.py), or plain
    HALF: tl.constexpr,  # bytes of a group with two values per byte; 0 means one value per byte
    SCALES: tl.constexpr,  # scales per row
    SCALE_SPAN: tl.constexpr,  # bytes of a row under one scale
    SCALE_ROWS: tl.constexpr,  # rows that share scales
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,  # slices per chunk
    SPAN: tl.constexpr,  # bytes per slice; plain: 1 element
    DEPTH: tl.constexpr,  # chunks that are loaded ahead
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,  # 0 means no limit
    BIAS: tl.constexpr,
    DOT: tl.constexpr,  # type of the unpacked values
    ASSEMBLY: tl.constexpr,  # unpack with NVIDIA instructions (inline PTX)
    PDL: tl.constexpr,
):
    """y = activation(W_e x + bias) for each pair (GEMV). Grid (num_tokens * SLOTS, cdiv(INNER, BLOCK_N))."""
    CHUNKS: tl.constexpr = (ROW // SPAN + BLOCK_G - 1) // BLOCK_G
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    g = tl.arange(0, BLOCK_G)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # not earlier: the next kernel reads the experts before it waits
    first = tl.load(experts_ptr + pair).to(tl.int64) * (2 * INNER)
    x_row = x_ptr + (pair // SLOTS).to(tl.int64) * HIDDEN
    gates = ()
    ups = ()
    for c in tl.static_range(DEPTH):
        gates = gates + (_slices(weight_ptr, scales_ptr, zeros_ptr, first, n, g, c, INNER, ROW, SPAN, SCALES, SCALE_SPAN,
                                 SCALE_ROWS, ZEROS, WEIGHT),)  # fmt: skip
        ups = ups + (_slices(weight_ptr, scales_ptr, zeros_ptr, first + INNER, n, g, c, INNER, ROW, SPAN, SCALES, SCALE_SPAN,
                             SCALE_ROWS, ZEROS, WEIGHT),)  # fmt: skip
    gate = tl.zeros((BLOCK_N, BLOCK_G), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_G), tl.float32)
    for c in tl.static_range(CHUNKS):
        low, high = _inputs(x_row, g, c, ROW, SPAN, HALF, WEIGHT)
        gate += _products(gates[c], low, high, WEIGHT, HALF, ZEROS, DOT, ASSEMBLY)
        up += _products(ups[c], low, high, WEIGHT, HALF, ZEROS, DOT, ASSEMBLY)
        if c + DEPTH < CHUNKS:
            gates = gates + (_slices(weight_ptr, scales_ptr, zeros_ptr, first, n, g, c + DEPTH, INNER, ROW, SPAN, SCALES,
                                     SCALE_SPAN, SCALE_ROWS, ZEROS, WEIGHT),)  # fmt: skip
            ups = ups + (_slices(weight_ptr, scales_ptr, zeros_ptr, first + INNER, n, g, c + DEPTH, INNER, ROW, SPAN, SCALES,
                                 SCALE_SPAN, SCALE_ROWS, ZEROS, WEIGHT),)  # fmt: skip
    gate_sum = tl.sum(gate, 1)
    up_sum = tl.sum(up, 1)
    if BIAS:
        own = bias_ptr + first + n
        gate_sum += tl.load(own, mask=n < INNER, other=0.0).to(tl.float32)
        up_sum += tl.load(own + INNER, mask=n < INNER, other=0.0).to(tl.float32)
    y = activated(gate_sum, up_sum, ALPHA, LIMIT)
    tl.store(y_ptr + pair * INNER + n, y.to(y_ptr.dtype.element_ty), mask=n < INNER)


@triton.jit
def down_rows(
    x_ptr,  # [num_tokens * SLOTS, INNER]
    weight_ptr,  # [NUM_ALL * HIDDEN, ROW], as above
    scales_ptr,  # as above
    zeros_ptr,
    bias_ptr,  # [NUM_ALL, HIDDEN] (BIAS)
    experts_ptr,  # int32 [num_tokens * SLOTS]
    weights_ptr,  # float32 [num_tokens * SLOTS]
    y_ptr,  # [num_tokens, HIDDEN], added to
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SLOTS: tl.constexpr,
    ROW: tl.constexpr,  # as above
    WEIGHT: tl.constexpr,
    HALF: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_SPAN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SPAN: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    DOT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """y += the weighted sum of W_e x + bias over a token's slots (GEMV). Grid (num_tokens, cdiv(HIDDEN, BLOCK_N)).

    The experts were selected two kernels earlier, and the kernel in between waited for the selection before it allowed this
    kernel to start. So this kernel can load the experts' weights before x is available.
    """
    CHUNKS: tl.constexpr = (ROW // SPAN + BLOCK_G - 1) // BLOCK_G
    pair = tl.program_id(0) * SLOTS
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    g = tl.arange(0, BLOCK_G)
    tiles = ()
    for i in tl.static_range(DEPTH):
        first = tl.load(experts_ptr + pair + i // CHUNKS).to(tl.int64) * HIDDEN
        tiles = tiles + (_slices(weight_ptr, scales_ptr, zeros_ptr, first, n, g, i % CHUNKS, HIDDEN, ROW, SPAN, SCALES,
                                 SCALE_SPAN, SCALE_ROWS, ZEROS, WEIGHT),)  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y_at = y_ptr + tl.program_id(0).to(tl.int64) * HIDDEN + n
    y = tl.load(y_at, mask=n < HIDDEN, other=0.0).to(tl.float32)
    if BIAS:
        for slot in tl.static_range(SLOTS):
            expert = tl.load(experts_ptr + pair + slot).to(tl.int64)
            bias = tl.load(bias_ptr + expert * HIDDEN + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
            y += tl.load(weights_ptr + pair + slot) * bias
    sums = tl.zeros((BLOCK_N, BLOCK_G), tl.float32)
    for i in tl.static_range(SLOTS * CHUNKS):
        low, high = _inputs(x_ptr + (pair + i // CHUNKS).to(tl.int64) * INNER, g, i % CHUNKS, ROW, SPAN, HALF, WEIGHT)
        weight = tl.load(weights_ptr + pair + i // CHUNKS)
        if WEIGHT == "plain":  # x has fewer elements than the products
            sums += _products(tiles[i], low * weight, high, WEIGHT, HALF, ZEROS, DOT, ASSEMBLY)
        else:
            sums += weight * _products(tiles[i], low, high, WEIGHT, HALF, ZEROS, DOT, ASSEMBLY)
        if i + DEPTH < SLOTS * CHUNKS:
            first = tl.load(experts_ptr + pair + (i + DEPTH) // CHUNKS).to(tl.int64) * HIDDEN
            tiles = tiles + (_slices(weight_ptr, scales_ptr, zeros_ptr, first, n, g, (i + DEPTH) % CHUNKS, HIDDEN, ROW, SPAN,
                                     SCALES, SCALE_SPAN, SCALE_ROWS, ZEROS, WEIGHT),)  # fmt: skip
    tl.store(y_at, (y + tl.sum(sums, 1)).to(y_ptr.dtype.element_ty), mask=n < HIDDEN)


@triton.jit
def _slices(weight_ptr, scales_ptr, zeros_ptr, first, n, g, c, N: tl.constexpr, ROW: tl.constexpr, SPAN: tl.constexpr,
            SCALES: tl.constexpr, SCALE_SPAN: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
            WEIGHT: tl.constexpr):  # fmt: skip
    """Load chunk c of rows first + n, which is read once and need not stay in the cache: elements [BLOCK_N, BLOCK_G] if WEIGHT is
    plain, else bytes [BLOCK_N, BLOCK_G, SPAN], and scales and zeros [BLOCK_N, BLOCK_G]."""
    u = c * g.shape[0] + g
    inside = (n < N)[:, None] & (u < ROW // SPAN)[None, :]
    if WEIGHT == "plain":
        chunk = weight_ptr + (first * ROW + c * g.shape[0]) + (n[:, None] * ROW + g[None, :])
        if N // n.shape[0] * n.shape[0] == N and ROW // g.shape[0] * g.shape[0] == ROW:  # constexpr has no right-hand %
            loaded = (tl.load(chunk, eviction_policy="evict_first"),)
        else:
            loaded = (tl.load(chunk, mask=inside, other=0.0, eviction_policy="evict_first"),)
    else:
        at = n[:, None, None] * ROW + (u[:, None] * SPAN + tl.arange(0, SPAN)[None, :])[None, :, :]
        codes = tl.load(weight_ptr + first * ROW + at, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
        place = ((first + n) // SCALE_ROWS * SCALES)[:, None] + (u * SPAN // SCALE_SPAN)[None, :]
        loaded = codes, tl.load(scales_ptr + place, mask=inside, other=0)
        if ZEROS:
            loaded = loaded + (tl.load(zeros_ptr + place, mask=inside, other=0),)
    return loaded


@triton.jit
def _inputs(x_row, g, c, ROW: tl.constexpr, SPAN: tl.constexpr, HALF: tl.constexpr, WEIGHT: tl.constexpr):
    """Load the elements of x that belong to the low and to the high values of a chunk's bytes, as float32 [BLOCK_G, SPAN] each,
    or the elements for a chunk of a plain weight [BLOCK_G], twice."""
    u = c * g.shape[0] + g
    column, inside = u, u < ROW
    if WEIGHT != "plain":
        inside = (u < ROW // SPAN)[:, None]
        column = u[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    if HALF > 0:
        column += column // HALF * HALF
    low = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
    high = low
    if HALF > 0:
        high = tl.load(x_row + column + HALF, mask=inside, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _products(slices, low, high, WEIGHT: tl.constexpr, HALF: tl.constexpr, ZEROS: tl.constexpr, DOT: tl.constexpr,
              ASSEMBLY: tl.constexpr):  # fmt: skip
    """Return [BLOCK_N, BLOCK_G]: for each slice, the scaled sum of its weights times x."""
    codes = slices[0]
    if WEIGHT == "plain":
        sums = codes.to(tl.float32) * low[None, :]
    elif HALF > 0:
        first, second = unpack_pairs(codes, WEIGHT, DOT, ASSEMBLY)
        first, second = first.to(tl.float32), second.to(tl.float32)
        if WEIGHT == "int4":
            BASE: tl.constexpr = (1024 if DOT == tl.float16 else 128) if ASSEMBLY else 0  # noqa: SIM300
            if ZEROS:
                zero = (slices[2].to(tl.float32) + BASE)[:, :, None]
                first, second = first - zero, second - zero
            else:
                first, second = first - (BASE + 8), second - (BASE + 8)
        sums = tl.sum(first * low[None, :, :] + second * high[None, :, :], 2)
    else:
        sums = tl.sum(unpack_bytes(codes, WEIGHT, DOT, ASSEMBLY).to(tl.float32) * low[None, :, :], 2)
    if WEIGHT != "plain":
        sums *= wide_scales(slices[1], WEIGHT)
    return sums


QUANTIZED_FORMATS = frozenset({"fp8", "int8", "int4", "mxfp4"})
GPUS = ("cuda", "cpu") if INTERPRETED else ("cuda",)


Product = tuple[Tensor, Tensor | QuantizedWeight, Tensor | None]
"""(x, weights of all experts, biases of all experts or None)."""


class TritonExperts(RoutedKernel):
    """Base of the Triton kernels for experts."""

    capabilities = ExpertsCapabilities(
        formats=QUANTIZED_FORMATS | {"plain"},
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        devices=GPUS,
        biases=True,
        ungated=True,
        clamped=True,
    )

    def __init__(self, spec: ExpertsSpec, shared: dict[Any, Any] | None = None) -> None:
        super().__init__(spec, shared)
        self._config = spec.config
        self._launchers = Launchers(spec.device)

    def _launch(self, launch: FixedLauncher, grid: Grid, product: Product, others: Mapping[str, Tensor | float]) -> None:
        """Launch the kernel of a GEMM. others: arguments in addition to the arguments that all kernels have."""
        x, weight, bias = product
        codes, scales, zeros = (weight, weight, weight) if isinstance(weight, Tensor) else tensors_of(weight)
        own = {"weight_ptr": codes, "scales_ptr": scales, "zeros_ptr": zeros, "bias_ptr": x if bias is None else bias}
        launch(grid, x_ptr=x, **own, **others)

    @classmethod
    def available(cls) -> Support:
        return can_launch()

    @classmethod
    def supports(cls, spec: ExpertsSpec) -> Support:
        """Return whether the kernels support the layer. Groups of quantized weights must fill a row, and x's type must be able to
        represent the scales."""
        support = super().supports(spec)
        for weight in examples_of(spec):
            if weight is not None and (weight_bytes(weight) is None or not reads_form(weight, spec.dtype)):
                support &= Support.no("weights", "groups of 16 columns or more that fill a row, in half precision", spec)
        return support


def activation(config: ExpertsConfig) -> dict[str, float]:
    """Return the constants of the activation between the experts' GEMMs."""
    return {"ALPHA": config.swiglu_alpha, "LIMIT": config.swiglu_limit or 0.0}


def described(weight: Tensor | QuantizedWeight, columns: int) -> WeightBytes:
    """Return the byte layout of a weight that `supports` accepted. The lengths of a plain weight count elements."""
    if isinstance(weight, Tensor):
        return WeightBytes("plain", columns, half=0, scales=0, scale_span=1, scale_rows=1, zeros=False, span=1)
    found = weight_bytes(weight)
    assert found is not None
    return found


def form_constants(weight: WeightBytes, dtype: torch.dtype) -> dict[str, Any]:
    """Return the compile-time constants of a quantization format. dtype: type of x."""
    return {**weight.constants, "DOT": dot_type(dtype), "ASSEMBLY": not INTERPRETED}


_SPAN = 16
"""Bytes per slice, which a thread loads at once."""


def slices_of_a_chunk(row: int) -> int:
    """Return the number of slices of a row that a warp reads at once: the largest of 32, 16 and 8 that pads a row by at most a
    tenth, else the number with the least padding."""
    slices = row // _SPAN
    padded = {count: triton.cdiv(slices, count) * count for count in (32, 16, 8)}
    return next((count for count in padded if padded[count] <= 1.1 * slices), min(padded, key=padded.__getitem__))


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Split of a GEMV over one token into many small programs, which keep the memory busy."""

    rows: int
    """Weight rows per program. In the gate/up projection: rows of gate, and as many rows of up, for one pair. In the down
    projection: rows for all experts of a token. Quantized weights with fewer than 32 slices per chunk have proportionally more
    rows."""
    warps: int
    depth: int
    """Number of chunks that are loaded ahead."""
    chunk: int = 0
    """Maximum columns per load, for dense weights. For quantized weights, `slices_of_a_chunk` is used instead."""


_PLAIN_SPLITS = RowSplit(4, 4, 4, 1024), RowSplit(8, 4, 6, 256)
"""Splits of the gate/up and the down projection over dense weights."""
_UNEVEN = RowSplit(8, 8, 24, 128)
"""Split of the down projection if 256 does not divide an expert's size."""
_QUANTIZED_SPLITS = {1: (RowSplit(2, 1, 2), RowSplit(1, 1, 8)), 4: (RowSplit(4, 4, 4), RowSplit(4, 4, 12))}
"""Warps per program -> splits of the gate/up and the down projection.

With one warp, threads exchange x by shuffles. More warps wait for each other, and each warp has fewer registers to fill.
"""
MAX_ROWS = 16
"""Approximate maximum number of tokens to compute one by one. With more tokens, too many experts would be read repeatedly."""


class RowKernel(TritonExperts):
    """GEMV kernels that compute each token separately, for any dtype: three launches per layer. Fast for one or a few tokens."""

    capabilities = replace(TritonExperts.capabilities, ungated=False)
    sorts = False
    warps: ClassVar[int]
    """Warps per program over quantized weights."""
    plain_splits: ClassVar[tuple[RowSplit, RowSplit] | None] = None
    """Splits over dense weights. None means the default split for the expert's width."""

    def __init__(self, spec: ExpertsSpec, shared: dict[Any, Any] | None = None) -> None:
        super().__init__(spec, shared)
        first, last = _PLAIN_SPLITS
        self._plain_splits = self.plain_splits or (first, last if spec.config.intermediate_size % 256 == 0 else _UNEVEN)

    @classmethod
    def supports(cls, spec: ExpertsSpec) -> Support:
        """Return whether the kernel supports the layer. Only one variant supports dense weights."""
        support = super().supports(spec)
        if cls.warps > 1 and {spec.gate_up.name, spec.down.name} == {"plain"}:
            support &= Support.no("weights", "quantised ones", "plain ones")
        return support

    def runs(self, num_tokens: int) -> bool:
        return TOKENS.cell(num_tokens) <= TOKENS.cell(MAX_ROWS)

    def add(self, routed: Routed, weights: ExpertsWeights, out: Tensor) -> None:
        between = out.new_empty((routed.experts.numel(), self._config.intermediate_size))
        self._multiply(routed, routed.x, weights.gate_up, weights.gate_up_bias, between, first=True)
        self._multiply(routed, between, weights.down, weights.down_bias, out, first=False)

    def _multiply(
        self, routed: Routed, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, y: Tensor, first: bool
    ) -> None:
        """Launch one of the two GEMVs. first: True for the gate/up projection, with its activation."""
        config, terms, form = self._config, 1 if first else self._config.num_slots, described(weight, x.shape[1])
        if isinstance(weight, Tensor):
            split, span = self._plain_splits[not first], 1
            block_n, block_g = split.rows, min(split.chunk, triton.next_power_of_2(form.row))
        else:
            split, span, block_g = _QUANTIZED_SPLITS[self.warps][not first], _SPAN, slices_of_a_chunk(form.row)
            block_n = split.rows * (32 // block_g)
        chunks = triton.cdiv(form.row, span * block_g)
        how: dict[str, Any] = {"BLOCK_G": block_g, "SPAN": span, **form_constants(form, x.dtype)}
        sizes = {"HIDDEN": routed.x.shape[1], "INNER": config.intermediate_size, "SLOTS": config.num_slots, "BLOCK_N": block_n}
        how |= {
            **sizes,
            "DEPTH": min(split.depth, terms * chunks),
            "BIAS": bias is not None,
            **(activation(config) if first else {}),
        }
        launch = self._launchers.get(gate_up_rows if first else down_rows, split.warps, how)
        routing = {"experts_ptr": routed.experts} if first else {"experts_ptr": routed.experts, "weights_ptr": routed.weights}
        self._launch(launch, (len(y), triton.cdiv(y.shape[1], block_n), 1), (x, weight, bias), {**routing, "y_ptr": y})


def row_kernel(name: str) -> type[RowKernel]:
    """Return the kernel class named `name`, from ROW_WARPS."""
    return type("RowKernel", (RowKernel,), {"name": name, "warps": ROW_WARPS[name]})
