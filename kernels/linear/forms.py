"""Operations on quantised weights: rows and columns of them, several as one, and how kernels read their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.contract.weights import MX_GROUP, Float4Weight, Float8Weight, Int4Weight, Int8Weight, WeightFormat
from headway.kernels.linear.gguf_weight import GgufWeight

QuantizedWeight = Float8Weight | Int8Weight | Int4Weight | Float4Weight | GgufWeight


def format_of(weight: QuantizedWeight) -> WeightFormat:
    """Return the format of a weight; blocks of a .gguf file have one that is named by their types."""
    return WeightFormat(weight.kind) if isinstance(weight, GgufWeight) else WeightFormat.of(weight)


@dataclass(slots=True, eq=False)
class Operand:
    """What our kernels read of a layer."""

    weight: Any
    """As the kernel arranges it."""
    bias: Tensor | None
    out_features: int
    in_features: int
    order: Tensor | None = None
    """int32 [in_features]: the input that belongs to each column; None: column k belongs to input k."""

    @classmethod
    def of(cls, weight: Any, bias: Tensor | None, arranged: Any = None) -> Operand:
        """Make what a kernel reads of a weight. arranged: in the kernel's order, if it has one of its own."""
        rows, columns = weight.shape
        return cls(weight if arranged is None else arranged, bias, rows, columns, getattr(weight, "order", None))


def without_elements(form: WeightFormat, rows: int, columns: int) -> QuantizedWeight:
    """Return a weight [rows, columns] on torch's device `meta`: for rules that ask for shapes alone. form: not plain."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if form.name == "fp8":
        high, wide = form.block or (1, columns)
        return Float8Weight(
            empty(rows, columns, dtype=torch.float8_e4m3fn), empty(-(-rows // high), -(-columns // wide)), (high, wide)
        )
    if form.name == "int8":
        return Int8Weight(empty(rows, columns, dtype=torch.int8), empty(rows))
    packed = empty(rows, columns // 2, dtype=torch.uint8)
    if form.name == "mxfp4":
        return Float4Weight(packed, empty(rows, columns // MX_GROUP, dtype=torch.uint8))
    assert form.name == "int4"
    assert form.group_size is not None
    scales = empty(rows, columns // form.group_size)
    zeros = torch.empty_like(scales, dtype=torch.uint8) if form.zeros else None
    order = empty(columns, dtype=torch.int32) if form.order else None
    return Int4Weight(packed, scales, zeros, form.group_size, order)


def num_bytes(weight: QuantizedWeight) -> int:
    """Memory that a weight takes, its scales included."""
    if isinstance(weight, GgufWeight):
        return weight.nbytes
    tensors = (getattr(weight, field.name) for field in fields(weight))
    return sum(each.nbytes for each in tensors if isinstance(each, Tensor))


def rows_of(weight: QuantizedWeight, rows: range) -> QuantizedWeight:
    """Cut out rows that follow one another. Of blocks that they cut through, each row gets a scale of its own."""
    place = slice(rows.start, rows.stop)
    if isinstance(weight, GgufWeight):
        return weight.rows(rows)
    if isinstance(weight, Float8Weight):
        high, wide = weight.block
        if rows.start % high == 0 and (rows.stop % high == 0 or rows.stop == weight.shape[0]):
            return Float8Weight(weight.values[place], weight.scales[rows.start // high : -(-rows.stop // high)], weight.block)
        each = torch.arange(rows.start, rows.stop, device=weight.scales.device) // high
        return Float8Weight(weight.values[place], weight.scales[each], (1, wide))
    return _picked(weight, place)


def _picked(weight: Int8Weight | Int4Weight | Float4Weight, rows: slice | Tensor) -> QuantizedWeight:
    """Some rows of a weight each of whose rows has scales of its own."""
    if isinstance(weight, Int4Weight):
        zeros = None if weight.zeros is None else weight.zeros[rows]
        return replace(weight, packed=weight.packed[rows], scales=weight.scales[rows], zeros=zeros)
    return type(weight)(*(getattr(weight, field.name)[rows] for field in fields(weight)))


def columns_of(weight: QuantizedWeight, columns: range) -> QuantizedWeight | None:
    """Cut out columns that follow one another; None where they cut through a group or block."""
    place = slice(columns.start, columns.stop)
    if isinstance(weight, GgufWeight):
        return weight.columns(columns)
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.values[:, place].contiguous(), weight.scales)
    if isinstance(weight, Float8Weight):
        if weight.scales.shape[1] == 1:  # of whole rows
            return Float8Weight(weight.values[:, place].contiguous(), weight.scales, (weight.block[0], len(columns)))
        wide = weight.block[1]
    else:
        wide = weight.group_size if isinstance(weight, Int4Weight) else MX_GROUP
    if columns.start % wide or columns.stop % wide or getattr(weight, "order", None) is not None:
        return None
    groups, half = slice(columns.start // wide, columns.stop // wide), slice(columns.start // 2, columns.stop // 2)
    if isinstance(weight, Float8Weight):
        return Float8Weight(weight.values[:, place].contiguous(), weight.scales[:, groups].contiguous(), weight.block)
    if isinstance(weight, Float4Weight):
        return Float4Weight(weight.packed[:, half].contiguous(), weight.exponents[:, groups].contiguous())
    zeros = None if weight.zeros is None else weight.zeros[:, groups].contiguous()
    return Int4Weight(weight.packed[:, half].contiguous(), weight.scales[:, groups].contiguous(), zeros, wide)


def with_rows(weight: QuantizedWeight, order: Tensor) -> QuantizedWeight:
    """Take rows in another order. order: int64 [N], the row that comes to each place. Blocks become blocks of single rows."""
    if isinstance(weight, GgufWeight):
        return weight.in_order(order)
    if isinstance(weight, Float8Weight):
        values = weight.values.view(torch.uint8)[order].view(weight.values.dtype)
        return Float8Weight(values, weight.scales[order // weight.block[0]], (1, weight.block[1]))
    return _picked(weight, order)


def dequantized_stack(weight: QuantizedWeight, count: int, dtype: torch.dtype) -> Tensor:
    """Expand the weights of `count` experts that lie one after the other, one at a time: [count, N / count, K]."""
    rows, columns = weight.shape
    each = rows // count
    whole = torch.empty(count, each, columns, dtype=dtype, device=device_of(weight))
    for number, target in enumerate(whole):
        target.copy_(rows_of(weight, range(number * each, (number + 1) * each)).dequantized(dtype))
    return whole


def device_of(weight: QuantizedWeight) -> torch.device:
    """Where a weight lies."""
    if isinstance(weight, GgufWeight):
        return weight.blocks[0].device
    return (weight.exponents if isinstance(weight, Float4Weight) else weight.scales).device


def merged(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights of one input as one, the rows of each after those of the one before.

    :raises ModelError: their forms differ, or their groups.
    """
    first, *rest = parts
    if not rest:
        return first
    if isinstance(first, Float8Weight):
        return _merged_float8([each for each in parts if isinstance(each, Float8Weight)], len(parts))
    gguf = [each for each in parts if isinstance(each, GgufWeight)]
    if len(gguf) == len(parts):
        return GgufWeight.of_parts([part for each in gguf for part in zip(each.types, each.blocks, strict=True)])
    alike = all(type(each) is type(first) for each in rest)
    if isinstance(first, Int4Weight):
        mine = [each for each in parts if isinstance(each, Int4Weight) and each.group_size == first.group_size]
        same = len(mine) == len(parts) and all(_equal(each.order, first.order) for each in mine)
        if same:
            zeros = [
                torch.full_like(each.packed[:, : each.scales.shape[1]], 8) if each.zeros is None else each.zeros for each in mine
            ]
            whole = None if all(each.zeros is None for each in mine) else torch.cat(zeros)
            return Int4Weight(_cat(mine, "packed"), _cat(mine, "scales"), whole, first.group_size, first.order)
    elif alike and not isinstance(first, GgufWeight):
        return type(first)(*(_cat(parts, field.name) for field in fields(first)))
    raise ModelError(f"weights: products of one input need one form of weights, got {', '.join(each.kind for each in parts)}")


def _merged_float8(parts: Sequence[Float8Weight], count: int) -> Float8Weight:
    """Blocks of rows that do not end where a part ends become blocks of single rows."""
    if len(parts) < count or len({each.block[1] for each in parts}) > 1:
        raise ModelError("weights: products of one input need one form of weights, got fp8 beside others or other blocks")
    rows, columns = parts[0].block
    whole = all(each.block == parts[0].block and each.shape[0] % rows == 0 for each in parts)
    scales = [each.scales if whole else each.scales.repeat_interleave(each.block[0], 0)[: each.shape[0]] for each in parts]
    return Float8Weight(_cat(parts, "values"), torch.cat(scales), (rows if whole else 1, columns))


def _cat(parts: Sequence[QuantizedWeight], field: str) -> Tensor:
    return torch.cat([getattr(each, field) for each in parts])


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


_LEAST_SPAN = 16
"""Columns of a product that the matrix units take at least."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """What the kernel must know of a weight's form: lengths in bytes of a row."""

    kind: str
    row: int
    half: int
    """Half a group, where a byte holds two codes; 0: a byte is a code."""
    scales: int
    """Scales of a row."""
    scale_span: int
    """Bytes under one scale."""
    scale_rows: int
    """Rows that share scales."""
    zeros: bool
    span: int
    """Bytes that a slice can have at most: they lie under one scale."""


def weight_bytes(weight: QuantizedWeight) -> WeightBytes | None:
    """How the kernel reads a weight; None where it cannot: too few columns share a scale, or they do not fill a row."""
    columns = weight.shape[1]
    if isinstance(weight, Int4Weight | Float4Weight):
        group = weight.group_size if isinstance(weight, Int4Weight) else MX_GROUP
        row, half, scale_rows = columns // 2, group // 2, 1
        scale_span, zeros = half, isinstance(weight, Int4Weight) and weight.zeros is not None
        span = 64 if half == MX_GROUP // 2 and row % 64 == 0 else math.gcd(half, 64)
    else:
        block = weight.block if isinstance(weight, Float8Weight) else (1, columns)
        row, half, zeros, scale_rows = columns, 0, False, block[0]
        scale_span = min(block[1], columns)
        span = math.gcd(scale_span, 128)
    if span < _LEAST_SPAN or row % scale_span:
        return None
    return WeightBytes(weight.kind, row, half, row // scale_span, scale_span, scale_rows, zeros, span)


def tensors_of(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes, scales and zeros, each contiguous; something else where there are no zeros."""
    if isinstance(weight, Int4Weight):
        return weight.packed, weight.scales, weight.scales if weight.zeros is None else weight.zeros
    if isinstance(weight, Float4Weight):
        return weight.packed, weight.exponents, weight.exponents
    assert isinstance(weight, Float8Weight | Int8Weight)
    return weight.values.view(torch.uint8), weight.scales, weight.scales
