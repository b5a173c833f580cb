"""Measured times looked up by a step's shape: what each backend would cost. Pure numbers, wherever they come from."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from headway.core.contract.metadata import Phase


@dataclass(frozen=True, slots=True)
class Shape:
    """The part of a step that one backend serves: sequences of the same phase and similar lengths."""

    phase: Phase
    batch: int
    query_len: int
    """New tokens of a sequence: 1 in DECODE, 2 to 8 where guesses are verified."""
    kv_len: int
    """Cached and new tokens of a sequence."""
    captured: bool = False
    """Whether a graph's replay runs it, so that the host's time for the launches does not count, nor that for the plan where the
    graph holds one of fixed lengths: of a prompt."""

    @classmethod
    def of(cls, phase: Phase, query_lens: Sequence[int], kv_lens: Sequence[int]) -> Shape:
        """Sequences of equal lengths that cost about what these do, at least one.

        DECODE reads keys, so theirs are the means. Prompts pair queries with keys: their lengths are means over the tokens, not
        over the sequences, so that one long prompt among many short ones, whose work is nearly all there is, counts as that.
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
"""Stands for the block size of layers with a state, which lies in slots."""


def state_shape(phase: Phase, batch: int, query_len: int) -> Shape:
    """Return the shape under which a time of layers with a state stands: what came before the new tokens takes no time."""
    return Shape(Phase.DECODE if phase is Phase.DECODE else Phase.PREFILL, batch, query_len, query_len)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one layer's call."""

    shape: Shape
    backend: str
    layout: str | None
    """None: no cache is read, so the time holds for every layout and block size (a dense prefill)."""
    block_size: int | None
    layer_us: float | None
    """Time on the device. None: the backend failed at this shape, or was not tried."""
    plan_us: float = 0.0
    """Host time per step, shared by its layers."""
    host_us: float = 0.0
    """Host time of the call where it is launched in every step; the longer of host and device counts. 0: a graph, or unknown."""
    between: bool = False
    """Whether the shape lies between points of the grid, measured to refine the grid where the fastest backend changes."""


Leaf = tuple[float, ...]
"""Logarithms of times; infinite where there is none."""
Axes = tuple[int, ...]
"""A point's place, the axis that times depend on most outermost."""
_Node = tuple[list[float], list["_Node | Leaf"]]
_Hat = tuple[float, float, float]
"""A correction along one axis: where it begins, is whole, and ends. It is linear between; an end at infinity keeps it whole."""

_AXES: dict[Phase, Callable[[Shape], Axes]] = {
    Phase.PREFILL: lambda shape: (shape.batch, shape.query_len),
    Phase.EXTEND: lambda shape: (shape.query_len, shape.batch, shape.kv_len),
    Phase.DECODE: lambda shape: (shape.query_len, shape.batch, shape.kv_len),
}
"""The axes on which a phase's times depend, outermost first; the innermost may reach further in one row than in the next."""

_Key = tuple[Phase, str, str | None, int | None]


class CostTable:
    """Times of one kind of layer: log-linear between measured points, and beyond them those of the nearest edge.

    Device and host are looked up apart, and the longer counts: at small sizes the host's time, which hardly grows, hides the
    device's, and a line between the longer of each would lie far above both.

    Where a point was measured without a backend, or it failed there, its time is infinite, and so between there and its next
    points: nothing is chosen on a guess.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        noise: float,
        source: str = "",
        excluded: Mapping[str, str] | None = None,
        phases: Collection[Phase] = tuple(Phase),
    ) -> None:
        """noise: relative difference below which two times count as equal. excluded: backend -> why it must not be chosen.

        phases: those in which the layer is asked for; samples of others are left out.
        """
        self.noise = noise
        self.source = source
        """Where the times come from, in words: for the log."""
        self.excluded = dict(excluded or {})
        self.phases = frozenset(phases)
        kept = [sample for sample in samples if sample.backend not in self.excluded and sample.shape.phase in self.phases]
        self.shapes = _by_phase(sample for sample in kept if not sample.between)
        """The points of each phase's grid."""
        self.between = _by_phase(sample for sample in kept if sample.between)
        """The points of each phase that were measured between those of the grid."""
        times: dict[_Key, dict[Shape, Leaf]] = {}
        for sample in kept:
            if sample.layer_us is not None:
                key = (sample.shape.phase, sample.backend, sample.layout, sample.block_size)
                # a graph or a rough time has no host time: the device's stands in, for a line towards a point that has one
                leaf = sample.layer_us, max(sample.plan_us, 1e-3), sample.host_us or sample.layer_us
                times.setdefault(key, {})[sample.shape] = tuple(map(math.log, leaf))
        self._surfaces = {key: self._surface(key[0], found) for key, found in times.items()}

    def _surface(self, phase: Phase, found: Mapping[Shape, Leaf]) -> Surface:
        axes, nothing = _AXES[phase], (math.inf,) * 3
        points = (self.shapes[phase], self.between[phase])
        return Surface(*({axes(shape): found.get(shape, nothing) for shape in shapes} for shapes in points))

    def at(self, shape: Shape, backend: str, layout: str, block_size: int) -> tuple[float, float]:
        """(microseconds per layer, microseconds per step for the plan); infinite where the backend has no time."""
        surface = self._surfaces.get((shape.phase, backend, layout, block_size))
        surface = surface or self._surfaces.get((shape.phase, backend, None, None))
        if surface is None:
            return math.inf, math.inf
        device, plan, host = surface.at(_AXES[shape.phase](shape))
        if not shape.captured:
            return math.exp(max(device, host)), math.exp(plan)
        return math.exp(device), math.exp(plan) if shape.phase is Phase.DECODE else 0.0

    def covers(self, shape: Shape) -> bool:
        """Whether a shape lies within the measured range of every axis."""
        points = [_AXES[shape.phase](point) for point in self.shapes[shape.phase]]
        ranges = zip(_AXES[shape.phase](shape), zip(*points, strict=True), strict=True) if points else ()
        return bool(points) and all(min(known) <= value <= max(known) for value, known in ranges)


@dataclass(frozen=True)
class StepCosts:
    """The cost of a whole step through each backend, over one layout and block size."""

    parts: Sequence[tuple[CostTable, int]]
    """The table of each distinct kind of layer, and how many layers are of that kind."""
    layout: str
    block_size: int
    noise: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise", max(table.noise for table, _ in self.parts))

    def step_us(self, backend: str, shape: Shape) -> float:
        """Microseconds of attention in a step: every layer's call, and one plan for each kind of layer."""
        total = 0.0
        for table, layers in self.parts:
            if shape.phase not in table.phases:
                continue
            layer, plan = table.at(shape, backend, self.layout, self.block_size)
            total += plan + layers * layer
        return total

    def ranking(self, shape: Shape, names: Iterable[str]) -> list[tuple[str, float]]:
        """(backend, microseconds) of the backends that have a time here, fastest first."""
        times = [(name, self.step_us(name, shape)) for name in names]
        return sorted((pair for pair in times if math.isfinite(pair[1])), key=lambda pair: pair[1])

    def shapes(self, phase: Phase) -> list[Shape]:
        """Points of a phase's grid."""
        return list(dict.fromkeys(shape for table, _ in self.parts for shape in table.shapes[phase]))

    def between(self, phase: Phase) -> list[Shape]:
        """Points of a phase that were measured between those of the grid."""
        return list(dict.fromkeys(shape for table, _ in self.parts for shape in table.between[phase]))

    def winners(self, phase: Phase, names: Sequence[str]) -> list[str]:
        """Backends that are fastest at some measured point of a phase, the one that wins most first."""
        shapes = [*self.shapes(phase), *self.between(phase)]
        wins = [ranked[0][0] for shape in shapes if (ranked := self.ranking(shape, names))]
        return sorted(dict.fromkeys(wins), key=lambda name: -wins.count(name))

    def covers(self, shape: Shape) -> bool:
        """Whether every table was measured around this shape."""
        return all(table.covers(shape) for table, _ in self.parts if shape.phase in table.phases)


@dataclass(frozen=True)
class CountAxis:
    """Counts of rows, tokens or bytes at which the kernels of one kind are measured."""

    unit: str
    counts: Sequence[int]
    """The counts, in ascending order."""
    nearest: bool = False
    """True if any other count takes the cell of the nearest one, by ratio; False if it takes that of the next larger one."""

    def cell(self, count: int) -> int:
        """Return the index in `counts` of the cell that a count takes; the last one beyond them."""
        cell = min(bisect_left(self.counts, count), len(self.counts) - 1)
        closer_before = self.nearest and cell > 0 and count * count < self.counts[cell - 1] * self.counts[cell]
        return cell - closer_before

    def changes(self, serving: Callable[[int], str]) -> dict[int, str]:
        """Return the count from which each kernel serves -> its name. serving: returns the kernel of one of `counts`."""
        names = [serving(count) for count in self.counts]
        starts = self.counts if self.nearest else [1, *(count + 1 for count in self.counts)]
        return {starts[cell]: name for cell, name in enumerate(names) if cell == 0 or name != names[cell - 1]}

    def describe(self, changes: Mapping[int, str], source: str) -> str:
        """Return the ranges of `changes` in words. source: where the choice comes from."""
        ranges = ", ".join(f"{name} from {start:,}" for start, name in changes.items())
        return f"{ranges} {self.unit} on ({source})"


@dataclass(frozen=True)
class AxisTimes:
    """Measured times of the kernels of one kind over one axis, on one device."""

    axis: CountAxis
    us: Mapping[str, Sequence[float | None]]
    """Kernel -> microseconds at each of the axis' counts; None: it does not take that many, failed, or was far behind before."""
    source: str
    """Where they come from, in words."""

    def fastest(self, count: int, able: Iterable[str], handicap: Mapping[str, float] | None = None) -> str | None:
        """Return the fastest kernel at a count; None if none of them was measured there.

        able: kernels that can serve. handicap: kernel -> the factor by which it must be faster than others; 1 if missing.
        """
        cell, factors = self.axis.cell(count), handicap or {}
        known = [(self.us[name][cell], name) for name in able if cell < len(self.us.get(name, ()))]
        times = [(us * factors.get(name, 1.0), name) for us, name in known if us is not None]
        return min(times)[1] if times else None


def _by_phase(samples: Iterable[Sample]) -> dict[Phase, list[Shape]]:
    shapes = list(dict.fromkeys(sample.shape for sample in samples))
    return {phase: [shape for shape in shapes if shape.phase is phase] for phase in Phase}


class Surface:
    """One backend's times over a phase's axes: log-linear between points of the grid, and beyond it those of the nearest edge.

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
        self._ends = [[-math.inf, *(math.log(value) for value in line), math.inf] for line in lines]
        """Where the cells of the grid end on each axis."""
        self._reaching: dict[tuple[int, ...], Sequence[tuple[list[_Hat], Leaf]]] = {}
        """What `_around` has found, by cell: how many of each axis' ends lie at or before a place."""
        known = set(grid)
        # points in a row of the grid first: what lies off it on two axes corrects what these have made of its surroundings
        for axes, leaf in sorted(between.items(), key=lambda point: _off_lines(point[0], lines)):
            hats = [_hat(axes, number, line, known) for number, line in enumerate(lines)]
            expected = self.at(axes)
            surplus = tuple(
                got - guess if math.isfinite(guess) else 0.0 for got, guess in zip(leaf, expected, strict=True)
            )  # where the grid has no time nothing is chosen, whatever was measured between
            self._corrections.append((hats, surplus))
            known.add(axes)
            self._reaching.clear()

    def at(self, axes: Sequence[int]) -> Leaf:
        """Logarithms of the times at a place."""
        place = [math.log(max(value, 1)) for value in axes]
        found = _interpolate(self._node, place)
        for hats, surplus in self._around(place):
            share = math.prod(_share(hat, value) for hat, value in zip(hats, place, strict=True))
            if share > 0.0:
                found = tuple(value + share * more for value, more in zip(found, surplus, strict=True))
        return found

    def _around(self, place: Sequence[float]) -> Sequence[tuple[list[_Hat], Leaf]]:
        """The corrections that reach into the cell of the grid around a place: few of all, and a step waits for them."""
        cell = tuple(bisect_right(line, value) for line, value in zip(self._ends, place, strict=True))
        found = self._reaching.get(cell)
        if found is None:
            found = self._reaching[cell] = [each for each in self._corrections if self._reaches(each[0], cell)]
        return found

    def _reaches(self, hats: Sequence[_Hat], cell: Sequence[int]) -> bool:
        return all(low < line[n] and line[n - 1] < high for (low, _, high), line, n in zip(hats, self._ends, cell, strict=True))


def _off_lines(axes: Axes, lines: Sequence[Sequence[int]]) -> int:
    """On how many axes a point lies between two lines of the grid."""
    return sum(value not in line for value, line in zip(axes, lines, strict=True))


def _hat(axes: Axes, number: int, line: Sequence[int], known: set[Axes]) -> _Hat:
    """The hat of a point along one axis: it ends at the next line of the grid, or at a known point of its row that is nearer."""
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
    groups: dict[int, list[tuple[Axes, Leaf]]] = {}
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
