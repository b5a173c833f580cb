"""Measured times of layers with a state, looked up by a step's shape and summed over a workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.contract.metadata import Phase
from headway.core.select.costs import CostTable, Shape
from headway.core.select.workload import Workload

NO_BLOCKS = 0
"""Stands for the block size in a `CostTable` of states, which lie in slots."""


def state_shape(phase: Phase, batch: int, query_len: int) -> Shape:
    """The shape under which a state backend's time stands: what came before the new tokens takes no time."""
    return Shape(Phase.DECODE if phase is Phase.DECODE else Phase.PREFILL, batch, query_len, query_len)


@dataclass(frozen=True)
class StateCosts:
    """The cost of a workload's layers with a state through each backend."""

    parts: Sequence[tuple[CostTable, int]]
    """The table of each distinct layer, and how many layers are of that kind."""
    workload: Workload
    decode_len: int = 1
    """Tokens of a sequence in a decode: one and its drafts."""

    @property
    def layers(self) -> int:
        """Layers with a state."""
        return sum(count for _, count in self.parts)

    @property
    def noise(self) -> float:
        """Relative difference below which two times count as equal."""
        return max(table.noise for table, _ in self.parts)

    @property
    def excluded(self) -> dict[str, str]:
        """Backends that must not be chosen -> why."""
        return {name: why for table, _ in self.parts for name, why in table.excluded.items()}

    def steps(self, phase: Phase) -> list[tuple[Shape, float]]:
        """Shapes of the workload's steps, and how many steps have each. phase: PREFILL (prompts) or DECODE."""
        decodes = phase is Phase.DECODE
        return [
            (state_shape(phase, shape.batch, self.decode_len if decodes else shape.query_len), count)
            for shape, count in self.workload.steps()
            if (shape.phase is Phase.DECODE) is decodes
        ]

    def step_us(self, name: str, layout: str, shape: Shape) -> float:
        """Microseconds of all layers with a state in a step; infinite where some layer was not measured."""
        total = 0.0
        for table, layers in self.parts:
            layer, plan = table.at(shape, name, layout, NO_BLOCKS)
            total += plan + layers * layer
        return total

    def total_us(self, name: str, layout: str, phase: Phase) -> float:
        """Microseconds of the whole workload's steps of a phase."""
        return sum(count * self.step_us(name, layout, shape) for shape, count in self.steps(phase))

    def mean_us(self, name: str, layout: str, phase: Phase) -> float | None:
        """Microseconds of the mean step of a phase; None where it was not measured."""
        mean = self.total_us(name, layout, phase) / sum(count for _, count in self.steps(phase))
        return mean if math.isfinite(mean) else None
