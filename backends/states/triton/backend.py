"""The state backend `triton`: linear attention and SSM layers in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from headway.backends.states.triton.arguments import StateTuning
from headway.backends.states.triton.scan import StateScan, plan_scan, shared_bytes
from headway.backends.states.triton.step_kernels import StateStep
from headway.core.contract.backend import Plan
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.metadata import Phase
from headway.core.contract.state import (
    STATE_KINDS,
    StateBackend,
    StateCache,
    StateCapabilities,
    StateLayout,
    StateMetadata,
    StateParameters,
    StateSpec,
)
from headway.core.contract.support import Support
from headway.kernels.runtime.triton_launch import INTERPRETED, Workspace, can_launch, shared_memory

LONGEST_KEY = 256
"""Maximum key_dim: the kernels hold a whole column of the state in registers."""


class TritonStates(StateBackend):
    """Runs decode steps (convolution and recurrence) in one launch, and prompts in chunks, for every kind and layout of state.
    Needs no build step."""

    name = "triton"
    capabilities: ClassVar[StateCapabilities] = StateCapabilities(
        kinds=frozenset(STATE_KINDS),
        state_dtypes=(torch.float32, torch.bfloat16),
        devices=("cpu", "cuda") if INTERPRETED else ("cuda",),
    )
    graph_level = GraphLevel.UNIFORM

    def __init__(self, spec: StateSpec, layout: StateLayout) -> None:
        super().__init__(spec, layout)
        self.tuning = StateTuning()
        cuda = spec.device.type == "cuda"
        multiprocessors = torch.cuda.get_device_properties(spec.device).multi_processor_count if cuda else 4
        self._step = StateStep(spec, Workspace(spec.device))
        self._scan = StateScan(spec, multiprocessors)

    @classmethod
    def available(cls) -> Support:
        return can_launch()

    @classmethod
    def supports(cls, spec: StateSpec, layout: StateLayout, phase: Phase) -> Support:
        """Return whether the backend's capabilities, the layer's key_dim and the GPU's shared memory allow a layer."""
        support = super().supports(spec, layout, phase)
        if spec.key_dim > LONGEST_KEY:
            support &= Support.no("key_dim", f"at most {LONGEST_KEY}", spec.key_dim)
        asked = phase != Phase.DECODE and spec.device.type == "cuda" and torch.cuda.is_available()
        if asked and (needed := shared_bytes(spec)) > (found := shared_memory(spec.device)):
            wanted = f"{needed >> 10} KB for keys of {spec.key_dim} in float32"
            support &= Support.no("shared memory", wanted, f"{found >> 10} KB", "--dtype bfloat16, or --state-backend torch")
        return support

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        return self._scan.workspace_bytes(max_num_tokens, max_num_seqs)

    def plan(self, metadata: StateMetadata) -> Plan:
        return self._step.plan(metadata) if metadata.step.num_decodes else plan_scan(metadata, self.spec.device)

    def scan(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        self._scan(x, gates, parameters, cache, plan, out, self.tuning)

    def step(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        self._step(x, gates, parameters, cache, plan, out, self.tuning)
