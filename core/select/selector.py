"""The kernels of a model's layers: which can serve and why not, the choice at start, instances, and each step's kernel."""

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


_WORKLOAD_GAIN, _TYPICAL_GAIN = 0.15, 0.035
"""How much less, as a logarithm, the workload or the typical point must cost over a layout and block size than over one that
comes before it in order, for that one to be given up. A few points decide about the workload, and each may be off by the noise;
about the typical point all of them do, so that little noise is left in their mean. The first in order are small blocks, which
waste less memory."""
_NOISES = 4.0
"""Times the noise: what the workload must gain at least. The typical point must gain the noise once."""


NO_ATTENTION = "none"
"""Name that stands for a backend where no layer asks one."""


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
        self, places: Sequence[Placement[L]], able: Callable[[Phase, Placement[L]], Iterable[str]]
    ) -> tuple[Selection[L], StepChooser] | None:
        """The place of least expected cost, with the kernels that win there; None if the free phases have times over no place.

        able: returns the kernels that serve a phase of every layer at a place.
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


class Rated(NamedTuple):
    """One kernel at one shape, over the chosen layout and block size."""

    name: str
    reasons: tuple[Reason, ...]
    """Why it cannot serve or must not be chosen; empty: it can."""
    us: float | None
    """Microseconds of a step, all layers; None: not measured, or it cannot serve."""


class KernelSelector(Generic[S, B, L]):
    """The choice for all layers of one kind: a layout and a block size over which every phase is served as the user asked.

    What the user named serves, or is refused with every reason. For the rest `auto` takes what has the least measured cost over
    the workload; without times, for each phase, the first kernel of the rank hook's order that supports every layer.
    """

    def __init__(
        self,
        candidates: Candidates[S, B, L],
        request: BackendRequest = ALL_AUTO,
        costs: Mapping[S, CostTable] | None = None,
        workload: Workload = PRESETS["chat"],
    ) -> None:
        """costs: measured times of each distinct layer; None: there are none.

        :raises HeadwayError: an unknown name, or layers that nothing serves, with every reason and the nearest request that
            would be served.
        """
        self._able = candidates
        self._request = request
        self._parts = [(costs[spec], count) for spec, count in candidates.counts.items()] if costs else []
        self._failed = {name: why for table, _ in self._parts for name, why in table.excluded.items()}
        """Kernels that failed their self-test -> what failed."""
        self._chooser: StepChooser | None = None
        selection = self._select(workload)
        helpers = {phase: candidates.helper(name, phase, selection.place) for phase, name in selection.names.items()}
        self.selection = replace(selection, helpers={phase: helper for phase, helper in helpers.items() if helper})

    def backends_for(self, phase: Phase) -> Mapping[S, B]:
        """The instances of the selection's kernel for a phase, by spec."""
        return self._able.instances(self.selection.names[phase], (phase,), self.selection.place)

    @property
    def costs(self) -> StepCosts | None:
        """Measured times over the selection's layout and block size; None where they did not decide."""
        return self._chooser.costs if self._chooser is not None else None

    @property
    def all_costs(self) -> StepCosts | None:
        """Measured times over the selection's layout and block size, whether or not they decided; None: there are none."""
        return StepCosts(self._parts, self.selection.layout.name, self.selection.block_size) if self._parts else None

    def rated(self, shape: Shape, chosen: str) -> list[Rated]:
        """Every registered kernel over the selection's layout and block size: the chosen one, then those with a time, fastest
        first, then those that can serve."""
        costs, found = self.all_costs, []
        for name in self._able.source.entries:
            reasons = self._able.reasons(name, shape.phase, self.selection.place) + self._failure(name)
            us = math.inf if reasons or costs is None else costs.step_us(name, shape)
            found.append(Rated(name, reasons, us if math.isfinite(us) else None))
        return sorted(found, key=lambda each: (each.name != chosen, bool(each.reasons), each.us is None, each.us or 0.0))

    def why_not(self, phase: Phase) -> dict[str, tuple[Reason, ...]]:
        """Each kernel that was considered for a phase -> why the phase is refused, over the selection's layout; (): it can."""
        names = self._names(self._request, phase, every=True) if self._able.specs else ()
        failed = self._failed if self._request.name_for(phase) == AUTO else {}
        found = {name: self._able.reasons(name, phase, self.selection.place) for name in names}
        return found | {name: self._failure(name) for name in failed}

    def _failure(self, name: str) -> tuple[Reason, ...]:
        return (Reason(name, "to pass its self-test", self._failed[name]),) if name in self._failed else ()

    def _select(self, workload: Workload) -> Selection[L]:
        able, free = self._able, [phase for phase in self._request.auto_phases if phase in self._able.specs]
        if not able.specs:  # pages of such a cache take no memory, and only count tokens
            return Selection(able.places[0], dict.fromkeys(Phase, NO_ATTENTION), "no layer has attention")
        why = "auto: no crossover table, rank order" if free else "asked for"
        if self._parts and free:
            choice = MeasuredChoice(self._parts, workload, able.steps(workload), free, able.specs, able.per_step)
            if (measured := choice.select(able.places, partial(self._serving, self._request))) is not None:
                self._chooser = measured[1]
                return measured[0]
            why = f"auto: {self._parts[0][0].source} has no times for this layout and block size, rank order"
        found = self._search(self._request, able.places, why)
        if found is None:
            raise self._refusal()
        return found

    def _search(self, request: BackendRequest, places: Sequence[Placement[L]], why: str = "") -> Selection[L] | None:
        """The first layout and block size over which the request covers every phase."""
        for place in places:
            names = {phase: next(self._serving(request, phase, place), "") for phase in self._able.specs}
            if all(names.values()):
                return Selection(place, names, why)
        return None

    def _serving(self, request: BackendRequest, phase: Phase, place: Placement[L]) -> Iterator[str]:
        """Kernels that can serve a phase of every layer as the request has it, in rank order."""
        return (name for name in self._names(request, phase) if not self._able.reasons(name, phase, place))

    def _names(self, request: BackendRequest, phase: Phase, every: bool = False) -> Sequence[str]:
        """Return the names to try, best guess first. every: True includes kernels that are registered for other devices."""
        if (name := request.name_for(phase)) != AUTO:
            return (name,)
        source, spec = self._able.source, self._able.first
        meant = source.entries if every else source.meant_for(spec.device.type)
        return source.rank(spec, phase, [name for name in meant if name not in self._failed])

    def _refusal(self) -> UnsupportedError:
        """Explain the layout and block size that came nearest, and name what would work."""

        def unserved(place: Placement[L]) -> list[Phase]:
            return [phase for phase in self._able.specs if not any(self._serving(self._request, phase, place))]

        nearest = min(self._able.places, key=lambda place: len(unserved(place)))
        reasons: list[Reason] = []
        for phase in unserved(nearest):
            for name in self._names(self._request, phase, every=True):
                label = f"{name}, " if self._request.name_for(phase) == AUTO else ""
                found = self._able.reasons(name, phase, nearest)
                reasons += [reason._replace(what=f"{label}{reason.what}") for reason in found]
        asked = ", ".join(self._request.names) or AUTO
        where = f"{self._able.kind.name} backend {asked} ({nearest}, {self._able.first})"
        return UnsupportedError(where, list(dict.fromkeys(reasons)), self._fix(unserved(nearest)))

    def _fix(self, unserved: Sequence[Phase]) -> str:
        """The smallest change of the request that would be served, found by trying; empty: there is none."""
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
    """Chooses attention backends at start, then answers each step's question with a dict get (`StepChooser`)."""

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
        """options: backend -> option -> value. costs: measured times of each distinct layer, expanded ones too; None: none.

        :raises HeadwayError: an unknown name, or a request that cannot be served, with every reason.
        """
        candidates = AttentionCandidates(source, layers, kv_layout, block_size, options)
        super().__init__(candidates, request, costs, workload)
        chosen = self.selection
        self._candidates = candidates
        self.instances: dict[str, Backends] = {}
        """Each backend that may be called -> its instances, by spec."""
        for name in dict.fromkeys(name for phase in chosen.names for name in chosen.all_for(phase)):
            served = [phase for phase in candidates.specs if name in chosen.all_for(phase)]
            self.instances[name] = candidates.instances(name, served, chosen.place)
        self.gathering = candidates.gathering(chosen.names[Phase.PREFILL], chosen.place)
        """The spec of a latent layer's cache -> the backend that attends to its context after that was gathered and expanded: the
        one of its prompts. A layer that this backend cannot serve so is missing."""

    def backends_for(self, phase: Phase, batch: int | None = None, query_len: int = 1, kv_len: int = 1) -> Backends:
        """The instances, by spec, that serve a phase in this step.

        batch: sequences of that part of the step (of a graph: those it is captured for); None: the phase's usual backend.
        query_len, kv_len: of each sequence, new tokens and cached plus new ones; where they differ see `Shape.of`.
        """
        name = None
        if batch is not None and self._chooser is not None and phase in self.selection.others:
            name = self._chooser.choose(phase, batch, query_len, kv_len)
        return self.instances[name or self.selection.names[phase]]

    def backends_of(self, shape: Shape) -> Backends:
        """As `backends_for`, of a shape. For a captured one they are the fastest on the device out of those that can be captured,
        for a replay spares the host their launches; where none can be, or none has a time, those of a step that is launched."""
        if shape.captured and self.costs is not None:
            named = [(name, self.instances[name].values()) for name in self.selection.all_for(shape.phase)]
            able = [name for name, backends in named if all(each.captures(shape.query_len) for each in backends)]
            if ranked := self.costs.ranking(shape, able):
                return self.instances[ranked[0][0]]
        return self.backends_for(shape.phase, shape.batch, shape.query_len, shape.kv_len)

    def candidates_for(self, phase: Phase, batch: int) -> Sequence[str]:
        """Backends between which `backends_for` chooses in steps of this phase and batch size. Asking changes nothing."""
        return self.decode_candidates(batch) if phase is Phase.DECODE else self.selection.all_for(phase)

    def decode_candidates(self, batch: int) -> list[str]:
        """Backends that `backends_for` may name for decodes of this batch size: those worth a captured graph, at most two."""
        if self._chooser is None or Phase.DECODE not in self.selection.others:
            return [self.selection.names[Phase.DECODE]]
        return self._chooser.decode_candidates(batch) or [self.selection.names[Phase.DECODE]]

    def decode_us(self, batch: int, query_len: int, kv_len: int) -> float:
        """Microseconds of the attention of a decode step with the fastest backend; infinite where nothing was measured."""
        if self.costs is None:
            return math.inf
        shape = Shape(Phase.DECODE, batch, query_len, kv_len)
        return min(self.costs.step_us(name, shape) for name in self.selection.all_for(Phase.DECODE))

    def forget(self) -> None:
        """Choose the next step's backends as in the first step: after steps of warm-up."""
        if self._chooser is not None:
            self._chooser.forget()

    def layout_of(self, spec: AttentionSpec) -> CacheLayout:
        """The layout of a layer's cache: the selection's, or where that does not fit the layer's values another."""
        return self._candidates.layout_of(spec, self.selection.layout)
