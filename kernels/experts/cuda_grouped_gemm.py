"""Grouped GEMM in CUDA C++ (expert_lots.cu) over tiles of one expert's rows, for quantized weights on Hopper (wgmma).

The kernels are named cuda.lots8 to cuda.lots64. The rows of the weight are distributed over the warps, and all warps use the same
rows of x. Therefore, a tile can have more rows than in cuda_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig, ExpertsSpec, ExpertsWeights
from headway.core.contract.support import YES, Support
from headway.kernels.experts.builtin import GROUPED_TILE_ROWS, most_blocks
from headway.kernels.experts.cuda_rows import (
    CudaExperts,
    ExpertProduct,
    ExpertTilingRule,
    ExpertVariant,
    expert_variant,
    pointers_of,
)
from headway.kernels.experts.plain import Routed
from headway.kernels.linear.cuda_products import POINTERS, ArrangedWeight
from headway.kernels.linear.cuda_variant import CSRC, PART_ROWS, SLICE_BYTES, CudaTiling
from headway.kernels.linear.forms import WeightBytes
from headway.kernels.runtime.nvrtc.compiler import Variant, architecture
from headway.kernels.runtime.nvrtc.launch import MAP_BYTES, Arguments, CompiledKernel, Launch, tensor_map
from headway.kernels.runtime.nvrtc.store import load

MOST_TOKENS = 256
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
    variant = GroupedVariant(replace(of, most_tokens=MOST_TOKENS), following)
    tiling = of.each.tiling
    room = _MULTIPROCESSOR_BYTES // tiling.per_multiprocessor - _KEPT_BYTES
    tiling = replace(tiling, stages=max(2, min(tiling.stages, room // variant.step_bytes)))
    return replace(variant, of=replace(variant.of, each=replace(of.each, tiling=tiling)))


_ARRANGING = 256
"""Number of threads per thread block of the extra kernels, which permute a row or add up the slots with 4 columns per thread."""
_MOST_SLOTS = 24
"""Maximum number of slots per token for which arrange_lots's counters fit 48 KiB of shared memory."""


class _Launcher:
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
    """Grouped GEMM over tiles of one expert's rows, with inputs permuted first: five launches per layer, up to MOST_TOKENS
    tokens.

    The outputs of a token's experts are added in the order of the token's slots, in float32. A token's result has the same bits
    in every run, whatever the other tokens are. Not thread-safe.
    """

    capabilities = replace(CudaExperts.capabilities, max_tokens=MOST_TOKENS)

    def __init__(self, spec: ExpertsSpec, shared: dict[Any, Any] | None = None) -> None:
        super().__init__(spec, shared)
        self._made = cache(lambda variant: _Launcher(variant, spec.device, self._multiprocessors))

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

    def _products(self, weights: ExpertsWeights) -> tuple[_Launcher, _Launcher]:
        up, down = self._arranged(weights.gate_up), self._arranged(weights.down)
        return self._launcher(up, weights.gate_up_bias, down.described), self._launcher(down, weights.down_bias, None)

    def _launcher(self, weight: ArrangedWeight, bias: Tensor | None, following: WeightBytes | None) -> _Launcher:
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
    return num_tokens <= MOST_TOKENS and filled and (rows_per_tile == GROUPED_TILE_ROWS[-1] or pairs <= 4 * rows_per_tile)
