"""Costs of backends: measured times, looked up by the shape of a step. This module does not depend on the source of the times."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import cast

from headway.core.contract.metadata import Phase


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the part of a step that one backend runs: sequences of the same phase and similar lengths."""

    phase: Phase
    batch: int
    query_len: int
    """Number of new tokens per sequence. In DECODE, it is 1, or 2 to 8 if draft tokens are verified."""
    kv_len: int
    """Number of cached plus new tokens per sequence."""
    captured: bool = False
    """True if a CUDA graph replay runs this part of the step. Host time for launches then does not count. Plan time does not
    count either if the graph has fixed lengths (prompts)."""

    @classmethod
    def of(cls, phase: Phase, query_lens: Sequence[int], kv_lens: Sequence[int]) -> Shape:
        """Return a shape with equal lengths that costs about as much as these sequences. There must be at least one sequence.

        DECODE reads keys, so its lengths are means over the sequences. Prompts pair queries with keys, so their lengths are means
        over the tokens. One long prompt among many short prompts, which causes nearly all of the work, then dominates.
        """
        count, tokens = len(query_lens), sum(query_lens)
        if phase is Phase.DECODE:
            return cls(phase, count, tokens // count, sum(kv_lens) // count)
        query_len = sum(n * n for n in query_lens) / tokens
        kv_len = sum(n * length for n, length in zip(query_lens, kv_lens, strict=True)) / tokens
        return cls(phase, max(1, round(tokens / query_len)), round(query_len), round(kv_len))

    def __str__(self) -> str:
        return f"{self.phase.value} {self.batch}q{self.query_len}s{self.kv_len}"


NO_BLOCKS = 0
"""Block size in entries for state layers. States are stored in slots, not in blocks."""


def state_shape(phase: Phase, batch: int, query_len: int) -> Shape:
    """Return the shape under which times of state layers are stored. Cached tokens do not affect these times."""
    return Shape(Phase.DECODE if phase is Phase.DECODE else Phase.PREFILL, batch, query_len, query_len)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of a backend's call for one layer."""

    shape: Shape
    backend: str
    layout: str | None
    """Name of the layout. None if the backend reads no cache (dense prefill), in which case the time applies to every layout and
    block size."""
    block_size: int | None
    layer_us: float | None
    """Device time in microseconds. None if the backend failed at this shape or was not tried."""
    plan_us: float = 0.0
    """Host time in microseconds to plan a step. The layers share one plan."""
    host_us: float = 0.0
    """Host time per launch in microseconds. The longer of host and device time counts. 0 means that a graph was measured, or the
    time is unknown."""
    between: bool = False
    """True if the shape is between grid points, measured to refine the grid where the fastest backend changes."""


Leaf = tuple[float, ...]
"""Logarithms of times in microseconds. Infinite if a time was not measured."""
Axes = tuple[float, ...]
"""Coordinates of a point. The axis that affects times most comes first."""
_Node = tuple[list[float], list["_Node | Leaf"]]
_Hat = tuple[float, float, float]
"""Range of a correction along one axis: start, peak and end. The weight is linear in between, and constant towards an infinite
start or end."""

_AXES: dict[Phase, Callable[[Shape], Axes]] = {
    Phase.PREFILL: lambda shape: (shape.batch, shape.query_len),
    Phase.EXTEND: lambda shape: (shape.query_len, shape.batch, shape.kv_len),
    Phase.DECODE: lambda shape: (shape.query_len, shape.batch, shape.kv_len),
}
"""Phase -> function that returns a shape's coordinates on the axes of the phase's times, outermost first. The range of the
innermost axis may differ from row to row."""

_Key = tuple[Phase, str, str | None, int | None]


class CostTable:
    """Times of one kind of layer. They are interpolated log-linearly between measured points, and constant beyond the outermost
    points.

    Device and host time are interpolated separately, and the longer counts. At small sizes, the nearly constant host time hides
    the device time. Interpolating the longer of the two would overestimate the result.

    If a backend was not measured at a point, or failed there, its time is infinite up to the neighbouring points. So no backend
    is chosen without a measurement.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        noise: float,
        source: str = "",
        excluded: Mapping[str, str] | None = None,
        phases: Collection[Phase] = tuple(Phase),
    ) -> None:
        """noise: relative difference below which two times count as equal. excluded: backend -> reason not to choose the backend.
        phases: phases in which the layer needs a backend. Samples of other phases are ignored."""
        self.noise = noise
        self.source = source
        """Description of the source of the times, for the log."""
        self.excluded = dict(excluded or {})
        self.phases = frozenset(phases)
        kept = [sample for sample in samples if sample.backend not in self.excluded and sample.shape.phase in self.phases]
        self.shapes = _by_phase(sample for sample in kept if not sample.between)
        """Phase -> grid points."""
        self.between = _by_phase(sample for sample in kept if sample.between)
        """Phase -> points that were measured between grid points."""
        times: dict[_Key, dict[Shape, Leaf]] = {}
        for sample in kept:
            if sample.layer_us is not None:
                key = (sample.shape.phase, sample.backend, sample.layout, sample.block_size)
                # a graph or a rough time has no host time; the device time replaces it, to interpolate towards a point that has
                # one
                leaf = sample.layer_us, max(sample.plan_us, 1e-3), sample.host_us or sample.layer_us
                times.setdefault(key, {})[sample.shape] = tuple(map(math.log, leaf))
        self._surfaces = {key: self._surface(key[0], found) for key, found in times.items()}

    def _surface(self, phase: Phase, found: Mapping[Shape, Leaf]) -> Surface:
        axes, nothing = _AXES[phase], (math.inf,) * 3
        points = (self.shapes[phase], self.between[phase])
        return Surface(*({axes(shape): found.get(shape, nothing) for shape in shapes} for shapes in points))

    def at(self, shape: Shape, backend: str, layout: str, block_size: int) -> tuple[float, float]:
        """Return the time per layer and the plan time per step, in microseconds. Both are infinite if the backend was not
        measured."""
        surface = self._surfaces.get((shape.phase, backend, layout, block_size))
        surface = surface or self._surfaces.get((shape.phase, backend, None, None))
        if surface is None:
            return math.inf, math.inf
        device, plan, host = surface.at(_AXES[shape.phase](shape))
        if not shape.captured:
            return math.exp(max(device, host)), math.exp(plan)
        return math.exp(device), math.exp(plan) if shape.phase is Phase.DECODE else 0.0

    def covers(self, shape: Shape) -> bool:
        """Return whether a shape is within the measured range of every axis."""
        points = [_AXES[shape.phase](point) for point in self.shapes[shape.phase]]
        ranges = zip(_AXES[shape.phase](shape), zip(*points, strict=True), strict=True) if points else ()
        return bool(points) and all(min(known) <= value <= max(known) for value, known in ranges)


@dataclass(frozen=True)
class StepCosts:
    """Cost of a whole step with each backend, for one layout and block size."""

    parts: Sequence[tuple[CostTable, int]]
    """(table, number of layers) of each distinct kind of layer."""
    layout: str
    block_size: int
    noise: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise", max(table.noise for table, _ in self.parts))

    def step_us(self, backend: str, shape: Shape) -> float:
        """Return the total time in microseconds of a step with a backend: one call per layer, plus one plan per kind of layer."""
        total = 0.0
        for table, layers in self.parts:
            if shape.phase not in table.phases:
                continue
            layer, plan = table.at(shape, backend, self.layout, self.block_size)
            total += plan + layers * layer
        return total

    def ranking(self, shape: Shape, names: Iterable[str]) -> list[tuple[str, float]]:
        """Return (backend, microseconds) of the backends that have a time at a shape, fastest first."""
        times = [(name, self.step_us(name, shape)) for name in names]
        return sorted((pair for pair in times if math.isfinite(pair[1])), key=lambda pair: pair[1])

    def shapes(self, phase: Phase) -> list[Shape]:
        """Return the grid points of a phase."""
        return list(dict.fromkeys(shape for table, _ in self.parts for shape in table.shapes[phase]))

    def between(self, phase: Phase) -> list[Shape]:
        """Return the points of a phase that were measured between grid points."""
        return list(dict.fromkeys(shape for table, _ in self.parts for shape in table.between[phase]))

    def winners(self, phase: Phase, names: Sequence[str]) -> list[str]:
        """Return the backends that are fastest at any measured point of a phase. The backend that is fastest at the most points
        comes first."""
        shapes = [*self.shapes(phase), *self.between(phase)]
        wins = [ranked[0][0] for shape in shapes if (ranked := self.ranking(shape, names))]
        return sorted(dict.fromkeys(wins), key=lambda name: -wins.count(name))

    def covers(self, shape: Shape) -> bool:
        """Return whether a shape is within the measured range of every table."""
        return all(table.covers(shape) for table, _ in self.parts if shape.phase in table.phases)


@dataclass(frozen=True)
class CountAxis:
    """Numbers of rows, tokens or bytes at which the kernels of one kind are measured."""

    unit: str
    counts: Sequence[int]
    """Numbers of rows, tokens or bytes, in ascending order."""
    nearest: bool = False
    """True if other counts use the cell of the nearest count, by ratio. False if they use the cell of the next larger count."""

    def cell(self, count: int) -> int:
        """Return the index in `counts` of the cell that a count uses. A count larger than all others uses the last cell."""
        cell = min(bisect_left(self.counts, count), len(self.counts) - 1)
        closer_before = self.nearest and cell > 0 and count * count < self.counts[cell - 1] * self.counts[cell]
        return cell - closer_before

    def changes(self, serving: Callable[[int], str]) -> dict[int, str]:
        """Return a map from each count at which the kernel changes to the name of the kernel used from this count on. serving:
        function that returns the kernel for a count."""
        names = [serving(count) for count in self.counts]
        starts = self.counts if self.nearest else [1, *(count + 1 for count in self.counts)]
        return {starts[cell]: name for cell, name in enumerate(names) if cell == 0 or name != names[cell - 1]}

    def describe(self, changes: Mapping[int, str], source: str) -> str:
        """Return a description of the ranges in `changes`. source: description of the source of the choice."""
        ranges = ", ".join(f"{name} from {start:,}" for start, name in changes.items())
        return f"{ranges} {self.unit} on ({source})"


@dataclass(frozen=True)
class AxisTimes:
    """Measured times of the kernels of one kind along one axis, on one device."""

    axis: CountAxis
    us: Mapping[str, Sequence[float | None]]
    """Kernel -> time in microseconds at each count. None if the kernel does not support the count, failed, or was skipped as
    too slow."""
    source: str
    """Description of the source of the times."""

    def fastest(self, count: int, able: Iterable[str], handicap: Mapping[str, float] | None = None) -> str | None:
        """Return the fastest kernel at a count, or None if no kernel in `able` was measured at that count.

        able: names of the kernels that support the count. handicap: kernel -> factor by which the kernel must be faster than
        others, 1 by default.
        """
        cell, factors = self.axis.cell(count), handicap or {}
        known = [(self.us[name][cell], name) for name in able if cell < len(self.us.get(name, ()))]
        times = [(us * factors.get(name, 1.0), name) for us, name in known if us is not None]
        return min(times)[1] if times else None


def _by_phase(samples: Iterable[Sample]) -> dict[Phase, list[Shape]]:
    shapes = list(dict.fromkeys(sample.shape for sample in samples))
    return {phase: [shape for shape in shapes if shape.phase is phase] for phase in Phase}


class Surface:
    """Times of one backend over a phase's axes. They are interpolated log-linearly between grid points, and constant beyond the
    grid.

    A point measured between two grid neighbours corrects the interpolation. The difference between the measured and the
    interpolated time is added in full at the point, and decreases to zero at the next grid lines. This is the hierarchical
    surplus of sparse grids (Bungartz and Griebel 2004). A single point can thus refine the grid without a whole row or column.
    """

    def __init__(self, grid: Mapping[Axes, Leaf], between: Mapping[Axes, Leaf]) -> None:
        """grid: times at all grid points, infinite if not measured. between: times at points between grid points, in the order of
        measurement."""
        if not grid:
            grid, between = between, {}
        self._node = _nest(list(grid.items()))
        lines = [sorted({axes[number] for axes in grid}) for number in range(len(next(iter(grid), ())))]
        self._ends = [[-math.inf, *(math.log(value) for value in line), math.inf] for line in lines]
        """Boundaries of the grid cells on each axis."""
        self._corrections: dict[tuple[int, ...], list[tuple[list[_Hat], Leaf]]] = {}
        """Grid cell -> corrections that affect it. A cell is the number of boundaries at or below a point on each axis."""
        known = set(grid)
        # points on grid lines come first: points off the lines on two axes correct the surface that these have changed
        ordered = sorted(between.items(), key=lambda item: sum(at not in line for at, line in zip(item[0], lines, strict=True)))
        for axes, leaf in ordered:
            hats = [_hat(axes, number, line, known) for number, line in enumerate(lines)]
            expected = self.at(axes)
            # if the grid has no time, nothing is chosen there, whatever was measured between
            surplus = tuple(got - guess if math.isfinite(guess) else 0.0 for got, guess in zip(leaf, expected, strict=True))
            for cell in product(*map(_cells, hats, self._ends)):
                self._corrections.setdefault(cell, []).append((hats, surplus))
            known.add(axes)

    def at(self, axes: Sequence[float]) -> Leaf:
        """Return the logarithms of the times at a point. axes: coordinates of the point."""
        place = [math.log(max(value, 1)) for value in axes]
        found = _interpolate(self._node, place)
        cell = tuple(map(bisect_right, self._ends, place))
        for hats, surplus in self._corrections.get(cell, ()):
            share = math.prod(_share(hat, value) for hat, value in zip(hats, place, strict=True))
            if share > 0.0:
                found = tuple(value + share * more for value, more in zip(found, surplus, strict=True))
        return found


def _cells(hat: _Hat, line: Sequence[float]) -> list[int]:
    """Return the numbers of the cells between the boundaries in `line` that overlap a correction's range."""
    low, _, high = hat
    return [n for n in range(1, len(line)) if low < line[n] and line[n - 1] < high]


def _hat(axes: Axes, number: int, line: Sequence[float], known: set[Axes]) -> _Hat:
    """Return the range of a point's correction along one axis. It extends to the next grid line, or to a nearer known point in
    the same row."""
    value = axes[number]
    row = [other[number] for other in known if other[:number] == axes[:number] and other[number + 1 :] == axes[number + 1 :]]
    ends = sorted({*row, *line, value})
    at = bisect_left(ends, value)
    low = math.log(ends[at - 1]) if at > 0 else -math.inf
    high = math.log(ends[at + 1]) if at + 1 < len(ends) else math.inf
    return low, math.log(value), high


def _share(hat: _Hat, value: float) -> float:
    low, middle, high = hat
    if value <= middle:
        return 1.0 if low == -math.inf else max(0.0, (value - low) / (middle - low))
    return 1.0 if high == math.inf else max(0.0, (high - value) / (high - middle))


def _nest(rows: Sequence[tuple[Axes, Leaf]]) -> _Node:
    groups: dict[float, list[tuple[Axes, Leaf]]] = {}
    for axes, leaf in rows:
        groups.setdefault(axes[0], []).append((axes[1:], leaf))
    keys = sorted(groups)
    children = [_nest(groups[key]) if groups[key][0][0] else groups[key][-1][1] for key in keys]
    return [math.log(key) for key in keys], children


def _interpolate(node: _Node | Leaf, at: Sequence[float]) -> Leaf:
    if not at:
        return cast(Leaf, node)
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
