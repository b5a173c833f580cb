"""Selection of the kernels for a model's layers, by kind of layer: support, reasons for refusals, instances."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import product
from operator import add
from typing import Generic

from headway.core.contract.backend import AttentionBackend, Backends
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Reason
from headway.core.select.choice import (
    NO_ATTENTION,
    ChoiceRow,
    MeasuredChoice,
    Rated,
    RatedPlace,
    Selection,
    StepChooser,
    doubts_of,
    rounded,
    steady_choice,
    undecided,
)
from headway.core.select.costs import NO_BLOCKS, CostTable, Shape, StepCosts
from headway.core.select.kernels import AttentionCandidates, B, Candidates, Kernels, L, Placement, S
from headway.core.select.request import ALL_AUTO, AUTO, PRESETS, BackendRequest, LayerSpecs, Workload, kinds_of

StepKey = tuple[Phase, int, int, int]
"""(phase, batch, query_len, kv_len)."""


class KernelGroup(Generic[S, B, L]):
    """Layers of one kind, for which `settle` chooses a layout and block size with which every phase runs as the user requested.

    A kernel that the user named is used, or rejected with all reasons. Otherwise `auto` minimizes the measured cost over the
    workload. Without times, each phase gets the first kernel in rank order that supports every layer.
    """

    selection: Selection[L]
    """The choice, set by `settle`."""

    def __init__(self, candidates: Candidates[S, B, L], request: BackendRequest, costs: Mapping[S, CostTable] | None) -> None:
        """costs: measured times of each distinct layer. None if there are none."""
        self._able = candidates
        self._request = request
        self._chooser: StepChooser | None = None
        self.know(costs)

    def know(self, costs: Mapping[S, CostTable] | None) -> None:
        """Set the measured times for the next `settle`. costs: as in the constructor."""
        self._parts = self._parts_of(costs)
        self._failed = {name: why for table, _ in self._parts for name, why in table.excluded.items()}
        """Kernel excluded from selection, for example by a failed self-test -> reason."""

    def settle(self, workload: Workload, places: Sequence[Placement[L]] | None = None) -> Selection[L]:
        """Choose among placements, by default among all that the user's options allow, and return the choice.

        :raises HeadwayError: if a name is unknown or no kernel supports the layers, with all reasons and the nearest request
            that would be supported.
        """
        self._chooser = None
        selection = self._select(workload, self._able.places if places is None else places)
        helpers = {phase: self._able.helper(name, phase, selection.place) for phase, name in selection.names.items()}
        self.selection = replace(selection, helpers={phase: helper for phase, helper in helpers.items() if helper})
        return self.selection

    def backends_for(self, phase: Phase) -> Mapping[S, B]:
        """Return spec -> instance of the selected kernel for a phase."""
        return self._able.instances(self.selection.names[phase], (phase,), self.selection.place)

    def plan(self, kind: str) -> list[ChoiceRow]:
        """Return the choice for each phase. kind: name of the kind of layers."""
        chosen, rows = self.selection, list[ChoiceRow]()
        size = "-" if chosen.block_size == NO_BLOCKS else str(chosen.block_size)
        for phase in self._able.specs:
            layers, heads, cache = self._able.describe(phase)
            names = "|".join(chosen.all_for(phase))
            why = "asked for" if self._request.name_for(phase) != AUTO else "measured" if self._chooser else "rank order"
            rows.append(ChoiceRow(kind, phase.value, layers, heads, chosen.layout.name, size, cache, names, why))
        return rows

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

    def _parts_of(self, costs: Mapping[S, CostTable] | None) -> list[tuple[CostTable, int]]:
        return [(costs[spec], count) for spec, count in self._able.counts.items()] if costs else []

    def _measured(self, workload: Workload, costs: Mapping[S, CostTable] | None = None) -> MeasuredChoice | None:
        """Return the choice by measured times, or None if there are no times or no free phase. costs: times to use instead of the
        known ones."""
        able, free = self._able, [phase for phase in self._request.auto_phases if phase in self._able.specs]
        parts = self._parts if costs is None else self._parts_of(costs)
        if not parts or not free:
            return None
        return MeasuredChoice(parts, workload, able.steps(workload), free, able.specs, able.per_step)

    def _select(self, workload: Workload, places: Sequence[Placement[L]]) -> Selection[L]:
        able, choice = self._able, self._measured(workload)
        if not able.specs:  # a page then takes no memory and only counts tokens
            return Selection(places[0], dict.fromkeys(Phase, NO_ATTENTION), "no layer has attention")
        free = any(phase in able.specs for phase in self._request.auto_phases)
        why = "auto: no crossover table, rank order" if free else "asked for"
        if choice is not None:
            if (measured := choice.select(places, partial(self._supported, self._request))) is not None:
                self._chooser = measured[1]
                return measured[0]
            why = f"auto: {self._parts[0][0].source} has no times for this layout and block size, rank order"
        found = self._search(self._request, places, why)
        if found is None:
            raise self.refusal(places)
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

    def refusal(self, places: Sequence[Placement[L]]) -> UnsupportedError:
        """Return an error with the reasons for the placement that fails in the fewest phases, and with options that would
        work."""

        def unserved(place: Placement[L]) -> list[Phase]:
            return [phase for phase in self._able.specs if not any(self._supported(self._request, phase, place))]

        nearest = min(places, key=lambda place: len(unserved(place)))
        reasons: list[Reason] = []
        for phase in unserved(nearest):
            for name in self._names(self._request, phase, every=True):
                label = f"{name}, " if self._request.name_for(phase) == AUTO else ""
                found = self._able.reasons(name, phase, nearest)
                reasons += [reason._replace(what=f"{label}{reason.what}") for reason in found]
        wanted, first = ", ".join(self._request.names) or AUTO, self._able.first
        layers = f"{kinds_of(first)[0]} layers: " if isinstance(first, AttentionSpec) else ""
        where = f"{layers}{self._able.kind.name} backend {wanted} ({nearest}, {first})"
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


class KernelSelector(KernelGroup[S, B, L]):
    """Chooses kernels for all layers of one kind, when it is made."""

    def __init__(
        self,
        candidates: Candidates[S, B, L],
        request: BackendRequest = ALL_AUTO,
        costs: Mapping[S, CostTable] | None = None,
        workload: Workload = PRESETS["chat"],
    ) -> None:
        """costs, and the errors raised: see `KernelGroup`."""
        super().__init__(candidates, request, costs)
        self.settle(workload)


class AttentionGroup(KernelGroup[AttentionSpec, AttentionBackend, CacheLayout]):
    """Attention layers of one kind, such as `window`: their backends, and each step's backend by a dict lookup
    (`StepChooser`)."""

    _able: AttentionCandidates

    def prepare(self) -> None:
        """Make an instance of every backend that may be called, once the group is settled."""
        chosen, candidates = self.selection, self._able
        self.instances: dict[str, Backends] = {}
        """Name of a backend that may be called -> instances of the backend, keyed by spec."""
        for name in dict.fromkeys(name for phase in chosen.names for name in chosen.all_for(phase)):
            served = [phase for phase in candidates.specs if name in chosen.all_for(phase)]
            self.instances[name] = candidates.instances(name, served, chosen.place)
        self.gathering = candidates.gathering(chosen.names[Phase.PREFILL], chosen.place)
        """Spec of a latent layer's cache -> the prefill backend's instance for attention over its gathered, up-projected context.
        Specs that the backend does not support are missing."""

    def serves(self, place: Placement[CacheLayout]) -> bool:
        """Return whether the request covers every phase with a placement."""
        return place in self._able.places and self._search(self._request, [place]) is not None

    def reads(self, layout: str, block_size: int) -> bool:
        """Return whether the request covers every phase with a layout, or with any if it is auto."""
        places = dict.fromkeys(each._replace(block_size=block_size) for each in self._able.all_places)
        return self._search(self._request, [each for each in places if layout in (AUTO, each.layout.name)]) is not None

    def rate(self, workload: Workload, place: Placement[CacheLayout]) -> RatedPlace[CacheLayout] | None:
        """Return the group's costs at a placement. None if no times decide there."""
        choice = self._measured(workload)
        return None if choice is None else choice.rate(place, partial(self._supported, self._request))

    def is_measured(self, workload: Workload) -> bool:
        """Return whether measured times decide at least one phase."""
        return self._measured(workload) is not None

    @property
    def places(self) -> Sequence[Placement[CacheLayout]]:
        """Placements that the user's options allow, preferred first."""
        return self._able.places

    @property
    def layers(self) -> int:
        """Number of layers. Both forms of a latent layer count."""
        return sum(self._able.counts.values())

    def name_for(self, phase: Phase, batch: int | None, query_len: int, kv_len: int) -> str:
        """Return the name of the backend for a phase in a step; see `Selector.backends_for`."""
        name = None
        if batch is not None and self._chooser is not None and phase in self.selection.others:
            name = self._chooser.choose(phase, batch, query_len, kv_len)
        return name or self.selection.names[phase]

    def name_of(self, shape: Shape) -> str:
        """Return the name of the backend for a shape; see `Selector.backends_of`."""
        if shape.captured and self.costs is not None:
            named = [(name, self.instances[name].values()) for name in self.selection.all_for(shape.phase)]
            able = [name for name, backends in named if all(each.captures(shape.query_len) for each in backends)]
            if ranked := self.costs.ranking(shape, able):
                return ranked[0][0]
        return self.name_for(shape.phase, shape.batch, shape.query_len, shape.kv_len)

    def candidates_for(self, phase: Phase, batch: int) -> Sequence[str]:
        """Return the backends among which `name_for` chooses for a phase and batch size, without changing any state."""
        return self.decode_candidates(batch) if phase is Phase.DECODE else self.selection.all_for(phase)

    def decode_candidates(self, batch: int) -> list[str]:
        """Return the backends that `name_for` may return for decodes of a batch size: at most two, for which graphs are
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

    def compare(
        self, workload: Workload, costs: Mapping[AttentionSpec, CostTable], steps: Mapping[StepKey, int]
    ) -> tuple[float, float]:
        """Return the microseconds that steps take by these times, with the current choices and with the choices that `settle`
        would make. The first is infinite if a current choice has no time at a step, for example because its result was wrong.

        steps: (phase, batch, query_len, kv_len) -> number of steps.
        """
        choice, now, then = self._measured(workload, costs), 0.0, 0.0
        found = None if choice is None else choice.select([self.selection.place], partial(self._supported, self._request))
        if found is None:
            return now, then
        selection, chooser = found
        for step, count in steps.items():
            if step[0] in selection.names:
                name = chooser.choose(*step) if step[0] in selection.others else None
                us = chooser.costs.step_us(name or selection.names[step[0]], Shape(*step))
                if math.isfinite(us):
                    now += count * chooser.costs.step_us(self.name_for(*step), Shape(*step))
                    then += count * us
        return now, then

    def forget(self) -> None:
        """Reset each phase's current backend, after warm-up steps."""
        if self._chooser is not None:
            self._chooser.forget()

    def capture_one(self) -> None:
        """Capture one backend per batch size in decode graphs, because another group of layers changes its backend."""
        if self._chooser is not None:
            self._chooser.most_captured = 1


class Selector:
    """Chooses attention backends at start, for each group of layers of one kind (`LayerSpecs.groups`), and in each step.

    All groups have one block size. They have one layout too if any layout serves all of them, since their caches then share
    memory. The backends of a step are named together: `a` if all groups use it, `a+b` if the first uses `a` and the second `b`.
    """

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
        requests = layers.requests(request)
        self._workload = workload
        self.steps: Counter[StepKey] = Counter()
        """(phase, batch, query_len, kv_len) -> number of steps that ran, with lengths rounded to an eighth of an octave."""

        def group(kind: str, part: LayerSpecs) -> AttentionGroup:
            named = kv_layout  # a latent layer's cache needs another layout than the cache of ordinary layers
            if kv_layout != AUTO and 0 < sum(spec.value_in_key for spec in layers.cached) < len(layers.cached):
                holds = source.layout(kv_layout).layout.has_value is not part.cached[0].value_in_key
                named = kv_layout if holds else AUTO
            return AttentionGroup(AttentionCandidates(source, part, named, block_size, options), requests[kind], costs)

        self.groups = {kind: group(kind, part) for kind, part in (layers.groups or {"": layers}).items()}
        """Most specific kind of layer -> its choice. The kind "" if no layer has attention."""
        self.instances: dict[str, Backends] = {}
        """Name of backends that may be called together -> instances, keyed by spec. More are added when a step needs them."""
        self._kind_of = {spec: kind for kind, part in layers.groups.items() for spec in part.distinct}
        try:
            if len(self.groups) == 1:
                next(iter(self.groups.values())).settle(workload)
            else:
                places, remark = self._choose_places(workload)
                for each, place in zip(self.groups.values(), places, strict=True):
                    chosen = each.settle(workload, [place])
                    each.selection = replace(chosen, why=chosen.why + remark * each.is_measured(workload))
        except UnsupportedError as error:
            placed = bool(block_size) or kv_layout != AUTO
            fix = error.fix if len(self.groups) == 1 else self._fix(source, layers, request, options, placed)
            raise UnsupportedError(error.asked, [self._hinted(reason) for reason in error.reasons], fix) from None
        self.gathering: dict[AttentionSpec, AttentionBackend] = {}
        """Spec of a latent layer's cache -> see `AttentionGroup.gathering`."""
        self._prepare()

    def _prepare(self) -> None:
        """Make the instances of all backends that may be called, once every group is settled."""
        for each in self.groups.values():
            each.prepare()
        self.main = max(self.groups.values(), key=lambda each: each.layers)
        """Group with the most layers."""
        for each in self.groups.values():
            if each is not self.main:
                each.capture_one()
        self.selection = self._combined_selection()
        """The choice for all layers; see `Selection.parts`."""
        for phase in self.selection.names:
            for names in self._combinations(phase):
                self._together(names)
        self.gathering |= {spec: backend for each in self.groups.values() for spec, backend in each.gathering.items()}

    def renew(self, costs: Mapping[AttentionSpec, CostTable] | None) -> None:
        """Choose the backends anew by other times, with the same layouts and block size. costs: as in the constructor."""
        for each in self.groups.values():
            each.know(costs)
            each.settle(self._workload, [each.selection.place])
        self.instances.clear()
        self.gathering.clear()
        self._prepare()

    def count(self, phase: Phase, batch: int, query_len: int, kv_len: int) -> None:
        """Count a step's sequences of one phase; see `steps`. For unequal lengths, see `Shape.of`."""
        self.steps[phase, batch, rounded(query_len), rounded(kv_len)] += 1

    def compare(self, costs: Mapping[AttentionSpec, CostTable]) -> tuple[float, float]:
        """Return the microseconds of the counted steps by these times, with the current choices and with those that `renew` would
        make."""
        found = [each.compare(self._workload, costs, self.steps) for each in self.groups.values()]
        return sum(now for now, _ in found), sum(then for _, then in found)

    def step_us(self, phase: Phase, batch: int, query_len: int, kv_len: int) -> float:
        """Return the attention time of a step with the fastest backends in microseconds; 1 for each group without times."""
        shape = Shape(phase, batch, query_len, kv_len)
        costs = [
            (each.all_costs, each.selection.all_for(phase)) for each in self.groups.values() if phase in each.selection.names
        ]
        ranked = [found.ranking(shape, names) if found is not None else [] for found, names in costs]
        return sum(each[0][1] if each else 1.0 for each in ranked)

    def _choose_places(self, workload: Workload) -> tuple[Sequence[Placement[CacheLayout]], str]:
        """Return the placement of each group, with one block size: the least expected cost over all groups. Also return a remark
        if the times were too noisy to decide, else ""."""
        groups = list(self.groups.values())
        served = [[place] * len(groups) for place in groups[0].places if all(each.serves(place) for each in groups)]
        sizes = dict.fromkeys(place.block_size for place in groups[0].places)
        if not served:
            firsts = [
                [
                    next((place for place in each.places if place.block_size == size and each.serves(place)), None)
                    for each in groups
                ]
                for size in sizes
            ]
            served = [[place for place in places if place] for places in firsts if None not in places]
        if not served:
            raise self._refusal()
        free = [each for each in groups if each.is_measured(workload)]
        rated: dict[int, RatedPlace[CacheLayout]] = {}
        for number, places in enumerate(served):
            found = [each.rate(workload, place) for each, place in zip(groups, places, strict=True) if each in free]
            known = [rating for rating in found if rating is not None]
            if known and len(known) == len(found):
                rated[number] = reduce(add, known)
        if not rated:
            return served[0], ""
        chosen = steady_choice(list(rated.values()), doubts_of(next(iter(rated.values())).costs.noise))
        number = next(number for number, rating in rated.items() if rating is chosen)
        return served[number], undecided(list(rated.values()), chosen)

    def _refusal(self) -> UnsupportedError:
        """Return the reasons of the first group that no placement serves, or else of a group that shares no block size with the
        others."""

        def able(each: AttentionGroup, size: int) -> bool:
            return any(place.block_size == size and each.serves(place) for place in each.places)

        sizes = dict.fromkeys(place.block_size for each in self.groups.values() for place in each.places)
        nearest = max(sizes, key=lambda size: sum(able(each, size) for each in self.groups.values()))
        groups = self.groups.values()
        group = next(
            (each for each in groups if not any(able(each, size) for size in sizes)),
            next(each for each in groups if not able(each, nearest)),
        )
        shared = any(able(group, size) for size in sizes)
        return group.refusal([place for place in group.places if not shared or place.block_size == nearest])

    def _hinted(self, reason: Reason) -> Reason:
        """Return a reason with the layout `auto` as its hint if another kind of layer refuses the layout of its hint, and `auto`
        is supported."""
        flag, _, name = reason.hint.partition(" ")
        groups = self.groups.values()

        def works(layout: str) -> bool:
            sizes = dict.fromkeys(place.block_size for each in groups for place in each.places)
            return any(all(each.reads(layout, size) for each in groups) for size in sizes)

        return reason._replace(hint=f"{flag} {AUTO}") if flag == "--kv-layout" and not works(name) and works(AUTO) else reason

    def _fix(
        self,
        source: Kernels,
        layers: LayerSpecs,
        request: BackendRequest,
        options: Mapping[str, Mapping[str, str]] | None,
        placed: bool,
    ) -> str:
        """Return options that are supported: the request with another placement if the user named one (`placed`), with auto for
        one kind of layer, or auto for all; else ""."""
        changed = [*(request.without(kind) for kind in self.groups if request.names_kind(kind)), ALL_AUTO]
        for other in ([request] if placed else []) + [each for each in changed if each != request]:
            try:
                found = Selector(source, layers, other, options=options).selection
            except UnsupportedError:
                continue
            layouts = {part.layout.name for part in found.parts.values()} or {found.layout.name}
            layout = layouts.pop() if len(layouts) == 1 else AUTO
            return AttentionCandidates.options.format(other, layout, found.block_size)
        return ""

    def _combined_selection(self) -> Selection[CacheLayout]:
        parts = {kind: each.selection for kind, each in self.groups.items()}
        first = next(iter(parts.values()))
        if len(parts) == 1:
            return first
        phases = [phase for phase in Phase if all(phase in part.names for part in parts.values())]
        usual = {phase: [_joined(names) for names in self._combinations(phase)] for phase in phases}
        same = all(
            (part.names, part.others, part.place, part.why) == (first.names, first.others, first.place, first.why)
            for part in parts.values()
        )
        return Selection(
            first.place,
            {phase: names[0] for phase, names in usual.items()},
            first.why,
            {phase: names[1:] for phase, names in usual.items() if len(names) > 1},
            parts={} if same else parts,
        )

    def plan(self) -> list[ChoiceRow]:
        """Return the choice for each kind of layer and phase."""
        return [row for kind, each in self.groups.items() for row in each.plan(kind)]

    def _combinations(self, phase: Phase) -> list[tuple[str, ...]]:
        """Return names of backends, one for each group, so that each backend of a phase is in one of the combinations."""
        every = [each.selection.all_for(phase) for each in self.groups.values()]
        return [tuple(names[min(number, len(names) - 1)] for names in every) for number in range(max(map(len, every)))]

    def _together(self, names: tuple[str, ...]) -> Backends:
        """Return spec -> instance of the backends with these names, one for each group."""
        joined = _joined(names)
        if joined not in self.instances:
            pairs = zip(self.groups.values(), names, strict=True)
            self.instances[joined] = {spec: made for each, name in pairs for spec, made in each.instances[name].items()}
        return self.instances[joined]

    def backends_for(self, phase: Phase, batch: int | None = None, query_len: int = 1, kv_len: int = 1) -> Backends:
        """Return spec -> backend instance for a phase in this step.

        batch: number of sequences of the phase in the step, or in the graph that is captured. None selects the phase's usual
        backend. query_len, kv_len: new tokens, and cached plus new tokens, of each sequence. For unequal lengths, see `Shape.of`.
        """
        return self._together(tuple(each.name_for(phase, batch, query_len, kv_len) for each in self.groups.values()))

    def backends_of(self, shape: Shape) -> Backends:
        """Return spec -> instance for a shape.

        For a captured shape, the backend with the shortest device time is selected among the backends that can be captured,
        because a replay needs no launches by the host. If no such backend has a measured time, the backend is selected as for a
        launched step.
        """
        return self._together(tuple(each.name_of(shape) for each in self.groups.values()))

    def decode_candidates(self, batch: int) -> list[str]:
        """Return the backends that `backends_for` may select for decodes of a batch size: at most two, for which graphs are
        captured. Only the group with the most layers changes its backend between graphs of one batch size."""
        found = list(product(*(each.decode_candidates(batch) for each in self.groups.values())))
        for names in found:
            self._together(names)
        return [_joined(names) for names in found]

    def decode_us(self, batch: int, query_len: int, kv_len: int) -> float:
        """Return the attention time of a decode step with the fastest backends in microseconds, or infinity if not measured."""
        return sum(each.decode_us(batch, query_len, kv_len) for each in self.groups.values())

    def forget(self) -> None:
        """Reset each phase's current backend and the counted steps, after warm-up steps."""
        self.steps.clear()
        for each in self.groups.values():
            each.forget()

    def layout_of(self, spec: AttentionSpec) -> CacheLayout:
        """Return the layout of a layer's cache."""
        return self.groups[self._kind_of[spec]].selection.layout


def _joined(names: Sequence[str]) -> str:
    """Return the name of backends that run together, one for each group of layers."""
    return names[0] if len(set(names)) == 1 else "+".join(names)
