"""The backends of layers with a state: a layout for their states, a backend for `scan`, and one for `step`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from headway.core.contract.backend import Plan
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.metadata import Phase
from headway.core.contract.state import StateCache, StateLayout, StateMetadata, StateParameters, StateSpec
from headway.core.contract.state_backend import StateBackend, StateBackends
from headway.core.contract.support import Reason, Support
from headway.core.select.backend_request import ALL_AUTO, AUTO, BackendRequest


class StateSource(Protocol):
    """The part of the Registry that the choice of state backends needs."""

    @property
    def state_backends(self) -> Mapping[str, object]:
        """Names of all state backends, in the order they were registered."""

    @property
    def state_layouts(self) -> Mapping[str, StateLayout]:
        """All layouts of states, in the order they were registered."""

    def state_backend(self, name: str) -> type[StateBackend]:
        """A state backend's class; raises UnknownBackendError."""

    def state_supports(self, name: str, spec: StateSpec, layout: StateLayout, phase: Phase) -> Support:
        """Whether a state backend can run here and serve this layer."""

    def rank_states(self, spec: StateSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
        """Candidates, best guess first."""


@dataclass(frozen=True, slots=True)
class StateSelection:
    """Which state backend serves which phase, over which layout."""

    layout: StateLayout
    scan: str
    """Serves prompts."""
    step: str
    """Serves decodes."""
    convolution: Mapping[tuple[str, Phase], str]
    """The backend that applies the convolutions of one that does not, by its name and phase."""
    why: str

    def __str__(self) -> str:
        names = self.scan if self.scan == self.step else f"prefill={self.scan},decode={self.step}"
        return f"{names}, states in layout {self.layout.name} ({self.why})"


class StateSelector:
    """Chooses once at start, and holds the instances of every spec."""

    def __init__(self, source: StateSource, specs: Sequence[StateSpec], request: BackendRequest = ALL_AUTO) -> None:
        """specs: the distinct layers with a state.

        :raises HeadwayError: an unknown name, or layers that nothing serves, with every reason.
        """
        self._source, self._specs, self._request = source, specs, request
        for name in request.names:
            source.state_backend(name)
        self.selection = self._select()
        self.scan = self._instances(self.selection.scan, Phase.PREFILL)
        """Serves sequences that prefill or extend."""
        self.step = self._instances(self.selection.step, Phase.DECODE)
        """Serves sequences that decode."""

    def _select(self) -> StateSelection:
        why = "auto: rank order" if self._request.auto_phases else "asked for"
        for layout in self._source.state_layouts.values():
            scan = next((name for name in self._candidates(Phase.PREFILL) if self._serves(name, layout, Phase.PREFILL)), None)
            step = next((name for name in self._candidates(Phase.DECODE) if self._serves(name, layout, Phase.DECODE)), None)
            if scan is not None and step is not None:
                helpers = {
                    (name, phase): helper
                    for name, phase in ((scan, Phase.PREFILL), (step, Phase.DECODE))
                    if (helper := self._helper(name, layout, phase))
                }
                return StateSelection(layout, scan, step, helpers, why)
        raise self._refusal()

    def _candidates(self, phase: Phase) -> Sequence[str]:
        name = self._request.name_for(phase)
        return self._source.rank_states(self._specs[0], phase, list(self._source.state_backends)) if name == AUTO else [name]

    def _serves(self, name: str, layout: StateLayout, phase: Phase) -> bool:
        return not self._reasons(name, layout, phase)

    def _phases(self, phase: Phase) -> Sequence[Phase]:
        """The phases that one verb serves."""
        return (Phase.DECODE,) if phase is Phase.DECODE else (Phase.PREFILL, Phase.EXTEND)

    def _reasons(self, name: str, layout: StateLayout, phase: Phase) -> tuple[Reason, ...]:
        """Why a backend cannot serve a phase of every layer, with the help of another for convolutions where it needs one."""
        support = Support()
        for spec in self._specs:
            whole = self._supports(name, spec, layout, phase)
            if not whole and spec.recurrent and spec.conv_channels and self._helpers(layout, phase, spec):
                whole = self._supports(name, spec.recurrence, layout, phase)
            support &= whole
        return support.reasons

    def _supports(self, name: str, spec: StateSpec, layout: StateLayout, phase: Phase) -> Support:
        support = Support()
        for each in self._phases(phase):
            support &= self._source.state_supports(name, spec, layout, each)
        return support

    def _helpers(self, layout: StateLayout, phase: Phase, spec: StateSpec) -> Iterator[str]:
        """Backends that apply a layer's convolution alone."""
        names = self._source.state_backends
        return (name for name in names if self._supports(name, spec.convolution, layout, phase))

    def _helper(self, name: str, layout: StateLayout, phase: Phase) -> str:
        """The backend that applies convolutions for another; empty: it needs none."""
        lacking = [spec for spec in self._specs if not self._supports(name, spec, layout, phase)]
        return next(self._helpers(layout, phase, lacking[0])) if lacking else ""

    def _refusal(self) -> UnsupportedError:
        reasons = []
        for layout in self._source.state_layouts.values():
            for phase in (Phase.PREFILL, Phase.DECODE):
                for name in self._candidates(phase):
                    reasons += [
                        each._replace(what=f"{name} over {layout.name}, {each.what}")
                        for each in self._reasons(name, layout, phase)
                    ]
        asked = ", ".join(self._request.names) or AUTO
        served = next((name for name in self._source.state_backends if self._all_serve(name)), "")
        hint = f"--state-backend {served}" if served else ""
        return UnsupportedError(f"state backend {asked} ({self._specs[0]})", list(dict.fromkeys(reasons)), hint)

    def _all_serve(self, name: str) -> bool:
        layouts = self._source.state_layouts.values()
        return any(all(self._serves(name, layout, phase) for phase in Phase) for layout in layouts)

    def _instances(self, name: str, phase: Phase) -> StateBackends:
        layout, made = self.selection.layout, {}
        for spec in self._specs:
            if self._supports(name, spec, layout, phase):
                made[spec] = self._source.state_backend(name)(spec, layout)
            else:
                recurrence = self._source.state_backend(name)(spec.recurrence, layout)
                helper = self._source.state_backend(self.selection.convolution[name, phase])
                made[spec] = ComposedState(spec, layout, helper(spec.convolution, layout), recurrence)
        return made


class _ComposedPlan(NamedTuple):
    convolution: Plan
    recurrence: Plan


class ComposedState(StateBackend):
    """A layer whose convolution one backend applies and whose recurrence another."""

    def __init__(self, spec: StateSpec, layout: StateLayout, convolution: StateBackend, recurrence: StateBackend) -> None:
        super().__init__(spec, layout)
        self.name = recurrence.name  # type: ignore[misc]
        self._convolution, self._recurrence = convolution, recurrence
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
        conv, recurrent = self._caches(cache)
        convolved = x.new_empty(x.shape)
        self._convolution.scan(x, (), parameters, conv, plan.convolution, convolved)
        self._recurrence.scan(convolved, gates, replace(parameters, conv_weight=None), recurrent, plan.recurrence, out)

    def step(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        """Convolve, then run the recurrence over what comes of it."""
        conv, recurrent = self._caches(cache)
        convolved = x.new_empty(x.shape)
        self._convolution.step(x, (), parameters, conv, plan.convolution, convolved)
        self._recurrence.step(convolved, gates, replace(parameters, conv_weight=None), recurrent, plan.recurrence, out)

    def _caches(self, cache: StateCache) -> tuple[StateCache, StateCache]:
        """The states of the convolution and those of the recurrence."""
        conv = StateCache({"conv": cache.tensors["conv"]}, cache.layout, self.spec.convolution)
        return conv, StateCache({"recurrent": cache.tensors["recurrent"]}, cache.layout, self.spec.recurrence)
