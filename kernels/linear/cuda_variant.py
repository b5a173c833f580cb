"""What products in CUDA C++ are compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from headway.kernels.linear.cuda_cuts import (
    ALONE_BYTES,
    PART_ROWS,
    SHARED_BYTES,
    SLICE_BYTES,
    CudaCut,
    few_rows_bytes,
    float8_two_fit,
    two_fit,
)
from headway.kernels.linear.quantized import WeightBytes
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.step.config import Activation

CSRC = Path(__file__).parent / "csrc"
MOST_FEW_ROWS, MOST_SHARED_ROWS, MOST_FLOAT8_ROWS = 16, 512, 256
"""Rows up to which few_rows.cu, shared_rows.cu and w8a8.cu compute."""
FLOAT8_COLUMNS = 128
"""Columns of a step of w8a8.cu, and of a block of the weight under one scale."""
KINDS = {"fp8": 0, "int4": 1, "mxfp4": 2, "int8": 3}
HALVES = {torch.bfloat16: 0, torch.float16: 1}
"""Codes of weights, and types of half precision, by their numbers in the sources."""
_FULL_SUMS = 128
"""Rows times parts of a warp above which sums of shared_rows.cu and w8a8.cu take the registers of other warps (FULL)."""
_ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu2": 5}


@dataclass(frozen=True, slots=True)
class CudaVariant:
    """All that few_rows.cu or, where its cut has splits, shared_rows.cu is compiled for."""

    dtype: torch.dtype
    weight: WeightBytes
    scale_dtype: torch.dtype
    wide: bool
    cut: CudaCut
    most_rows: int
    in_features: int
    out_features: int
    norm: torch.dtype | None
    gated: bool
    activation: Activation | None
    add: bool
    bias: bool
    heads: tuple[int, int, int] | None
    """num_heads, num_kv_heads and head_dim, where they are to be rotated."""
    head_norm: torch.dtype | None

    @property
    def constants(self) -> dict[str, str | int]:
        """Macros of the sources."""
        weight, cut = self.weight, self.cut
        num_heads, num_kv_heads, head_dim = self.heads or (0, 0, 0)
        return {
            "WEIGHT": KINDS[weight.kind],
            "HALF_TYPE": HALVES[self.dtype],
            "N": self.out_features,
            "K": self.in_features,
            "ROW": weight.row,
            "HALF": weight.half or 1,
            "SCALE_SPAN": weight.scale_span,
            "SCALE_ROWS": weight.scale_rows,
            "SCALE_SIZE": self.scale_dtype.itemsize,
            "SCALE_FLOAT16": int(self.scale_dtype == torch.float16),
            "ZEROS": int(weight.zeros),
            "WIDE": int(self.wide),
            "TILES": cut.tiles,
            "WARPS": cut.warps,
            "STAGES": cut.stages,
            "SPLITS": cut.splits,
            "KEPT": int(cut.kept),
            "RESIDENT": 2 if self.two_fit and self.needed_bytes <= SHARED_BYTES else 1,
            "MOST_ROWS": self.most_rows,
            "NORM": int(self.norm is not None),
            "NORM_FLOAT": int(self.norm == torch.float32),
            "GATED": int(self.gated),
            "ACTIVATION": _ACTIVATIONS[self.activation],
            "ADD": int(self.add),
            "BIAS": int(self.bias),
            "HEADS": num_heads,
            "KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "QK_NORM": int(self.head_norm is not None),
            "HEAD_NORM_FLOAT": int(self.head_norm == torch.float32),
        }

    @property
    def name(self) -> str:
        """The kernel's name, and its file's."""
        return "shared_rows" if self.cut.splits else "few_rows"

    @property
    def source(self) -> Variant:
        """What the compiler is given."""
        return Variant(CSRC, f"{self.name}.cu", tuple(self.constants.items()))

    @property
    def by_row(self) -> bool:
        """Whether each row of the weight has one scale."""
        return self.weight.scale_span >= self.weight.row and self.weight.scale_rows == 1

    @property
    def tile_rows(self) -> int:
        """Columns of y that a tile has."""
        along = self.cut.warps if self.cut.splits else 1
        return PART_ROWS * self.cut.tiles * along // (2 if self.gated else 1)

    @property
    def two_fit(self) -> bool:
        """Whether the registers suffice for two blocks of threads on a multiprocessor."""
        return two_fit(self.cut, self.most_rows) if self.cut.splits else self.most_rows <= MOST_FEW_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: of the warps that multiply, and of those beside them, see the kernels' THREADS."""
        if self.cut.splits:
            beside = 4 if self.cut.tiles * self.most_rows > _FULL_SUMS else 1  # four give registers away
        else:
            beside = 1 if self.most_rows == 1 else 4
        return 32 * (self.cut.warps + beside)

    @property
    def _copied_scales(self) -> int:
        """Bytes of scales and zeros for 16 rows of a slice, in shared_rows.cu."""
        weight = self.weight
        if weight.scale_rows > 1 or weight.scale_span >= weight.row:
            return 0
        return max(1, SLICE_BYTES // weight.scale_span) * 16 * (self.scale_dtype.itemsize + int(weight.zeros))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a launch."""
        return max(self.needed_bytes, ALONE_BYTES) if self.cut.alone else self.needed_bytes

    @property
    def needed_bytes(self) -> int:
        """Dynamic shared memory that the kernels use."""
        cut, slices, rows = self.cut, 1 if self.weight.half else 2, PART_ROWS * self.cut.tiles
        if not cut.splits:
            return few_rows_bytes(self.weight, self.most_rows, cut, self.scale_dtype.itemsize)
        step = 2 * self.most_rows * 128 + slices * cut.warps * cut.tiles * (1024 + self._copied_scales)
        return max(cut.stages * -(-step // 1024) * 1024, self.most_rows * (cut.warps * rows + 4) * 4) + 1024


@dataclass(frozen=True, slots=True)
class Float8Variant(CudaVariant):
    """All that w8a8.cu is compiled for."""

    @property
    def name(self) -> str:
        """The kernel's name, and its file's."""
        return "w8a8"

    @property
    def groups(self) -> int:
        """Scales of a row of x."""
        return 1 if self.by_row else self.in_features // FLOAT8_COLUMNS

    @property
    def two_fit(self) -> bool:
        """Whether the registers suffice for two blocks of threads on a multiprocessor."""
        return float8_two_fit(self.cut, self.most_rows, self.by_row)

    @property
    def needed_bytes(self) -> int:
        """Dynamic shared memory that the kernel uses."""
        rows, most = PART_ROWS * self.cut.tiles * self.cut.warps, self.most_rows
        step = (rows + most) * FLOAT8_COLUMNS + (0 if self.by_row else 4 * most)
        return max(self.cut.stages * step, most * (rows + 4) * 4) + 1024
