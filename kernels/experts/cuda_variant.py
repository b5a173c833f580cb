"""What kernels/linear/csrc/expert_rows.cu is compiled for, and how the two products of experts are cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.linear.cuda_arranged import ArrangedWeight
from headway.kernels.linear.cuda_cuts import PART_ROWS, SHARED_BYTES, SLICE_BYTES, CudaCut, warps_bytes
from headway.kernels.linear.cuda_variant import CSRC, CudaVariant
from headway.kernels.linear.quantized import WeightBytes
from headway.kernels.runtime.nvrtc.compiler import Variant

MOST_TOKENS = 64
"""Tokens up to which the kernel computes."""
_SWISH = 6
"""ACTIVATION of product.cuh: x * sigmoid(ALPHA x)."""
_WARPS = 8, 12, 6, 10, 4, 2
"""Warps that may share a sum over K: the first that has slices for nearly all of them, as 8 mostly have."""
_ROOM = 220 * 1024
"""Shared memory of a block of threads."""


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
    """Cut a product: as many warps along K as there are slices for, and rings as deep as there is room.

    What is preferred comes from an H100, Qwen3-30B-A3B in FP8 by blocks and gpt-oss-20b in MXFP4: docs/notes/kernels.md.
    """
    weight, lot, out_features = product.weight, product.lot, product.out_features
    slices = -(-weight.row // SLICE_BYTES)
    preferred = _FIRST if product.first else _LAST
    tiles, wanted, most_stages, blocks = preferred[bool(weight.half), min(lot, 16)]
    if not product.gated and out_features <= PART_ROWS * tiles * multiprocessors // 2:
        tiles = 1
    order = (wanted, *(count for count in _WARPS if count != wanted))
    padded = {warps: -(-slices // warps) * warps for warps in order}
    warps = next((count for count in order if padded[count] <= 1.05 * slices), min(order, key=padded.__getitem__))
    step = warps * (tiles * 1024 * 17 // 16 + (2 if weight.half else 1) * lot * 128)
    kept = 2 * warps * lot * (PART_ROWS * tiles + 4) * 4 + (5 if product.first else 12) * 1024
    stages = (_ROOM - kept) // step
    return CudaCut(tiles, warps, max(2, min(stages, most_stages)), per_multiprocessor=blocks)


_Preferred = dict[tuple[bool, int], tuple[int, int, int, int]]
_FIRST: _Preferred = {
    (False, 1): (4, 4, 4, 1),
    (False, 8): (2, 8, 4, 1),
    (False, 16): (4, 4, 4, 1),
    (True, 1): (2, 8, 3, 2),
    (True, 8): (4, 8, 3, 1),
    (True, 16): (4, 4, 4, 1),
}
"""(codes of 4 bits, rows of a lot) -> tiles, warps, stages and blocks of threads of a multiprocessor, of that of tokens."""
_LAST: _Preferred = {
    (False, 1): (1, 12, 3, 2),
    (False, 8): (1, 12, 3, 2),
    (False, 16): (1, 12, 4, 2),
    (True, 1): (1, 12, 3, 2),
    (True, 8): (2, 12, 3, 2),
    (True, 16): (2, 8, 3, 2),
}
"""Likewise of the product that is added up."""


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
    most_tokens: int = MOST_TOKENS

    @property
    def tokens(self) -> int:
        """Tokens of a launch, at most."""
        return 1 if self.each.most_rows == 1 else self.most_tokens

    @property
    def most_lots(self) -> int:
        """Lots of a launch, at most."""
        pairs, rows = self.tokens * self.slots, self.each.most_rows
        return (pairs + min(pairs, self.experts) * (rows - 1)) // rows

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
        pairs = self.tokens * self.slots
        floats, shorts = 1 if self.first else pairs, 3 * pairs + 2 * self.most_lots + 1 + 2 * (self.experts + 1)
        return 4 + 4 * floats + -(-shorts // 2) * 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, as expert_rows.cu adds it up."""
        each, totals = self.each, 0 if self.first else self.tokens * self._outputs * 4
        return warps_bytes(each.weight, each.most_rows, each.cut, each.scale_dtype.itemsize) + totals + self.lots_bytes

    @property
    def constants(self) -> dict[str, str | int]:
        """Macros of expert_rows.cu."""
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
        """What the compiler is given."""
        return Variant(CSRC, "expert_rows.cu", tuple(self.constants.items()))


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
