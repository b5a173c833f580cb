"""The backends of a model's steps: layout, block size and backends chosen at start, made once per spec, named for every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from headway.core.contract.backend import AttentionBackend, Backends, make_backend
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.layout import CacheLayout, LayoutInfo
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Reason, Support
from headway.core.select.backend_request import ALL_AUTO, AUTO, BackendRequest
from headway.core.select.costs import CostTable, Shape, StepCosts
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.selection import NO_ATTENTION, PRESETS, MeasuredChoice, Selection, StepChooser, Workload

DEFAULT_BLOCK_SIZES = (16, 64, 128, 256)
"""Tried in this order where the user names none: small blocks waste least memory."""


class BackendSource(Protocol):
    """The part of the Registry that the choice of backends needs."""

    @property
    def backends(self) -> Mapping[str, object]:
        """Names of all backends, in the order they were registered."""

    def meant_for(self, device_type: str) -> list[str]:
        """Names of those that may serve a type of device, by their registrations."""

    @property
    def layouts(self) -> Mapping[str, LayoutInfo]:
        """All layouts, in the order they were registered."""

    def layout(self, name: str) -> LayoutInfo:
        """One layout; raises ConfigError for an unknown name."""

    def backend(self, name: str) -> type[AttentionBackend]:
        """A backend's class; raises UnknownBackendError."""

    def supports(self, name: str, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Whether a backend can run here and serve this layer."""

    def rank(self, spec: AttentionSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
        """Candidates, best guess first."""


def check_names(source: BackendSource, request: BackendRequest, kv_layout: str, options: Mapping[str, object]) -> None:
    """Check every name a user gave, before anything slow begins.

    :raises HeadwayError: an unknown backend or layout.
    """
    for name in (*request.names, *options):
        if name not in source.backends:
            source.backend(name)  # raises; one that exists is loaded later, where a refusal carries its hint and a fix
    if kv_layout != "auto":
        source.layout(kv_layout)


class StartupChoice:
    """Finds a layout and a block size over which every phase of every layer is served as the user asked.

    With a crossover table `auto` takes those of least expected cost over the workload. Without one it takes, for each phase, the
    first backend of the rank hook's order that supports every layer.
    """

    def __init__(
        self,
        source: BackendSource,
        layers: LayerSpecs,
        request: BackendRequest,
        costs: Mapping[AttentionSpec, CostTable] | None,
        workload: Workload,
    ) -> None:
        self._source = source
        self._layers = layers
        self._request = request
        self._measured: MeasuredChoice | None = None
        self._free = [phase for phase in request.auto_phases if phase in layers.phases]
        """The phases that are auto."""
        if costs and self._free:
            parts = [(costs[spec], count) for spec, count in layers.counts.items()]
            self._measured = MeasuredChoice(parts, workload, self._free, layers.phases)

    def select(self, kv_layout: str, block_size: int | None) -> tuple[Selection, StepChooser | None]:
        """Make the choice; returns it and what chooses among its backends in each step, None where no measured times decided.

        A model without a layer of attention asks no backend; pages of its cache take no memory, and only count tokens.

        :raises UnsupportedError: nothing serves the request; with every reason, and the nearest request that would be served.
        """
        choices = self._choices(kv_layout, block_size)
        if not self._layers.cached:
            layout, size = choices[0]
            return Selection(layout, size, dict.fromkeys(Phase, NO_ATTENTION), "no layer has attention"), None
        measured = self._measured.select(choices, self._able) if self._measured is not None else None
        if measured is not None:
            return measured
        found = self._search(self._request, choices)
        if found is None:
            raise self._refusal(choices)
        return found, None

    def why_not(self, phase: Phase, chosen: Selection) -> dict[str, tuple[Reason, ...]]:
        """Each backend that was considered for a phase -> why the phase is refused over the chosen layout; (): it can.

        Empty if no layer has attention.
        """
        names = self._candidates(self._request, phase, every=True) if self._layers.cached else ()
        found = {name: self._reasons(name, phase, chosen.layout, chosen.block_size) for name in names}
        failed = self._failed if self._request.name_for(phase) == AUTO else {}
        return found | {name: (Reason(name, "to pass its self-test", why),) for name, why in failed.items()}

    def layout_of(self, spec: AttentionSpec, chosen: CacheLayout) -> CacheLayout:
        """The layout of a layer's cache: the chosen one, or where that cannot hold its values the first registered that can.

        There are two kinds of layers: those whose value lies in the key, and those with a value of its own.
        """
        kinds = {each.value_in_key for each in (*self._layers.distinct, spec)}
        if len(kinds) == 1 or spec.value_in_key is not chosen.has_value:
            return chosen
        others = (info.layout for info in self._source.layouts.values())
        return next((other for other in others if other.has_value is not spec.value_in_key), chosen)

    @property
    def _failed(self) -> Mapping[str, str]:
        return self._measured.excluded if self._measured is not None else {}

    def _able(self, phase: Phase, layout: CacheLayout, block_size: int) -> list[str]:
        """Backends that can serve a phase of every layer, in rank order."""
        names = self._candidates(self._request, phase)
        return [name for name in names if not self._reasons(name, phase, layout, block_size)]

    def _choices(self, kv_layout: str = "auto", block_size: int | None = None) -> list[tuple[CacheLayout, int]]:
        infos = list(self._source.layouts.values()) if kv_layout == "auto" else [self._source.layout(kv_layout)]
        sizes = DEFAULT_BLOCK_SIZES if block_size is None else (block_size,)
        return [(info.layout, size) for size in sizes for info in infos]

    def _search(self, request: BackendRequest, choices: Sequence[tuple[CacheLayout, int]]) -> Selection | None:
        """The first layout and block size over which the request covers every phase."""
        for layout, size in choices:
            names = {phase: self._first(request, phase, layout, size) for phase in self._layers.phases}
            served = {phase: name for phase, name in names.items() if name is not None}
            if len(served) == len(names):
                return Selection(layout, size, served, self._why() if self._free else "asked for")
        return None

    def _why(self) -> str:
        if self._measured is None:
            return "auto: no crossover table, rank order"
        return f"auto: {self._measured.parts[0][0].source} has no times for this layout and block size, rank order"

    def _first(self, request: BackendRequest, phase: Phase, layout: CacheLayout, block_size: int) -> str | None:
        candidates = self._candidates(request, phase)
        return next((name for name in candidates if not self._reasons(name, phase, layout, block_size)), None)

    def _candidates(self, request: BackendRequest, phase: Phase, every: bool = False) -> Sequence[str]:
        """Return the names to try, best guess first. every: True includes backends that are registered for other devices."""
        if (name := request.name_for(phase)) != AUTO:
            return (name,)
        spec = self._layers.distinct[0]
        meant = self._source.backends if every else self._source.meant_for(spec.device.type)
        return self._source.rank(spec, phase, [name for name in meant if name not in self._failed])

    def _reasons(self, name: str, phase: Phase, layout: CacheLayout, block_size: int) -> tuple[Reason, ...]:
        support = Support()
        for spec in (self._layers.in_phase(spec, phase) for spec in self._layers.distinct):
            support &= self._source.supports(name, spec, self.layout_of(spec, layout), block_size, phase)
        return support.reasons

    def _refusal(self, choices: Sequence[tuple[CacheLayout, int]]) -> UnsupportedError:
        """Explain the layout and block size that came nearest, and name what would work."""

        def unserved(choice: tuple[CacheLayout, int]) -> list[Phase]:
            layout, size = choice
            return [phase for phase in self._layers.phases if self._first(self._request, phase, layout, size) is None]

        layout, size = nearest = min(choices, key=lambda choice: len(unserved(choice)))
        reasons: list[Reason] = []
        for phase in unserved(nearest):
            for name in self._candidates(self._request, phase, every=True):
                label = f"{name}, " if self._request.name_for(phase) == AUTO else ""
                found = self._reasons(name, phase, layout, size)
                reasons += [reason._replace(what=f"{label}{reason.what}") for reason in found]
        asked = ", ".join(self._request.names) or AUTO
        where = f"attention backend {asked} (kv_layout={layout.name}, block_size={size}, {self._layers.distinct[0]})"
        return UnsupportedError(where, list(dict.fromkeys(reasons)), self._fix(unserved(nearest)))

    def _fix(self, unserved: Sequence[Phase]) -> str:
        """The smallest change of the request that would be served, found by trying; empty: there is none."""
        kept = BackendRequest(
            AUTO if {Phase.PREFILL, Phase.EXTEND} & set(unserved) else self._request.prefill,
            AUTO if Phase.DECODE in unserved or Phase.DECODE not in self._layers.phases else self._request.decode,
        )
        for request in (self._request, *([kept] if kept.names else ()), ALL_AUTO):
            found = self._search(request, self._choices())
            if found is not None:
                return f"--attn-backend {request} --kv-layout {found.layout.name} --block-size {found.block_size}"
        return ""


class Selector:
    """Chooses once at start (`StartupChoice`), then answers each step's question with a dict get (`StepChooser`)."""

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
        self._source = source
        self._layers = layers
        self._options = options or {}
        for name, chosen in self._options.items():
            source.backend(name).check_options(chosen)
        self._startup = StartupChoice(source, layers, request, costs, workload)
        selection, chooser = self._startup.select(kv_layout, block_size)
        self.selection = selection
        self._chooser = chooser
        names = dict.fromkeys(name for phase in self.selection.names for name in self.selection.all_for(phase))
        self._instances = {name: self._make(name) for name in names}
        self.gathering = self._gathering()
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

    def why_not(self, phase: Phase) -> dict[str, tuple[Reason, ...]]:
        """Each backend that was considered for a phase -> why the phase is refused, over the selection's layout; (): it can."""
        return self._startup.why_not(phase, self.selection)

    def forget(self) -> None:
        """Choose the next step's backends as in the first step: after steps of warm-up."""
        if self._chooser is not None:
            self._chooser.forget()

    def instances_of(self, name: str) -> Backends:
        """The instances of one of the selection's backends, by spec."""
        return self._instances[name]

    @property
    def costs(self) -> StepCosts | None:
        """Measured times over the selection's layout and block size; None where they did not decide."""
        return self._chooser.costs if self._chooser is not None else None

    @property
    def instances(self) -> list[Backends]:
        """The instances of every backend that may be called, by spec."""
        return list(self._instances.values())

    def layout_of(self, spec: AttentionSpec) -> CacheLayout:
        """The layout of a layer's cache: the selection's, or where that does not fit the layer's values another."""
        return self._startup.layout_of(spec, self.selection.layout)

    def _make(self, name: str) -> Backends:
        """Instances for the specs of the phases in which a backend may be called."""
        phases = [phase for phase in self._layers.phases if name in self.selection.all_for(phase)]
        specs = dict.fromkeys(self._layers.in_phase(spec, phase) for phase in phases for spec in self._layers.distinct)
        return {spec: self._instance(name, spec) for spec in specs}

    def _instance(self, name: str, spec: AttentionSpec) -> AttentionBackend:
        backend, options = self._source.backend(name), self._options.get(name)
        return make_backend(backend, spec, self.layout_of(spec), self.selection.block_size, options)

    def _gathering(self) -> Backends:
        name, size = self.selection.names[Phase.PREFILL], self.selection.block_size
        found = {}
        for spec, dense in self._layers.expanded.items():
            cached = replace(dense, dense=False)
            if self._source.supports(name, cached, self.layout_of(cached), size, Phase.EXTEND):
                found[spec] = self._instance(name, cached)
        return found
