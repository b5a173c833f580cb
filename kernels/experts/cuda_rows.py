"""MoE kernels in CUDA C++ (expert_rows.cu) for few tokens and quantized weights: compilation and launches of the skinny GEMMs.

Reading the selected experts' weights takes most of the time of a decode step. A weight is read once if its expert's tokens fit
one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsCapabilities, ExpertsConfig, ExpertsSpec, ExpertsWeights
from headway.core.contract.support import Support
from headway.core.contract.weights import QuantizedWeight
from headway.kernels.experts.builtin import SKINNY_TILE_ROWS
from headway.kernels.experts.plain import Routed, RoutedKernel
from headway.kernels.experts.weights import examples_of
from headway.kernels.linear.cuda_products import POINTERS, ArrangedWeight, Arrangements, computes
from headway.kernels.linear.cuda_variant import CSRC, PART_ROWS, SHARED_BYTES, SLICE_BYTES, CudaTiling, CudaVariant, warps_bytes
from headway.kernels.linear.forms import WeightBytes
from headway.kernels.runtime.nvrtc.compiler import Variant, architecture, find_compiler
from headway.kernels.runtime.nvrtc.launch import Arguments, CompiledKernel, Launch
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
