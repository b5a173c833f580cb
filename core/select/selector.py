"""The kernels of a model's layers: which can serve and why not, the choice at start, instances, and each step's kernel."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Backends, Plan, make_backend
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ATTENTION, STATE, OperationKind
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import (
    StateBackend,
    StateCache,
    StateLayout,
    StateMetadata,
    StateParameters,
    StateSpec,
    make_state_backend,
)
from headway.core.contract.support import Reason, Support
from headway.core.select.backend_request import ALL_AUTO, AUTO, BackendRequest
from headway.core.select.costs import NO_BLOCKS, CostTable, Shape, StepCosts, state_shape
from headway.core.select.kernels import KernelRegistry, Kernels
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.selection import NO_ATTENTION, PRESETS, L, MeasuredChoice, Placement, Selection, StepChooser, Workload

DEFAULT_BLOCK_SIZES = (16, 64, 128, 256)
"""Tried in this order where the user names none: small blocks waste least memory."""
VERBS: Mapping[Phase, str] = {Phase.PREFILL: "scan", Phase.DECODE: "step"}
"""The phases in which layers with a state ask for a kernel, and its call. What prefills is also what extends."""

S = TypeVar("S", bound=AttentionSpec | StateSpec)
B = TypeVar("B", bound=AttentionBackend | StateBackend)


class Candidates(ABC, Generic[S, B, L]):
    """The kernels of one kind, asked for all layers of a model that need one."""

    kind: ClassVar[OperationKind]
    options: ClassVar[str]
    """The options of the command line that ask for a request, a layout and a block size."""
    per_step: ClassVar[bool]
    """True if the kernel of a phase may change from step to step."""

    def __init__(
        self,
        source: KernelRegistry[B, Any],
        counts: Mapping[S, int],
        specs: Mapping[Phase, Sequence[S]],
        places: Sequence[Placement[L]],
        all_places: Sequence[Placement[L]],
    ) -> None:
        self.source = source
        self.counts = counts
        """Each kind of layer that asks for kernels -> the number of layers."""
        self.specs = specs
        """Phase in which any layer asks -> the distinct layers, as they ask in it. Empty if no layer asks."""
        self.places = places
        """Places that the user's options leave, the preferred first."""
        self.all_places = all_places
        """Places that other options would leave."""

    @property
    def first(self) -> S:
        """The first layer, as it asks once it has a cache."""
        return [*self.specs.values()][-1][0]

    @abstractmethod
    def supports(self, name: str, spec: S, phase: Phase, place: Placement[L]) -> Support:
        """Return whether a kernel can serve a layer in a phase."""

    @abstractmethod
    def make(self, name: str, spec: S, phase: Phase, place: Placement[L]) -> B:
        """Make an instance of a kernel that `supports` the layer."""

    @abstractmethod
    def steps(self, workload: Workload) -> list[tuple[Shape, float]]:
        """Shapes of the workload's steps, as the tables of these layers know them, and the number of steps of each."""

    def helper(self, name: str, phase: Phase, place: Placement[L]) -> str:
        """The kernel that does a part of the work for another; empty: none does."""
        return ""

    def reasons(self, name: str, phase: Phase, place: Placement[L]) -> tuple[Reason, ...]:
        """Every reason why a kernel cannot serve a phase of all layers."""
        support = Support()
        for spec in self.specs[phase]:
            support &= self.supports(name, spec, phase, place)
        return support.reasons

    def instances(self, name: str, phases: Sequence[Phase], place: Placement[L]) -> Mapping[S, B]:
        """Make a kernel for the layers, as they ask in these phases."""
        wanted: dict[S, Phase] = {}
        for phase in phases:
            wanted = dict.fromkeys(self.specs[phase], phase) | wanted
        return {spec: self.make(name, spec, phase, place) for spec, phase in wanted.items()}


class AttentionCandidates(Candidates[AttentionSpec, AttentionBackend, CacheLayout]):
    """Attention backends, asked for the layers of a model that attend."""

    kind = ATTENTION
    options = "--attn-backend {} --kv-layout {} --block-size {}"
    per_step = True

    def __init__(
        self,
        source: Kernels,
        layers: LayerSpecs,
        kv_layout: str,
        block_size: int | None,
        options: Mapping[str, Mapping[str, str]] | None,
    ) -> None:
        """kv_layout: auto or a name. block_size: None: one of DEFAULT_BLOCK_SIZES. options: backend -> option -> value.

        :raises HeadwayError: an unknown layout or option.
        """
        kernels = source.of(ATTENTION)
        self._layers = layers
        self._options = options or {}
        self._layouts = [info.layout for info in kernels.layouts.values()]
        for name, chosen in self._options.items():
            kernels.backend(name).check_options(chosen)
        layouts = self._layouts if kv_layout == "auto" else [source.layout(kv_layout).layout]
        sizes = DEFAULT_BLOCK_SIZES if block_size is None else (block_size,)
        super().__init__(
            kernels,
            layers.counts,
            {phase: [layers.in_phase(spec, phase) for spec in layers.distinct] for phase in layers.phases},
            [Placement(layout, size) for size in sizes for layout in layouts],
            [Placement(layout, size) for size in DEFAULT_BLOCK_SIZES for layout in self._layouts],
        )

    def supports(self, name: str, spec: AttentionSpec, phase: Phase, place: Placement[CacheLayout]) -> Support:
        """Return whether a backend can serve a layer in a phase, over the chosen layout or that which suits the layer."""
        return self.source.supports(name, spec, self.layout_of(spec, place.layout), place.block_size, phase)

    def make(self, name: str, spec: AttentionSpec, phase: Phase, place: Placement[CacheLayout]) -> AttentionBackend:
        """Make a backend, with the options that the user gave it."""
        kind, layout = self.source.backend(name), self.layout_of(spec, place.layout)
        return make_backend(kind, spec, layout, place.block_size, self._options.get(name))

    def steps(self, workload: Workload) -> list[tuple[Shape, float]]:
        """The steps of the phases in which layers ask; if no layer has a cache, no part of a prompt is cached."""
        asked = workload if Phase.EXTEND in self.specs else replace(workload, cached_len=0)
        return [(shape, count) for shape, count in asked.steps() if shape.phase in self.specs]

    def layout_of(self, spec: AttentionSpec, chosen: CacheLayout) -> CacheLayout:
        """The layout of a layer's cache: the chosen one, or where that cannot hold its values the first registered that can.

        There are two kinds of layers: those whose value lies in the key, and those with a value of its own.
        """
        kinds = {each.value_in_key for each in (*self._layers.distinct, spec)}
        if len(kinds) == 1 or spec.value_in_key is not chosen.has_value:
            return chosen
        return next((other for other in self._layouts if other.has_value is not spec.value_in_key), chosen)

    def gathering(self, name: str, place: Placement[CacheLayout]) -> Backends:
        """Instances that attend to the context of latent layers after that was gathered and expanded, where a backend can."""
        found = {}
        for spec, dense in self._layers.expanded.items():
            cached = replace(dense, dense=False)
            if self.supports(name, cached, Phase.EXTEND, place):
                found[spec] = self.make(name, cached, Phase.EXTEND, place)
        return found


class _ComposedPlan(NamedTuple):
    convolution: Plan
    recurrence: Plan


class ComposedState(StateBackend):
    """A layer whose convolution one backend applies and whose recurrence another."""

    def __init__(self, spec: StateSpec, layout: StateLayout, convolution: StateBackend, recurrence: StateBackend) -> None:
        super().__init__(spec, layout)
        self.name = recurrence.name  # type: ignore[misc]
        self._convolution = convolution
        self._recurrence = recurrence
        self.graph_level = min(convolution.graph_level, recurrence.graph_level)  # type: ignore[misc]

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Return the bytes of both, and of what one hands to the other."""
        between = max_num_tokens * self.spec.conv_channels * self.spec.dtype.itemsize
        parts = (self._convolution, self._recurrence)
        return between + sum(part.workspace_bytes(max_num_tokens, max_num_seqs) for part in parts)

    def plan(self, metadata: StateMetadata) -> Plan:
        """Plan both."""
        return _ComposedPlan(self._convolution.plan(metadata), self._recurrence.plan(metadata))

    def plan_for_capture(self, metadata: StateMetadata) -> Plan:
        """Plan both for a graph."""
        return _ComposedPlan(self._convolution.plan_for_capture(metadata), self._recurrence.plan_for_capture(metadata))

    def scan(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        """Convolve, then run the recurrence over what comes of it."""
        convolved = x.new_empty(x.shape)
        self._convolution.scan(x, (), parameters, cache.convolution, plan.convolution, convolved)
        self._recurrence.scan(convolved, gates, parameters, cache.recurrence, plan.recurrence, out)

    def step(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        """Convolve, then run the recurrence over what comes of it."""
        convolved = x.new_empty(x.shape)
        self._convolution.step(x, (), parameters, cache.convolution, plan.convolution, convolved)
        self._recurrence.step(convolved, gates, parameters, cache.recurrence, plan.recurrence, out)


class StateCandidates(Candidates[StateSpec, StateBackend, StateLayout]):
    """State backends, asked for the layers of a model that keep a state. They ask in the phases of VERBS."""

    kind = STATE
    options = "--state-backend {}"
    per_step = False

    def __init__(
        self, source: KernelRegistry[StateBackend, StateLayout], specs: Sequence[StateSpec], decode_len: int = 1
    ) -> None:
        """specs: that of each layer. decode_len: tokens of a sequence in a decode, with its drafts."""
        self._decode_len = decode_len
        places = [Placement(layout, NO_BLOCKS) for layout in source.layouts.values()]
        counts = Counter(specs)
        super().__init__(source, counts, {phase: list(counts) for phase in VERBS}, places, places)

    def supports(self, name: str, spec: StateSpec, phase: Phase, place: Placement[StateLayout]) -> Support:
        """Return whether a backend can serve a layer, with the help of another for its convolution if it needs one."""
        whole = self._alone(name, spec, phase, place)
        if not whole and spec.recurrent and spec.conv_channels and any(True for _ in self._helpers(spec, phase, place)):
            return self._alone(name, spec.recurrence, phase, place)
        return whole

    def make(self, name: str, spec: StateSpec, phase: Phase, place: Placement[StateLayout]) -> StateBackend:
        """Make a backend, and another for the convolution if it needs one."""
        if self._alone(name, spec, phase, place):
            return make_state_backend(self.source.backend(name), spec, place.layout)
        recurrence = make_state_backend(self.source.backend(name), spec.recurrence, place.layout)
        helper = self.source.backend(next(self._helpers(spec, phase, place)))
        return ComposedState(spec, place.layout, make_state_backend(helper, spec.convolution, place.layout), recurrence)

    def steps(self, workload: Workload) -> list[tuple[Shape, float]]:
        """The steps without what came before them, decodes with their drafts."""
        found = []
        for shape, count in workload.steps():
            query_len = self._decode_len if shape.phase is Phase.DECODE else shape.query_len
            found.append((state_shape(shape.phase, shape.batch, query_len), count))
        return found

    def helper(self, name: str, phase: Phase, place: Placement[StateLayout]) -> str:
        """The backend that applies convolutions for another; empty: it needs none."""
        lacking = [spec for spec in self.counts if not self._alone(name, spec, phase, place)]
        return next(self._helpers(lacking[0], phase, place)) if lacking else ""

    def _alone(self, name: str, spec: StateSpec, phase: Phase, place: Placement[StateLayout]) -> Support:
        support = Support()
        for each in (phase,) if phase is Phase.DECODE else (Phase.PREFILL, Phase.EXTEND):
            support &= self.source.supports(name, spec, place.layout, each)
        if support and phase is Phase.DECODE:
            most = self.source.backend(name).capabilities.max_draft_tokens
            if self._decode_len - 1 > most:
                hint = f"--num-speculative-tokens {most}" if most else "leave --speculate out"
                support = Support.no("max_draft_tokens", f"at most {most} drafts of a sequence", self._decode_len - 1, hint)
        return support

    def _helpers(self, spec: StateSpec, phase: Phase, place: Placement[StateLayout]) -> Iterator[str]:
        """Backends that apply a layer's convolution by itself."""
        return (name for name in self.source.entries if self._alone(name, spec.convolution, phase, place))


def check_names(source: Kernels, asked: Mapping[OperationKind, Iterable[str]], kv_layout: str = AUTO) -> None:
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
