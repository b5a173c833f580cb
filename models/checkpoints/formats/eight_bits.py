"""Weights of 8 bits an element: floats (DeepSeek's blocks, compressed-tensors, ModelOpt) and whole numbers (W8A8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from headway.kernels.linear.forms import Float8Weight, Int8Weight
from headway.models.checkpoints.formats.drawn import Octets, float8, int8
from headway.models.checkpoints.formats.module import QuantizedModule
from headway.models.checkpoints.tensor_files import PLAIN

_FLOAT8, _INT8 = ("float8_e4m3fn",), ("int8",)
_POWERS = "float8_e8m0fnu"
"""Scales that are powers of two alone."""


@dataclass(frozen=True, slots=True)
class Float8Format:
    """`weight` float8_e4m3fn [N, K] times `weight_scale` (or `weight_scale_inv`, which multiplies too)."""

    scales: Literal["tensor", "channel"] | tuple[int, int]
    """What has a scale: the whole tensor, each row, or blocks of so many rows and columns."""
    inverse_name: bool = False
    """Whether the method's own name for scales is `weight_scale_inv`."""
    suffixes: ClassVar[tuple[str, ...]] = (
        ".weight",
        ".weight_scale",
        ".weight_scale_inv",
        ".input_scale",
        ".activation_scale",
        ".activation_scale_inv",
    )
    of_experts: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The format in words."""
        if isinstance(self.scales, tuple):
            return f"fp8 (blocks of {self.scales[0]} x {self.scales[1]})"
        return f"fp8 (a scale for each {'row' if self.scales == 'channel' else 'tensor'})"

    def holds(self, module: QuantizedModule) -> bool:
        """See StoredFormat."""
        return module.elements(".weight") in _FLOAT8

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        """See StoredFormat."""
        return (1, self.scales[1]) if isinstance(self.scales, tuple) else (1, 1)

    def read(self, module: QuantizedModule) -> Float8Weight:
        """See StoredFormat."""
        values = module.take(".weight", _FLOAT8, module.rows, module.columns)
        suffix = module.suffix_of(self.suffixes[1:3] if not self.inverse_name else self.suffixes[2:0:-1])
        if not isinstance(self.scales, tuple):
            scales = _row_scales(module, suffix, self.scales)
            return Float8Weight(values, scales[:, None], (1, module.columns.size))
        rows, columns = self.scales
        blocks = module.columns.units(columns)
        elements = (*PLAIN, _POWERS)
        if _is_cut_within(module, rows):
            held = torch.tensor([row // rows for row in module.rows.pick(range(module.rows.whole))], device=values.device)
            scales = module.take_scales(suffix, -(-module.rows.whole // rows), blocks, elements=elements)
            return Float8Weight(values, scales.float()[held], (1, columns))
        scales = module.take_scales(suffix, module.rows.units(rows), blocks, elements=elements)
        return Float8Weight(values, scales.float(), (rows, columns))

    def drawn(self, octets: Octets, rows: int, columns: int, std: float, dtype: torch.dtype) -> Float8Weight:
        """See StoredFormat."""
        return float8(octets, rows, columns, std, self.scales if isinstance(self.scales, tuple) else None)


@dataclass(frozen=True, slots=True)
class Int8Format:
    """`weight` int8 [N, K] times `weight_scale`: one for each row, or for all."""

    scales: Literal["tensor", "channel"]
    suffixes: ClassVar[tuple[str, ...]] = (".weight", ".weight_scale", ".input_scale", ".input_zero_point", ".weight_zero_point")
    of_experts: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The format in words."""
        return f"int8 (a scale for each {'row' if self.scales == 'channel' else 'tensor'})"

    def holds(self, module: QuantizedModule) -> bool:
        """See StoredFormat."""
        return module.elements(".weight") in _INT8

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        """See StoredFormat."""
        return 1, 1

    def read(self, module: QuantizedModule) -> Int8Weight:
        """See StoredFormat."""
        values = module.take(".weight", _INT8, module.rows, module.columns)
        if module.elements(".weight_zero_point"):
            zeros: Tensor = module.take(".weight_zero_point", _INT8, *module.shape(".weight_zero_point"))
            if bool(zeros.any()):
                raise module.error(".weight_zero_point", "needs zeros alone: rows are computed without", "others")
        return Int8Weight(values, _row_scales(module, ".weight_scale", self.scales))

    def drawn(self, octets: Octets, rows: int, columns: int, std: float, dtype: torch.dtype) -> Int8Weight:
        """See StoredFormat."""
        return int8(octets, rows, columns, std)


def _row_scales(module: QuantizedModule, suffix: str, scales: Literal["tensor", "channel"]) -> Tensor:
    """float32 [N]: a scale for each row that is held, also of a tensor that has one scale."""
    stored = module.shape(suffix) if module.elements(suffix) else [1]
    if scales == "tensor":
        shape = stored if stored in ([], [1], [1, 1]) else [1]
        return module.take_scales(suffix, *shape).float().reshape(1).repeat(module.rows.size)
    rest = [] if len(stored) == 1 else [1]
    return module.take_scales(suffix, module.rows, *rest).float().flatten()


def _is_cut_within(module: QuantizedModule, rows: int) -> bool:
    """Whether what is held begins or ends within a block of so many rows."""
    ends = [end for each in module.rows.held for end in (each.start, each.stop)]
    return any(end % rows and end != module.rows.whole for end in ends)
