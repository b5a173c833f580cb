"""The backends of layers with a state: a layout for their states, a backend for `scan`, and one for `step`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.core.contract.errors import UnsupportedError
from headway.core.contract.metadata import Phase
from headway.core.contract.state import StateLayout, StateSpec
from headway.core.contract.support import Reason
from headway.core.select.backend_request import ALL_AUTO, AUTO, BackendRequest
from headway.core.select.costs import CostTable, Shape
from headway.core.select.selection import PRESETS, Workload
from headway.core.select.state_candidates import VERBS, StateCandidates, StateSource

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


@dataclass(frozen=True, slots=True)
class StateSelection:
    """Which state backend serves which phase, over which layout."""

    layout: StateLayout
    scan: str
    """Serves prompts."""
    step: str
    """Serves decodes."""
    why: str
    convolution: Mapping[tuple[str, Phase], str] = field(default_factory=dict)
    """The backend that applies the convolutions of one that does not, by its name and phase."""

    def name_for(self, phase: Phase) -> str:
        """The backend that serves a phase."""
        return self.step if phase is Phase.DECODE else self.scan

    def __str__(self) -> str:
        names = self.scan if self.scan == self.step else f"prefill={self.scan},decode={self.step}"
        helpers = ", ".join(dict.fromkeys(self.convolution.values()))
        convolved = f", convolutions by {helpers}" if helpers else ""
        return f"{names}{convolved}, states in layout {self.layout.name} ({self.why})"


class RatedState(NamedTuple):
    """One state backend in one phase over the chosen layout."""

    name: str
    reasons: tuple[Reason, ...]
    """Why it cannot serve; empty: it can."""
    us: float | None
    """Microseconds of the workload's mean step of that phase, all layers; None: not measured."""


class StateSelector:
    """Chooses once at start, and holds the instances of every spec.

    `auto` takes the layout and, for each verb, the backend of least expected cost over the workload where all of that was
    measured, else what comes first by the rank hook's order.
    """

    def __init__(
        self,
        source: StateSource,
        specs: Sequence[StateSpec],
        request: BackendRequest = ALL_AUTO,
        costs: Mapping[StateSpec, CostTable] | None = None,
        workload: Workload = PRESETS["chat"],
        decode_len: int = 1,
    ) -> None:
        """specs: that of each layer with a state. costs: measured times of each distinct one; None: there are none.

        decode_len: tokens of a sequence in a decode, with its drafts.

        :raises HeadwayError: an unknown name, or layers that nothing serves, with every reason.
        """
        counts = Counter(specs)
        self._source = source
        self._request = request
        self._able = StateCandidates(source, list(counts), decode_len)
        self._costs = None
        if costs:
            self._costs = StateCosts([(costs[spec], count) for spec, count in counts.items()], workload, decode_len)
        for name in request.names:
            source.backend(name)
        self.selection = self._select()
        layout = self.selection.layout
        self.scan = self._able.instances(self.selection.scan, layout, Phase.PREFILL)
        """Serves sequences that prefill or extend."""
        self.step = self._able.instances(self.selection.step, layout, Phase.DECODE)
        """Serves sequences that decode."""

    def rated(self, phase: Phase) -> list[RatedState]:
        """Every state backend over the chosen layout: the one that serves the phase, then those that could, the fastest first.

        phase: PREFILL, which stands for `scan`, or DECODE.
        """
        layout, chosen, failed = self.selection.layout, self.selection.name_for(phase), self._failed
        found = []
        for name in self._source.entries:
            reasons = self._able.reasons(name, layout, phase)
            if name in failed:
                reasons += (Reason(name, "right answers when it was measured", failed[name]),)
            us = None if reasons or self._costs is None else self._costs.mean_us(name, layout.name, phase)
            found.append(RatedState(name, reasons, us))
        return sorted(found, key=lambda each: (each.name != chosen, bool(each.reasons), each.us or math.inf))

    @property
    def _failed(self) -> Mapping[str, str]:
        return {} if self._costs is None else self._costs.excluded

    def _select(self) -> StateSelection:
        if not self._request.auto_phases:
            why = "asked for"
        elif self._costs is not None and (found := self._measured(self._costs)) is not None:
            return found
        else:
            why = "auto: rank order" if self._costs is None else "auto: not measured far enough, rank order"
        for layout in self._source.layouts.values():
            names = [self._served(layout, phase) for phase in VERBS]
            if all(names):
                return self._selection(layout, names[0][0], names[1][0], why)
        raise self._refusal()

    def _measured(self, costs: StateCosts) -> StateSelection | None:
        """The least expected cost; None: what was asked for is served over no layout on which every phase was measured."""
        best, found = math.inf, None
        for layout in self._source.layouts.values():
            total, names = 0.0, []
            for phase in VERBS:
                able = self._served(layout, phase)
                if self._request.name_for(phase) == AUTO:
                    times = {name: costs.total_us(name, layout.name, phase) for name in able}
                    able = sorted(times, key=times.__getitem__)  # of equal ones the first in rank order
                    total += min(times.values(), default=math.inf)
                names += able[:1]
            # A layout that comes first is left for one that gains more than the noise.
            if len(names) == len(VERBS) and total < best * (1.0 if math.isinf(best) else 1.0 - costs.noise):
                best, found = total, self._selection(layout, names[0], names[1], self._figures(costs, layout, names))
        return found

    def _figures(self, costs: StateCosts, layout: StateLayout, names: Sequence[str]) -> str:
        told = []
        for (phase, verb), name in zip(VERBS.items(), names, strict=True):
            if (us := costs.mean_us(name, layout.name, phase)) is None:
                continue
            times = {other: costs.mean_us(other, layout.name, phase) for other in self._served(layout, phase) if other != name}
            slower = ", ".join(f"{other} {theirs:,.0f}" for other, theirs in times.items() if theirs is not None)
            told.append(f"{verb} {us:,.0f} us" + f" ({slower})" * bool(slower))
        source = costs.parts[0][0].source
        return f"auto: measured, {', '.join(told)}, for {costs.layers} layers in a mean step of {costs.workload}; {source}"

    def _served(self, layout: StateLayout, phase: Phase) -> list[str]:
        """Candidates that serve a phase of every layer, in rank order."""
        return [name for name in self._candidates(phase) if self._able.serves(name, layout, phase)]

    def _selection(self, layout: StateLayout, scan: str, step: str, why: str) -> StateSelection:
        pairs = ((scan, Phase.PREFILL), (step, Phase.DECODE))
        helpers = {(name, phase): helper for name, phase in pairs if (helper := self._able.helper(name, layout, phase))}
        return StateSelection(layout, scan, step, why, helpers)

    def _candidates(self, phase: Phase) -> Sequence[str]:
        name = self._request.name_for(phase)
        if name != AUTO:
            return [name]
        return self._source.rank(self._able.specs[0], phase, [name for name in self._source.entries if name not in self._failed])

    def _refusal(self) -> UnsupportedError:
        reasons = []
        for layout in self._source.layouts.values():
            for phase in VERBS:
                for name in self._candidates(phase):
                    reasons += [
                        each._replace(what=f"{name} over {layout.name}, {each.what}")
                        for each in self._able.reasons(name, layout, phase)
                    ]
        asked = ", ".join(self._request.names) or AUTO
        served = next((name for name in self._source.entries if self._all_serve(name)), "")
        hint = f"--state-backend {served}" if served else ""
        return UnsupportedError(f"state backend {asked} ({self._able.specs[0]})", list(dict.fromkeys(reasons)), hint)

    def _all_serve(self, name: str) -> bool:
        layouts = self._source.layouts.values()
        return any(all(self._able.serves(name, layout, phase) for phase in VERBS) for layout in layouts)
