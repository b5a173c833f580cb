"""What was chosen at start, and the choice by measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.select.chooser import Chooser
from headway.core.select.costs import CostTable, StepCosts
from headway.core.select.workload import Workload

_INDIFFERENT = 1.01
"""A block size whose cost is within this factor of the least over the same layout, for the workload and in the mean of all that
was measured, is as good: the smallest is taken, since small blocks waste less memory and share more prefixes."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A layout, a block size, and a backend for each phase."""

    layout: CacheLayout
    block_size: int
    names: Mapping[Phase, str]
    why: str
    others: Mapping[Phase, Sequence[str]] = field(default_factory=dict)
    """Backends that a phase may switch to, step by step."""

    def __str__(self) -> str:
        switching = {phase: "|".join((name, *self.others.get(phase, ()))) for phase, name in self.names.items()}
        names = ", ".join(f"{phase.value}={text}" for phase, text in switching.items())
        return f"{names}; kv_layout={self.layout.name}, block_size={self.block_size} ({self.why})"


Able = Callable[[Phase, CacheLayout, int], list[str]]
"""(phase, layout, block size) -> backends that serve every layer there."""


@dataclass(frozen=True)
class Measured:
    """Chooses by measured times."""

    parts: Sequence[tuple[CostTable, int]]
    """The table of each distinct kind of layer, and how many layers are of it."""
    workload: Workload
    free: Collection[Phase]
    """Phases that are auto; the others have a backend of their own, which counts where it has times."""

    @property
    def excluded(self) -> set[str]:
        """Backends that failed their self-test."""
        return {name for table, _ in self.parts for name in table.excluded}

    def select(self, choices: Sequence[tuple[CacheLayout, int]], able: Able) -> tuple[Selection, Chooser] | None:
        """The layout and block size of least expected cost, with the backends that win there.

        None if the free phases have times over none of the choices.
        """
        rated: list[tuple[float, StepCosts, CacheLayout, dict[Phase, list[str]]]] = []
        for layout, size in choices:
            names = {phase: able(phase, layout, size) for phase in Phase}
            costs = StepCosts(self.parts, layout.name, size)
            cost = self._expected(costs, names)
            if cost is not None:
                rated.append((cost, costs, layout, names))
        if not rated:
            return None
        least, _, best, _ = min(rated, key=lambda row: row[0])
        as_good = [row for row in rated if row[2] == best and row[0] <= least * _INDIFFERENT]
        overall = [self._overall(costs, names) for _, costs, _, names in as_good]
        _, costs, layout, names = next(row for row, us in zip(as_good, overall, strict=True) if us <= min(overall) * _INDIFFERENT)
        winners = {phase: costs.winners(phase, names[phase]) if phase in self.free else names[phase][:1] for phase in Phase}
        usual = {phase: self._usual(costs, phase, winners[phase]) for phase in Phase}
        others = {phase: [name for name in winners[phase] if name != usual[phase]] for phase in Phase}
        others = {phase: rest for phase, rest in others.items() if rest}
        chooser = Chooser(costs, {phase: [usual[phase], *rest] for phase, rest in others.items()})
        why = f"auto: {self.parts[0][0].source}, workload {self.workload}"
        return Selection(layout, costs.block_size, usual, why, others), chooser

    def _expected(self, costs: StepCosts, names: Mapping[Phase, Sequence[str]]) -> float | None:
        """Microseconds of attention in the workload; None where a phase is not served, or a free one has no times."""
        measured = {
            phase: any(math.isfinite(costs.step_us(name, shape)) for name in able for shape in costs.shapes(phase))
            for phase, able in names.items()
        }
        if not all(names.values()) or not all(measured[phase] for phase in self.free):
            return None
        steps = [(shape, count) for shape, count in self.workload.steps() if measured[shape.phase]]
        total = sum(count * min(costs.step_us(name, shape) for name in names[shape.phase]) for shape, count in steps)
        return total if math.isfinite(total) else None

    def _overall(self, costs: StepCosts, names: Mapping[Phase, Sequence[str]]) -> float:
        """Geometric mean of the least costs at all measured points: what a workload that departs from the expected one meets."""
        logs = [
            math.log(ranked[0][1])
            for phase, able in names.items()
            for shape in costs.shapes(phase)
            if (ranked := costs.ranking(shape, able))
        ]
        return math.exp(fmean(logs)) if logs else 0.0

    def _usual(self, costs: StepCosts, phase: Phase, names: Sequence[str]) -> str:
        """The backend that serves the workload's steps of a phase best; without such steps the one that wins most."""
        steps = [(shape, count) for shape, count in self.workload.steps() if shape.phase is phase]
        return min(names, key=lambda name: sum(count * costs.step_us(name, shape) for shape, count in steps))
