"""The weights that linear kernels read: one class for each stored representation, into which a checkpoint's format is read.

A weight is [out_features, in_features], as torch's, written N and K here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

MX_GROUP = 32
"""Elements of a row that share a scale in the microscaling formats of the Open Compute Project."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of a float of 4 bits (e2m1)."""


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight:
    """Floats of 8 bits (e4m3), with a scale for each block."""

    kind: ClassVar[str] = "fp8"
    values: Tensor
    """float8_e4m3fn [N, K]"""
    scales: Tensor
    """float32 [ceil(N / block_rows), ceil(K / block_columns)]"""
    block: tuple[int, int]
    """Rows and columns that share a scale: (1, K) for a scale a row, (128, 128) for DeepSeek's blocks."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.values.shape[0], self.values.shape[1]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight itself, [N, K]."""
        return (self.values.float() * _spread(self.scales, self.block, self.shape)).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """Whole numbers of 8 bits, with a scale for each row."""

    kind: ClassVar[str] = "int8"
    values: Tensor
    """int8 [N, K]"""
    scales: Tensor
    """float32 [N]"""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.values.shape[0], self.values.shape[1]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight itself, [N, K]."""
        return (self.values.float() * self.scales[:, None]).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """Whole numbers of 4 bits, 0 to 15, with a scale and perhaps a zero for each group of columns of a row."""

    kind: ClassVar[str] = "int4"
    packed: Tensor
    """uint8 [N, K / 2]: byte j of a group holds its column j below and its column j + group_size / 2 above."""
    scales: Tensor
    """float16, bfloat16 or float32 [N, K / group_size]"""
    zeros: Tensor | None
    """uint8 [N, K / group_size], what is subtracted first; None: 8 everywhere."""
    group_size: int
    order: Tensor | None = None
    """int32 [K]: the input that belongs to each column; None: column k belongs to input k."""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.packed.shape[0], self.packed.shape[1] * 2

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight itself, [N, K], its columns in the order of the inputs."""
        codes = unpacked(self.packed, self.group_size).view(len(self.packed), -1, self.group_size).float()
        zeros = 8.0 if self.zeros is None else self.zeros.float()[:, :, None]
        weight = ((codes - zeros) * self.scales.float()[:, :, None]).to(dtype).flatten(1)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order.long(), weight)


@dataclass(frozen=True, slots=True, eq=False)
class Float4Weight:
    """Floats of 4 bits (e2m1), with a power of two for each 32 columns of a row (MXFP4)."""

    kind: ClassVar[str] = "mxfp4"
    packed: Tensor
    """uint8 [N, K / 2], packed as Int4Weight's with groups of 32 columns"""
    exponents: Tensor
    """uint8 [N, K / 32]: the scale is 2 ** (exponent - 127)"""

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.packed.shape[0], self.packed.shape[1] * 2

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight itself, [N, K]."""
        table = torch.tensor(FP4_VALUES, device=self.packed.device)
        values = table[unpacked(self.packed, MX_GROUP).int()].view(len(self.packed), -1, MX_GROUP)
        scales = torch.ldexp(torch.ones_like(self.exponents, dtype=torch.float32), self.exponents.int() - 127)
        return (values * scales[:, :, None]).to(dtype).flatten(1)


def packed(codes: Tensor, group_size: int) -> Tensor:
    """Pack codes of 4 bits, uint8 [N, K], as `Int4Weight.packed` says: uint8 [N, K / 2]."""
    low, high = codes.view(len(codes), -1, 2, group_size // 2).unbind(2)
    return (low | high << 4).flatten(1)


def unpacked(packed: Tensor, group_size: int) -> Tensor:
    """Undo `packed`: uint8 [N, K]."""
    halves = packed.view(len(packed), -1, group_size // 2)
    return torch.stack([halves & 15, halves >> 4], dim=2).flatten(1)


def _spread(scales: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """A scale for each element, or one that broadcasts."""
    rows, columns = block
    if rows > 1:
        scales = scales.repeat_interleave(rows, 0)[: shape[0]]
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(columns, 1)[:, : shape[1]]


Weight = Tensor | Float8Weight | Int8Weight | Int4Weight | Float4Weight
"""The weight of a linear layer: a plain matrix, or one of the quantised weights."""
FORMATS = ("plain", "fp8", "int8", "int4", "mxfp4")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The representation of a weight without its tensors: what kernels tell apart."""

    name: str
    """Out of FORMATS; blocks of .gguf files have names of their own."""
    group_size: int | None = None
    """Columns of a row that share a scale, of weights of 4 bits."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, of floats of 8 bits. None means one scale for each row, or one for all rows."""
    zeros: bool = False
    """True if each group has a zero."""
    order: bool = False
    """True if the columns are in another order than the inputs."""

    @classmethod
    def of(cls, weight: Weight) -> WeightFormat:
        """Return the format of a weight."""
        if isinstance(weight, Tensor):
            return cls("plain")
        if isinstance(weight, Float8Weight):
            by_row = weight.scales.shape[1] == 1 and weight.block[0] in (1, len(weight.values))
            return cls(weight.kind, block=None if by_row else weight.block)
        if isinstance(weight, Int4Weight):
            return cls(weight.kind, weight.group_size, zeros=weight.zeros is not None, order=weight.order is not None)
        return cls(weight.kind, MX_GROUP if isinstance(weight, Float4Weight) else None)

    def __str__(self) -> str:
        if self.name == "fp8":
            return f"fp8 {'rows' if self.block is None else '{}x{}'.format(*self.block)}"
        words = self.name if self.group_size is None or self.name == "mxfp4" else f"{self.name} of {self.group_size}"
        words = f"{words} with zeros" if self.zeros else words
        return f"{words}, columns in another order" if self.order else words
