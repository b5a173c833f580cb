"""The blocks of .gguf files: weights of 4 to 8 bits, as llama.cpp's types lay them out (ggml-common.h, ggml-quants.c)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from headway.kernels.runtime.native.library import SCALE_D, SCALE_DM, SCALE_SUPER, SCALE_SUPER_DM, Coded

_GROUP = 32
_SUPER = 256
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks."""

    columns: int
    """Columns of a row in one block."""
    num_bytes: int
    """Bytes of a block."""
    decode: Callable[[Tensor], Coded]
    """From blocks uint8 [rows, blocks, num_bytes] to codes and scales."""


@dataclass(frozen=True, slots=True, eq=False)
class GgufWeight:
    """Rows of blocks as they lie in the file; rows of several types one after the other, where products of one input differ."""

    types: tuple[str, ...]
    """Names of BLOCK_TYPES, one for each part."""
    blocks: tuple[Tensor, ...]
    """uint8 [rows, blocks, num_bytes]"""

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[str, Tensor]]) -> GgufWeight:
        """Rows one after the other; neighbours of one type become one part."""
        runs = [(name, [blocks for _, blocks in run]) for name, run in groupby(parts, key=lambda part: part[0])]
        return cls(tuple(name for name, _ in runs), tuple(torch.cat(blocks) for _, blocks in runs))

    @property
    def kind(self) -> str:
        """The types in words."""
        return f"gguf {' and '.join(dict.fromkeys(self.types))}"

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return sum(map(len, self.blocks)), self.blocks[0].shape[1] * BLOCK_TYPES[self.types[0]].columns

    @property
    def nbytes(self) -> int:
        """Memory that the blocks take."""
        return sum(each.nbytes for each in self.blocks)

    def coded(self) -> list[Coded]:
        """Codes and scales of each part."""
        return [BLOCK_TYPES[name].decode(blocks) for name, blocks in zip(self.types, self.blocks, strict=True)]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight itself, [N, K]."""
        return torch.cat([_expanded(coded).to(dtype) for coded in self.coded()])

    def rows(self, rows: range) -> GgufWeight:
        """Rows that follow one another."""
        types, blocks, first = [], [], 0
        for name, part in zip(self.types, self.blocks, strict=True):
            held = part[max(rows.start - first, 0) : max(rows.stop - first, 0)]
            first += len(part)
            if len(held):
                types.append(name)
                blocks.append(held)
        return GgufWeight(tuple(types), tuple(blocks))

    def columns(self, columns: range) -> GgufWeight | None:
        """Columns that follow one another; None where they cut through a block."""
        blocks = []
        for name, part in zip(self.types, self.blocks, strict=True):
            wide = BLOCK_TYPES[name].columns
            if columns.start % wide or columns.stop % wide:
                return None
            blocks.append(part[:, columns.start // wide : columns.stop // wide].contiguous())
        return GgufWeight(self.types, tuple(blocks))

    def in_order(self, order: Tensor) -> GgufWeight:
        """Rows in another order: each becomes a part of its own where they have several types."""
        if len(self.types) == 1:
            return GgufWeight(self.types, (self.blocks[0][order],))
        rows = [self.rows(range(row, row + 1)) for row in order.tolist()]
        return GgufWeight(tuple(row.types[0] for row in rows), tuple(row.blocks[0] for row in rows))


def _expanded(coded: Coded) -> Tensor:
    codes = (coded.codes if coded.table is None else coded.table[coded.codes.long()]).float()
    numbers = [scales.float() for scales in coded.scales]
    if coded.supers:
        repeat = coded.superblock // coded.group
        numbers = [n * s.float().repeat_interleave(repeat, 1) for n, s in zip(numbers, coded.supers, strict=True)]
    groups = codes.view(len(codes), -1, coded.group) * numbers[0][:, :, None]
    return (groups if len(numbers) == 1 else groups + numbers[1][:, :, None]).flatten(1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """A float16 of each block: [rows, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(octets: Tensor) -> Tensor:
    """Low halves of bytes, then the high ones: [..., n] to [..., 2 n]."""
    return torch.cat([octets & 15, octets >> 4], dim=-1)


def _parts(octets: Tensor, *sizes: int) -> Tensor:
    """Bytes of a block in parts: [..., n] to [..., *sizes]."""
    return octets.reshape(*octets.shape[:-1], *sizes)


def _fifth_bits(octets: Tensor) -> Tensor:
    """32 bits of 4 bytes, shifted to the place of a fifth bit: [..., 4] to [..., 32]."""
    bits = octets[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _table(values: tuple[int, ...] | range) -> Tensor:
    return torch.tensor(tuple(values), dtype=torch.int8)


def _q4_0(blocks: Tensor) -> Coded:
    return Coded(
        _nibbles(blocks[..., 2:]).flatten(1).view(torch.int8), _table(range(-8, 8)), SCALE_D, _GROUP, (_half(blocks, 0),)
    )


def _q4_1(blocks: Tensor) -> Coded:
    scales = _half(blocks, 0), _half(blocks, 2)
    return Coded(_nibbles(blocks[..., 4:]).flatten(1).view(torch.int8), _table(range(16)), SCALE_DM, _GROUP, scales)


def _q5_0(blocks: Tensor) -> Coded:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Coded(codes.flatten(1).view(torch.int8) - 16, None, SCALE_D, _GROUP, (_half(blocks, 0),))


def _q5_1(blocks: Tensor) -> Coded:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Coded(codes.flatten(1).view(torch.int8), None, SCALE_DM, _GROUP, (_half(blocks, 0), _half(blocks, 2)))


def _q8_0(blocks: Tensor) -> Coded:
    return Coded(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), None, SCALE_D, _GROUP, (_half(blocks, 0),))


def _six_bits(octets: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and mins of 6 bits out of 12 bytes: each uint8 [rows, 8 blocks]."""
    low, middle, high = octets.tensor_split([4, 8], dim=-1)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    mins = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1)
    return scales.flatten(1), mins.flatten(1)


def _q4_k(blocks: Tensor) -> Coded:
    codes = _nibbles(_parts(blocks[..., 16:], 4, 32)).flatten(1).view(torch.int8)
    supers = _half(blocks, 0), -_half(blocks, 2)
    return Coded(codes, _table(range(16)), SCALE_SUPER_DM, _GROUP, _six_bits(blocks[..., 4:16]), supers, _SUPER)


def _q5_k(blocks: Tensor) -> Coded:
    low = _parts(_nibbles(_parts(blocks[..., 48:], 4, 32)), 2, 32)
    high = blocks[..., 16:48][..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    codes = (low | high.reshape((*high.shape[:-2], 4, 2, 32)) << 4).flatten(1).view(torch.int8)
    supers = _half(blocks, 0), -_half(blocks, 2)
    return Coded(codes, None, SCALE_SUPER_DM, _GROUP, _six_bits(blocks[..., 4:16]), supers, _SUPER)


def _q6_k(blocks: Tensor) -> Coded:
    low = _nibbles(_parts(blocks[..., :128], 2, 64))
    high = _parts(blocks[..., 128:192], 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    codes = (low | high.flatten(-2) << 4).flatten(1).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return Coded(codes, None, SCALE_SUPER, 16, (scales,), (_half(blocks, 208),), _SUPER)


def _iq4_nl(blocks: Tensor) -> Coded:
    return Coded(_nibbles(blocks[..., 2:]).flatten(1).view(torch.int8), _table(_IQ4), SCALE_D, _GROUP, (_half(blocks, 0),))


def _iq4_xs(blocks: Tensor) -> Coded:
    high = blocks[..., 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], dim=-1)
    scales = (low.flatten(-2) | high.flatten(-2) << 4).flatten(1).view(torch.int8) - 32
    codes = _nibbles(_parts(blocks[..., 8:], 8, 16)).flatten(1).view(torch.int8)
    return Coded(codes, _table(_IQ4), SCALE_SUPER, _GROUP, (scales,), (_half(blocks, 0),), _SUPER)


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(_GROUP, 18, _q4_0),
    "Q4_1": BlockType(_GROUP, 20, _q4_1),
    "Q5_0": BlockType(_GROUP, 22, _q5_0),
    "Q5_1": BlockType(_GROUP, 24, _q5_1),
    "Q8_0": BlockType(_GROUP, 34, _q8_0),
    "Q4_K": BlockType(_SUPER, 144, _q4_k),
    "Q5_K": BlockType(_SUPER, 176, _q5_k),
    "Q6_K": BlockType(_SUPER, 210, _q6_k),
    "IQ4_NL": BlockType(_GROUP, 18, _iq4_nl),
    "IQ4_XS": BlockType(_SUPER, 136, _iq4_xs),
}
"""The types that our C multiplies; a tensor of another one is expanded when the file is converted."""
