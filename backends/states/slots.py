"""Reading and writing the states of slots, also where a captured graph finds out only at its replay which rows are padding."""

from __future__ import annotations

import torch
from torch import Tensor


def read_slots(states: Tensor, slots: Tensor, empty: Tensor | None) -> Tensor:
    """Return float32 copies of the states of some slots, in the order of memory that the states have.

    states: logical view [num_slots, ...] of any layout; slots: int [n], those below 0 are read as any; empty: bool [n], rows
    that begin with zeros. None: none does.
    """
    order = sorted(range(states.dim()), key=states.stride, reverse=True)
    if order[0] != 0:  # strides of tensors with one element say nothing
        order = list(range(states.dim()))
    taken = states.permute(order).index_select(0, slots.clamp(min=0)).float()
    taken = taken.permute([order.index(axis) for axis in range(states.dim())])
    if empty is None:
        return taken
    return taken.masked_fill_(empty.view(-1, *[1] * (states.dim() - 1)), 0.0)


def write_slots(states: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write values [n, ...] to slots, int [n], all of them at least 0."""
    states.index_copy_(0, slots.long(), values.to(states.dtype))


def write_known_later(states: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write values to slots, int [n], where those below 0 write nothing and the host does not know which these are.

    A row without a slot writes what the first row with one writes, to the same place; where no row has one, slot 0 is written
    with what it holds.
    """
    rows = slots.shape[0]
    wanted = slots >= 0
    first = wanted.int().argmax()
    source = torch.where(wanted, torch.arange(rows, device=slots.device), first)
    target = slots.index_select(0, source).clamp(min=0).long()
    values = values.to(states.dtype).index_select(0, source)
    held = states.index_select(0, target[:1])
    states.index_copy_(0, target, torch.where(wanted.any(), values, held))
