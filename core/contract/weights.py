"""Weights of linear layers, with one class per stored representation. Each checkpoint format is read into one of these classes.

A weight has torch's shape, [out_features, in_features], written [N, K] here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError, ModelError

MX_GROUP = 32
"""Group size of the OCP microscaling formats: number of elements of a row that share a scale."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 FP4 (e2m1) codes."""


class QuantizedWeight(ABC):
    """A quantized weight: quantized values, scales and optional zero points."""

    __slots__ = ()

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the weight format."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), from the first tensor in `spans`."""
        name, span = next(iter(self.spans.items()))
        rows, columns = getattr(self, name).shape
        return rows, columns * span

    @property
    @abstractmethod
    def spans(self) -> Mapping[str, int]:
        """Number of weight columns per column of each row-wise tensor, by field name. 0 means the tensor has no columns."""

    @abstractmethod
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [N, K], with columns in the order of the inputs."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the weight: quantized values, scales and others."""
        weight: Any = self
        return tuple(each for field in fields(weight) if isinstance(each := getattr(weight, field.name), Tensor))

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(each.nbytes for each in self.tensors)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.tensors[0].device

    def rows(self, rows: range | Tensor) -> QuantizedWeight:
        """Return a weight with some of this weight's rows. rows: a range, or int64 row indices in any order."""
        place = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        return self._changed({name: tensor[place] for name, tensor in self._spanned()})

    def columns(self, columns: range) -> QuantizedWeight | None:
        """Return a weight with a range of the columns, or None if the range splits a group or block, or columns are permuted."""
        spans = self.spans
        if any(span and (columns.start % span or columns.stop % span) for span in spans.values()):
            return None
        cut = {name: slice(columns.start // span, columns.stop // span) for name, span in spans.items() if span}
        return self._changed({name: tensor[:, cut[name]].contiguous() for name, tensor in self._spanned() if name in cut})

    def merged(self, others: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
        """Return one weight with this weight's rows followed by the rows of `others`, or None if the formats differ."""
        if any(type(each) is not type(self) for each in others):
            return None
        return self._changed({name: _joined([self, *others], name) for name in self.spans})

    def dequantized_stack(self, count: int, dtype: torch.dtype) -> Tensor:
        """Dequantize the concatenated weights of `count` experts, one expert at a time, to [count, N / count, K]."""
        rows, columns = self.shape
        each = rows // count
        whole = torch.empty(count, each, columns, dtype=dtype, device=self.device)
        for number, target in enumerate(whole):
            target.copy_(self.rows(range(number * each, (number + 1) * each)).dequantized(dtype))
        return whole

    def _spanned(self) -> list[tuple[str, Tensor]]:
        """Return the name and tensor of each field in `spans`, without fields that are None."""
        return [(name, tensor) for name in self.spans if (tensor := getattr(self, name)) is not None]

    def _changed(self, made: Mapping[str, Any]) -> QuantizedWeight:
        """Return a copy of the weight in which the values in `made` replace the fields of the same names."""
        weight: Any = self
        kind: Any = type(weight)
        found: QuantizedWeight = kind(**{each.name: made.get(each.name, getattr(weight, each.name)) for each in fields(weight)})
        return found


def _joined(parts: Sequence[QuantizedWeight], name: str) -> Tensor:
    return torch.cat([getattr(each, name) for each in parts])


def merged(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight with the rows of all parts, in order. The parts are weights of linear layers with the same input.

    :raises ModelError: if formats or group sizes differ.
    """
    whole = parts[0].merged(parts[1:]) if len(parts) > 1 else parts[0]
    if whole is None:
        kinds = ", ".join(each.kind for each in parts)
        got = "fp8 beside others or other blocks" if isinstance(parts[0], Float8Weight) else kinds
        raise ModelError(f"weights: products of one input need one form of weights, got {got}")
    return whole


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight(QuantizedWeight):
    """FP8 (e4m3) weight with one scale per block."""

    kind = "fp8"
    values: Tensor
    """float8_e4m3fn [N, K]"""
    scales: Tensor
    """float32 [ceil(N / block_rows), ceil(K / block_columns)]"""
    block: tuple[int, int]
    """Numbers of rows and columns that share a scale: (1, K) for one scale per row, (128, 128) for DeepSeek's blocks."""

    @property
    def spans(self) -> Mapping[str, int]:
        return {"values": 1, "scales": 0 if self.scales.shape[1] == 1 else self.block[1]}

    def rows(self, rows: range | Tensor) -> Float8Weight:
        """Return a weight with some of this weight's rows. Blocks become single rows if `rows` splits or reorders them."""
        high, wide = self.block
        if isinstance(rows, range):
            if rows.start % high == 0 and (rows.stop % high == 0 or rows.stop == self.shape[0]):
                scales = self.scales[rows.start // high : -(-rows.stop // high)]
                return Float8Weight(self.values[rows.start : rows.stop], scales, self.block)
            rows = torch.arange(rows.start, rows.stop, device=self.device)
        values = self.values.view(torch.uint8)[rows].view(self.values.dtype)
        return Float8Weight(values, self.scales[rows // high], (1, wide))

    def columns(self, columns: range) -> QuantizedWeight | None:
        if self.scales.shape[1] > 1:
            return QuantizedWeight.columns(self, columns)
        values = self.values[:, columns.start : columns.stop].contiguous()
        return Float8Weight(values, self.scales, (self.block[0], len(columns)))

    def merged(self, others: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
        """Merge rows as the base class does. Blocks become single rows if a part does not end at a block boundary."""
        parts = [self, *(each for each in others if isinstance(each, Float8Weight) and each.block[1] == self.block[1])]
        if len(parts) <= len(others):
            return None
        rows, columns = self.block
        whole = all(each.block == self.block and each.shape[0] % rows == 0 for each in parts)
        scales = [each.scales if whole else each.scales.repeat_interleave(each.block[0], 0)[: each.shape[0]] for each in parts]
        return Float8Weight(_joined(parts, "values"), torch.cat(scales), (rows if whole else 1, columns))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return (self.values.float() * _spread(self.scales, self.block, self.shape)).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight(QuantizedWeight):
    """Int8 weight with one scale per row."""

    kind = "int8"
    values: Tensor
    """int8 [N, K]"""
    scales: Tensor
    """float32 [N]"""

    @property
    def spans(self) -> Mapping[str, int]:
        return {"values": 1, "scales": 0}

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return (self.values.float() * self.scales[:, None]).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight(QuantizedWeight):
    """Int4 weight with values 0 to 15, and one scale and optional zero point per row and group of columns."""

    kind = "int4"
    packed: Tensor
    """uint8 [N, K / 2]: byte j of a group holds its column j (low 4 bits) and its column j + group_size / 2 (high 4 bits)."""
    scales: Tensor
    """float16, bfloat16 or float32 [N, K / group_size]"""
    zeros: Tensor | None
    """uint8 [N, K / group_size]: zero points, subtracted before scaling. None means 8 for all groups."""
    group_size: int
    order: Tensor | None = None
    """int32 [K]: index of the input of each column. None means column k belongs to input k."""

    @property
    def spans(self) -> Mapping[str, int]:
        return {"packed": 2, "scales": self.group_size, "zeros": self.group_size}

    def columns(self, columns: range) -> QuantizedWeight | None:
        return QuantizedWeight.columns(self, columns) if self.order is None else None

    def merged(self, others: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
        """Merge rows as the base class does. Parts without zero points get zero points of 8 if other parts have some."""
        parts = [self, *(each for each in others if isinstance(each, Int4Weight) and each.group_size == self.group_size)]
        if len(parts) <= len(others) or not all(_equal(each.order, self.order) for each in parts):
            return None
        zeros = [
            torch.full_like(each.packed[:, : each.scales.shape[1]], 8) if each.zeros is None else each.zeros for each in parts
        ]
        whole = None if all(each.zeros is None for each in parts) else torch.cat(zeros)
        return Int4Weight(_joined(parts, "packed"), _joined(parts, "scales"), whole, self.group_size, self.order)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        codes = unpacked(self.packed, self.group_size).view(len(self.packed), -1, self.group_size).float()
        zeros = 8.0 if self.zeros is None else self.zeros.float()[:, :, None]
        weight = ((codes - zeros) * self.scales.float()[:, :, None]).to(dtype).flatten(1)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order.long(), weight)


@dataclass(frozen=True, slots=True, eq=False)
class Float4Weight(QuantizedWeight):
    """FP4 (e2m1) weight with one power-of-two scale per row and group of 32 columns (MXFP4)."""

    kind = "mxfp4"
    packed: Tensor
    """uint8 [N, K / 2]: packed as in `Int4Weight`, with groups of 32 columns."""
    exponents: Tensor
    """uint8 [N, K / 32]: scale = 2 ** (exponent - 127)."""

    @property
    def spans(self) -> Mapping[str, int]:
        return {"packed": 2, "exponents": MX_GROUP}

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        table = torch.tensor(FP4_VALUES, device=self.packed.device)
        values = table[unpacked(self.packed, MX_GROUP).int()].view(len(self.packed), -1, MX_GROUP)
        scales = torch.ldexp(torch.ones_like(self.exponents, dtype=torch.float32), self.exponents.int() - 127)
        return (values * scales[:, :, None]).to(dtype).flatten(1)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def packed(codes: Tensor, group_size: int) -> Tensor:
    """Pack 4-bit values, uint8 [N, K], to uint8 [N, K / 2] in the layout of `Int4Weight.packed`."""
    low, high = codes.view(len(codes), -1, 2, group_size // 2).unbind(2)
    return (low | high << 4).flatten(1)


def unpacked(packed: Tensor, group_size: int) -> Tensor:
    """Unpack the result of `packed` to uint8 [N, K]."""
    halves = packed.view(len(packed), -1, group_size // 2)
    return torch.stack([halves & 15, halves >> 4], dim=2).flatten(1)


def _spread(scales: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Return scales that broadcast to the weight: one per element, or one per row."""
    rows, columns = block
    if rows > 1:
        scales = scales.repeat_interleave(rows, 0)[: shape[0]]
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(columns, 1)[:, : shape[1]]


Weight = Tensor | QuantizedWeight
"""Weight of a linear layer: a plain matrix or a quantized weight."""
FORMATS = ("plain", "fp8", "int8", "int4", "mxfp4")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Format of a weight, without tensors: the properties that kernels distinguish."""

    name: str
    """Name from FORMATS, or the name of a GGUF block format."""
    group_size: int | None = None
    """Number of columns of a row that share a scale, for 4-bit weights."""
    block: tuple[int, int] | None = None
    """Numbers of rows and columns that share a scale, for FP8 weights. None means one scale per row, or one for all rows."""
    zeros: bool = False
    """True if each group has a zero point."""
    order: bool = False
    """True if the columns are permuted relative to the inputs."""

    @classmethod
    def of(cls, weight: Tensor | QuantizedWeight) -> WeightFormat:
        """Return the format of a weight."""
        if isinstance(weight, Tensor):
            return cls("plain")
        if isinstance(weight, Float8Weight):
            by_row = weight.scales.shape[1] == 1 and weight.block[0] in (1, len(weight.values))
            return cls(weight.kind, block=None if by_row else weight.block)
        if isinstance(weight, Int4Weight):
            return cls(weight.kind, weight.group_size, zeros=weight.zeros is not None, order=weight.order is not None)
        return cls(weight.kind, MX_GROUP if isinstance(weight, Float4Weight) else None)

    def sample(self, rows: int, columns: int) -> QuantizedWeight | None:
        """Return a weight of this format on torch's device `meta`, for checks of shapes, or None if this module has no class for
        the format."""

        def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        if self.name == "fp8":
            high, wide = self.block or (1, columns)
            scales = empty(-(-rows // high), -(-columns // wide), dtype=torch.float32)
            return Float8Weight(empty(rows, columns, dtype=torch.float8_e4m3fn), scales, (high, wide))
        if self.name == "int8":
            return Int8Weight(empty(rows, columns, dtype=torch.int8), empty(rows, dtype=torch.float32))
        if self.name == "mxfp4":
            return Float4Weight(empty(rows, columns // 2), empty(rows, columns // MX_GROUP))
        if self.name != "int4" or self.group_size is None:
            return None
        groups = columns // self.group_size
        zeros, order = empty(rows, groups) if self.zeros else None, empty(columns, dtype=torch.int32) if self.order else None
        return Int4Weight(empty(rows, columns // 2), empty(rows, groups, dtype=torch.float16), zeros, self.group_size, order)

    def __str__(self) -> str:
        if self.name == "fp8":
            return f"fp8 {'rows' if self.block is None else '{}x{}'.format(*self.block)}"
        words = self.name if self.group_size is None or self.name == "mxfp4" else f"{self.name} of {self.group_size}"
        words = f"{words} with zeros" if self.zeros else words
        return f"{words}, columns in another order" if self.order else words


def rewrite(old: Any, new: Any, kernel: str) -> None:
    """Copy the tensors of `new` into the tensors of `old`, whose addresses are captured in CUDA graphs.

    Both are results of a kernel's `prepare`. Tensors are found in tuples, lists, mappings and fields of objects.

    :raises ConfigError: if `old` and `new` differ in anything other than the elements of tensors.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    if not _pair(old, new, pairs, set()):
        hint = "its method `update` can write it, see LinearKernel.update; or make a new LLM of the new weights"
        got = f"others by the kernel {kernel}"
        raise ConfigError("load_weights", "kernels whose `prepare` returns the same for new weights but for numbers", got, hint)
    for target, source in pairs:
        target.copy_(source)


def _pair(old: Any, new: Any, pairs: list[tuple[Tensor, Tensor]], seen: set[int]) -> bool:
    """Collect the corresponding tensors of two objects in `pairs`. Return False if the objects differ in anything else."""
    if old is new or id(old) in seen:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, Tensor):
        pairs.append((old, new))
        return (old.shape, old.dtype, old.layout) == (new.shape, new.dtype, new.layout)
    seen.add(id(old))
    if isinstance(old, list | tuple):
        return len(old) == len(new) and all(_pair(one, other, pairs, seen) for one, other in zip(old, new, strict=True))
    if is_dataclass(old):
        return all(_pair(getattr(old, each.name), getattr(new, each.name), pairs, seen) for each in fields(old))
    if not isinstance(old, dict) and not hasattr(old, "__dict__"):
        return bool(old == new)
    held, other = (each if isinstance(each, dict) else vars(each) for each in (old, new))
    return held.keys() == other.keys() and all(_pair(held[key], other[key], pairs, seen) for key in held)
