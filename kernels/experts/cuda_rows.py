"""MoE kernels in CUDA C++ over quantized weights: skinny GEMMs for few tokens (expert_rows.cu), and a grouped GEMM on Hopper
(expert_lots.cu, wgmma).

Reading the selected experts' weights takes most of the time of a decode step. A weight is read once if its expert's tokens fit
one tile. The kernels of the grouped GEMM are named cuda.lots8 to cuda.lots64. In them, the rows of the weight are distributed
over the warps, and all warps use the same rows of x. Therefore, a tile can have more rows than in expert_rows.cu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from struct import Struct
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsCapabilities, ExpertsConfig, ExpertsSpec, ExpertsWeights
from headway.core.contract.support import YES, Support
from headway.core.contract.weights import QuantizedWeight
from headway.kernels.experts.builtin import GROUPED_TILE_ROWS, SKINNY_TILE_ROWS, most_blocks
from headway.kernels.experts.plain import Routed, RoutedKernel
from headway.kernels.experts.weights import examples_of
from headway.kernels.linear.cuda_products import POINTERS, ArrangedWeight, Arrangements, computes
from headway.kernels.linear.cuda_variant import CSRC, PART_ROWS, SHARED_BYTES, SLICE_BYTES, CudaTiling, CudaVariant, warps_bytes
from headway.kernels.linear.forms import WeightBytes
from headway.kernels.runtime.nvrtc.compiler import Variant, architecture, find_compiler
from headway.kernels.runtime.nvrtc.launch import MAP_BYTES, Arguments, CompiledKernel, Launch, tensor_map
from headway.kernels.runtime.nvrtc.store import load

MOST_TOKENS = 64
"""Maximum number of tokens per step."""
_SWISH = 6
"""Value of ACTIVATION in product.cuh for x * sigmoid(ALPHA x)."""
_WARPS = 8, 12, 6, 10, 4, 2
"""Numbers of warps that may split a sum over K, in order of preference. The first number for which nearly all warps have slices
is used."""
_ROOM = 220 * 1024
"""Maximum shared memory of a thread block, in bytes."""


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """Properties of one of a layer's two GEMMs that determine its tiling."""

    weight: WeightBytes
    out_features: int
    """Output features of one expert, after the activation."""
    first: bool
    """True for the gate/up projection, whose rows are tokens. False for the down projection. Its rows are pairs, whose results
    are summed per token."""
    gated: bool
    rows_per_tile: int
    """Maximum rows of one expert per tile."""


ExpertTilingRule = Callable[[ExpertProduct, int], CudaTiling]
"""(GEMM, number of SMs) -> tiling."""


def expert_rows_tiling(product: ExpertProduct, multiprocessors: int) -> CudaTiling:
    """Return the tiling of a GEMM: the preferred number of warps along K, or a number that divides the slices more evenly, and
    the deepest rings that fit.

    The preferred values were measured on an H100 with Qwen3-30B-A3B in block FP8 and gpt-oss-20b in MXFP4; see
    docs/notes/kernels.md.
    """
    weight, rows_per_tile, out_features = product.weight, product.rows_per_tile, product.out_features
    slices = -(-weight.row // SLICE_BYTES)
    preferred = _FIRST if product.first else _LAST
    tiles, wanted, most_stages, blocks = preferred[bool(weight.half), min(rows_per_tile, 16)]
    if not product.gated and out_features <= PART_ROWS * tiles * multiprocessors // 2:
        tiles = 1
    order = (wanted, *(count for count in _WARPS if count != wanted))
    padded = {warps: -(-slices // warps) * warps for warps in order}
    warps = next((count for count in order if padded[count] <= 1.05 * slices), min(order, key=padded.__getitem__))
    step = warps * (tiles * 1024 * 17 // 16 + (2 if weight.half else 1) * rows_per_tile * 128)
    reserved = 2 * warps * rows_per_tile * (PART_ROWS * tiles + 4) * 4 + (5 if product.first else 12) * 1024
    stages = (_ROOM - reserved) // step
    return CudaTiling(tiles, warps, max(2, min(stages, most_stages)), per_multiprocessor=blocks)


_Preferred = dict[tuple[bool, int], tuple[int, int, int, int]]
_FIRST: _Preferred = {
    (False, 1): (4, 4, 4, 1),
    (False, 8): (2, 8, 4, 1),
    (False, 16): (4, 4, 4, 1),
    (True, 1): (2, 8, 3, 2),
    (True, 8): (4, 8, 3, 1),
    (True, 16): (4, 4, 4, 1),
}
"""(4-bit weight, rows per tile) -> tiles, warps, stages and thread blocks per SM, for the gate/up projection."""
_LAST: _Preferred = {
    (False, 1): (1, 12, 3, 2),
    (False, 8): (1, 12, 3, 2),
    (False, 16): (1, 12, 4, 2),
    (True, 1): (1, 12, 3, 2),
    (True, 8): (2, 12, 3, 2),
    (True, 16): (2, 8, 3, 2),
}
"""(4-bit weight, rows per tile) -> tiles, warps, stages and thread blocks per SM, for the down projection."""


@dataclass(frozen=True, slots=True)
class ExpertVariant:
    """Parameters that the kernel is compiled for."""

    each: CudaVariant
    """GEMM of one expert."""
    experts: int
    slots: int
    first: bool
    alpha: float
    limit: float | None
    most_tokens: int = MOST_TOKENS

    @property
    def tokens(self) -> int:
        """Maximum number of tokens per launch."""
        return 1 if self.each.most_rows == 1 else self.most_tokens

    @property
    def max_tiles(self) -> int:
        """Maximum number of expert tiles per launch."""
        pairs, rows = self.tokens * self.slots, self.each.most_rows
        return (pairs + min(pairs, self.experts) * (rows - 1)) // rows

    @property
    def tiles(self) -> int:
        """Number of output tiles, over which thread blocks loop."""
        return -(-self.each.out_features // self._outputs)

    @property
    def _outputs(self) -> int:
        return PART_ROWS * self.each.tiling.tiles // (2 if self.each.gated else 1)

    @property
    def lots_bytes(self) -> int:
        """Size of `struct Lots` in bytes."""
        pairs = self.tokens * self.slots
        floats, shorts = 1 if self.first else pairs, 3 * pairs + 2 * self.max_tiles + 1 + 2 * (self.experts + 1)
        return 4 + 4 * floats + -(-shorts // 2) * 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory in bytes, as in expert_rows.cu."""
        each, totals = self.each, 0 if self.first else self.tokens * self._outputs * 4
        return warps_bytes(each.weight, each.most_rows, each.tiling, each.scale_dtype.itemsize) + totals + self.lots_bytes

    @property
    def constants(self) -> dict[str, str | int]:
        """Values of the macros in expert_rows.cu."""
        each = self.each
        constants: dict[str, str | int] = {
            **each.constants,
            "RESIDENT": 2 if self.shared_bytes <= SHARED_BYTES and (each.most_rows <= 8 or not self.first) else 1,
            "EXPERTS": self.experts,
            "SLOTS": self.slots,
            "GATHER": int(self.first),
            "MOST_TOKENS": self.tokens,
            "LOTS_BYTES": self.lots_bytes,
            "LIMITED": int(self.limit is not None),
            "LIMIT": f"{float(self.limit or 0)!r}f",
        }
        if each.gated:
            constants |= {"ACTIVATION": _SWISH, "ALPHA": f"{float(self.alpha)!r}f"}
        return constants

    @property
    def source(self) -> Variant:
        """Source and constants for the compiler."""
        return Variant(CSRC, "expert_rows.cu", tuple(self.constants.items()))


def expert_variant(
    config: ExpertsConfig,
    weight: ArrangedWeight,
    dtype: torch.dtype,
    rows_per_tile: int,
    first: bool,
    bias: bool,
    multiprocessors: int,
    rule: ExpertTilingRule = expert_rows_tiling,
) -> ExpertVariant:
    """Return the variant for one of a layer's two GEMMs.

    rows_per_tile: maximum rows per tile; 1 means a single token. dtype: type of x.
    """
    gated, rows = first and config.gated, len(weight.codes) // config.num_all
    out_features = rows // 2 if gated else rows
    each = CudaVariant(
        dtype=dtype,
        weight=weight.described,
        scale_dtype=weight.scales.dtype,
        wide=weight.wide,
        tiling=rule(ExpertProduct(weight.described, out_features, first, gated, rows_per_tile), multiprocessors),
        most_rows=rows_per_tile,
        in_features=weight.described.row * (2 if weight.described.half else 1),
        out_features=out_features,
        norm=None,
        gated=gated,
        activation="relu2" if first and not gated else None,
        add=False,
        bias=bias,
        heads=None,
        head_norm=None,
    )
    return ExpertVariant(each, config.num_all, config.num_slots, first, config.swiglu_alpha, config.swiglu_limit)


_ROUTED = Struct("=2Q")
"""Layout of `struct Routed` in lots.cuh."""


class _Launcher:
    """A compiled kernel with its launch configuration and its arguments, which are copied at each launch."""

    def __init__(self, variant: ExpertVariant, device: torch.device, multiprocessors: int) -> None:
        tiling = variant.each.tiling
        self.kernel: CompiledKernel = load(variant.source, "expert_rows", device, architecture(device))
        self.kernel.allow_shared(variant.shared_bytes)
        blocks = multiprocessors * tiling.per_multiprocessor
        early = torch.cuda.get_device_capability(device) >= (9, 0)
        grid = blocks if variant.first else min(variant.tiles, blocks)
        self.launch = Launch((grid, 1, 1), variant.each.threads, variant.shared_bytes, overlaps=early)
        self.arguments = Arguments(bytes(POINTERS.size), bytes(_ROUTED.size), numpy.int32(0))


class CudaExperts(RoutedKernel):
    """Base of the CUDA C++ kernels over quantized weights, which multiply tiles of one expert's rows."""

    capabilities = ExpertsCapabilities(
        formats=frozenset({"fp8", "int8", "int4", "mxfp4"}), max_tokens=MOST_TOKENS, biases=True, ungated=True, clamped=True
    )
    sorts = False
    rows_per_tile: ClassVar[int]
    """Maximum rows of one expert per tile."""

    def __init__(self, spec: ExpertsSpec, shared: dict[Any, Any] | None = None) -> None:
        super().__init__(spec, shared)
        self._config = spec.config
        self._arranged: Arrangements = self.shared.setdefault(Arrangements, Arrangements())
        self._multiprocessors = torch.cuda.get_device_properties(spec.device).multi_processor_count

    @classmethod
    def available(cls) -> Support:
        return find_compiler()[1]

    @classmethod
    def supports(cls, spec: ExpertsSpec) -> Support:
        support = super().supports(spec)
        if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < (8, 0):
            support &= Support.no("device", "a GPU of compute capability 8.0 or newer", spec.device)
        rows = spec.config.intermediate_size, spec.hidden_size
        for weight, rows_of_y in zip(examples_of(spec), rows, strict=True):
            if weight is not None:
                support &= computes(spec.dtype, weight, rows_of_y)
        return support

    def extra_bytes(self, weights: ExpertsWeights) -> int:
        """Return the size of the repacked scales and zeros, in bytes."""
        return self._arranged.num_bytes(weights.gate_up) + self._arranged.num_bytes(weights.down)


class CudaRows(CudaExperts):
    """Skinny GEMMs over tiles of one expert's rows, in the order of experts: three launches per layer, up to MOST_TOKENS tokens.

    A token's result does not depend on the other tokens or their number. Not thread-safe.
    """

    def __init__(self, spec: ExpertsSpec, shared: dict[Any, Any] | None = None) -> None:
        super().__init__(spec, shared)
        self._made = cache(lambda variant: _Launcher(variant, spec.device, self._multiprocessors))

    def runs(self, num_tokens: int) -> bool:
        """Return whether the tile size suits this number of tokens. If there are too few tokens to fill the tile, a kernel with
        smaller tiles is used."""
        return num_tokens <= MOST_TOKENS and (self.rows_per_tile == SKINNY_TILE_ROWS[0] or num_tokens > self.rows_per_tile // 2)

    def add(self, routed: Routed, weights: ExpertsWeights, out: Tensor) -> None:
        between = out.new_empty((routed.experts.numel(), self._config.intermediate_size))
        self._multiply(routed, routed.x, weights.gate_up, weights.gate_up_bias, between, first=True)
        self._multiply(routed, between, weights.down, weights.down_bias, out, first=False)

    def _multiply(
        self, routed: Routed, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, y: Tensor, first: bool
    ) -> None:
        num_tokens, arranged = len(routed.experts), self._arranged(weight)
        launcher = self._launcher(weight, bias, 1 if num_tokens == 1 else self.rows_per_tile, first)
        routing = _ROUTED.pack(routed.experts.data_ptr(), routed.weights.data_ptr())
        launcher.arguments.set(pointers_of(x, arranged, bias, y), routing, numpy.int32(num_tokens))
        launcher.kernel(launcher.launch, launcher.arguments)

    def prepare(self, weights: ExpertsWeights) -> ExpertsWeights:
        """Repack a layer's scales, and compile the kernels."""
        products = (weights.gate_up, weights.gate_up_bias, True), (weights.down, weights.down_bias, False)
        for weight, bias, first in products:
            for rows_per_tile in {1, self.rows_per_tile} if self.runs(1) else {self.rows_per_tile}:
                self._launcher(weight, bias, rows_per_tile, first)
        return weights

    def _launcher(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, rows_per_tile: int, first: bool) -> _Launcher:
        arranged, dtype = self._arranged(weight), self.spec.dtype
        return self._made(
            expert_variant(self._config, arranged, dtype, rows_per_tile, first, bias is not None, self._multiprocessors)
        )


def cuda_rows(rows_per_tile: int) -> type[CudaRows]:
    """Return the kernel class with tiles of `rows_per_tile` rows, from SKINNY_TILE_ROWS."""
    return type("CudaRows", (CudaRows,), {"name": f"cuda.rows{rows_per_tile}", "rows_per_tile": rows_per_tile})


def pointers_of(x: Tensor, weight: ArrangedWeight, bias: Tensor | None, y: Tensor) -> bytes:
    """Return `struct Pointers` for a GEMM without norm and rotary embedding."""
    read = x, weight.codes, weight.scales, weight.zeros, None, bias, y
    return POINTERS.pack(*[0 if tensor is None else tensor.data_ptr() for tensor in read], *[0] * 5)


MOST_GROUPED_TOKENS = 256
"""Maximum number of tokens per step."""
_MULTIPROCESSOR_BYTES, _KEPT_BYTES = 228 * 1024, 5 * 1024
"""Shared memory of an SM, in bytes, and the number of bytes that a thread block uses in addition to its ring."""
_MOST_STAGES = 12
"""Maximum number of ring stages. In every format, these are enough to hide the memory latency."""
_STEP_COLUMNS = 128


def expert_grouped_tiling(product: ExpertProduct, multiprocessors: int) -> CudaTiling:
    """Return the tiling of a GEMM: thread blocks of 128 weight rows, or of 64 if 128 would pad more than a tenth.

    Larger thread blocks copy x fewer times. Per SM, two thread blocks of eight warps, or four thread blocks of four warps, keep
    the most warps busy to the end. For 16 tokens of gpt-oss-20b, an H100 took 252 us with three thread blocks of four warps and
    two row groups per warp. With two thread blocks of eight warps, it took 224 us. Above 16 rows, each warp has two groups of 16
    weight rows, for which it reads x once. An SM then runs as many thread blocks as registers allow.
    """
    if product.rows_per_tile <= 16:
        eight = product.weight.half or product.rows_per_tile == 16
        return CudaTiling(1, 8 if eight else 4, _MOST_STAGES, per_multiprocessor=2 if eight else 4)
    blocks = 3 if product.rows_per_tile <= (32 if product.weight.half else 16) else 2
    wide = CudaTiling(2, 4, _MOST_STAGES, per_multiprocessor=blocks)
    outputs = 128 // (2 if product.gated else 1)
    padded = -(-product.out_features // outputs) * outputs
    return wide if padded <= 1.1 * product.out_features else replace(wide, tiles=1)


@dataclass(frozen=True, slots=True)
class GroupedVariant:
    """Parameters that the kernel is compiled for."""

    of: ExpertVariant
    following: WeightBytes | None
    """Weight of the second GEMM, which determines the layout of the first GEMM's output. None if this is the second GEMM."""

    @property
    def outputs(self) -> int:
        """Columns of y per tile (OUT)."""
        each = self.of.each
        return PART_ROWS * each.tiling.tiles * each.tiling.warps // (2 if each.gated else 1)

    @property
    def groups(self) -> int:
        """Number of groups per slice whose scales are copied. 0 if scales are per row or per block, because such scales are not
        copied."""
        weight = self.of.each.weight
        return 0 if weight.scale_rows > 1 or weight.scale_span >= weight.row else max(1, SLICE_BYTES // weight.scale_span)

    @property
    def box(self) -> int:
        """Weight rows per copy: the largest number with which no copy crosses the end of an expert."""
        box = self.outputs
        while self.of.each.out_features % box:
            box //= 2
        return box

    @property
    def step_bytes(self) -> int:
        """Shared memory of one ring stage in bytes, as in expert_lots.cu."""
        each = self.of.each
        row_ranges, places, halves = 2 if each.gated else 1, self.groups * self.outputs, 2 if each.weight.half else 1
        scales = -(-places * each.scale_dtype.itemsize // 128) * 128
        zeros = -(-places // 128) * 128 if each.weight.zeros else 0
        slice_bytes = row_ranges * (self.outputs * SLICE_BYTES + scales + zeros)
        return -(-(2 * each.most_rows * 128 + 2 // halves * slice_bytes) // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory in bytes, including the alignment to 1,024."""
        return self.of.each.tiling.stages * self.step_bytes + 1024

    @property
    def threads(self) -> int:
        """Threads per thread block: the warps that multiply, and one warp that copies."""
        return 32 * (self.of.each.tiling.warps + 1)

    @property
    def row_columns(self) -> int:
        """Columns per row of permuted x, rounded up to whole steps by zeros at the row's end."""
        weight = self.of.each.weight
        return -(-weight.row * (2 if weight.half else 1) // _STEP_COLUMNS) * _STEP_COLUMNS

    @property
    def table_words(self) -> int:
        """Size of `struct Table` in 32-bit words."""
        return self.of.max_tiles + 2 + self.of.tokens * self.of.slots

    @property
    def source(self) -> Variant:
        """Source and constants for the compiler."""
        constants = {**self.of.constants, "RESIDENT": self.of.each.tiling.per_multiprocessor, "BOX": self.box}
        if self.following is not None:
            half = self.following.half
            constants |= {
                "NEXT_ROW": self.following.row,
                "NEXT_STEP": _STEP_COLUMNS // (2 if half else 1),
                "NEXT_HALVES": 2 if half else 1,
                "NEXT_HALF": half or 1,
                "NEXT_PAIR_STEP": 2 if self.following.kind == "mxfp4" else 1,
            }
        return Variant(CSRC, "expert_lots.cu", tuple(constants.items()))


def grouped_variant(
    config: ExpertsConfig,
    weight: ArrangedWeight,
    dtype: torch.dtype,
    rows_per_tile: int,
    following: WeightBytes | None,
    bias: bool,
    multiprocessors: int,
    rule: ExpertTilingRule = expert_grouped_tiling,
) -> GroupedVariant:
    """Return the variant for one of a layer's two GEMMs. rows_per_tile: maximum rows per tile. dtype: type of x. following: see
    GroupedVariant.
    """
    of = expert_variant(config, weight, dtype, rows_per_tile, following is not None, bias, multiprocessors, rule)
    variant = GroupedVariant(replace(of, most_tokens=MOST_GROUPED_TOKENS), following)
    tiling = of.each.tiling
    room = _MULTIPROCESSOR_BYTES // tiling.per_multiprocessor - _KEPT_BYTES
    tiling = replace(tiling, stages=max(2, min(tiling.stages, room // variant.step_bytes)))
    return replace(variant, of=replace(variant.of, each=replace(of.each, tiling=tiling)))


_ARRANGING = 256
"""Number of threads per thread block of the extra kernels, which permute a row or add up the slots with 4 columns per thread."""
_MOST_SLOTS = 24
"""Maximum number of slots per token for which arrange_lots's counters fit 48 KiB of shared memory."""


class _GroupedLauncher:
    """A compiled GEMM with its arguments, and the extra kernel launched before the first GEMM or after the second."""

    def __init__(self, variant: GroupedVariant, device: torch.device, multiprocessors: int) -> None:
        specific = architecture(device, specific=True)
        self.variant = variant
        self._kernel: CompiledKernel = load(variant.source, "expert_lots", device, specific)
        self._kernel.allow_shared(variant.shared_bytes)
        self._extra: CompiledKernel = load(variant.source, "arrange_lots" if variant.of.first else "add_slots", device, specific)
        blocks = multiprocessors * variant.of.each.tiling.per_multiprocessor
        self._launch = Launch((blocks, 1, 1), variant.threads, variant.shared_bytes, overlaps=True)
        blank = bytes(MAP_BYTES)
        self._arguments = Arguments(blank, blank, blank, bytes(POINTERS.size), 0)
        self._extra_arguments = Arguments(*[0] * (5 if variant.of.first else 4))
        self._extra_launch = cache(partial(Launch, threads=_ARRANGING, overlaps=True))

    def multiply(self, x: Tensor, weight: ArrangedWeight, bias: Tensor | None, y: Tensor, table: Tensor) -> None:
        """Launch the GEMM."""
        variant, blank = self.variant, bytes(MAP_BYTES)
        boxes = (variant.box, SLICE_BYTES), (max(1, variant.groups), variant.outputs)
        scales = tensor_map(weight.scales, boxes[1], 0) if variant.groups else blank
        zeros = blank if weight.zeros is None else tensor_map(weight.zeros, boxes[1], 0)
        codes, pointers = tensor_map(weight.codes, boxes[0], 0), pointers_of(x, weight, bias, y)
        self._arguments.set(codes, scales, zeros, pointers, table.data_ptr())
        self._kernel(self._launch, self._arguments)

    def launch_extra(self, grid: tuple[int, int, int], *tensors: Tensor) -> None:
        """Launch the extra kernel before or after the GEMM."""
        self._extra_arguments.set(*[tensor.data_ptr() for tensor in tensors])
        self._extra(self._extra_launch(grid), self._extra_arguments)


class CudaGroupedGemm(CudaExperts):
    """Grouped GEMM over tiles of one expert's rows, with inputs permuted first: five launches per layer, up to
    MOST_GROUPED_TOKENS tokens.

    The outputs of a token's experts are added in the order of the token's slots, in float32. A token's result has the same bits
    in every run, whatever the other tokens are. Not thread-safe.
    """

    capabilities = replace(CudaExperts.capabilities, max_tokens=MOST_GROUPED_TOKENS)

    def __init__(self, spec: ExpertsSpec, shared: dict[Any, Any] | None = None) -> None:
        super().__init__(spec, shared)
        self._made = cache(lambda variant: _GroupedLauncher(variant, spec.device, self._multiprocessors))

    @classmethod
    def supports(cls, spec: ExpertsSpec) -> Support:
        support, slots = super().supports(spec), spec.config.num_slots
        if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) != (9, 0):
            support &= Support.no("device", "a GPU of compute capability 9.0", spec.device)
        return support & (YES if slots <= _MOST_SLOTS else Support.no("experts of a token", f"up to {_MOST_SLOTS}", slots))

    def runs(self, num_tokens: int) -> bool:
        return suits(self.rows_per_tile, num_tokens, self._config)

    def add(self, routed: Routed, weights: ExpertsWeights, out: Tensor) -> None:
        (num_tokens, hidden), pairs = out.shape, routed.experts.numel()
        up, down = self._products(weights)
        rows = most_blocks(pairs, self._config.num_all, self.rows_per_tile) * self.rows_per_tile
        x = out.new_empty(rows * up.variant.row_columns)  # padding rows are never read
        between = out.new_empty(rows * down.variant.row_columns)
        table = torch.empty(up.variant.table_words, dtype=torch.int32, device=out.device)
        parts = torch.empty((pairs, hidden), dtype=torch.float32, device=out.device)
        up.launch_extra((pairs, 1, 1), routed.x, routed.experts, table, x, between)
        up.multiply(x, self._arranged(weights.gate_up), weights.gate_up_bias, between, table)
        down.multiply(between, self._arranged(weights.down), weights.down_bias, parts, table)
        columns = 4 * _ARRANGING
        down.launch_extra((num_tokens, -(-hidden // columns), 1), parts, table, routed.weights, out)

    def prepare(self, weights: ExpertsWeights) -> ExpertsWeights:
        """Repack a layer's scales, and compile the kernels."""
        self._products(weights)
        return weights

    def _products(self, weights: ExpertsWeights) -> tuple[_GroupedLauncher, _GroupedLauncher]:
        up, down = self._arranged(weights.gate_up), self._arranged(weights.down)
        return self._launcher(up, weights.gate_up_bias, down.described), self._launcher(down, weights.down_bias, None)

    def _launcher(self, weight: ArrangedWeight, bias: Tensor | None, following: WeightBytes | None) -> _GroupedLauncher:
        of = self._config, weight, self.spec.dtype, self.rows_per_tile, following, bias is not None, self._multiprocessors
        return self._made(grouped_variant(*of))


def cuda_grouped_gemm(rows_per_tile: int) -> type[CudaGroupedGemm]:
    """Return the kernel class with tiles of `rows_per_tile` rows, from GROUPED_TILE_ROWS."""
    return type("CudaGroupedGemm", (CudaGroupedGemm,), {"name": f"cuda.lots{rows_per_tile}", "rows_per_tile": rows_per_tile})


def suits(rows_per_tile: int, num_tokens: int, config: ExpertsConfig) -> bool:
    """Return whether tiles of up to `rows_per_tile` rows may be the fastest for this number of tokens.

    Smaller tiles are better if experts fill less than about half a tile, and larger tiles if experts fill more than four tiles.
    """
    pairs = num_tokens * config.num_slots / config.num_all
    filled = rows_per_tile == GROUPED_TILE_ROWS[0] or (num_tokens > rows_per_tile // 2 and pairs >= rows_per_tile / 8)
    return num_tokens <= MOST_GROUPED_TOKENS and filled and (rows_per_tile == GROUPED_TILE_ROWS[-1] or pairs <= 4 * rows_per_tile)
