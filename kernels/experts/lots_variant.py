"""What kernels/linear/csrc/expert_lots.cu is compiled for, and how the two products of experts are cut there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.experts.cuda_variant import ExpertCutRule, ExpertProduct, ExpertVariant, expert_variant
from headway.kernels.linear.cuda_arranged import ArrangedWeight
from headway.kernels.linear.cuda_cuts import PART_ROWS, SLICE_BYTES, CudaCut
from headway.kernels.linear.cuda_variant import CSRC
from headway.kernels.linear.quantized import WeightBytes
from headway.kernels.runtime.nvrtc.compiler import Variant

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
