"""One backend's measured times over a phase's axes: log-linear on the grid, corrected by points measured between its lines."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

Leaf = tuple[float, ...]
"""Logarithms of times; infinite where there is none."""
Axes = tuple[int, ...]
"""A point's place, the axis that times depend on most outermost."""
_Node = tuple[list[float], list["_Node | Leaf"]]
_Hat = tuple[float, float, float]
"""Where a correction begins, is whole, and ends; it goes linearly between, and one that ends at infinity stays whole."""


class Surface:
    """Times at any place, their logarithm linear in those of the axes; beyond the grid those of the nearest edge.

    A point between two neighbours of the grid corrects the line through them: what it was measured at, less what had been
    interpolated there, is added in full at its place and ever less towards the next grid lines on every side. (The surplus of
    hierarchical bases, as in sparse grids: Bungartz and Griebel 2004.) So a single point refines the grid where that is
    worth it, and needs no row or column of its own.
    """

    def __init__(self, grid: Mapping[Axes, Leaf], between: Mapping[Axes, Leaf]) -> None:
        """grid: every point of the grid, infinite where there is no time. between: in the order in which they were measured."""
        if not grid:
            grid, between = between, {}
        self._node = _nest(list(grid.items()))
        lines = [sorted({axes[number] for axes in grid}) for number in range(len(next(iter(grid), ())))]
        self._corrections: list[tuple[list[_Hat], Leaf]] = []
        known = set(grid)
        for axes, leaf in between.items():
            hats = [_hat(axes, number, line, known) for number, line in enumerate(lines)]
            expected = self.at(axes)
            surplus = tuple(
                got - guess if math.isfinite(guess) else 0.0 for got, guess in zip(leaf, expected, strict=True)
            )  # where the grid has no time nothing is chosen, whatever was measured between
            self._corrections.append((hats, surplus))
            known.add(axes)

    def at(self, axes: Sequence[int]) -> Leaf:
        """The logarithms of the times at a place."""
        place = [math.log(max(value, 1)) for value in axes]
        found = _interpolate(self._node, place)
        for hats, surplus in self._corrections:
            share = math.prod(_share(hat, value) for hat, value in zip(hats, place, strict=True))
            if share > 0.0:
                found = tuple(value + share * more for value, more in zip(found, surplus, strict=True))
        return found


def _hat(axes: Axes, number: int, line: Sequence[int], known: set[Axes]) -> _Hat:
    """Along one axis: to the nearest known points of the row where the point lies between grid lines, else to the next lines."""
    value = axes[number]
    if value not in line:
        row = [other[number] for other in known if other[:number] == axes[:number] and other[number + 1 :] == axes[number + 1 :]]
        line = sorted({*row, value})
    at = bisect_left(line, value)
    low = math.log(line[at - 1]) if at > 0 else -math.inf
    high = math.log(line[at + 1]) if at + 1 < len(line) else math.inf
    return low, math.log(value), high


def _share(hat: _Hat, value: float) -> float:
    low, middle, high = hat
    if value <= middle:
        return 1.0 if low == -math.inf else max(0.0, (value - low) / (middle - low))
    return 1.0 if high == math.inf else max(0.0, (high - value) / (high - middle))


def _nest(rows: Sequence[tuple[Axes, Leaf]]) -> _Node:
    groups: dict[int, list[tuple[Axes, Leaf]]] = {}
    for axes, leaf in rows:
        groups.setdefault(axes[0], []).append((axes[1:], leaf))
    keys = sorted(groups)
    children = [_nest(groups[key]) if groups[key][0][0] else groups[key][-1][1] for key in keys]
    return [math.log(key) for key in keys], children


def _interpolate(node: _Node | Leaf, at: Sequence[float]) -> Leaf:
    if not at:
        return node  # type: ignore[return-value]
    keys, children = node
    assert isinstance(keys, list)
    assert isinstance(children, list)
    right = bisect_right(keys, at[0])
    if right == 0 or right == len(keys):
        return _interpolate(children[max(right - 1, 0)], at[1:])
    share = (at[0] - keys[right - 1]) / (keys[right] - keys[right - 1])
    low = _interpolate(children[right - 1], at[1:])
    if share < 1e-9:  # exactly on a point: its neighbour may have no time
        return low
    high = _interpolate(children[right], at[1:])
    return tuple((1 - share) * a + share * b for a, b in zip(low, high, strict=True))
