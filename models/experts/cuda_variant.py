"""What models/fused/csrc/expert_rows.cu is compiled for, and how the two products of experts are cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headway.backends.nvrtc.compiler import Variant
from headway.models.experts.config import ExpertsConfig
from headway.models.fused.cuda_cuts import PART_ROWS, SHARED_BYTES, SLICE_BYTES, CudaCut
from headway.models.fused.cuda_products import CSRC, ArrangedWeight, CudaVariant
from headway.models.fused.quantized import WeightBytes

MOST_TOKENS = 64
"""Tokens up to which the kernel computes."""
_SWISH = 6
"""ACTIVATION of product.cuh: x * sigmoid(ALPHA x)."""
_WARPS = 8, 12, 6, 10, 4, 2
"""Warps that may share a sum over K: the first that has slices for nearly all of them, as 8 mostly have."""
_ROOM = 126 * 1024
"""Shared memory of a block of threads beside which there is none of the same product."""


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """One of a layer's two products, as far as its cut depends on it."""

    weight: WeightBytes
    out_features: int
    """Rows of y: of one expert, after the activation."""
    first: bool
    """Whether rows are those of tokens, and are activated; else they are those of pairs, and each token's are added up."""
    gated: bool
    lot: int
    """Most rows of one expert that are multiplied together."""


ExpertCutRule = Callable[[ExpertProduct, int], CudaCut]
"""(product, multiprocessors) -> cut"""


def expert_rows_cut(product: ExpertProduct, multiprocessors: int) -> CudaCut:
    """Cut a product: as many warps along K as there are slices for, and rings as deep as there is room."""
    weight, lot, out_features = product.weight, product.lot, product.out_features
    slices = -(-weight.row // SLICE_BYTES)
    padded = {warps: -(-slices // warps) * warps for warps in _WARPS}
    warps = next((count for count in _WARPS if padded[count] <= 1.05 * slices), min(_WARPS, key=padded.__getitem__))
    tiles = 2 if product.gated or (not product.first and out_features > 2 * PART_ROWS * multiprocessors) else 1
    step = warps * (tiles * 1024 * 17 // 16 + (2 if weight.half else 1) * lot * 128)
    kept = 2 * warps * lot * (PART_ROWS * tiles + 4) * 4 + (5 if product.first else 12) * 1024
    alone = product.first or -(-out_features // (PART_ROWS * tiles)) <= multiprocessors
    stages = ((_ROOM if alone else SHARED_BYTES) - kept) // step
    return CudaCut(tiles, warps, max(2, min(stages, 6)), per_multiprocessor=1 if product.first else 2)


@dataclass(frozen=True, slots=True)
class ExpertVariant:
    """All that the kernel is compiled for."""

    each: CudaVariant
    """The product of one expert."""
    experts: int
    slots: int
    first: bool
    alpha: float
    limit: float | None

    @property
    def tokens(self) -> int:
        """Tokens of a launch, at most."""
        return 1 if self.each.most_rows == 1 else MOST_TOKENS

    @property
    def tiles(self) -> int:
        """Tiles of the output, which some blocks of threads have each."""
        return -(-self.each.out_features // self._outputs)

    @property
    def _outputs(self) -> int:
        return PART_ROWS * self.each.cut.tiles // (2 if self.each.gated else 1)

    @property
    def lots_bytes(self) -> int:
        """Size of `struct Lots`."""
        pairs, rows = self.tokens * self.slots, self.each.most_rows
        lots = (pairs + min(pairs, self.experts) * (rows - 1)) // rows
        floats, shorts = 1 if self.first else pairs, 3 * pairs + 2 * lots + 1 + 2 * (self.experts + 1)
        return 4 + 4 * floats + -(-shorts // 2) * 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, as expert_rows.cu adds it up."""
        totals = 0 if self.first else self.tokens * self._outputs * 4
        return self.each.shared_bytes + totals + self.lots_bytes

    @property
    def source(self) -> Variant:
        """What the compiler is given."""
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
        return Variant(CSRC, "expert_rows.cu", tuple(constants.items()))


def expert_variant(
    config: ExpertsConfig,
    weight: ArrangedWeight,
    dtype: torch.dtype,
    lot: int,
    first: bool,
    bias: bool,
    multiprocessors: int,
    rule: ExpertCutRule = expert_rows_cut,
) -> ExpertVariant:
    """Return what is compiled for one of a layer's two products. lot: most rows; 1: of a single token. dtype: of x."""
    gated, rows = first and config.gated, len(weight.codes) // config.num_all
    out_features = rows // 2 if gated else rows
    each = CudaVariant(
        dtype,
        weight.described,
        weight.scales.dtype,
        weight.wide,
        rule(ExpertProduct(weight.described, out_features, first, gated, lot), multiprocessors),
        lot,
        weight.described.row * (2 if weight.described.half else 1),
        out_features,
        None,
        gated,
        "relu2" if first and not gated else None,
        False,
        bias,
        None,
        None,
    )
    return ExpertVariant(each, config.num_all, config.num_slots, first, config.swiglu_alpha, config.swiglu_limit)
