"""How Marlin (Frantar et al. 2024, arXiv 2408.11743) wants a quantised weight, as vLLM extends it.

The codes go to vLLM's `gptq_marlin_repack` in GPTQ's form, whose words hold neighbouring columns of one row of the weight. Scales
and zeros are put into the order in which the threads of a warp meet them: rows of the weight that lie eight apart where scales
change along a row; pairs of neighbours, eight apart, where one scale serves a row, because that is applied to what is stored at
the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from headway.core.contract.support import YES, Support
from headway.kernels.linear.forms import (
    MX_GROUP,
    Float4Weight,
    Float8Weight,
    Int4Weight,
    QuantizedWeight,
    form_name,
    unpacked,
)
from headway.kernels.runtime.vllm_library.scalar_types import FLOAT4, FLOAT8, INT4, INT4_LESS_8

GROUPS: Final = (32, 64, 128)
"""Columns that may share a scale, apart from all of a row."""
_GROUPED: Final = [row + 8 * step for row in range(8) for step in range(8)]
_WHOLE: Final = [2 * pair + row + 8 * step for pair in range(4) for step in range(4) for row in (0, 1)]
_NIBBLES: Final = [0, 2, 4, 6, 1, 3, 5, 7]
"""Order of the codes of 4 bits in a word, for a pair of them is unpacked at once; likewise of four bytes: 0, 2, 1, 3."""
_BYTES: Final = [0, 2, 1, 3]


@dataclass(frozen=True, slots=True)
class MarlinWeight:
    """What Marlin reads of a layer."""

    codes: Tensor
    """int32, as `gptq_marlin_repack` leaves it."""
    scales: Tensor
    """[K / group, N] in x's type, or e8m0 for MXFP4"""
    zeros: Tensor | None
    """int32 [K / group, N / 8]"""
    bias: Tensor | None
    """[N]"""
    order: Tensor | None
    """int32 [K]: the input that belongs to each column."""
    type_id: int

    @property
    def num_bytes(self) -> int:
        """Memory of its own."""
        return sum(each.nbytes for each in (self.codes, self.scales, self.zeros, self.bias) if each is not None)


def can_arrange(weight: QuantizedWeight, dtype: torch.dtype) -> Support:
    """Whether Marlin has kernels for a form and shape. dtype: of x."""
    (rows, columns), support = weight.shape, YES
    if not ((rows % 64 == 0 and columns % 128 == 0) or (rows % 128 == 0 and columns % 64 == 0)):
        need = "multiples of 64 x 128 or 128 x 64"
        support &= Support.no("shape", need, f"{rows} x {columns}")
    if isinstance(weight, Int4Weight):
        group = weight.group_size
        if group != columns and group not in GROUPS:
            support &= Support.no("group size", f"{', '.join(map(str, GROUPS))} or a whole row", group)
        elif columns % group:
            support &= Support.no("columns", "whole groups", f"{columns} in groups of {group}")
    elif isinstance(weight, Float8Weight):
        by_row = weight.scales.shape[1] == 1 and weight.block[0] in (1, rows)
        if not by_row and (weight.block[1] != GROUPS[-1] or columns % GROUPS[-1]):
            got = "{} x {}".format(*weight.block)
            support &= Support.no("scales", f"one a row, or of {GROUPS[-1]} columns", got)
    elif isinstance(weight, Float4Weight):
        if dtype != torch.bfloat16:
            support &= Support.no("dtype", "bfloat16 for MXFP4", dtype)
    else:
        support &= Support.no("form", "4 bits, or floats of 8", form_name(weight))
    return support


def words(weight: QuantizedWeight) -> Tensor:
    """The codes in GPTQ's form, the first column of a word lowest: int32 [K / 8, N] of 4 bits, [K / 4, N] of 8."""
    if isinstance(weight, Float8Weight):
        codes = weight.values.view(torch.uint8)
    else:
        assert isinstance(weight, Int4Weight | Float4Weight)
        flat = unpacked(weight.packed, weight.group_size if isinstance(weight, Int4Weight) else MX_GROUP)
        low, high = flat.view(len(flat), -1, 2).unbind(2)
        codes = low | high << 4
    return codes.contiguous().view(torch.int32).t().contiguous()


def scales_of(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """[K / group, N], in Marlin's order and in x's type: those of floats hold the difference of the exponents' biases, too.

    :raises ArithmeticError: a scale is too large or too small for x's type.
    """
    if isinstance(weight, Float4Weight):
        # Powers of two in a byte each, of which four are unpacked at once.
        permuted = _permuted(weight.exponents.t(), _GROUPED)
        return permuted.view(-1, 4)[:, _BYTES].view(permuted.shape).contiguous().view(torch.float8_e8m0fnu)
    if isinstance(weight, Float8Weight):
        # As vLLM's kernel unpacks e4m3: its exponent's bits are those of x's type, unchanged.
        scales = weight.scales.repeat_interleave(weight.block[0], 0)[: weight.shape[0]] * 2.0 ** _EXPONENTS[dtype]
    else:
        assert isinstance(weight, Int4Weight)
        scales = weight.scales
    found = scales.to(dtype)
    if not bool((found.isfinite() & ((found != 0) | (scales == 0))).all()):
        raise ArithmeticError(f"the weight's scales have no place in {dtype}")
    by_row = found.shape[1] == 1
    return _permuted(found.t(), _WHOLE if by_row else _GROUPED)


def zeros_of(weight: QuantizedWeight) -> Tensor | None:
    """int32 [K / group, N / 8] in Marlin's order, which is that of scales within k, whatever the group; None: 8 everywhere."""
    if not isinstance(weight, Int4Weight) or weight.zeros is None:
        return None
    permuted = _permuted(weight.zeros.t(), _GROUPED)
    low, high = permuted.view(len(permuted), -1, 8)[:, :, _NIBBLES].reshape(len(permuted), -1, 2).unbind(2)
    return (low | high << 4).contiguous().view(torch.int32)


def bias_of(bias: Tensor | None) -> Tensor | None:
    """[N] in Marlin's order."""
    return None if bias is None else _permuted(bias[None], _WHOLE)[0]


def type_of(weight: QuantizedWeight) -> int:
    """The number by which vLLM's operators know a weight's elements."""
    if isinstance(weight, Int4Weight):
        return INT4_LESS_8 if weight.zeros is None else INT4
    return FLOAT8 if isinstance(weight, Float8Weight) else FLOAT4


def _permuted(values: Tensor, order: list[int]) -> Tensor:
    return values.reshape(-1, len(order))[:, order].view(values.shape).contiguous()


_EXPONENTS: Final = {torch.float16: 8, torch.bfloat16: 120}
"""Bias of the exponents of x's type less that of e4m3."""
