"""Axes of a checkpoint's tensors, and the shard of each axis on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a tensor in a checkpoint, and the ranges of the axis that a rank holds (its shard), in order.

    The unit of an axis may be a head, a group of elements, or any other unit. Axes are scaled and concatenated with arithmetic
    operators. If `heads` and `kv_heads` are axes, `(heads + kv_heads + kv_heads) * head_dim` is the axis of a merged qkv weight's
    rows, with the rank's shard of it.
    """

    whole: int
    """Number of elements in the checkpoint."""
    held: tuple[range, ...]
    """Disjoint ranges in the order in which the rank holds them. Empty means that the rank holds nothing."""

    @classmethod
    def all(cls, size: int) -> Axis:
        """Return an axis that every rank holds completely."""
        return cls(size, (range(size),))

    @classmethod
    def of(cls, size: int | Axis) -> Axis:
        """Return an axis unchanged, or for an int, an axis of this size that every rank holds completely."""
        return size if isinstance(size, Axis) else cls.all(size)

    @property
    def size(self) -> int:
        """Number of elements that the rank holds."""
        return sum(map(len, self.held))

    @property
    def is_whole(self) -> bool:
        """True if the rank holds the complete axis, in the checkpoint's order."""
        return self.held == (range(self.whole),)

    @property
    def none(self) -> Axis:
        """Axis of the same size of which the rank holds nothing."""
        return Axis(self.whole, ())

    def __mul__(self, elements: int) -> Axis:
        """Return the axis with `elements` elements per unit."""
        return Axis(self.whole * elements, tuple(range(each.start * elements, each.stop * elements) for each in self.held))

    def __add__(self, other: Axis) -> Axis:
        """Return the concatenation of two axes in one tensor."""
        moved = [range(each.start + self.whole, each.stop + self.whole) for each in other.held]
        return Axis(self.whole + other.whole, _merged([*self.held, *moved]))

    def rounded(self, size: int) -> Axis:
        """Widen the held ranges, which must be in increasing order, to complete units of `size` elements. The last unit of the
        axis may be shorter.
        """
        wide = [range(each.start // size * size, min(-(-each.stop // size) * size, self.whole)) for each in self.held]
        apart = [range(max(each.start, before.stop), each.stop) for before, each in zip([range(0), *wide], wide, strict=False)]
        return Axis(self.whole, _merged(apart))

    def units(self, size: int) -> Axis:
        """Return the axis counted in units of `size` elements; partly held units count as held (`rounded`)."""
        return Axis(-(-self.whole // size), tuple(range(each.start // size, -(-each.stop // size)) for each in self.held))

    def places_in(self, wider: Axis) -> list[int]:
        """Return the positions of this axis's held elements among the held elements of `wider`."""
        place_of = {element: place for place, element in enumerate(wider.pick(range(wider.whole)))}
        return [place_of[element] for element in self.pick(range(self.whole))]

    def piece(self, number: int, count: int) -> Axis:
        """Split the axis into `count` equal parts and return part `number`, with the held ranges inside it."""
        size = self.whole // count
        first = number * size
        inside = [range(max(each.start - first, 0), min(each.stop - first, size)) for each in self.held]
        return Axis(size, tuple(each for each in inside if each))

    def pick(self, items: Sequence[Item]) -> list[Item]:
        """Return the items that the rank holds, from a sequence with one item per element of the axis."""
        return [items[index] for each in self.held for index in each]


Shape = Sequence[int | Axis]
"""Axes of a tensor. An int is the size of an axis that every rank holds completely."""


def axes_of(shape: Shape) -> tuple[Axis, ...]:
    """Return the axes of a shape, in which ints are replaced by axes that every rank holds completely."""
    return tuple(map(Axis.of, shape))


def held_sizes(shape: Shape) -> tuple[int, ...]:
    """Return the shape of the rank's shard."""
    return tuple(axis.size for axis in axes_of(shape))


def whole_sizes(shape: Shape) -> tuple[int, ...]:
    """Return the shape of the tensor in the checkpoint."""
    return tuple(axis.whole for axis in axes_of(shape))


def shard_of(tensor: Tensor, shape: Shape) -> Tensor:
    """Return the rank's shard of a complete tensor: a copy, or the tensor itself if the rank holds all of it."""
    for place, axis in enumerate(axes_of(shape)):
        if not axis.is_whole:
            parts = [tensor.narrow(place, each.start, len(each)) for each in axis.held]
            tensor = torch.cat(parts or [tensor.narrow(place, 0, 0)], dim=place)
    return tensor


def _merged(ranges: list[range]) -> tuple[range, ...]:
    """Return the ranges, with adjacent ranges merged."""
    merged: list[range] = []
    for each in ranges:
        if merged and merged[-1].stop == each.start:
            each = range(merged.pop().start, each.stop)
        if each:
            merged.append(each)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Division:
    """Division of units among ranks, from one rank's point of view."""

    rank: int
    size: int

    def even(self, count: int) -> Axis:
        """Divide `count` units evenly. count: a multiple of the number of ranks."""
        own = count // self.size
        return Axis(count, (range(self.rank * own, (self.rank + 1) * own),))

    def repeated(self, count: int) -> Axis:
        """Divide evenly, or assign each unit to several consecutive ranks if there are more ranks than units.

        count: a multiple or a divisor of the number of ranks.
        """
        if count >= self.size:
            return self.even(count)
        unit = self.rank * count // self.size
        return Axis(count, (range(unit, unit + 1),))

    def uneven(self, count: int) -> Axis:
        """Divide any number of units: the last ranks get fewer units than the first, or none."""
        own = -(-count // self.size)
        held = range(min(self.rank * own, count), min((self.rank + 1) * own, count))
        return Axis(count, (held,) if held else ())
