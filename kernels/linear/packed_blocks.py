"""Weights arranged for our C on a CPU: panels of 16 outputs, of which a product reads each as one stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headway.kernels.runtime.native.library import LANES, TYPES, ProductStruct, WeightStruct, functions

_FLOAT32, _HALF, _PAIRS, _CODES4, _CODES8 = range(5)
_FORMS = {torch.float32: _FLOAT32, torch.float16: _HALF, torch.bfloat16: _PAIRS}
SCALE_NONE, SCALE_D, SCALE_DM, SCALE_SUPER, SCALE_SUPER_DM = range(5)
"""How the weights of codes follow from them, see panels.h."""


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A weight [n, k] in panels, with the structure that our C reads."""

    data: Tensor
    """The panels; uint8 or the weight's element type."""
    out_features: int
    in_features: int
    described: ctypes._Pointer[WeightStruct]
    held: tuple[Tensor, ...]
    """What the structure points to beside the panels."""
    more: tuple[ctypes._Pointer[WeightStruct], ...] = ()
    """Structures of the rows behind the first ones, where these have another form."""

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""
        return self.data.nbytes + sum(each.nbytes for each in self.held)

    @property
    def gates(self) -> bool:
        """Whether the outputs divide into halves of whole panels."""
        return self.out_features % (2 * LANES) == 0 and not self.more


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """Codes of 4 or 8 bits for the elements of a weight, and the scales that turn them into numbers."""

    codes: Tensor
    """int8 [n, k]; of 4 bits 0 to 15."""
    table: Tensor | None
    """int8 [16], what codes of 4 bits stand for (with an m: 0 to 15); None: codes of 8 bits, which stand for themselves."""
    scale: int
    """A scheme of panels.h."""
    group: int
    """Columns under one scale."""
    scales: tuple[Tensor, ...]
    """For each number of a group a matrix [n, k / group]: float16, or int8 or uint8 where superblocks scale them."""
    supers: tuple[Tensor, ...] = ()
    """float16 [n, k / superblock]"""
    superblock: int = 0


def dense_panels(weight: Tensor, bias: Tensor | None = None) -> Panels | None:
    """Arrange a plain weight; None where our C does not multiply it: no library, another element type, an odd bfloat16."""
    n, k = weight.shape
    form = _FORMS.get(weight.dtype)
    if form is None or functions() is None or (form == _PAIRS and k % 2):
        return None
    rows = _whole(weight).view(-1, LANES, k)
    columns = rows.view(-1, LANES, k // 2, 2) if form == _PAIRS else rows
    return _panels(columns.transpose(1, 2).contiguous(), n, k, form, bias)


def coded_panels(parts: Sequence[Coded], bias: Tensor | None = None) -> Panels | None:
    """Arrange a weight of codes, whose rows may come in several schemes; None where there is no library."""
    if functions() is None:
        return None
    panels, row = [], 0
    for coded in parts:
        n, k = coded.codes.shape
        rows = _whole(coded.codes).view(-1, LANES, k)
        if coded.table is None:
            data, form = (rows.view(-1, LANES, k // 4, 4).int() + 128).to(torch.uint8), _CODES8
        else:
            low, high = rows.view(-1, LANES, k // 8, 2, 4).view(torch.uint8).unbind(3)
            data, form = low | high << 4, _CODES4
        data = data.transpose(1, 2).contiguous()
        panels.append(_panels(data, n, k, form, None if bias is None else bias[row : row + n], coded))
        row += n
    for one, after in pairwise(panels):
        one.described.contents.next = ctypes.cast(after.described, ctypes.c_void_p)
    first = panels[0]
    if len(panels) == 1:
        return first
    held = (*first.held, *(tensor for each in panels[1:] for tensor in (each.data, *each.held)))
    structs = tuple(each.described for each in panels[1:])
    return Panels(first.data, row, first.in_features, first.described, held, structs)


def _panels(data: Tensor, n: int, k: int, form: int, bias: Tensor | None, coded: Coded | None = None) -> Panels:
    whole = None if bias is None else _whole(bias.float())
    table = None if coded is None or coded.table is None else (coded.table.int() + 128).to(torch.uint8)
    scales = None if coded is None else _by_group(coded.scales)
    supers = None if coded is None or not coded.supers else _by_group(coded.supers)

    def address(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    def each(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.nbytes // len(tensor)

    struct = WeightStruct(
        panels=address(data),
        scales=address(scales),
        supers=address(supers),
        bias=address(whole),
        table=address(table),
        n=n,
        k=k,
        panel_bytes=each(data),
        scale_bytes=each(scales),
        super_bytes=each(supers),
        form=form,
        scale=SCALE_NONE if coded is None else coded.scale,
        group=0 if coded is None else coded.group,
        superblock=0 if coded is None else coded.superblock,
    )
    held = tuple(tensor for tensor in (scales, supers, whole, table) if tensor is not None)
    return Panels(data, n, k, ctypes.pointer(struct), held)


def _by_group(matrices: tuple[Tensor, ...]) -> Tensor:
    """Matrices [n, groups] as [panels, groups, matrices, 16]."""
    panels = [_whole(each).view(-1, LANES, each.shape[1]).transpose(1, 2) for each in matrices]
    return torch.stack(panels, dim=2).contiguous()


def _whole(rows: Tensor) -> Tensor:
    """Rows with zeros behind them, up to whole panels."""
    missing = -len(rows) % LANES
    return rows.contiguous() if not missing else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def multiply(panels: Panels, x: Tensor, out: Tensor | None = None) -> Tensor:
    """The product of x [rows, k] with a weight in panels, and its bias: [rows, n]; `out`, where it is given."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    found, target = functions(), x.new_empty(len(x), panels.out_features) if out is None else out
    assert found is not None
    found.product(
        ProductStruct(
            weight=panels.described,
            x=x.data_ptr(),
            out=target.data_ptr(),
            rows=len(x),
            ldx=x.stride(0),
            ldo=target.stride(0),
            type=TYPES[x.dtype],
        )
    )
    return target
