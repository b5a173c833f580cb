"""Selection of the kernels for a model's layers: support, reasons for refusals, choice at start, instances, and choice per
step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Generic, NamedTuple

from headway.core.contract.backend import AttentionBackend, Backends
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Reason
from headway.core.select.costs import CostTable, Shape, StepCosts
from headway.core.select.kernels import AttentionCandidates, B, Candidates, Kernels, L, Placement, S
from headway.core.select.request import ALL_AUTO, AUTO, PRESETS, BackendRequest, LayerSpecs, Workload

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
        self._choices: dict[tuple[Phase, int, int, int], _Choice | None] = {}
        self._candidates: dict[int, list[str]] = {}
        self._current: dict[Phase, str] = {}
        self._reported: set[Phase] = set()

    def choose(self, phase: Phase, batch: int, query_len: int, kv_len: int) -> str | None:
        """Return the backend for the sequences of one phase in a step, or None if no backend was measured. The result becomes the
        phase's current backend.

        query_len, kv_len: lengths of each of these sequences; for unequal lengths, see `Shape.of`.
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
            self._candidates[batch] = self._find_candidates(batch)
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


def _rounded(length: int) -> int:
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
    """Logarithm of the workload's time in microseconds."""
    typical: Mapping[Shape, float]
    """Logarithm of the minimum time in microseconds, for each measured point."""


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
        rated: list[_Rated[L]] = []
        for place in places:
            names = {phase: list(able(phase, place)) for phase in self.phases}
            costs = StepCosts(self.parts, place.layout.name, place.block_size)
            expected = self._expected(costs, names)
            if expected is not None:
                rated.append(_Rated(place, costs, names, math.log(expected), _typical(costs, names)))
        if not rated:
            return None
        noise = rated[0].costs.noise
        chosen = _steady_choice(rated, _doubts(noise) if self.per_step else (noise, math.inf))
        usual, others = {}, {}
        for phase, served in chosen.names.items():
            able_here = served if phase in self.free else served[:1]
            winners = chosen.costs.winners(phase, served) if self.per_step and phase in self.free else able_here
            usual[phase] = self._usual(chosen.costs, phase, winners)
            if self.per_step and len(winners) > 1:
                others[phase] = [name for name in winners if name != usual[phase]]
        why = f"auto: {self.parts[0][0].source}, workload {self.workload}{_undecided(rated, chosen) if self.per_step else ''}"
        selection = Selection(chosen.place, usual, why, others)
        return selection, StepChooser(chosen.costs, {phase: selection.all_for(phase) for phase in others})

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


def _typical(costs: StepCosts, names: Mapping[Phase, Sequence[str]]) -> dict[Shape, float]:
    """Return the logarithm of the minimum cost at each measured point, for workloads that differ from the expected one."""
    shapes = [(shape, able) for phase, able in names.items() for shape in costs.shapes(phase)]
    return {shape: math.log(ranked[0][1]) for shape, able in shapes if (ranked := costs.ranking(shape, able))}


def _doubts(noise: float) -> tuple[float, float]:
    """Return the minimum gains of the workload and of the typical point, as logarithms. noise: relative noise of the times."""
    return max(_WORKLOAD_GAIN, _NOISES * noise), max(_TYPICAL_GAIN, noise)


def _steady_choice(rated: Sequence[_Rated[L]], doubts: tuple[float, float]) -> _Rated[L]:
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


def _undecided(rated: Sequence[_Rated[L]], chosen: _Rated[L]) -> str:
    """Return a remark if a different layout or block size would be selected with the noise of the times ignored, else ""."""
    otherwise = _steady_choice(rated, _doubts(0.0))
    if otherwise is chosen:
        return ""
    return f"; times too noisy ({chosen.costs.noise:.0%}) to prefer {otherwise.place}: the first in order stays"


class Rated(NamedTuple):
    """One kernel at one shape, with the chosen layout and block size."""

    name: str
    reasons: tuple[Reason, ...]
    """Reasons why the kernel does not support the shape or must not be chosen. Empty if there are none."""
    us: float | None
    """Time per step over all layers, in microseconds. None if not measured or not supported."""


class KernelSelector(Generic[S, B, L]):
    """Chooses, for all layers of one kind, a layout and block size with which every phase runs as the user requested.

    A kernel that the user named is used, or rejected with all reasons. Otherwise `auto` minimizes the measured cost over the
    workload. Without times, each phase gets the first kernel in rank order that supports every layer.
    """

    def __init__(
        self,
        candidates: Candidates[S, B, L],
        request: BackendRequest = ALL_AUTO,
        costs: Mapping[S, CostTable] | None = None,
        workload: Workload = PRESETS["chat"],
    ) -> None:
        """costs: measured times of each distinct layer. None if there are none.

        :raises HeadwayError: if a name is unknown or no kernel supports the layers, with all reasons and the nearest request
            that would be supported.
        """
        self._able = candidates
        self._request = request
        self._parts = [(costs[spec], count) for spec, count in candidates.counts.items()] if costs else []
        self._failed = {name: why for table, _ in self._parts for name, why in table.excluded.items()}
        """Kernel excluded from selection, for example by a failed self-test -> reason."""
        self._chooser: StepChooser | None = None
        selection = self._select(workload)
        helpers = {phase: candidates.helper(name, phase, selection.place) for phase, name in selection.names.items()}
        self.selection = replace(selection, helpers={phase: helper for phase, helper in helpers.items() if helper})

    def backends_for(self, phase: Phase) -> Mapping[S, B]:
        """Return spec -> instance of the selected kernel for a phase."""
        return self._able.instances(self.selection.names[phase], (phase,), self.selection.place)

    @property
    def costs(self) -> StepCosts | None:
        """Measured times for the selected layout and block size. None if these times did not decide the selection."""
        return self._chooser.costs if self._chooser is not None else None

    @property
    def all_costs(self) -> StepCosts | None:
        """Measured times for the selected layout and block size, even if they did not decide. None if there are none."""
        return StepCosts(self._parts, self.selection.layout.name, self.selection.block_size) if self._parts else None

    def rated(self, shape: Shape, chosen: str) -> list[Rated]:
        """Return every registered kernel, with the selected layout and block size: `chosen`, then kernels with a measured time,
        fastest first, then other supported kernels, then the rest."""
        costs, found = self.all_costs, []
        for name in self._able.source.entries:
            reasons = self._able.reasons(name, shape.phase, self.selection.place) + self._failure(name)
            us = math.inf if reasons or costs is None else costs.step_us(name, shape)
            found.append(Rated(name, reasons, us if math.isfinite(us) else None))
        return sorted(found, key=lambda each: (each.name != chosen, bool(each.reasons), each.us is None, each.us or 0.0))

    def why_not(self, phase: Phase) -> dict[str, tuple[Reason, ...]]:
        """Return a mapping from each kernel considered for a phase to the reasons why it does not support the phase with the
        selected layout. The reasons are () if the kernel supports the phase."""
        names = self._names(self._request, phase, every=True) if self._able.specs else ()
        failed = self._failed if self._request.name_for(phase) == AUTO else {}
        found = {name: self._able.reasons(name, phase, self.selection.place) for name in names}
        return found | {name: self._failure(name) for name in failed}

    def _failure(self, name: str) -> tuple[Reason, ...]:
        return (Reason(name, "to pass its self-test", self._failed[name]),) if name in self._failed else ()

    def _select(self, workload: Workload) -> Selection[L]:
        able, free = self._able, [phase for phase in self._request.auto_phases if phase in self._able.specs]
        if not able.specs:  # a page then takes no memory and only counts tokens
            return Selection(able.places[0], dict.fromkeys(Phase, NO_ATTENTION), "no layer has attention")
        why = "auto: no crossover table, rank order" if free else "asked for"
        if self._parts and free:
            choice = MeasuredChoice(self._parts, workload, able.steps(workload), free, able.specs, able.per_step)
            if (measured := choice.select(able.places, partial(self._supported, self._request))) is not None:
                self._chooser = measured[1]
                return measured[0]
            why = f"auto: {self._parts[0][0].source} has no times for this layout and block size, rank order"
        found = self._search(self._request, able.places, why)
        if found is None:
            raise self._refusal()
        return found

    def _search(self, request: BackendRequest, places: Sequence[Placement[L]], why: str = "") -> Selection[L] | None:
        """Return the first layout and block size with which the request covers every phase."""
        for place in places:
            names = {phase: next(self._supported(request, phase, place), "") for phase in self._able.specs}
            if all(names.values()):
                return Selection(place, names, why)
        return None

    def _supported(self, request: BackendRequest, phase: Phase, place: Placement[L]) -> Iterator[str]:
        """Return the kernels that support a phase of every layer under a request, in rank order."""
        return (name for name in self._names(request, phase) if not self._able.reasons(name, phase, place))

    def _names(self, request: BackendRequest, phase: Phase, every: bool = False) -> Sequence[str]:
        """Return the names to try, best guess first. every: True to include kernels registered for other devices."""
        if (name := request.name_for(phase)) != AUTO:
            return (name,)
        source, spec = self._able.source, self._able.first
        meant = source.entries if every else source.meant_for(spec.device.type)
        return source.rank(spec, phase, [name for name in meant if name not in self._failed])

    def _refusal(self) -> UnsupportedError:
        """Return an error with the reasons for the layout and block size that fail in the fewest phases, and with options that
        would work."""

        def unserved(place: Placement[L]) -> list[Phase]:
            return [phase for phase in self._able.specs if not any(self._supported(self._request, phase, place))]

        nearest = min(self._able.places, key=lambda place: len(unserved(place)))
        reasons: list[Reason] = []
        for phase in unserved(nearest):
            for name in self._names(self._request, phase, every=True):
                label = f"{name}, " if self._request.name_for(phase) == AUTO else ""
                found = self._able.reasons(name, phase, nearest)
                reasons += [reason._replace(what=f"{label}{reason.what}") for reason in found]
        wanted = ", ".join(self._request.names) or AUTO
        where = f"{self._able.kind.name} backend {wanted} ({nearest}, {self._able.first})"
        return UnsupportedError(where, list(dict.fromkeys(reasons)), self._fix(unserved(nearest)))

    def _fix(self, unserved: Sequence[Phase]) -> str:
        """Return the options of the smallest change to the request that is supported, or "" if there is none. Changes are tried
        in order of size."""
        kept = BackendRequest(
            AUTO if {Phase.PREFILL, Phase.EXTEND} & set(unserved) else self._request.prefill,
            AUTO if Phase.DECODE in unserved or Phase.DECODE not in self._able.specs else self._request.decode,
        )
        for request in (self._request, *([kept] if kept.names else ()), ALL_AUTO):
            found = self._search(request, self._able.all_places)
            if found is not None:
                return self._able.options.format(request, found.layout.name, found.block_size)
        return ""


class Selector(KernelSelector[AttentionSpec, AttentionBackend, CacheLayout]):
    """Chooses attention backends at start, and each step's backend by a dict lookup (`StepChooser`)."""

    def __init__(
        self,
        source: Kernels,
        layers: LayerSpecs,
        request: BackendRequest = ALL_AUTO,
        *,
        kv_layout: str = "auto",
        block_size: int | None = None,
        options: Mapping[str, Mapping[str, str]] | None = None,
        costs: Mapping[AttentionSpec, CostTable] | None = None,
        workload: Workload = PRESETS["chat"],
    ) -> None:
        """options: backend -> option -> value. costs: measured times of each distinct layer, including non-absorbed ones. None if
        there are none.

        :raises HeadwayError: if a name is unknown or the request is not supported, with all reasons.
        """
        candidates = AttentionCandidates(source, layers, kv_layout, block_size, options)
        super().__init__(candidates, request, costs, workload)
        chosen = self.selection
        self._candidates = candidates
        self.instances: dict[str, Backends] = {}
        """Name of a backend that may be called -> instances of the backend, keyed by spec."""
        for name in dict.fromkeys(name for phase in chosen.names for name in chosen.all_for(phase)):
            served = [phase for phase in candidates.specs if name in chosen.all_for(phase)]
            self.instances[name] = candidates.instances(name, served, chosen.place)
        self.gathering = candidates.gathering(chosen.names[Phase.PREFILL], chosen.place)
        """Spec of a latent layer's cache -> the prefill backend's instance for attention over its gathered, up-projected context.
        Specs that the backend does not support are missing."""

    def backends_for(self, phase: Phase, batch: int | None = None, query_len: int = 1, kv_len: int = 1) -> Backends:
        """Return spec -> backend instance for a phase in this step.

        batch: number of sequences of the phase in the step, or in the graph that is captured. None selects the phase's usual
        backend. query_len, kv_len: new tokens, and cached plus new tokens, of each sequence. For unequal lengths, see `Shape.of`.
        """
        name = None
        if batch is not None and self._chooser is not None and phase in self.selection.others:
            name = self._chooser.choose(phase, batch, query_len, kv_len)
        return self.instances[name or self.selection.names[phase]]

    def backends_of(self, shape: Shape) -> Backends:
        """Return spec -> instance for a shape.

        For a captured shape, the backend with the shortest device time is selected among the backends that can be captured,
        because a replay needs no launches by the host. If no such backend has a measured time, the backend is selected as for a
        launched step.
        """
        if shape.captured and self.costs is not None:
            named = [(name, self.instances[name].values()) for name in self.selection.all_for(shape.phase)]
            able = [name for name, backends in named if all(each.captures(shape.query_len) for each in backends)]
            if ranked := self.costs.ranking(shape, able):
                return self.instances[ranked[0][0]]
        return self.backends_for(shape.phase, shape.batch, shape.query_len, shape.kv_len)

    def candidates_for(self, phase: Phase, batch: int) -> Sequence[str]:
        """Return the backends among which `backends_for` chooses for a phase and batch size, without changing any state."""
        return self.decode_candidates(batch) if phase is Phase.DECODE else self.selection.all_for(phase)

    def decode_candidates(self, batch: int) -> list[str]:
        """Return the backends that `backends_for` may select for decodes of a batch size: at most two, for which graphs are
        captured."""
        if self._chooser is None or Phase.DECODE not in self.selection.others:
            return [self.selection.names[Phase.DECODE]]
        return self._chooser.decode_candidates(batch) or [self.selection.names[Phase.DECODE]]

    def decode_us(self, batch: int, query_len: int, kv_len: int) -> float:
        """Return the attention time of a decode step with the fastest backend in microseconds, or infinity if not measured."""
        if self.costs is None:
            return math.inf
        shape = Shape(Phase.DECODE, batch, query_len, kv_len)
        return min(self.costs.step_us(name, shape) for name in self.selection.all_for(Phase.DECODE))

    def forget(self) -> None:
        """Reset each phase's current backend, after warm-up steps."""
        if self._chooser is not None:
            self._chooser.forget()

    def layout_of(self, spec: AttentionSpec) -> CacheLayout:
        """Return the layout of a layer's cache: the selected layout, or a different layout if the selected one cannot hold the
        layer's values."""
        return self._candidates.layout_of(spec, self.selection.layout)
