"""Whole numbers of 4 or 8 bits, with scales of groups: AWQ, GPTQ and compressed-tensors' pack-quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headway.kernels.linear.axes import Axis
from headway.kernels.linear.forms import Int4Weight, packed
from headway.models.checkpoints.formats.drawn import Octets, int4
from headway.models.checkpoints.formats.module import QuantizedModule

_WORD = 32
"""Bits of a word."""
_WORDS, _INDICES = ("int32",), ("int32", "int64")
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ keeps each of 8 columns that follow one another."""


@dataclass(frozen=True, slots=True)
class IntegerGroups:
    """What the three have in common."""

    bits: int
    group_size: int
    """Columns of a row that share a scale; -1: all."""
    of_experts: ClassVar[bool] = False

    @property
    def codes(self) -> int:
        """Numbers in a word."""
        return _WORD // self.bits

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        """See StoredFormat."""
        size, count = self.group(module)
        return self.codes, self.codes if count == 1 else size

    def group(self, module: QuantizedModule) -> tuple[int, int]:
        """Columns of a group, and how many groups the whole weight has."""
        size = module.columns.whole if self.group_size == -1 else self.group_size
        return size, module.divided(size)

    def named(self, name: str) -> str:
        """The format in words."""
        return f"{name} ({self.bits} bits, {'rows' if self.group_size == -1 else f'groups of {self.group_size}'})"

    def weight(
        self, module: QuantizedModule, codes: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor | None = None
    ) -> Int4Weight | Tensor:
        """Bring what was read into the form of products, or expand it.

        codes: uint8 [N, K]; scales: [N, groups]; zeros: uint8 [N, groups], what is subtracted first, None: the middle.
        group_of: the group of each column, int64 [K]; None: columns lie group by group.
        """
        size = codes.shape[1] // scales.shape[1] if group_of is None else self.group(module)[0]
        order = None
        if group_of is not None:
            order = torch.argsort(group_of, stable=True)
            counted = torch.arange(codes.shape[1], device=order.device) // size
            fits = codes.shape[1] == size * scales.shape[1] and bool(torch.equal(group_of[order], counted))
        if self.bits == 4 and (group_of is None or fits):
            codes = codes if order is None else codes[:, order]
            plain = zeros is None or bool((zeros == 8).all())
            kept = None if zeros is None or plain else zeros.contiguous()
            return Int4Weight(packed(codes, size), scales.contiguous(), kept, size, None if order is None else order.int())
        groups = group_of if group_of is not None else torch.arange(codes.shape[1], device=codes.device) // size
        middle = float(2 ** (self.bits - 1))
        values = codes.float() - (middle if zeros is None else zeros.float()[:, groups])
        return (values * scales.float()[:, groups]).to(module.dtype)

    def drawn(self, octets: Octets, rows: int, columns: int, std: float, dtype: torch.dtype) -> Int4Weight | None:
        """See StoredFormat."""
        size = columns if self.group_size == -1 else self.group_size
        return int4(octets, rows, columns, std, size, dtype) if self.bits == 4 and columns % size == 0 else None


@dataclass(frozen=True, slots=True)
class Awq(IntegerGroups):
    """`qweight` int32 [K, N / 8], `qzeros` [groups, N / 8], `scales` [groups, N] (the layout that AutoAWQ calls gemm)."""

    suffixes: ClassVar[tuple[str, ...]] = (".weight", ".qweight", ".qzeros", ".scales")

    @property
    def label(self) -> str:
        """The format in words."""
        return self.named("AWQ")

    def holds(self, module: QuantizedModule) -> bool:
        """See StoredFormat."""
        return bool(module.elements(".qweight"))

    def read(self, module: QuantizedModule) -> Int4Weight | Tensor:
        """See StoredFormat."""
        size, count = self.group(module)
        words = module.rows.units(self.codes)
        groups = _groups(module, size, count)
        codes = _awq_columns(module.take(".qweight", _WORDS, module.columns, words))
        zeros = _awq_columns(module.take(".qzeros", _WORDS, groups, words))
        scales = module.take_scales(".scales", groups, module.rows, signed=True)
        return self.weight(module, codes.t(), scales.t(), zeros.t())


@dataclass(frozen=True, slots=True)
class Gptq(IntegerGroups):
    """`qweight` int32 [K / 8, N], `qzeros` [groups, N / 8], `scales` [groups, N], `g_idx` [K], the group of each column."""

    less_one: bool
    """Whether zeros are stored less 1, as the first version of the format has them."""
    suffixes: ClassVar[tuple[str, ...]] = (".weight", ".qweight", ".qzeros", ".scales", ".g_idx")

    @property
    def label(self) -> str:
        """The format in words."""
        return self.named("GPTQ")

    def holds(self, module: QuantizedModule) -> bool:
        """See StoredFormat."""
        return bool(module.elements(".qweight"))

    def read(self, module: QuantizedModule) -> Int4Weight | Tensor:
        """See StoredFormat."""
        size, count = self.group(module)
        group_of = _group_of(module, ".g_idx", size, count)
        groups = _groups(module, size, count) if group_of is None else Axis.all(count)
        words = module.columns.units(self.codes)
        codes = unpacked_words(module.take(".qweight", _WORDS, words, module.rows).t(), self.bits)
        zeros = module.take(".qzeros", _WORDS, groups, module.rows.units(self.codes))
        zeros = unpacked_words(zeros, self.bits)
        if self.less_one:
            zeros = (zeros + 1) & (2**self.bits - 1)  # AutoGPTQ, which wrote them, lets a zero of 0 wrap around
        scales = module.take_scales(".scales", groups, module.rows, signed=True)
        return self.weight(module, codes, scales.t(), zeros.t(), group_of)


@dataclass(frozen=True, slots=True)
class PackQuantized(IntegerGroups):
    """`weight_packed` int32 [N, K / 8], `weight_scale` [N, groups], `weight_zero_point` [N / 8, groups], `weight_g_idx`."""

    symmetric: bool
    suffixes: ClassVar[tuple[str, ...]] = (
        ".weight_packed",
        ".weight_scale",
        ".weight_shape",
        ".weight_zero_point",
        ".weight_g_idx",
        ".input_scale",
    )

    @property
    def label(self) -> str:
        """The format in words."""
        return self.named("pack-quantized")

    def holds(self, module: QuantizedModule) -> bool:
        """See StoredFormat."""
        return module.elements(".weight_packed") in _WORDS

    def read(self, module: QuantizedModule) -> Int4Weight | Tensor:
        """See StoredFormat."""
        size, count = self.group(module)
        group_of = _group_of(module, ".weight_g_idx", size, count)
        groups = _groups(module, size, count) if group_of is None else Axis.all(count)
        words = module.columns.units(self.codes)
        codes = unpacked_words(module.take(".weight_packed", _WORDS, module.rows, words), self.bits)
        scales = module.take_scales(".weight_scale", module.rows, groups, signed=True)
        zeros = None
        if not self.symmetric or module.elements(".weight_zero_point"):
            held = module.rows.units(self.codes)
            columns = module.take(".weight_zero_point", _WORDS, held, groups).t()
            zeros = unpacked_words(columns, self.bits).t()[: module.rows.size]
        return self.weight(module, codes[:, : module.columns.size], scales, zeros, group_of)


def unpacked_words(words: Tensor, bits: int) -> Tensor:
    """Numbers that lie in words of 32 bits, the first in the lowest bits. words: int32 [R, C]; uint8 [R, C * 32 / bits]."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)


def _awq_columns(words: Tensor) -> Tensor:
    """The numbers of AWQ's words, in the order of the columns."""
    octets = unpacked_words(words, 4)
    codes = octets.view(len(octets), -1, 8)
    return codes[:, :, torch.tensor(_AWQ_PLACES, device=codes.device)].flatten(1)


def _groups(module: QuantizedModule, size: int, count: int) -> Axis:
    """The groups that a rank holds; a row of one group may be cut anywhere."""
    return Axis.all(1) if count == 1 else module.columns.units(size)


def _group_of(module: QuantizedModule, suffix: str, size: int, count: int) -> Tensor | None:
    """The group of each column that is held; None where columns lie group by group, or nothing else is said.

    :raises ModelError: there is no such group.
    """
    if not module.elements(suffix):
        return None
    whole = module.take(suffix, _INDICES, module.columns.whole).long()
    counted = torch.arange(len(whole), device=whole.device) // size
    if torch.equal(whole, counted) or bool((whole == -1).any()):  # -1: compressed-tensors' word for "not ordered"
        return None
    low, high = int(whole.min()), int(whole.max())
    if low < 0 or high >= count:
        raise module.error(suffix, f"needs groups from 0 to {count - 1}", f"{low} to {high}")
    return torch.cat([whole[each.start : each.stop] for each in module.columns.held])
