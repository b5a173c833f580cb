"""Byte layouts of quantized weights as kernels read them, and the block formats of .gguf files, with functions that dequantize
the blocks.

Blocks hold values of 4 to 8 bits in llama.cpp's layouts (ggml-common.h, ggml-quants.c).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.linear import LinearSpec
from headway.core.contract.weights import MX_GROUP, Float4Weight, Float8Weight, Int4Weight, Int8Weight, QuantizedWeight
from headway.kernels.runtime.native.library import SCALE_D, SCALE_DM, SCALE_SUPER, SCALE_SUPER_DM, QuantizedValues

_GROUP = 32
_SUPER = 256
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Integers that are represented by the 4-bit values of IQ4_NL and IQ4_XS."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block type of .gguf files."""

    columns: int
    """Columns per block."""
    num_bytes: int
    """Bytes per block."""
    decode: Callable[[Tensor], QuantizedValues]
    """Function that decodes blocks, uint8 [rows, blocks, num_bytes], to quantized values and scales."""


@dataclass(frozen=True, slots=True, eq=False)
class GgufWeight(QuantizedWeight):
    """Rows of .gguf blocks in the file's layout. Merged layers may have consecutive rows of several types."""

    types: tuple[str, ...]
    """Names of block types in BLOCK_TYPES, one for each run of rows."""
    blocks: tuple[Tensor, ...]
    """uint8 [rows, blocks, num_bytes], one tensor for each run of rows."""

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[str, Tensor]]) -> GgufWeight:
        """Concatenate runs of rows. Adjacent runs of one type are merged."""
        runs = [(name, [blocks for _, blocks in run]) for name, run in groupby(parts, key=lambda part: part[0])]
        return cls(tuple(name for name, _ in runs), tuple(torch.cat(blocks) for _, blocks in runs))

    @property
    def kind(self) -> str:
        """Types of the blocks, for messages."""
        return f"gguf {' and '.join(dict.fromkeys(self.types))}"

    @property
    def shape(self) -> tuple[int, int]:
        return sum(map(len, self.blocks)), self.blocks[0].shape[1] * BLOCK_TYPES[self.types[0]].columns

    @property
    def spans(self) -> Mapping[str, int]:
        """Return an empty mapping, because blocks contain their scales."""
        return {}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Blocks of each run of rows."""
        return self.blocks

    def coded(self) -> list[QuantizedValues]:
        """Return the quantized values and scales of each run of rows."""
        return [BLOCK_TYPES[name].decode(blocks) for name, blocks in zip(self.types, self.blocks, strict=True)]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([_expanded(coded).to(dtype) for coded in self.coded()])

    def rows(self, rows: range | Tensor) -> GgufWeight:
        """Select rows. With several block types, a tensor of indices makes each row a separate run."""
        if not isinstance(rows, range):
            if len(self.types) == 1:
                return GgufWeight(self.types, (self.blocks[0][rows],))
            each = [self.rows(range(row, row + 1)) for row in rows.tolist()]
            return GgufWeight(tuple(row.types[0] for row in each), tuple(row.blocks[0] for row in each))
        types, blocks, first = [], [], 0
        for name, part in zip(self.types, self.blocks, strict=True):
            held = part[max(rows.start - first, 0) : max(rows.stop - first, 0)]
            first += len(part)
            if len(held):
                types.append(name)
                blocks.append(held)
        return GgufWeight(tuple(types), tuple(blocks))

    def columns(self, columns: range) -> GgufWeight | None:
        blocks = []
        for name, part in zip(self.types, self.blocks, strict=True):
            wide = BLOCK_TYPES[name].columns
            if columns.start % wide or columns.stop % wide:
                return None
            blocks.append(part[:, columns.start // wide : columns.stop // wide].contiguous())
        return GgufWeight(self.types, tuple(blocks))

    def merged(self, others: Sequence[QuantizedWeight]) -> GgufWeight | None:
        parts = [self, *(each for each in others if isinstance(each, GgufWeight))]
        if len(parts) <= len(others):
            return None
        return GgufWeight.of_parts([part for each in parts for part in zip(each.types, each.blocks, strict=True)])


def _expanded(coded: QuantizedValues) -> Tensor:
    codes = (coded.codes if coded.table is None else coded.table[coded.codes.long()]).float()
    numbers = [scales.float() for scales in coded.scales]
    if coded.supers:
        repeat = coded.superblock // coded.group
        numbers = [n * s.float().repeat_interleave(repeat, 1) for n, s in zip(numbers, coded.supers, strict=True)]
    groups = codes.view(len(codes), -1, coded.group) * numbers[0][:, :, None]
    return (groups if len(numbers) == 1 else groups + numbers[1][:, :, None]).flatten(1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block: [rows, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(octets: Tensor) -> Tensor:
    """Return the low halves of bytes, then the high halves: [..., n] -> [..., 2 n]."""
    return torch.cat([octets & 15, octets >> 4], dim=-1)


def _parts(octets: Tensor, *sizes: int) -> Tensor:
    """Reshape the bytes of a block: [..., n] -> [..., *sizes]."""
    return octets.reshape(*octets.shape[:-1], *sizes)


def _fifth_bits(octets: Tensor) -> Tensor:
    """Return 32 bits from 4 bytes, each shifted to bit 4: [..., 4] -> [..., 32]."""
    bits = octets[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _table(values: tuple[int, ...] | range) -> Tensor:
    return torch.tensor(tuple(values), dtype=torch.int8)


def _coded(blocks: Tensor, values: tuple[int, ...] | range) -> QuantizedValues:
    codes = _nibbles(blocks[..., 2:]).flatten(1).view(torch.int8)
    return QuantizedValues(codes, _table(values), SCALE_D, _GROUP, (_half(blocks, 0),))


def _q4_1(blocks: Tensor) -> QuantizedValues:
    scales = _half(blocks, 0), _half(blocks, 2)
    return QuantizedValues(_nibbles(blocks[..., 4:]).flatten(1).view(torch.int8), _table(range(16)), SCALE_DM, _GROUP, scales)


def _q5_0(blocks: Tensor) -> QuantizedValues:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return QuantizedValues(codes.flatten(1).view(torch.int8) - 16, None, SCALE_D, _GROUP, (_half(blocks, 0),), num_bits=5)


def _q5_1(blocks: Tensor) -> QuantizedValues:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    scales = _half(blocks, 0), _half(blocks, 2)
    return QuantizedValues(codes.flatten(1).view(torch.int8), None, SCALE_DM, _GROUP, scales, num_bits=5)


def _q8_0(blocks: Tensor) -> QuantizedValues:
    return QuantizedValues(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), None, SCALE_D, _GROUP, (_half(blocks, 0),))


def _six_bits(octets: Tensor) -> tuple[Tensor, Tensor]:
    """Return 6-bit scales and minimums from 12 bytes per block, as uint8 [rows, 8 * blocks] each."""
    low, middle, high = octets.tensor_split([4, 8], dim=-1)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    mins = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1)
    return scales.flatten(1), mins.flatten(1)


def _q4_k(blocks: Tensor) -> QuantizedValues:
    codes = _nibbles(_parts(blocks[..., 16:], 4, 32)).flatten(1).view(torch.int8)
    supers = _half(blocks, 0), -_half(blocks, 2)
    return QuantizedValues(codes, _table(range(16)), SCALE_SUPER_DM, _GROUP, _six_bits(blocks[..., 4:16]), supers, _SUPER)


def _q5_k(blocks: Tensor) -> QuantizedValues:
    low = _parts(_nibbles(_parts(blocks[..., 48:], 4, 32)), 2, 32)
    high = blocks[..., 16:48][..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    codes = (low | high.reshape((*high.shape[:-2], 4, 2, 32)) << 4).flatten(1).view(torch.int8)
    supers = _half(blocks, 0), -_half(blocks, 2)
    return QuantizedValues(codes, None, SCALE_SUPER_DM, _GROUP, _six_bits(blocks[..., 4:16]), supers, _SUPER, 5)


def _q6_k(blocks: Tensor) -> QuantizedValues:
    low = _nibbles(_parts(blocks[..., :128], 2, 64))
    high = _parts(blocks[..., 128:192], 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    codes = (low | high.flatten(-2) << 4).flatten(1).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return QuantizedValues(codes, None, SCALE_SUPER, 16, (scales,), (_half(blocks, 208),), _SUPER, 6)


def _iq4_xs(blocks: Tensor) -> QuantizedValues:
    high = blocks[..., 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], dim=-1)
    scales = (low.flatten(-2) | high.flatten(-2) << 4).flatten(1).view(torch.int8) - 32
    codes = _nibbles(_parts(blocks[..., 8:], 8, 16)).flatten(1).view(torch.int8)
    return QuantizedValues(codes, _table(_IQ4), SCALE_SUPER, _GROUP, (scales,), (_half(blocks, 0),), _SUPER)


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(_GROUP, 18, partial(_coded, values=range(-8, 8))),
    "Q4_1": BlockType(_GROUP, 20, _q4_1),
    "Q5_0": BlockType(_GROUP, 22, _q5_0),
    "Q5_1": BlockType(_GROUP, 24, _q5_1),
    "Q8_0": BlockType(_GROUP, 34, _q8_0),
    "Q4_K": BlockType(_SUPER, 144, _q4_k),
    "Q5_K": BlockType(_SUPER, 176, _q5_k),
    "Q6_K": BlockType(_SUPER, 210, _q6_k),
    "IQ4_NL": BlockType(_GROUP, 18, partial(_coded, values=_IQ4)),
    "IQ4_XS": BlockType(_SUPER, 136, _iq4_xs),
}
"""Block types that our C library multiplies, by name. Tensors of other types are dequantized when the file is converted."""


@dataclass(slots=True, eq=False)
class Operand:
    """A layer's weight and bias, as Headway's kernels read them."""

    weight: Any
    """Weight in the kernel's layout."""
    bias: Tensor | None
    out_features: int
    in_features: int
    order: Tensor | None = None
    """int32 [in_features]: input feature of each column. None means that column k belongs to input feature k."""

    @classmethod
    def of(cls, weight: Any, bias: Tensor | None, arranged: Any = None) -> Operand:
        """Make the operand for a weight. arranged: the weight in the kernel's layout. None means that `weight` has it."""
        rows, columns = weight.shape
        return cls(weight if arranged is None else arranged, bias, rows, columns, getattr(weight, "order", None))


def sample_of(spec: LinearSpec) -> QuantizedWeight:
    """Return a quantized weight like the layer's, without elements."""
    sample = spec.weight.sample(spec.out_features, spec.in_features)
    assert sample is not None
    return sample


_LEAST_SPAN = 16
"""Minimum columns per tensor-core instruction."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Byte layout of a quantized weight for the kernels. Lengths count bytes of a weight row."""

    kind: str
    row: int
    half: int
    """Bytes of half a group, if each byte holds two values. 0 means one value per byte."""
    scales: int
    """Number of scales per row."""
    scale_span: int
    """Bytes of a row that share a scale."""
    scale_rows: int
    """Number of rows that share scales."""
    zeros: bool
    span: int
    """Maximum number of bytes per slice. The values of a slice have one common scale."""

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants of the Triton kernels that read the weight."""
        names = "ROW", "WEIGHT", "HALF", "SCALES", "SCALE_SPAN", "SCALE_ROWS", "ZEROS"
        values = self.row, self.kind, self.half, self.scales, self.scale_span, self.scale_rows, self.zeros
        return dict(zip(names, values, strict=True))


def weight_bytes(weight: QuantizedWeight) -> WeightBytes | None:
    """Return the byte layout of a weight. None if kernels cannot read it: too few columns share a scale, or groups do not fill a
    row.
    """
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
    """Return bytes, scales and zeros, each contiguous. If there are no zeros, the last tensor is arbitrary."""
    if isinstance(weight, Int4Weight):
        return weight.packed, weight.scales, weight.scales if weight.zeros is None else weight.zeros
    if isinstance(weight, Float4Weight):
        return weight.packed, weight.exponents, weight.exponents
    assert isinstance(weight, Float8Weight | Int8Weight)
    return weight.values.view(torch.uint8), weight.scales, weight.scales
