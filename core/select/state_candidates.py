"""State backends that could serve a model's layers with a state: whether they can, with whose help, and their instances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from headway.core.contract.backend import Plan
from headway.core.contract.metadata import Phase
from headway.core.contract.state import (
    StateBackend,
    StateBackends,
    StateCache,
    StateLayout,
    StateMetadata,
    StateParameters,
    StateSpec,
    make_state_backend,
)
from headway.core.contract.support import Reason, Support


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


class StateSource(Protocol):
    """The part of the Registry that the choice of state backends needs."""

    @property
    def entries(self) -> Mapping[str, object]:
        """Names of all state backends, in the order they were registered."""

    @property
    def layouts(self) -> Mapping[str, StateLayout]:
        """All layouts of states, in the order they were registered."""

    def backend(self, name: str) -> type[StateBackend]:
        """A state backend's class; raises UnknownBackendError."""

    def supports(self, name: str, spec: StateSpec, layout: StateLayout, phase: Phase) -> Support:
        """Whether a state backend can run here and serve this layer."""

    def rank(self, spec: StateSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
        """Candidates, best guess first."""


VERBS: Mapping[Phase, str] = {Phase.PREFILL: "scan", Phase.DECODE: "step"}
"""Phase -> the method of a state backend that serves the phase; what prefills is also what extends."""


@dataclass(frozen=True)
class StateCandidates:
    """Every state backend, asked for the same layers. A phase is one of VERBS."""

    source: StateSource
    specs: Sequence[StateSpec]
    """Distinct layers with a state."""
    decode_len: int = 1
    """Tokens of a sequence in a decode: one and its drafts."""

    def reasons(self, name: str, layout: StateLayout, phase: Phase) -> tuple[Reason, ...]:
        """Why a backend cannot serve a phase of every layer, with the help of another for convolutions where it needs one."""
        support = Support()
        for spec in self.specs:
            whole = self._supports(name, spec, layout, phase)
            if not whole and spec.recurrent and spec.conv_channels and any(True for _ in self._helpers(layout, phase, spec)):
                whole = self._supports(name, spec.recurrence, layout, phase)
            support &= whole
        return support.reasons

    def serves(self, name: str, layout: StateLayout, phase: Phase) -> bool:
        """Whether a backend serves a phase of every layer over a layout."""
        return not self.reasons(name, layout, phase)

    def helper(self, name: str, layout: StateLayout, phase: Phase) -> str:
        """The backend that applies convolutions for another; empty: it needs none."""
        lacking = [spec for spec in self.specs if not self._supports(name, spec, layout, phase)]
        return next(self._helpers(layout, phase, lacking[0])) if lacking else ""

    def instances(self, name: str, layout: StateLayout, phase: Phase) -> StateBackends:
        """What serves a phase of each layer, where `serves` says that the backend can."""
        made: dict[StateSpec, StateBackend] = {}
        for spec in self.specs:
            if self._supports(name, spec, layout, phase):
                made[spec] = make_state_backend(self.source.backend(name), spec, layout)
            else:
                recurrence = make_state_backend(self.source.backend(name), spec.recurrence, layout)
                helper = self.source.backend(next(self._helpers(layout, phase, spec)))
                convolution = make_state_backend(helper, spec.convolution, layout)
                made[spec] = ComposedState(spec, layout, convolution, recurrence)
        return made

    def _supports(self, name: str, spec: StateSpec, layout: StateLayout, phase: Phase) -> Support:
        support = Support()
        for each in (phase,) if phase is Phase.DECODE else (Phase.PREFILL, Phase.EXTEND):
            support &= self.source.supports(name, spec, layout, each)
        if support and phase is Phase.DECODE:
            most = self.source.backend(name).capabilities.max_draft_tokens
            if self.decode_len - 1 > most:
                hint = f"--num-speculative-tokens {most}" if most else "leave --speculate out"
                support = Support.no("max_draft_tokens", f"at most {most} drafts of a sequence", self.decode_len - 1, hint)
        return support

    def _helpers(self, layout: StateLayout, phase: Phase, spec: StateSpec) -> Iterator[str]:
        """Backends that apply a layer's convolution alone."""
        names = self.source.entries
        return (name for name in names if self._supports(name, spec.convolution, layout, phase))
