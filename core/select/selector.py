"""The kernels of a model's layers: layout, block size and kernels chosen at start, made once per spec, named for every step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple

from headway.core.contract.backend import AttentionBackend, Backends
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import OperationKind
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Reason
from headway.core.select.backend_request import ALL_AUTO, AUTO, BackendRequest
from headway.core.select.candidates import AttentionCandidates, B, BackendSource, Candidates, S
from headway.core.select.costs import CostTable, Shape, StepCosts
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.selection import NO_ATTENTION, PRESETS, L, MeasuredChoice, Placement, Selection, StepChooser, Workload


def check_names(source: BackendSource, asked: Mapping[OperationKind, Iterable[str]], kv_layout: str = AUTO) -> None:
    """Check every name a user gave, before anything slow begins.

    asked: names of kernels, by their kind.

    :raises HeadwayError: an unknown kernel or layout.
    """
    for kind, names in asked.items():
        kernels = source.of(kind)
        for name in names:
            if name not in kernels.entries:
                kernels.backend(name)  # raises; one that exists is loaded later, where a refusal carries its hint and a fix
    if kv_layout != AUTO:
        source.layout(kv_layout)


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
            if (measured := choice.select(able.places, self._all)) is not None:
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
            names = {phase: self._first(request, phase, place) for phase in self._able.specs}
            served = {phase: name for phase, name in names.items() if name is not None}
            if len(served) == len(names):
                return Selection(place, served, why)
        return None

    def _all(self, phase: Phase, place: Placement[L]) -> list[str]:
        """Kernels that can serve a phase of every layer, in rank order."""
        return [name for name in self._names(self._request, phase) if not self._able.reasons(name, phase, place)]

    def _first(self, request: BackendRequest, phase: Phase, place: Placement[L]) -> str | None:
        names = self._names(request, phase)
        return next((name for name in names if not self._able.reasons(name, phase, place)), None)

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
            return [phase for phase in self._able.specs if self._first(self._request, phase, place) is None]

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
        source: BackendSource,
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
        self._instances: dict[str, Backends] = {}
        for name in dict.fromkeys(name for phase in chosen.names for name in chosen.all_for(phase)):
            served = [phase for phase in candidates.specs if name in chosen.all_for(phase)]
            self._instances[name] = candidates.instances(name, served, chosen.place)
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
        return self._instances[name or self.selection.names[phase]]

    def backends_of(self, shape: Shape) -> Backends:
        """As `backends_for`, of a shape. For a captured one they are the fastest on the device out of those that can be captured,
        for a replay spares the host their launches; where none can be, or none has a time, those of a step that is launched."""
        if shape.captured and self.costs is not None:
            named = [(name, self._instances[name].values()) for name in self.selection.all_for(shape.phase)]
            able = [name for name, backends in named if all(each.captures(shape.query_len) for each in backends)]
            if ranked := self.costs.ranking(shape, able):
                return self._instances[ranked[0][0]]
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

    def instances_of(self, name: str) -> Backends:
        """The instances of one of the selection's backends, by spec."""
        return self._instances[name]

    @property
    def instances(self) -> list[Backends]:
        """The instances of every backend that may be called, by spec."""
        return list(self._instances.values())

    def layout_of(self, spec: AttentionSpec) -> CacheLayout:
        """The layout of a layer's cache: the selection's, or where that does not fit the layer's values another."""
        return self._candidates.layout_of(spec, self.selection.layout)
