"""Methods of computing a layer of experts on a GPU. All run inside CUDA graphs: grids follow only from the number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.kernel import AHEAD
from headway.kernels.experts.choice import TOKENS
from headway.kernels.experts.plain import ExpertOrder
from headway.kernels.experts.route_kernels import Routed, Router, dot_type
from headway.kernels.experts.row_kernels import down_quantized_rows, down_rows, gate_up_quantized_rows, gate_up_rows
from headway.kernels.experts.tile_kernels import activate_rows, add_slots, gather_rows, grouped_product, grouped_quantized_product
from headway.kernels.experts.weights import ExpertWeights
from headway.kernels.linear.forms import QuantizedWeight, WeightBytes, tensors_of, weight_bytes
from headway.kernels.runtime.triton_launch import INTERPRETED, FixedLauncher, Launchers, shared_memory
from headway.kernels.step.operations import Norm


def activation(config: ExpertsConfig) -> dict[str, float]:
    """Constants of what stands between the experts' products."""
    return {"ALPHA": config.swiglu_alpha, "LIMIT": config.swiglu_limit or 0.0}


_SPAN = 16
"""Bytes of a slice: what a thread loads at once."""


@dataclass(frozen=True, slots=True)
class QuantizedRowCut:
    """How the products of single tokens are cut. A warp reads slices of one row side by side, and rows one after the other."""

    gate_rows: int = 2
    """Rows of the gate, and of the other half, that a program of one pair holds."""
    gate_depth: int = 2
    """Chunks of these that are asked for ahead."""
    down_rows: int = 1
    """Rows of the down product that a program of one token holds, in all of its experts."""
    down_depth: int = 8
    warps: int = 1
    """With one, threads hand each other x by shuffles; more wait for each other, and have fewer registers to fill each."""


def described(weight: QuantizedWeight) -> WeightBytes:
    """How kernels read a weight, which they do (`reads_experts`)."""
    found = weight_bytes(weight)
    assert found is not None
    return found


def form_constants(weight: WeightBytes, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernels are compiled with for a form. dtype: of x."""
    return {
        "ROW": weight.row,
        "WEIGHT": weight.kind,
        "HALF": weight.half,
        "SCALES": weight.scales,
        "SCALE_SPAN": weight.scale_span,
        "SCALE_ROWS": weight.scale_rows,
        "ZEROS": weight.zeros,
        "DOT": dot_type(dtype),
        "ASSEMBLY": not INTERPRETED,
    }


def span_of_a_tile(form: WeightBytes, columns: int) -> int:
    """Bytes of a row that tiles of so many columns multiply at a time: under one scale, or under scales of whole groups."""
    num_bytes = columns // 2 if form.half else columns
    if form.half and num_bytes % form.scale_span == 0:
        return num_bytes
    if num_bytes <= form.scale_span == form.row:  # the end of the last piece is masked
        return num_bytes
    return math.gcd(num_bytes, form.scale_span)


def slices_of_a_chunk(row: int) -> int:
    """Slices that the lanes of a warp read side by side: all of them, where the last chunk of a row is not mostly empty."""
    slices = row // _SPAN
    padded = {count: triton.cdiv(slices, count) * count for count in (32, 16, 8)}
    return next((count for count in padded if padded[count] <= 1.1 * slices), min(padded, key=padded.__getitem__))


def _chunks(row: int, block_g: int) -> int:
    return -(-row // (_SPAN * block_g))


class Method(Protocol):
    """One way to compute the experts of a layer."""

    @property
    def name(self) -> str:
        """The method's name in reports and tables."""

    def takes(self, num_tokens: int, dtype: torch.dtype) -> bool:
        """Whether the method computes this many tokens of this type."""

    def route(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> Routed:
        """Norm and choice. x: [num_tokens, hidden_size], the residual stream."""

    def add(self, residual: Tensor, routed: Routed, weights: ExpertWeights) -> None:
        """Add what the experts give to the residual stream [num_tokens, hidden_size], in place."""


MAX_ROWS = 16
"""Tokens up to which, and about which, each may be computed by itself: above, too many experts would be read twice."""


@dataclass(frozen=True, slots=True)
class RowCut:
    """How the products of single tokens are cut: into small programs, since many together keep the memory busy."""

    gate_rows: int = 4
    """Rows of the gate, and of the other half, that a program of one pair holds."""
    gate_warps: int = 4
    down_rows: int = 8
    """Rows of the down product that a program of one token holds, in all of its experts."""
    down_chunk: int = 256
    """Columns that are read at a time."""
    down_depth: int = 6
    """Chunks that are asked for ahead."""
    down_warps: int = 4


QUANTIZED_ROW_CUTS = QuantizedRowCut(), QuantizedRowCut(4, 4, 4, 12, 4)
"""The same over quantised weights. The first serves where nothing was measured."""


class RowMethod:
    """Each token by itself: three launches a layer. Right for any dtype; fast for one token, and a few."""

    def __init__(
        self,
        config: ExpertsConfig,
        router: Router,
        device: torch.device,
        cut: RowCut | None = None,
        quantized_cut: QuantizedRowCut = QUANTIZED_ROW_CUTS[0],
    ) -> None:
        """cut: None: what suits the width of an expert."""
        self.name = "triton.rows" if quantized_cut.warps == 1 else f"triton.rows.{quantized_cut.warps}warps"
        self._quantized_cut = quantized_cut
        whole = config.intermediate_size % 256 == 0
        self._cut = cut or (RowCut() if whole else RowCut(down_chunk=128, down_depth=24, down_warps=8))
        self._config = config
        self._router = router
        self._launchers = Launchers(device)

    def takes(self, num_tokens: int, dtype: torch.dtype) -> bool:
        """See Method."""
        return self._config.gated and TOKENS.cell(num_tokens) <= TOKENS.cell(MAX_ROWS)

    def route(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> Routed:
        """See Method."""
        return self._router.rows(x, norm, weights)

    def add(self, residual: Tensor, routed: Routed, weights: ExpertWeights) -> None:
        """See Method."""
        config, pairs = self._config, routed.experts.numel()
        between = torch.empty((pairs, config.intermediate_size), dtype=residual.dtype, device=residual.device)
        if isinstance(weights.gate_up, Tensor):
            self._gate_up(routed, weights.gate_up, weights.gate_up_bias, between)
        else:
            self._gate_up_quantized(routed, weights.gate_up, weights.gate_up_bias, between)
        if isinstance(weights.down, Tensor):
            self._down(between, routed, weights.down, weights.down_bias, residual)
        else:
            self._down_quantized(between, routed, weights.down, weights.down_bias, residual)

    def _gate_up(self, routed: Routed, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
        config, cut, hidden = self._config, self._cut, routed.x.shape[1]
        block_k = min(triton.next_power_of_2(hidden), 1024)
        how = {"BLOCK_N": cut.gate_rows, "BLOCK_K": block_k, "DEPTH": min(4, triton.cdiv(hidden, block_k))}
        how |= {**activation(config), "BIAS": bias is not None}
        launch = self._launchers.get(gate_up_rows, cut.gate_warps, {**self._sizes(hidden), **how})
        grid, x = (len(y), triton.cdiv(config.intermediate_size, cut.gate_rows), 1), routed.x
        launch(grid, x_ptr=x, weight_ptr=weight, bias_ptr=x if bias is None else bias, experts_ptr=routed.experts, y_ptr=y)

    def _down(self, x: Tensor, routed: Routed, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        config, cut, (num_tokens, hidden) = self._config, self._cut, residual.shape
        block_k = min(cut.down_chunk, triton.next_power_of_2(config.intermediate_size))
        depth = min(cut.down_depth, config.num_slots * triton.cdiv(config.intermediate_size, block_k))
        how = {"BLOCK_N": cut.down_rows, "BLOCK_K": block_k, "DEPTH": depth, "BIAS": bias is not None}
        launch = self._launchers.get(down_rows, cut.down_warps, {**self._sizes(hidden), **how})
        launch(
            (num_tokens, triton.cdiv(hidden, cut.down_rows), 1),
            x_ptr=x,
            weight_ptr=weight,
            bias_ptr=x if bias is None else bias,
            experts_ptr=routed.experts,
            weights_ptr=routed.weights,
            y_ptr=residual,
        )

    def _gate_up_quantized(self, routed: Routed, weight: QuantizedWeight, bias: Tensor | None, y: Tensor) -> None:
        config, cut, x, form = self._config, self._quantized_cut, routed.x, described(weight)
        block_g = slices_of_a_chunk(form.row)
        block_n = cut.gate_rows * (32 // block_g)
        depth = min(cut.gate_depth, _chunks(form.row, block_g))
        how: dict[str, Any] = {"BLOCK_N": block_n, "BLOCK_G": block_g, "SPAN": _SPAN, "DEPTH": depth}
        how |= {**activation(config), "BIAS": bias is not None, **form_constants(form, x.dtype)}
        launch = self._launchers.get(gate_up_quantized_rows, cut.warps, {**self._sizes(x.shape[1]), **how})
        codes, scales, zeros = tensors_of(weight)
        launch(
            (len(y), triton.cdiv(config.intermediate_size, block_n), 1),
            x_ptr=x,
            weight_ptr=codes,
            scales_ptr=scales,
            zeros_ptr=zeros,
            bias_ptr=x if bias is None else bias,
            experts_ptr=routed.experts,
            y_ptr=y,
        )

    def _down_quantized(self, x: Tensor, routed: Routed, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor) -> None:
        (num_tokens, hidden), cut, form = residual.shape, self._quantized_cut, described(weight)
        block_g = slices_of_a_chunk(form.row)
        block_n = cut.down_rows * (32 // block_g)
        depth = min(cut.down_depth, self._config.num_slots * _chunks(form.row, block_g))
        how = {"BLOCK_N": block_n, "BLOCK_G": block_g, "SPAN": _SPAN, "DEPTH": depth, "BIAS": bias is not None}
        how |= form_constants(form, x.dtype)
        launch = self._launchers.get(down_quantized_rows, cut.warps, {**self._sizes(hidden), **how})
        codes, scales, zeros = tensors_of(weight)
        launch(
            (num_tokens, triton.cdiv(hidden, block_n), 1),
            x_ptr=x,
            weight_ptr=codes,
            scales_ptr=scales,
            zeros_ptr=zeros,
            bias_ptr=x if bias is None else bias,
            experts_ptr=routed.experts,
            weights_ptr=routed.weights,
            y_ptr=residual,
        )

    def _sizes(self, hidden: int) -> dict[str, int]:
        return {"HIDDEN": hidden, "INNER": self._config.intermediate_size, "SLOTS": self._config.num_slots}


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """How the grouped products are cut."""

    block_m: int
    block_n: int
    """Outputs of a tile of the down product; the gated one, which has two of everything, takes half of it above 64 rows."""
    block_k: int
    warps: int
    stages: int
    swapped: bool = False
    whole: bool = False
    """For at most block_m tokens, all of which make up each expert's tile: they need no order."""
    group_m: int = 8


class TileMethod:
    """Pairs in the order of experts, multiplied in tiles of our own: five launches a layer; four without the order."""

    def __init__(
        self, tiling: ExpertTiling, config: ExpertsConfig, router: Router, device: torch.device, always: bool = False
    ) -> None:
        """always: for any number of tokens, not only for those that such tiles may suit."""
        sizes = f"{tiling.block_m}x{tiling.block_n}x{tiling.block_k}"
        self.name = f"triton.tiles{sizes}{'.swapped' if tiling.swapped else ''}{'.whole' if tiling.whole else ''}"
        self._tiling = tiling
        self._config = config
        self._router = router
        self._launchers = Launchers(device)
        self._always = always
        self._shared_memory = shared_memory(device)
        self._places = torch.arange(tiling.block_m * config.num_slots if tiling.whole else 0, dtype=torch.int32, device=device)

    def takes(self, num_tokens: int, dtype: torch.dtype) -> bool:
        """See Method. Tiles of many rows need experts of some pairs, and for very many those of few are too small."""
        pairs, rows = num_tokens * self._config.num_slots / self._config.num_all, self._tiling.block_m
        if self._tiling.whole:
            return num_tokens <= rows
        return self._always or (rows <= 16 * max(pairs, 1) and (rows > 32 or pairs <= 4 * rows))

    def route(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> Routed:
        """See Method."""
        return (self._router.rows if self._tiling.whole else self._router.tiles)(x, norm, weights)

    def add(self, residual: Tensor, routed: Routed, weights: ExpertWeights) -> None:
        """See Method."""
        config, pairs = self._config, routed.experts
        order = ExpertOrder(pairs, self._places, pairs) if self._tiling.whole else self._router.order(routed)
        between = residual.new_empty((pairs.numel(), config.intermediate_size))
        self._multiply(routed.x, weights.gate_up, weights.gate_up_bias, order.pairs, order.ends, between, first=True)
        parts = residual.new_empty((pairs.numel(), residual.shape[1]))
        self._multiply(between, weights.down, weights.down_bias, order.pairs, order.ends, parts, first=False)
        add_all_slots(self._launchers, config, parts, None, routed, order.places, residual)

    def _multiply(
        self,
        x: Tensor,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        pairs: Tensor,
        ends: Tensor,
        y: Tensor,
        first: bool,
    ) -> None:
        """first: the product of the experts' inputs, with the activation behind it."""
        tiling, config = self._tiling, self._config
        gated = first and config.gated
        num_pairs, width = y.shape
        num_blocks = config.num_all if tiling.whole else most_blocks(num_pairs, config.num_all, tiling.block_m)
        block_n = tiling.block_n // 2 if gated and tiling.block_m > 64 else tiling.block_n
        sizes = {
            "N": width,
            "K": x.shape[1],
            "NUM_ALL": config.num_all,
            "BLOCK_E": triton.next_power_of_2(config.num_all),
            "SLOTS": config.num_slots,
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": block_n,
            "GROUP_M": tiling.group_m,
            "GATHER": first,
            "GATED": gated,
            "SQUARED": first and not gated,
            **activation(config),
            "BIAS": bias is not None,
            "WHOLE": tiling.whole,
            "BLOCK_S": triton.next_power_of_2(config.num_slots),
        }
        grid = triton.cdiv(width, block_n) * num_blocks, 1, 1
        count = num_pairs // config.num_slots if tiling.whole else num_blocks
        behind: dict[str, Tensor | float] = {"bias_ptr": x if bias is None else bias, "pairs_ptr": pairs, "ends_ptr": ends}
        behind |= {"y_ptr": y, "num_blocks": count}
        if isinstance(weight, Tensor):
            self._plain(x, block_n, gated, sizes)(grid, x_ptr=x, weight_ptr=weight, **behind)
        else:
            launch = self._quantized(x, described(weight), block_n, gated, sizes)
            codes, scales, zeros = tensors_of(weight)
            launch(grid, x_ptr=x, weight_ptr=codes, scales_ptr=scales, zeros_ptr=zeros, **behind)

    def _plain(self, x: Tensor, block_n: int, gated: bool, sizes: dict[str, Any]) -> FixedLauncher:
        tiling = self._tiling
        # The last stage needs no memory of its own; how many there are changes no sum.
        stage = (tiling.block_m + (2 if gated else 1) * block_n) * tiling.block_k * 2
        stages = min(tiling.stages, 1 + self._shared_memory // stage)
        how = {"BLOCK_K": tiling.block_k * 2 // x.itemsize, "STAGES": stages, "SWAPPED": tiling.swapped, "DOT": dot_type(x.dtype)}
        return self._launchers.get(grouped_product, tiling.warps, {**sizes, **how})

    def _quantized(self, x: Tensor, form: WeightBytes, block_n: int, gated: bool, sizes: dict[str, Any]) -> FixedLauncher:
        tiling = self._tiling
        span = span_of_a_tile(form, tiling.block_k)
        stage = span * (block_n * (2 if gated else 1) + 2 * tiling.block_m * (2 if form.half else 1))
        unpacked = 2 * block_n * tiling.block_k  # on the way to the matrix units
        stages = min(tiling.stages, 1 + (self._shared_memory - unpacked) // stage)
        how = {"SPAN": span, "STAGES": stages, **form_constants(form, x.dtype)}
        return self._launchers.get(grouped_quantized_product, tiling.warps, {**sizes, **how})


class GroupedMM:
    """Pairs in the order of experts, multiplied by torch's grouped product: seven launches a layer; bfloat16 alone."""

    name = "torch.grouped_mm"

    def __init__(self, config: ExpertsConfig, router: Router, device: torch.device) -> None:
        self._config = config
        self._router = router
        self._launchers = Launchers(device)

    def takes(self, num_tokens: int, dtype: torch.dtype) -> bool:
        """See Method."""
        whole = self._config.intermediate_size % 8 == 0  # 16 bytes; hidden sizes always are
        return dtype == torch.bfloat16 and whole and hasattr(torch, "_grouped_mm")

    def route(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> Routed:
        """See Method."""
        return self._router.tiles(x, norm, weights)

    def add(self, residual: Tensor, routed: Routed, weights: ExpertWeights) -> None:
        """See Method."""
        config, hidden = self._config, residual.shape[1]
        assert isinstance(weights.gate_up, Tensor)
        assert isinstance(weights.down, Tensor)
        order = self._router.order(routed)
        num_pairs = len(order.pairs)
        x = residual.new_empty((num_pairs, hidden))
        launch = self._launchers.get(gather_rows, 4, {"HIDDEN": hidden, "SLOTS": config.num_slots, "BLOCK": 1024})
        launch((num_pairs, triton.cdiv(hidden, 1024), 1), x_ptr=routed.x, pairs_ptr=order.pairs, y_ptr=x)
        both = _grouped(x, weights.gate_up, order.ends)
        parts = _grouped(self._activate(both, order, weights), weights.down, order.ends)
        add_all_slots(self._launchers, config, parts, weights.down_bias, routed, order.places, residual)

    def _activate(self, both: Tensor, order: ExpertOrder, weights: ExpertWeights) -> Tensor:
        """The hidden rows of experts out of their first product; without a gate by torch's operations, two launches."""
        config, num_pairs, inner = self._config, len(both), self._config.intermediate_size
        if not config.gated:
            return both.relu_().square_()
        between = both.new_empty((num_pairs, inner))
        sizes = {"NUM_ALL": config.num_all, "BLOCK_E": triton.next_power_of_2(config.num_all), "INNER": inner, "BLOCK": 1024}
        bias = weights.gate_up_bias
        launch = self._launchers.get(activate_rows, 4, {**sizes, **activation(config), "BIAS": bias is not None})
        grid = num_pairs, triton.cdiv(inner, 1024), 1
        launch(grid, x_ptr=both, bias_ptr=both if bias is None else bias, ends_ptr=order.ends, y_ptr=between)
        return between


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [num_pairs, K] times weight [num_all, N, K], each row by its expert's."""
    if AHEAD.get() is not None:  # nothing has filled `ends`, and the library traps on what lies there
        return x.new_empty((len(x), weight.shape[1]))
    return torch._grouped_mm(x, weight.mT, offs=ends)


def add_all_slots(
    launchers: Launchers,
    config: ExpertsConfig,
    parts: Tensor,
    bias: Tensor | None,
    routed: Routed,
    places: Tensor,
    residual: Tensor,
) -> None:
    """residual += the weighted sum over each token's slots of parts [num_pairs, hidden_size], in the order of experts."""
    num_tokens, hidden = residual.shape
    block = min(triton.next_power_of_2(hidden), 1024)
    constants = {"HIDDEN": hidden, "SLOTS": config.num_slots, "BLOCK": block, "BIAS": bias is not None}
    launchers.get(add_slots, 4, constants)(
        (num_tokens, triton.cdiv(hidden, block), 1),
        x_ptr=parts,
        bias_ptr=parts if bias is None else bias,
        experts_ptr=routed.experts,
        weights_ptr=routed.weights,
        places_ptr=places,
        y_ptr=residual,
    )


def most_blocks(num_pairs: int, num_all: int, block_m: int) -> int:
    """Blocks of at most block_m rows of one expert that there can be, however pairs are spread over experts."""
    touched = min(num_pairs, num_all)
    return (num_pairs + touched * (block_m - 1)) // block_m


_quantized_tiling = partial(ExpertTiling, swapped=True)
TILINGS = (
    ExpertTiling(16, 64, 128, 4, 4),
    ExpertTiling(16, 32, 128, 4, 5),
    ExpertTiling(16, 64, 128, 4, 3, swapped=True, whole=True),
    ExpertTiling(32, 64, 128, 4, 4, whole=True),
    ExpertTiling(32, 64, 128, 4, 3, swapped=True, whole=True),
    ExpertTiling(64, 64, 128, 4, 4, whole=True),
    ExpertTiling(64, 64, 128, 4, 3, swapped=True, whole=True),
    ExpertTiling(16, 64, 128, 4, 3, swapped=True),
    ExpertTiling(16, 128, 64, 4, 3, swapped=True),
    ExpertTiling(32, 64, 128, 4, 4),
    ExpertTiling(64, 128, 64, 4, 4),
    ExpertTiling(128, 128, 64, 8, 4),
    ExpertTiling(128, 256, 64, 8, 3),
)
"""Tilings of grouped products. The first of each number of rows serves where nothing was measured."""
QUANTIZED_TILINGS = (
    _quantized_tiling(16, 64, 128, 4, 4, whole=True),
    _quantized_tiling(16, 64, 256, 4, 3, whole=True),
    _quantized_tiling(16, 32, 256, 4, 3, whole=True),
    _quantized_tiling(32, 64, 128, 4, 4, whole=True),
    _quantized_tiling(64, 64, 128, 4, 4, whole=True),
    _quantized_tiling(16, 64, 128, 4, 4),
    _quantized_tiling(16, 128, 128, 4, 3),
    _quantized_tiling(32, 64, 128, 4, 4),
    _quantized_tiling(64, 64, 128, 4, 3),
    _quantized_tiling(64, 128, 64, 4, 4),
    _quantized_tiling(64, 128, 128, 8, 3),
    _quantized_tiling(128, 128, 64, 8, 4),
    _quantized_tiling(128, 128, 128, 8, 3),
    _quantized_tiling(128, 64, 128, 4, 3),
)
"""The same over quantised weights; `block_k` columns of them."""
INVARIANT, QUANTIZED_INVARIANT = ExpertTiling(64, 128, 64, 4, 4), ExpertTiling(64, 64, 128, 4, 3, swapped=True)
"""What serves any number of tokens where a token's bits must not depend on it."""
