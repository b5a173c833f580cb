"""MoE kernels for many tokens: grouped GEMMs (grouped_gemm) over pairs sorted by expert."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from headway.core.contract.experts import ExpertsCapabilities, ExpertsKernel, ExpertsSpec, ExpertsWeights
from headway.core.contract.kernel import AHEAD
from headway.core.contract.support import YES, Support
from headway.core.contract.weights import QuantizedWeight, WeightFormat
from headway.kernels.experts.builtin import (
    INVARIANT,
    PLAIN_TILINGS,
    QUANTIZED_INVARIANT,
    QUANTIZED_TILINGS,
    ExpertTiling,
    most_blocks,
)
from headway.kernels.experts.plain import ExpertOrder, Routed, RoutedKernel
from headway.kernels.experts.route_kernels import sorted_pairs
from headway.kernels.experts.row_kernels import (
    GPUS,
    QUANTIZED_FORMATS,
    TritonExperts,
    activation,
    described,
    form_constants,
)
from headway.kernels.experts.tile_kernels import activate_rows, add_slots, gather_rows, grouped_product
from headway.kernels.linear.forms import WeightBytes
from headway.kernels.linear.gpu_kernels import dequantize
from headway.kernels.runtime.triton_launch import Launchers, shared_memory


def span_of_a_tile(form: WeightBytes, columns: int) -> int:
    """Return the number of bytes of a row that tiles with this many columns multiply per iteration. These bytes have one common
    scale, or consist of whole groups."""
    num_bytes = columns // 2 if form.half else columns
    if form.half and num_bytes % form.scale_span == 0:
        return num_bytes
    if num_bytes <= form.scale_span == form.row:  # the end of the last chunk is masked
        return num_bytes
    return math.gcd(num_bytes, form.scale_span)


class SortingKernel(TritonExperts):
    """Base of kernels whose outputs are sorted by expert, and are summed over each token's slots at the end."""

    def _add_slots(self, parts: Tensor, bias: Tensor | None, routed: Routed, places: Tensor, out: Tensor) -> None:
        """Add the weighted sum over each token's slots to `out`. parts: [num_pairs, hidden_size], sorted by expert."""
        num_tokens, hidden = out.shape
        block = min(triton.next_power_of_2(hidden), 1024)
        constants = {"HIDDEN": hidden, "SLOTS": self._config.num_slots, "BLOCK": block, "BIAS": bias is not None}
        self._launchers.get(add_slots, 4, constants)(
            (num_tokens, triton.cdiv(hidden, block), 1),
            x_ptr=parts,
            bias_ptr=parts if bias is None else bias,
            experts_ptr=routed.experts,
            weights_ptr=routed.weights,
            places_ptr=places,
            y_ptr=out,
        )


class TileKernel(SortingKernel):
    """Grouped GEMM in Triton over pairs sorted by expert: five launches per layer, four without sorting."""

    plain: ClassVar[ExpertTiling | None] = None
    """Tiling over dense weights. None means that the kernel does not support dense weights."""
    quantized: ClassVar[ExpertTiling | None] = None
    """Tiling for layers with a quantized weight. None means that the kernel does not support quantized weights."""
    always: ClassVar[bool] = False
    """True if the kernel runs any number of tokens, not only numbers that suit its tiles."""

    def __init__(self, spec: ExpertsSpec, shared: dict[Any, Any] | None = None) -> None:
        super().__init__(spec, shared)
        tiling = self._tiling_of(spec)
        assert tiling is not None
        self._tiling = tiling
        self._shared_memory = shared_memory(spec.device)
        slots = tiling.block_m * spec.config.num_slots if tiling.whole else 0
        self._places = torch.arange(slots, dtype=torch.int32, device=spec.device)

    @classmethod
    def _tiling_of(cls, spec: ExpertsSpec) -> ExpertTiling | None:
        return cls.plain if {spec.gate_up.name, spec.down.name} == {"plain"} else cls.quantized

    @classmethod
    def supports(cls, spec: ExpertsSpec) -> Support:
        support = super().supports(spec)
        if cls._tiling_of(spec) is None:
            needed, got = ("quantised ones", "plain ones") if cls.plain is None else ("plain ones", "quantised ones")
            support &= Support.no("weights", needed, got)
        return support

    def runs(self, num_tokens: int) -> bool:
        """Return whether the tiles suit this number of tokens. Tall tiles need several pairs per expert, and short tiles are slow
        for very many pairs."""
        pairs, rows = num_tokens * self._config.num_slots / self._config.num_all, self._tiling.block_m
        if self._tiling.whole:
            return num_tokens <= rows
        return self.always or (rows <= 16 * max(pairs, 1) and (rows > 32 or pairs <= 4 * rows))

    def add(self, routed: Routed, weights: ExpertsWeights, out: Tensor) -> None:
        config, pairs = self._config, routed.experts
        whole = self._tiling.whole
        order = ExpertOrder(pairs, self._places, pairs) if whole else sorted_pairs(self._launchers, config, routed)
        between = out.new_empty((pairs.numel(), config.intermediate_size))
        self._multiply(routed.x, weights.gate_up, weights.gate_up_bias, order, between, first=True)
        parts = out.new_empty((pairs.numel(), out.shape[1]))
        self._multiply(between, weights.down, weights.down_bias, order, parts, first=False)
        self._add_slots(parts, None, routed, order.places, out)

    def _multiply(
        self, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, order: ExpertOrder, y: Tensor, first: bool
    ) -> None:
        """Launch one of the two GEMMs. first: True for the gate/up projection, with its activation."""
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
        form, parts = described(weight, x.shape[1]), 2 if gated else 1
        # The last stage needs no extra memory. The number of stages does not change results.
        if isinstance(weight, Tensor):
            span, stage, unpacked = tiling.block_k * 2 // x.itemsize, (tiling.block_m + parts * block_n) * tiling.block_k * 2, 0
        else:
            span, unpacked = span_of_a_tile(form, tiling.block_k), 2 * block_n * tiling.block_k  # on the way to the tensor cores
            stage = span * (block_n * parts + 2 * tiling.block_m * (2 if form.half else 1))
        stages = min(tiling.stages, 1 + (self._shared_memory - unpacked) // stage)
        sizes |= {"SPAN": span, "STAGES": stages, "SWAPPED": tiling.swapped, **form_constants(form, x.dtype)}
        launch = self._launchers.get(grouped_product, tiling.warps, sizes)
        written = {"pairs_ptr": order.pairs, "ends_ptr": order.ends, "y_ptr": y}
        self._launch(launch, grid, (x, weight, bias), {**written, "num_blocks": count})


def tile_kernel(name: str) -> type[TileKernel]:
    """Return the kernel class named `name`, from PLAIN_TILINGS or QUANTIZED_TILINGS."""
    return tiled(PLAIN_TILINGS.get(name), QUANTIZED_TILINGS.get(name))


def invariant_kernels() -> list[type[ExpertsKernel]]:
    """Return the kernels for any number of tokens in deterministic mode: for dense and for quantized weights."""
    return [tiled(INVARIANT, None, always=True), tiled(None, QUANTIZED_INVARIANT, always=True)]


def tiled(plain: ExpertTiling | None, quantized: ExpertTiling | None, always: bool = False) -> type[TileKernel]:
    """Return a kernel class with these tiles; see the fields of TileKernel. If both tilings are given, they have the same name
    and differ only in warps and stages."""
    tiling = plain or quantized
    assert tiling is not None
    fields = {"name": tiling.name, "sorts": not tiling.whole, "plain": plain, "quantized": quantized, "always": always}
    return type("TileKernel", (TileKernel,), fields)


class GroupedMM(SortingKernel):
    """Grouped GEMM by torch over pairs sorted by expert: seven launches per layer, only bfloat16."""

    name = "torch.grouped_mm"
    capabilities = ExpertsCapabilities(
        formats=frozenset({"plain"}), dtypes=(torch.bfloat16,), devices=GPUS, biases=True, ungated=True, clamped=True
    )

    @classmethod
    def available(cls) -> Support:
        has = YES if hasattr(torch, "_grouped_mm") else Support.no("torch", "torch._grouped_mm", torch.__version__)
        return super().available() & has

    @classmethod
    def supports(cls, spec: ExpertsSpec) -> Support:
        """Return whether torch supports the layer. Rows must start at multiples of 16 bytes, which is always true of rows of
        hidden_size elements."""
        support, inner = super().supports(spec), spec.config.intermediate_size
        return support & (Support.no("experts' inner size", "a multiple of 8", inner) if inner % 8 else YES)

    def add(self, routed: Routed, weights: ExpertsWeights, out: Tensor) -> None:
        config, hidden = self._config, out.shape[1]
        assert isinstance(weights.gate_up, Tensor)
        assert isinstance(weights.down, Tensor)
        order = sorted_pairs(self._launchers, config, routed)
        num_pairs = len(order.pairs)
        x = out.new_empty((num_pairs, hidden))
        launch = self._launchers.get(gather_rows, 4, {"HIDDEN": hidden, "SLOTS": config.num_slots, "BLOCK": 1024})
        launch((num_pairs, triton.cdiv(hidden, 1024), 1), x_ptr=routed.x, pairs_ptr=order.pairs, y_ptr=x)
        both = _grouped(x, weights.gate_up, order.ends)
        parts = _grouped(self._activate(both, order, weights.gate_up_bias), weights.down, order.ends)
        self._add_slots(parts, weights.down_bias, routed, order.places, out)

    def _activate(self, both: Tensor, order: ExpertOrder, bias: Tensor | None) -> Tensor:
        """Apply the activation to the first GEMM's output. Without a gate, this takes two launches of torch operations."""
        config, num_pairs, inner = self._config, len(both), self._config.intermediate_size
        if not config.gated:
            return both.relu_().square_()
        between = both.new_empty((num_pairs, inner))
        sizes = {"NUM_ALL": config.num_all, "BLOCK_E": triton.next_power_of_2(config.num_all), "INNER": inner, "BLOCK": 1024}
        launch = self._launchers.get(activate_rows, 4, {**sizes, **activation(config), "BIAS": bias is not None})
        grid = num_pairs, triton.cdiv(inner, 1024), 1
        launch(grid, x_ptr=both, bias_ptr=both if bias is None else bias, ends_ptr=order.ends, y_ptr=between)
        return between


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return x [num_pairs, K] times weight [num_all, N, K]: each row is multiplied by its expert's weight."""
    if AHEAD.get() is not None:  # `ends` is not filled yet, and the library traps on arbitrary values
        return x.new_empty((len(x), weight.shape[1]))
    return torch._grouped_mm(x, weight.mT, offs=ends)


_LEAST_PAIRS = 16
"""Minimum average number of pairs per expert. With fewer pairs, dequantizing takes longer than the rest of the layer."""


class DequantizingKernel(RoutedKernel):
    """Kernel that dequantizes all experts' weights to half precision in two launches, and then runs a kernel over dense weights.

    torch allocates the memory of the dequantized weights while the layer runs, so all layers reuse the same memory. The engine's
    trial step counts this memory as activations.
    """

    capabilities = ExpertsCapabilities(
        formats=QUANTIZED_FORMATS | {"plain"}, devices=GPUS, biases=True, ungated=True, clamped=True
    )
    inner: ClassVar[type[RoutedKernel]]
    """Class of the kernel over dense weights."""

    def __init__(self, spec: ExpertsSpec, shared: dict[Any, Any] | None = None) -> None:
        super().__init__(spec, shared)
        self._inner = self.inner(_expanded(spec), shared)
        self._launchers = Launchers(spec.device)

    @classmethod
    def available(cls) -> Support:
        return cls.inner.available()

    @classmethod
    def supports(cls, spec: ExpertsSpec) -> Support:
        support = super().supports(spec) & cls.inner.supports(_expanded(spec))
        if {spec.gate_up.name, spec.down.name} == {"plain"}:
            support &= Support.no("weights", "quantised ones", "plain ones")
        return support

    def runs(self, num_tokens: int) -> bool:
        pairs = num_tokens * self.spec.config.num_slots / self.spec.config.num_all
        return pairs >= _LEAST_PAIRS and self._inner.runs(num_tokens)

    def add(self, routed: Routed, weights: ExpertsWeights, out: Tensor) -> None:
        gate_up = self._plain(weights.gate_up, self.spec.config.up_size)
        down = self._plain(weights.down, out.shape[1])
        self._inner.add(routed, ExpertsWeights(gate_up, down, weights.gate_up_bias, weights.down_bias), out)

    def _plain(self, weight: Tensor | QuantizedWeight, rows: int) -> Tensor:
        if isinstance(weight, Tensor):
            return weight
        return dequantize(self._launchers, weight, self.spec.dtype).view(-1, rows, weight.shape[1])


def _expanded(spec: ExpertsSpec) -> ExpertsSpec:
    return replace(spec, gate_up=WeightFormat("plain"), down=WeightFormat("plain"))


def dequantizing(name: str) -> type[DequantizingKernel]:
    """Return the class that dequantizes weights for a kernel over dense weights. name: one of EXPANDED."""
    inner = GroupedMM if name == GroupedMM.name else tile_kernel(name)
    return type("DequantizingKernel", (DequantizingKernel,), {"name": f"dequantize+{name}", "inner": inner})
