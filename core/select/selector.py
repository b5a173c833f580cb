"""The backends of a model's steps: chosen at start, made once for each spec, and named for every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headway.core.contract.backend import AttentionBackend, Backends, make_backend
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Reason
from headway.core.select.backend_request import ALL_AUTO, BackendRequest
from headway.core.select.costs import CostTable, Shape, StepCosts
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.selection import PRESETS, Workload
from headway.core.select.startup import BackendSource, StartupChoice


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
        self.selection, self._chooser = self._startup.select(kv_layout, block_size)
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
            able = [name for name in self.selection.all_for(shape.phase) if _captures(self._instances[name], shape.query_len)]
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


def _captures(backends: Backends, query_len: int) -> bool:
    return all(backend.captures(query_len) for backend in backends.values())
