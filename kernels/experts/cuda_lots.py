"""Experts of several tokens over quantised weights by wgmma (compute capability 9.0): variants and launches of expert_lots.cu.

Warps lie side by side along the rows of a weight and share the rows of x, of which they can take more than those of cuda_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig, ExpertsSpec, ExpertsWeights
from headway.core.contract.support import YES, Support
from headway.kernels.experts.builtin import CUDA_LOTS, most_blocks
from headway.kernels.experts.cuda_rows import (
    CudaExperts,
    ExpertCutRule,
    ExpertProduct,
    ExpertVariant,
    expert_variant,
    pointers_of,
)
from headway.kernels.experts.plain import Routed
from headway.kernels.linear.cuda_products import POINTERS, ArrangedWeight
from headway.kernels.linear.cuda_variant import CSRC, PART_ROWS, SLICE_BYTES, CudaCut
from headway.kernels.linear.forms import WeightBytes
from headway.kernels.runtime.nvrtc.compiler import Variant, architecture
from headway.kernels.runtime.nvrtc.launch import MAP_BYTES, Arguments, CompiledKernel, Launch, tensor_map
from headway.kernels.runtime.nvrtc.store import load

MOST_TOKENS = 256
"""Tokens up to which the kernel computes."""
_MULTIPROCESSOR_BYTES, _KEPT_BYTES = 228 * 1024, 5 * 1024
"""Shared memory of a multiprocessor, and what of it a block of threads has besides its ring."""
_MOST_STAGES = 12
"""Steps of a ring beyond which no form's bytes would cover more of the memory's latency."""
_STEP_COLUMNS = 128


def expert_lots_cut(product: ExpertProduct, multiprocessors: int) -> CudaCut:
    """Cut a product: blocks of threads of 128 rows of the weight, and of 64 where those would be a tenth more than there are.

    Larger ones copy x fewer times. Two blocks of eight warps, or four of four, have the most warps that are busy to the end: an
    H100 took 252 us for 16 tokens of gpt-oss-20b by three of four warps, of two parts each, and 224 by two of eight. Beyond 16
    rows a warp has two parts of 16, for which it reads x once, and as many blocks as registers allow are on a multiprocessor.
    """
    if product.lot <= 16:
        eight = product.weight.half or product.lot == 16
        return CudaCut(1, 8 if eight else 4, _MOST_STAGES, per_multiprocessor=2 if eight else 4)
    blocks = 3 if product.lot <= (32 if product.weight.half else 16) else 2
    wide = CudaCut(2, 4, _MOST_STAGES, per_multiprocessor=blocks)
    outputs = 128 // (2 if product.gated else 1)
    padded = -(-product.out_features // outputs) * outputs
    return wide if padded <= 1.1 * product.out_features else replace(wide, tiles=1)


@dataclass(frozen=True, slots=True)
class LotsVariant:
    """All that the kernel is compiled for."""

    of: ExpertVariant
    following: WeightBytes | None
    """The second product's weight, which the first writes x for; None: this is the second."""

    @property
    def outputs(self) -> int:
        """Columns of y of a tile: OUT."""
        each = self.of.each
        return PART_ROWS * each.cut.tiles * each.cut.warps // (2 if each.gated else 1)

    @property
    def groups(self) -> int:
        """Groups of a slice whose scales are copied; 0: each row has one scale, or each block, and none is."""
        weight = self.of.each.weight
        return 0 if weight.scale_rows > 1 or weight.scale_span >= weight.row else max(1, SLICE_BYTES // weight.scale_span)

    @property
    def box(self) -> int:
        """Rows of the weight that one copy moves: as many as end with the rows of an expert."""
        box = self.outputs
        while self.of.each.out_features % box:
            box //= 2
        return box

    @property
    def step_bytes(self) -> int:
        """Shared memory of a step of the ring, as expert_lots.cu adds it up."""
        each = self.of.each
        pieces, places, halves = 2 if each.gated else 1, self.groups * self.outputs, 2 if each.weight.half else 1
        scales = -(-places * each.scale_dtype.itemsize // 128) * 128
        zeros = -(-places // 128) * 128 if each.weight.zeros else 0
        slice_bytes = pieces * (self.outputs * SLICE_BYTES + scales + zeros)
        return -(-(2 * each.most_rows * 128 + 2 // halves * slice_bytes) // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, beginning at a multiple of 1,024."""
        return self.of.each.cut.stages * self.step_bytes + 1024

    @property
    def threads(self) -> int:
        """Threads of a block: of the warps that multiply, and of one that copies."""
        return 32 * (self.of.each.cut.warps + 1)

    @property
    def row_columns(self) -> int:
        """Columns of a row of x as it is arranged, with the zeros at its end."""
        return arranged_columns(self.of.each.weight)

    @property
    def table_words(self) -> int:
        """Words of `struct Table`."""
        return self.of.most_lots + 2 + self.of.tokens * self.of.slots

    @property
    def source(self) -> Variant:
        """What the compiler is given."""
        constants = {**self.of.constants, "RESIDENT": self.of.each.cut.per_multiprocessor, "BOX": self.box}
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


def arranged_columns(weight: WeightBytes) -> int:
    """Columns of a row of x for a weight, as it is arranged: whole steps."""
    return -(-weight.row * (2 if weight.half else 1) // _STEP_COLUMNS) * _STEP_COLUMNS


def lots_variant(
    config: ExpertsConfig,
    weight: ArrangedWeight,
    dtype: torch.dtype,
    lot: int,
    following: WeightBytes | None,
    bias: bool,
    multiprocessors: int,
    rule: ExpertCutRule = expert_lots_cut,
) -> LotsVariant:
    """Return what is compiled for one of a layer's two products. lot: most rows. dtype: of x. See LotsVariant."""
    of = expert_variant(config, weight, dtype, lot, following is not None, bias, multiprocessors, rule)
    variant = LotsVariant(replace(of, most_tokens=MOST_TOKENS), following)
    cut = of.each.cut
    room = _MULTIPROCESSOR_BYTES // cut.per_multiprocessor - _KEPT_BYTES
    cut = replace(cut, stages=max(2, min(cut.stages, room // variant.step_bytes)))
    return replace(variant, of=replace(variant.of, each=replace(of.each, cut=cut)))


_ARRANGING = 256
"""Threads of a block that arranges a row, or adds to 4 columns each."""
_MOST_SLOTS = 24
"""Slots with which what arrange_lots counts by finds room in 48 KiB."""


class _Launcher:
    """One compiled product with its arguments, and the launch that stands before the first or behind the second."""

    def __init__(self, variant: LotsVariant, device: torch.device, multiprocessors: int) -> None:
        specific = architecture(device, specific=True)
        self.variant = variant
        self._kernel: CompiledKernel = load(variant.source, "expert_lots", device, specific)
        self._kernel.allow_shared(variant.shared_bytes)
        self._beside: CompiledKernel = load(variant.source, "arrange_lots" if variant.of.first else "add_slots", device, specific)
        blocks = multiprocessors * variant.of.each.cut.per_multiprocessor
        self._launch = Launch((blocks, 1, 1), variant.threads, variant.shared_bytes, overlaps=True)
        blank = bytes(MAP_BYTES)
        self._arguments = Arguments(blank, blank, blank, bytes(POINTERS.size), 0)
        self._beside_arguments = Arguments(*[0] * (5 if variant.of.first else 4))
        self._beside_launch = cache(partial(Launch, threads=_ARRANGING, overlaps=True))

    def multiply(self, x: Tensor, weight: ArrangedWeight, bias: Tensor | None, y: Tensor, table: Tensor) -> None:
        """Launch the product."""
        variant, blank = self.variant, bytes(MAP_BYTES)
        boxes = (variant.box, SLICE_BYTES), (max(1, variant.groups), variant.outputs)
        scales = tensor_map(weight.scales, boxes[1], 0) if variant.groups else blank
        zeros = blank if weight.zeros is None else tensor_map(weight.zeros, boxes[1], 0)
        codes, pointers = tensor_map(weight.codes, boxes[0], 0), pointers_of(x, weight, bias, y)
        self._arguments.set(codes, scales, zeros, pointers, table.data_ptr())
        self._kernel(self._launch, self._arguments)

    def beside(self, grid: tuple[int, int, int], *tensors: Tensor) -> None:
        """Launch what stands before or behind it."""
        self._beside_arguments.set(*[tensor.data_ptr() for tensor in tensors])
        self._beside(self._beside_launch(grid), self._beside_arguments)


class CudaLots(CudaExperts):
    """Lots of rows of one expert whose x is arranged before: five launches a layer, for up to MOST_TOKENS tokens.

    What experts give a token is added in the order of its slots, in float32: its bits are the same in every run, whatever the
    other tokens are. One thread at a time.
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
        return suits(self.lot, num_tokens, self._config)

    def add(self, routed: Routed, weights: ExpertsWeights, out: Tensor) -> None:
        (num_tokens, hidden), pairs = out.shape, routed.experts.numel()
        up, down = self._products(weights)
        rows = most_blocks(pairs, self._config.num_all, self.lot) * self.lot
        x = out.new_empty(rows * up.variant.row_columns)  # rows that are missing are never read
        between = out.new_empty(rows * down.variant.row_columns)
        table = torch.empty(up.variant.table_words, dtype=torch.int32, device=out.device)
        parts = torch.empty((pairs, hidden), dtype=torch.float32, device=out.device)
        up.beside((pairs, 1, 1), routed.x, routed.experts, table, x, between)
        up.multiply(x, self._arranged(weights.gate_up), weights.gate_up_bias, between, table)
        down.multiply(between, self._arranged(weights.down), weights.down_bias, parts, table)
        columns = 4 * _ARRANGING
        down.beside((num_tokens, -(-hidden // columns), 1), parts, table, routed.weights, out)

    def prepare(self, weights: ExpertsWeights) -> ExpertsWeights:
        """Arrange a layer's weights, and compile the kernels that multiply them."""
        self._products(weights)
        return weights

    def _products(self, weights: ExpertsWeights) -> tuple[_Launcher, _Launcher]:
        up, down = self._arranged(weights.gate_up), self._arranged(weights.down)
        return self._launcher(up, weights.gate_up_bias, down.described), self._launcher(down, weights.down_bias, None)

    def _launcher(self, weight: ArrangedWeight, bias: Tensor | None, following: WeightBytes | None) -> _Launcher:
        of = self._config, weight, self.spec.dtype, self.lot, following, bias is not None, self._multiprocessors
        return self._made(lots_variant(*of))


def cuda_lots(lot: int) -> type[CudaLots]:
    """Return the class of a kernel of CUDA_LOTS."""
    return type("CudaLots", (CudaLots,), {"name": f"cuda.lots{lot}", "lot": lot})


def suits(lot: int, num_tokens: int, config: ExpertsConfig) -> bool:
    """Whether lots of up to so many rows may be the best for so many tokens.

    Those that hardly an expert fills by half are left to smaller ones, and experts of more than four to larger ones.
    """
    pairs = num_tokens * config.num_slots / config.num_all
    filled = lot == CUDA_LOTS[0] or (num_tokens > lot // 2 and pairs >= lot / 8)
    return num_tokens <= MOST_TOKENS and filled and (lot == CUDA_LOTS[-1] or pairs <= 4 * lot)
