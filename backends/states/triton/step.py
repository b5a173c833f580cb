"""`step` of the Triton state backend: a launch for a layer's newest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
from torch import Tensor

from headway.backends.states.triton.arguments import (
    channel_constants,
    convolution_constants,
    head_constants,
    launch,
    states,
    weights,
)
from headway.backends.states.triton.step_kernels import step_channels, step_heads
from headway.backends.states.triton.tuning import StateTuning
from headway.core.contract.state import MAMBA1, StateCache, StateMetadata, StateParameters, StateSpec
from headway.kernels.runtime.triton_launch import Launcher, Workspace, launches_early


@dataclass(frozen=True, slots=True)
class StatesStepPlan:
    """One decode step: the slots of its sequences, and how many new tokens they have."""

    slots: Tensor
    out_slots: Tensor
    query_start_loc: Tensor
    recomputed: Tensor | None
    num_seqs: int
    single: bool
    """Whether every sequence has one new token."""

    @property
    def recomputed_tokens(self) -> Tensor:
        """What the kernel takes for `recomputed`, also where it does not look at it."""
        return self.slots if self.recomputed is None else self.recomputed


class StateStep:
    """Launches the decode of one kind of layer."""

    def __init__(self, spec: StateSpec, workspace: Workspace) -> None:
        self._spec = spec
        self._workspace = workspace
        self._early = launches_early(spec.device)
        self._heads = Launcher(step_heads)
        self._channels = Launcher(step_channels)

    def plan(self, metadata: StateMetadata) -> StatesStepPlan:
        """Plan a view of sequences that decode. Nothing is copied: a graph finds each step's values in the same tensors."""
        step = metadata.step
        if self._spec.recurrent and self._spec.conv_channels:
            self._workspace.counters(step.num_seqs * self._spec.num_key_heads)
        out_slots = metadata.out_slots
        width = out_slots.shape[1]
        assert width == 1 or width >= step.max_query_len, f"a column for each of {step.max_query_len} new tokens, or one: {width}"
        single = step.max_query_len == 1
        return StatesStepPlan(metadata.slots, out_slots, step.query_start_loc, metadata.recomputed, step.num_seqs, single)

    def __call__(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: StatesStepPlan,
        out: Tensor, tuning: StateTuning,
    ) -> None:  # fmt: skip
        """Run a layer; see `StateBackend.step`."""
        spec = self._spec
        if not spec.recurrent or spec.kind == MAMBA1:
            self._run_channels(x, gates, parameters, cache, plan, out, tuning)
            return
        self._run_heads(x, gates, parameters, cache, plan, out, tuning)

    def _run_heads(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: StatesStepPlan,
        out: Tensor, tuning: StateTuning,
    ) -> None:  # fmt: skip
        spec = self._spec
        block_v, num_warps = self._cut(plan, tuning)
        constants = {
            **head_constants(spec, cache),
            **convolution_constants(spec, cache, parameters),
            "SINGLE": plan.single,
            "RECOMPUTED": plan.recomputed is not None,
            "BLOCK_K": triton.next_power_of_2(spec.key_dim),
            "BLOCK_V": block_v,
            "OUT_WIDTH": plan.out_slots.shape[1],
            "QK_NORM": spec.qk_norm,
            "HAS_D": parameters.D is not None,
            "PDL": self._early,
        }
        first, second = (*gates, x, x)[:2]
        tensors = (
            x, first, second, out, *states(cache, x), *weights(parameters, x), plan.slots, plan.out_slots,
            plan.query_start_loc, plan.recomputed_tokens, self._workspace.counters(plan.num_seqs * spec.num_key_heads),
        )  # fmt: skip
        strides = x.stride(0), first.stride(0), second.stride(0), out.stride(0), plan.out_slots.stride(0)
        numbers = spec.scale, spec.beta_scale, *spec.dt_limits
        grid = spec.num_heads * triton.cdiv(spec.value_dim, block_v), plan.num_seqs, 1
        launch(self._heads, grid, tensors, (*strides, *map(float, numbers)), constants, num_warps)

    def _run_channels(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: StatesStepPlan,
        out: Tensor, tuning: StateTuning,
    ) -> None:  # fmt: skip
        spec = cache.spec
        channels = channel_constants(spec, cache)
        constants = {
            **channels,
            **convolution_constants(spec, cache, parameters),
            "SINGLE": plan.single,
            "RECOMPUTED": plan.recomputed is not None,
            "BLOCK_C": tuning.channels,
            "OUT_WIDTH": plan.out_slots.shape[1],
            "HAS_D": parameters.D is not None,
            "PDL": self._early,
        }
        dt, b, c = (*gates, x, x, x)[:3]
        tensors = (
            x, dt, b, c, out, *states(cache, x), *weights(parameters, x), plan.slots, plan.out_slots, plan.query_start_loc,
            plan.recomputed_tokens,
        )  # fmt: skip
        strides = tuple(each.stride(0) for each in (x, dt, b, c, out, plan.out_slots))
        grid = triton.cdiv(channels["CHANNELS"], tuning.channels), plan.num_seqs, 1
        launch(self._channels, grid, tensors, strides, constants, tuning.channel_warps)

    def _cut(self, plan: StatesStepPlan, tuning: StateTuning) -> tuple[int, int]:
        """Elements of the value that a program owns, and its warps: a state's tile takes 32 or 64 registers of a thread."""
        spec = self._spec
        chosen = 64 if plan.num_seqs * spec.num_heads >= 256 else 32
        block_v = min(tuning.step_value or chosen, triton.next_power_of_2(spec.value_dim))
        elements = triton.next_power_of_2(spec.key_dim) * block_v
        return block_v, tuning.step_warps or max(1, min(4, elements // 1024))
