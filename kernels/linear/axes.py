"""Axes of a checkpoint's tensors, and the part of each that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a tensor in a checkpoint, and the ranges of it that a rank holds, one after the other.

    Axes are counted in whatever they are made of, and then multiplied and added as the tensor is laid out: with axes of heads,
    `(heads + kv_heads + kv_heads) * head_dim` are the rows of a merged q, k, v product, and what of them is the rank's.
    """

    whole: int
    """Elements in the checkpoint."""
    held: tuple[range, ...]
    """Ranges that do not touch each other, in the order in which the rank holds them; none: nothing is held."""

    @classmethod
    def all(cls, size: int) -> Axis:
        """Make an axis that every rank holds whole."""
        return cls(size, (range(size),))

    @classmethod
    def of(cls, size: int | Axis) -> Axis:
        """Take a plain number for an axis that is held whole."""
        return size if isinstance(size, Axis) else cls.all(size)

    @property
    def size(self) -> int:
        """Elements that the rank holds."""
        return sum(map(len, self.held))

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds everything, in the checkpoint's order."""
        return self.held == (range(self.whole),)

    @property
    def none(self) -> Axis:
        """The same axis, of which nothing is held."""
        return Axis(self.whole, ())

    def __mul__(self, elements: int) -> Axis:
        """Every unit of the axis is so many elements."""
        return Axis(self.whole * elements, tuple(range(each.start * elements, each.stop * elements) for each in self.held))

    def __add__(self, other: Axis) -> Axis:
        """Two axes, one after the other in one tensor."""
        moved = [range(each.start + self.whole, each.stop + self.whole) for each in other.held]
        return Axis(self.whole + other.whole, _merged([*self.held, *moved]))

    def rounded(self, size: int) -> Axis:
        """Widen what is held, in increasing order, to whole units of so many elements; the last unit may be shorter."""
        wide = [range(each.start // size * size, min(-(-each.stop // size) * size, self.whole)) for each in self.held]
        apart = [range(max(each.start, before.stop), each.stop) for before, each in zip([range(0), *wide], wide, strict=False)]
        return Axis(self.whole, _merged(apart))

    def units(self, size: int) -> Axis:
        """Count the axis in units of so many elements, which are held whole (`rounded`)."""
        return Axis(-(-self.whole // size), tuple(range(each.start // size, -(-each.stop // size)) for each in self.held))

    def places_in(self, wider: Axis) -> list[int]:
        """Where among the elements that another axis holds those of this one are."""
        place_of = {element: place for place, element in enumerate(wider.pick(range(wider.whole)))}
        return [place_of[element] for element in self.pick(range(self.whole))]

    def piece(self, number: int, count: int) -> Axis:
        """Cut the checkpoint's axis into `count` equal pieces and return one of them, with what is held of the piece."""
        size = self.whole // count
        first = number * size
        inside = [range(max(each.start - first, 0), min(each.stop - first, size)) for each in self.held]
        return Axis(size, tuple(each for each in inside if each))

    def pick(self, items: Sequence[Item]) -> list[Item]:
        """Return the held ones of a sequence as long as the axis."""
        return [items[index] for each in self.held for index in each]


Shape = Sequence[int | Axis]
"""A tensor's axes; those that are plain numbers are held whole."""


def axes_of(shape: Shape) -> tuple[Axis, ...]:
    """Return the axes of a shape."""
    return tuple(map(Axis.of, shape))


def held_sizes(shape: Shape) -> tuple[int, ...]:
    """Return the sizes of what a rank holds."""
    return tuple(axis.size for axis in axes_of(shape))


def whole_sizes(shape: Shape) -> tuple[int, ...]:
    """Return the sizes in the checkpoint."""
    return tuple(axis.whole for axis in axes_of(shape))


def held_part(tensor: Tensor, shape: Shape) -> Tensor:
    """Cut out of a whole tensor what a rank holds: a copy, or the tensor itself where that is everything."""
    for place, axis in enumerate(axes_of(shape)):
        if not axis.is_whole:
            parts = [tensor.narrow(place, each.start, len(each)) for each in axis.held]
            tensor = torch.cat(parts or [tensor.narrow(place, 0, 0)], dim=place)
    return tensor


def _merged(ranges: list[range]) -> tuple[range, ...]:
    """The same ranges, those that touch as one."""
    merged: list[range] = []
    for each in ranges:
        if merged and merged[-1].stop == each.start:
            each = range(merged.pop().start, each.stop)
        if each:
            merged.append(each)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Division:
    """One rank's share of what can be divided among ranks."""

    rank: int
    size: int

    def even(self, count: int) -> Axis:
        """Divide units of which each rank gets equally many. count: a multiple of the number of ranks."""
        own = count // self.size
        return Axis(count, (range(self.rank * own, (self.rank + 1) * own),))

    def repeated(self, count: int) -> Axis:
        """Divide evenly, or, where ranks outnumber the units, give one unit to several ranks that follow one another.

        count: a multiple or a divisor of the number of ranks.
        """
        if count >= self.size:
            return self.even(count)
        unit = self.rank * count // self.size
        return Axis(count, (range(unit, unit + 1),))

    def uneven(self, count: int) -> Axis:
        """Divide any number of units: the last ranks get fewer than the first, or none."""
        own = -(-count // self.size)
        held = range(min(self.rank * own, count), min((self.rank + 1) * own, count))
        return Axis(count, (held,) if held else ())
