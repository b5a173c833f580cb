"""A layer with a state that two backends serve: one the convolution, another the recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from headway.core.contract.backend import Plan
from headway.core.contract.state import StateCache, StateLayout, StateMetadata, StateParameters, StateSpec
from headway.core.contract.state_backend import StateBackend


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
