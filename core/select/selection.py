"""The choice at start, the workload it is made for, and the choice by measured times."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Generic, NamedTuple, TypeVar

from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.state import StateLayout
from headway.core.select.costs import NO_BLOCKS, CostTable, Shape, StepCosts

log = logging.getLogger("headway")

L = TypeVar("L", bound=CacheLayout | StateLayout)

_Choice = tuple[str, dict[str, float], float]
"""(fastest, microseconds of each, microseconds up to which a backend still counts as equally fast)."""


class StepChooser:
    """Names a step's backend with a dict get: lengths are rounded to an eighth of an octave, each answer is computed once."""

    def __init__(self, costs: StepCosts, names: Mapping[Phase, Sequence[str]]) -> None:
        """names: the backends between which a phase may switch; `choose` is not asked about other phases."""
        self.costs = costs
        self.names = names
        self._choices: dict[tuple[Phase, int, int, int], _Choice | None] = {}
        self._candidates: dict[int, list[str]] = {}
        self._current: dict[Phase, str] = {}
        self._said: set[Phase] = set()

    def choose(self, phase: Phase, batch: int, query_len: int, kv_len: int) -> str | None:
        """The backend for a part of a step, None where nothing was measured; it becomes the phase's current one.

        query_len, kv_len: of each of the part's sequences; where they differ see `Shape.of`.
        """
        key = (phase, batch, _rounded(query_len), _rounded(kv_len))
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
        said = f"{phase.value} of {batch} sequences, query_len {key[2]}, kv_len {key[3]}"
        log.debug("attention: %s: %s (before: %s)", said, fastest, current)
        return fastest

    def forget(self) -> None:
        """Forget which backend of each phase is in use: after steps of warm-up."""
        self._current.clear()

    def decode_candidates(self, batch: int) -> list[str]:
        """Backends worth a captured graph of this batch size, at most two.

        The first is best over all measured lengths; a second one wins somewhere by more than the noise.
        """
        if batch not in self._candidates:
            self._candidates[batch] = self._find_candidates(batch)
        return self._candidates[batch]

    def _work_out(self, shape: Shape) -> _Choice | None:
        names = self.names[shape.phase]
        if shape.phase is Phase.DECODE and shape.query_len == 1:  # no third one is captured; drafts are verified outside graphs
            names = self.decode_candidates(shape.batch)
        if not self.costs.covers(shape) and shape.phase not in self._said:
            self._said.add(shape.phase)
            log.info("crossover table: %s lies beyond what was measured; the nearest measured edge decides", shape)
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
            """The largest factor by which a backend is faster than the first at some length."""
            pairs = zip(times[first], times[name], strict=True)
            return max(
                (math.inf if not math.isfinite(ours) else ours / theirs for ours, theirs in pairs if math.isfinite(theirs)),
                default=0.0,
            )

        second = max((name for name in names if name != first), key=gain, default=None)
        return [first] if second is None or gain(second) <= 1 + self.costs.noise else [first, second]


def _rounded(length: int) -> int:
    """The middle of the eighth of an octave that holds a length: short ones as they are."""
    shift = max(length.bit_length() - 4, 0)
    return ((length >> shift) << shift) + (1 << shift >> 1)


_CHUNK = 2048
"""Prompt tokens of one step."""
_MOST = 1 << 24
"""Most requests, and most tokens of one: a thousand times what is served, and still weighed in a moment."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Equal requests, `batch` of them at a time."""

    batch: int
    input_len: int
    output_len: int
    cached_len: int = 0
    """Tokens of the input that the prefix cache already holds."""

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read chat, long, batch, or BATCHxINPUT+OUTPUT such as 16x1024+256.

        :raises ConfigError: text of another form.
        """
        if text in PRESETS:
            return PRESETS[text]
        match = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text.strip())
        sizes = [int(number) for number in match.groups()] if match else [0]
        if min(sizes) < 1 or max(sizes) > _MOST:
            need = f"{', '.join(PRESETS)}, or BATCHxINPUT+OUTPUT in tokens such as 16x1024+256, each at most {_MOST:,}"
            raise ConfigError("workload", need, repr(text))
        return cls(*sizes)

    def steps(self) -> list[tuple[Shape, float]]:
        """The attention of all requests: (shape, number of steps of that shape)."""
        steps: list[tuple[Shape, float]] = [
            (Shape(Phase.DECODE, self.batch, 1, self.input_len + self.output_len // 2), float(self.output_len))
        ]
        new = self.input_len - self.cached_len
        if new <= _CHUNK:
            together = min(self.batch, max(1, _CHUNK // new))
            phase = Phase.EXTEND if self.cached_len else Phase.PREFILL
            return [(Shape(phase, together, new, self.input_len), self.batch / together), *steps]
        ends = range(self.cached_len + _CHUNK, self.input_len + 1, _CHUNK)
        phases = [Phase.of(_CHUNK, end - _CHUNK) for end in ends]
        chunks = [(Shape(phase, 1, _CHUNK, end), float(self.batch)) for phase, end in zip(phases, ends, strict=True)]
        return chunks + steps

    def __str__(self) -> str:
        name = next((name for name, preset in PRESETS.items() if preset == self), None)
        return name or f"{self.batch}x{self.input_len}+{self.output_len}"


PRESETS = {
    "chat": Workload(16, 1280, 256, cached_len=1024),
    "long": Workload(4, 16384, 512),
    "batch": Workload(256, 512, 512),
}
"""Turns of conversations; long documents; many short requests offline."""


_WORKLOAD_GAIN, _TYPICAL_GAIN = 0.15, 0.035
"""How much less, as a logarithm, the workload or the typical point must cost over a layout and block size than over one that
comes before it in order, for that one to be given up. A few points decide about the workload, and each may be off by the noise;
about the typical point all of them do, so that little noise is left in their mean. The first in order are small blocks, which
waste less memory."""
_NOISES = 4.0
"""Times the noise: what the workload must gain at least. The typical point must gain the noise once."""


NO_ATTENTION = "none"
"""Name that stands for a backend where no layer asks one."""


class Placement(NamedTuple, Generic[L]):
    """How the memory that kernels read and write is arranged."""

    layout: L
    block_size: int
    """Tokens of a block; NO_BLOCKS for layers with a state."""

    def __str__(self) -> str:
        layout, size = self.layout.name, self.block_size
        return f"state_layout={layout}" if size == NO_BLOCKS else f"kv_layout={layout}, block_size={size}"


@dataclass(frozen=True, slots=True)
class Selection(Generic[L]):
    """What was chosen at start for the layers of one kind: a layout, a block size, and the kernels of each phase."""

    place: Placement[L]
    names: Mapping[Phase, str]
    why: str
    others: Mapping[Phase, Sequence[str]] = field(default_factory=dict)
    """Backends that a phase may switch to, step by step."""
    helpers: Mapping[Phase, str] = field(default_factory=dict)
    """The kernel that applies convolutions for one that does not."""

    @property
    def layout(self) -> L:
        """The layout that was chosen."""
        return self.place.layout

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.place.block_size

    def all_for(self, phase: Phase) -> Sequence[str]:
        """The backends that may serve a phase, its usual one first."""
        return [self.names[phase], *self.others.get(phase, ())]

    def __str__(self) -> str:
        names = ", ".join(f"{phase.value}={'|'.join(self.all_for(phase))}" for phase in self.names)
        helpers = ", ".join(dict.fromkeys(self.helpers.values()))
        helped = f", convolutions by {helpers}" if helpers else ""
        return f"{names}{helped}; {self.place} ({self.why})"


@dataclass(frozen=True, slots=True)
class _Rated(Generic[L]):
    place: Placement[L]
    costs: StepCosts
    names: Mapping[Phase, Sequence[str]]
    expected: float
    """Logarithm of the workload's microseconds."""
    typical: Mapping[Shape, float]
    """Logarithm of the least microseconds at each measured point."""


@dataclass(frozen=True)
class MeasuredChoice:
    """Chooses layout, block size and kernels by measured times."""

    parts: Sequence[tuple[CostTable, int]]
    """The table of each distinct kind of layer, and how many layers are of it."""
    workload: Workload
    steps: Sequence[tuple[Shape, float]]
    """The workload's steps in `phases`: (shape, number of steps of that shape)."""
    free: Collection[Phase] = tuple(Phase)
    """Phases that are auto; the others have a kernel of their own, which counts where it has times."""
    phases: Collection[Phase] = tuple(Phase)
    """Phases in which layers ask for a kernel at all."""
    per_step: bool = True
    """True if the kernel of a phase may change from step to step, and later places waste more memory; False if one kernel serves
    every step of a phase, and places are equally large."""

    def select(
        self, places: Sequence[Placement[L]], able: Callable[[Phase, Placement[L]], list[str]]
    ) -> tuple[Selection[L], StepChooser] | None:
        """The place of least expected cost, with the kernels that win there; None if the free phases have times over no place.

        able: returns the kernels that serve a phase of every layer at a place.
        """
        rated: list[_Rated[L]] = []
        for place in places:
            names = {phase: able(phase, place) for phase in self.phases}
            costs = StepCosts(self.parts, place.layout.name, place.block_size)
            expected = self._expected(costs, names)
            if expected is not None:
                rated.append(_Rated(place, costs, names, math.log(expected), _typical(costs, names)))
        if not rated:
            return None
        noise = rated[0].costs.noise
        chosen = _steady_choice(rated, _doubts(noise) if self.per_step else (noise, math.inf))
        costs, served = chosen.costs, chosen.names
        winners = {phase: served[phase] if phase in self.free else served[phase][:1] for phase in served}
        if self.per_step:
            winners |= {phase: costs.winners(phase, served[phase]) for phase in self.free}
        usual = {phase: self._usual(costs, phase, winners[phase]) for phase in served}
        others = {phase: [name for name in winners[phase] if name != usual[phase]] for phase in served if self.per_step}
        others = {phase: rest for phase, rest in others.items() if rest}
        chooser = StepChooser(costs, {phase: [usual[phase], *rest] for phase, rest in others.items()})
        why = f"auto: {self.parts[0][0].source}, workload {self.workload}{_undecided(rated, chosen) if self.per_step else ''}"
        return Selection(chosen.place, usual, why, others), chooser

    def _expected(self, costs: StepCosts, names: Mapping[Phase, Sequence[str]]) -> float | None:
        """Microseconds of attention in the workload; None where a phase is not served, or a free one has no times."""
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
        """The backend that serves the workload's steps of a phase best; without such steps the one that wins most."""
        steps = [(shape, count) for shape, count in self.steps if shape.phase is phase]
        return min(names, key=lambda name: sum(count * costs.step_us(name, shape) for shape, count in steps))


def _typical(costs: StepCosts, names: Mapping[Phase, Sequence[str]]) -> dict[Shape, float]:
    """Logarithm of the least cost at each measured point: what a workload that departs from the expected one meets."""
    shapes = [(shape, able) for phase, able in names.items() for shape in costs.shapes(phase)]
    return {shape: math.log(ranked[0][1]) for shape, able in shapes if (ranked := costs.ranking(shape, able))}


def _doubts(noise: float) -> tuple[float, float]:
    """Return what the workload and the typical point must gain, as logarithms. noise: a share of a time."""
    return max(_WORKLOAD_GAIN, _NOISES * noise), max(_TYPICAL_GAIN, noise)


def _steady_choice(rated: Sequence[_Rated[L]], doubts: tuple[float, float]) -> _Rated[L]:
    """Return the first in order, unless a later one gains more than is in doubt, over the workload or at the typical point."""
    doubt, typical_doubt = doubts
    shared = [shape for shape in rated[0].typical if all(shape in each.typical for each in rated)]
    chosen = rated[0]
    for other in rated[1:]:
        gain = chosen.expected - other.expected
        typical_gain = fmean(chosen.typical[shape] - other.typical[shape] for shape in shared) if shared else 0.0
        if gain > doubt or (gain > -doubt and typical_gain > typical_doubt):
            chosen = other
    return chosen


def _undecided(rated: Sequence[_Rated[L]], chosen: _Rated[L]) -> str:
    """Return a remark if steadier times would have led to another layout or block size; else an empty text."""
    otherwise = _steady_choice(rated, _doubts(0.0))
    if otherwise is chosen:
        return ""
    return f"; times too noisy ({chosen.costs.noise:.0%}) to prefer {otherwise.place}: the first in order stays"
