"""Choice of a layout and block size at start, and of a backend in each step, by measured times."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Generic, NamedTuple

from headway.core.contract.metadata import Phase
from headway.core.contract.support import Reason
from headway.core.select.costs import CostTable, Shape, StepCosts
from headway.core.select.kernels import L, Placement
from headway.core.select.request import Workload

log = logging.getLogger("headway")

_Choice = tuple[str, dict[str, float], float]
"""(fastest backend, time of each backend, time up to which a backend counts as equally fast), times in microseconds."""


class StepChooser:
    """Chooses a step's backend by one dict lookup. Lengths are rounded to an eighth of an octave, and each choice is computed
    once."""

    def __init__(self, costs: StepCosts, names: Mapping[Phase, Sequence[str]]) -> None:
        """costs: measured times. names: phase -> backends among which the chooser may switch. Phases that are missing must not be
        passed to `choose`."""
        self.costs = costs
        self.names = names
        self.most_captured = 2
        """Maximum number of backends that `decode_candidates` returns."""
        self._choices: dict[tuple[Phase, int, int, int], _Choice | None] = {}
        self._candidates: dict[int, list[str]] = {}
        self._current: dict[Phase, str] = {}
        self._reported: set[Phase] = set()

    def choose(self, phase: Phase, batch: int, query_len: int, kv_len: int) -> str | None:
        """Return the backend for the sequences of one phase in a step, or None if no backend was measured. The result becomes the
        phase's current backend.

        query_len, kv_len: lengths of each of these sequences; for unequal lengths, see `Shape.of`.
        """
        key = (phase, batch, rounded(query_len), rounded(kv_len))
        try:
            choice = self._choices[key]
        except KeyError:
            choice = self._choices[key] = self._work_out(Shape(*key))
        if choice is None:
            return None
        fastest, times, limit = choice
        current = self._current.get(phase)
        if current == fastest:
            return fastest
        if current is not None and times.get(current, math.inf) <= limit:
            return current
        self._current[phase] = fastest
        step = f"{phase.value} of {batch} sequences, query_len {key[2]}, kv_len {key[3]}"
        log.debug("attention: %s: %s (before: %s)", step, fastest, current)
        return fastest

    def forget(self) -> None:
        """Reset the current backend of each phase, after warm-up steps."""
        self._current.clear()

    def decode_candidates(self, batch: int) -> list[str]:
        """Return the backends to capture in decode graphs of a batch size, at most two.

        The first backend is the best over all measured lengths. The second, if any, is faster than the first at some length by
        more than the noise.
        """
        if batch not in self._candidates:
            self._candidates[batch] = self._find_candidates(batch)[: self.most_captured]
        return self._candidates[batch]

    def _work_out(self, shape: Shape) -> _Choice | None:
        names = self.names[shape.phase]
        if (
            shape.phase is Phase.DECODE and shape.query_len == 1
        ):  # only these are captured; verify steps are not limited to graphs
            names = self.decode_candidates(shape.batch)
        if not self.costs.covers(shape) and shape.phase not in self._reported:
            self._reported.add(shape.phase)
            log.info("crossover table: %s is outside the measured range; using the nearest measured edge", shape)
        ranked = self.costs.ranking(shape, names)
        if not ranked:
            return None
        fastest, least = ranked[0]
        return fastest, dict(ranked), least * (1 + self.costs.noise)

    def _find_candidates(self, batch: int) -> list[str]:
        names = list(self.names[Phase.DECODE])
        lengths = sorted({shape.kv_len for shape in self.costs.shapes(Phase.DECODE)})
        between = [round(math.sqrt(low * high)) for low, high in pairwise(lengths)]
        shapes = [Shape(Phase.DECODE, batch, 1, kv_len) for kv_len in sorted({*lengths, *between})]
        times = {name: [self.costs.step_us(name, shape) for shape in shapes] for name in names}
        if not times or not shapes:
            return names[:1]

        def overall(name: str) -> tuple[int, float]:
            known = [math.log(us) for us in times[name] if math.isfinite(us)]
            return len(shapes) - len(known), sum(known)

        first = min(names, key=overall)

        def gain(name: str) -> float:
            """Return the largest factor, over all lengths, by which a backend is faster than the first backend."""
            pairs = zip(times[first], times[name], strict=True)
            return max(
                (math.inf if not math.isfinite(ours) else ours / theirs for ours, theirs in pairs if math.isfinite(theirs)),
                default=0.0,
            )

        second = max((name for name in names if name != first), key=gain, default=None)
        return [first] if second is None or gain(second) <= 1 + self.costs.noise else [first, second]


def rounded(length: int) -> int:
    """Return the middle of the eighth of an octave that contains a length. Short lengths are unchanged."""
    shift = max(length.bit_length() - 4, 0)
    return ((length >> shift) << shift) + (1 << shift >> 1)


_WORKLOAD_GAIN, _TYPICAL_GAIN = 0.15, 0.035
"""Minimum gains, as logarithms, with which a placement is preferred to an earlier one: over the workload, and at the typical
point.

The workload depends on a few points, each with noise. The typical point is a mean over all points and has little noise.
Placements with small blocks, which waste less memory, come first.
"""
_NOISES = 4.0
"""Minimum gain over the workload, as a multiple of the noise. At the typical point, the minimum gain is the noise."""


class Rated(NamedTuple):
    """One kernel at one shape, with the chosen layout and block size."""

    name: str
    reasons: tuple[Reason, ...]
    """Reasons why the kernel does not support the shape or must not be chosen. Empty if there are none."""
    us: float | None
    """Time per step over all layers, in microseconds. None if not measured or not supported."""


class ChoiceRow(NamedTuple):
    """Choice for the layers of one kind in one phase, as a row of a table."""

    kind: str
    phase: str
    layers: int
    heads: str
    layout: str
    block_size: str
    cache: str
    """Element type of the cache or state. - if there is none."""
    backend: str
    why: str
    """Source of the choice: asked for, measured, or rank order."""


def plan_text(rows: Iterable[ChoiceRow]) -> str:
    """Return a plan as a table of text, with aligned columns."""
    table = [tuple(name.removesuffix("_size") for name in ChoiceRow._fields), *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(row[number]) for row in table) for number in range(len(ChoiceRow._fields))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


NO_ATTENTION = "none"
"""Placeholder for the name of a backend if no layer needs a backend."""


@dataclass(frozen=True, slots=True)
class Selection(Generic[L]):
    """Choice made at start for the layers of one kind: layout, block size, and the kernels of each phase."""

    place: Placement[L]
    names: Mapping[Phase, str]
    why: str
    others: Mapping[Phase, Sequence[str]] = field(default_factory=dict)
    """Phase -> backends to which the phase may switch from step to step."""
    helpers: Mapping[Phase, str] = field(default_factory=dict)
    """Phase -> kernel that runs convolutions for the chosen kernel."""
    parts: Mapping[str, Selection[L]] = field(default_factory=dict)
    """Kind of layer -> its choice, if kinds of layers differ. `names` and `others` then combine the backends of all kinds."""

    @property
    def layout(self) -> L:
        """Layout that was chosen."""
        return self.place.layout

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""
        return self.place.block_size

    def all_for(self, phase: Phase) -> Sequence[str]:
        """Return the backends that may run a phase, the usual backend first."""
        return [self.names[phase], *self.others.get(phase, ())]

    def __str__(self) -> str:
        if self.parts:
            return "; ".join(f"{kind}: {part}" for kind, part in self.parts.items())
        names = ", ".join(f"{phase.value}={'|'.join(self.all_for(phase))}" for phase in self.names)
        helpers = ", ".join(dict.fromkeys(self.helpers.values()))
        helped = f", convolutions by {helpers}" if helpers else ""
        return f"{names}{helped}; {self.place} ({self.why})"


@dataclass(frozen=True, slots=True)
class RatedPlace(Generic[L]):
    """Expected costs of the layers of one kind, or of several kinds together, at a placement."""

    place: Placement[L]
    costs: StepCosts
    names: Mapping[Phase, Sequence[str]]
    expected: float
    """Logarithm of the workload's time in microseconds."""
    typical: Mapping[Shape, float]
    """Logarithm of the minimum time in microseconds, for each measured point."""

    def __add__(self, other: RatedPlace[L]) -> RatedPlace[L]:
        """Return the rating of both kinds of layers together, with the place, costs and names of the first."""
        shared = self.typical.keys() & other.typical.keys()
        typical = {shape: _log_sum(us, other.typical[shape]) for shape, us in self.typical.items() if shape in shared}
        return replace(self, expected=_log_sum(self.expected, other.expected), typical=typical)


@dataclass(frozen=True)
class MeasuredChoice:
    """Chooses a layout, a block size and kernels by measured times."""

    parts: Sequence[tuple[CostTable, int]]
    """(table, number of layers) of each distinct kind of layer."""
    workload: Workload
    steps: Sequence[tuple[Shape, float]]
    """(shape, number of steps) of the workload's steps in `phases`."""
    free: Collection[Phase] = tuple(Phase)
    """Phases that are auto. The other phases have a named kernel; its times count if it was measured."""
    phases: Collection[Phase] = tuple(Phase)
    """Phases in which layers need a kernel."""
    per_step: bool = True
    """True if the kernel of a phase may change from step to step, and later placements waste more memory. False if one kernel
    runs every step of a phase, and placements are equally large."""

    def select(
        self, places: Sequence[Placement[L]], able: Callable[[Phase, Placement[L]], Iterable[str]]
    ) -> tuple[Selection[L], StepChooser] | None:
        """Return the placement with the least expected cost and its best kernels, or None if no placement has times for the free
        phases.

        able: returns the kernels that support a phase of every layer at a placement.
        """
        rated = [found for place in places if (found := self.rate(place, able)) is not None]
        if not rated:
            return None
        noise = rated[0].costs.noise
        chosen = steady_choice(rated, doubts_of(noise) if self.per_step else (noise, math.inf))
        usual, others = {}, {}
        for phase, served in chosen.names.items():
            able_here = served if phase in self.free else served[:1]
            winners = chosen.costs.winners(phase, served) if self.per_step and phase in self.free else able_here
            usual[phase] = self._usual(chosen.costs, phase, winners)
            if self.per_step and len(winners) > 1:
                others[phase] = [name for name in winners if name != usual[phase]]
        why = f"auto: {self.parts[0][0].source}, workload {self.workload}{undecided(rated, chosen) if self.per_step else ''}"
        selection = Selection(chosen.place, usual, why, others)
        return selection, StepChooser(chosen.costs, {phase: selection.all_for(phase) for phase in others})

    def rate(self, place: Placement[L], able: Callable[[Phase, Placement[L]], Iterable[str]]) -> RatedPlace[L] | None:
        """Return the costs at a placement, or None if a free phase has no times there. able: see `select`."""
        names = {phase: list(able(phase, place)) for phase in self.phases}
        costs = StepCosts(self.parts, place.layout.name, place.block_size)
        expected = self._expected(costs, names)
        return None if expected is None else RatedPlace(place, costs, names, math.log(expected), _typical(costs, names))

    def _expected(self, costs: StepCosts, names: Mapping[Phase, Sequence[str]]) -> float | None:
        """Return the workload's time in microseconds, or None if a phase has no kernel, or a free phase has no times."""
        measured = {
            phase: any(math.isfinite(costs.step_us(name, shape)) for name in able for shape in costs.shapes(phase))
            for phase, able in names.items()
        }
        if not all(names.values()) or not all(measured[phase] for phase in self.free):
            return None
        steps = [(shape, count) for shape, count in self.steps if measured[shape.phase]]
        total = sum(count * min(costs.step_us(name, shape) for name in names[shape.phase]) for shape, count in steps)
        return total if math.isfinite(total) else None

    def _usual(self, costs: StepCosts, phase: Phase, names: Sequence[str]) -> str:
        """Return the fastest backend for the workload's steps of a phase. Without such steps, return the first backend, which is
        fastest at most of the measured points."""
        steps = [(shape, count) for shape, count in self.steps if shape.phase is phase]
        return min(names, key=lambda name: sum(count * costs.step_us(name, shape) for shape, count in steps))


def _log_sum(first: float, second: float) -> float:
    """Return the logarithm of the sum of two numbers that are given as logarithms."""
    high, low = max(first, second), min(first, second)
    return high + math.log1p(math.exp(low - high))


def _typical(costs: StepCosts, names: Mapping[Phase, Sequence[str]]) -> dict[Shape, float]:
    """Return the logarithm of the minimum cost at each measured point, for workloads that differ from the expected one."""
    shapes = [(shape, able) for phase, able in names.items() for shape in costs.shapes(phase)]
    return {shape: math.log(ranked[0][1]) for shape, able in shapes if (ranked := costs.ranking(shape, able))}


def doubts_of(noise: float) -> tuple[float, float]:
    """Return the minimum gains of the workload and of the typical point, as logarithms. noise: relative noise of the times."""
    return max(_WORKLOAD_GAIN, _NOISES * noise), max(_TYPICAL_GAIN, noise)


def steady_choice(rated: Sequence[RatedPlace[L]], doubts: tuple[float, float]) -> RatedPlace[L]:
    """Return the first candidate, unless a later candidate gains more than `doubts` over the workload or at the typical point."""
    doubt, typical_doubt = doubts
    shared = [shape for shape in rated[0].typical if all(shape in each.typical for each in rated)]
    chosen = rated[0]
    for other in rated[1:]:
        gain = chosen.expected - other.expected
        typical_gain = fmean(chosen.typical[shape] - other.typical[shape] for shape in shared) if shared else 0.0
        if gain > doubt or (gain > -doubt and typical_gain > typical_doubt):
            chosen = other
    return chosen


def undecided(rated: Sequence[RatedPlace[L]], chosen: RatedPlace[L]) -> str:
    """Return a remark if a different layout or block size would be selected with the noise of the times ignored, else ""."""
    otherwise = steady_choice(rated, doubts_of(0.0))
    if otherwise is chosen:
        return ""
    return f"; times too noisy ({chosen.costs.noise:.0%}) to prefer {otherwise.place}: the first in order stays"
