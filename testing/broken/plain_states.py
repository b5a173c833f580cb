"""A backend for layers with a state that reads like the definition, with a method for each step that a mistake can be in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.core.contract.backend import GraphLevel
from headway.core.contract.state import STATE_KINDS, StateCache, StateMetadata, StateParameters
from headway.core.contract.state_backend import StateBackend, StateCapabilities
from headway.core.oracle.state_reference import SequenceState, advance


class PlainStates(StateBackend):
    """One sequence and one token at a time; a captured plan is the step's metadata, whose tensors are read when it runs."""

    name = "plain-states"
    capabilities = StateCapabilities(
        frozenset(STATE_KINDS), devices=("cpu",), state_dtypes=(torch.float32, torch.bfloat16, torch.float16)
    )
    graph_level = GraphLevel.UNIFORM

    def plan(self, metadata: StateMetadata) -> StateMetadata:
        """Nothing to prepare."""
        return metadata

    def scan(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: StateMetadata, out: Tensor
    ) -> None:
        """Every sequence, token by token."""
        token = 0
        old = [0] * plan.step.num_seqs if plan.recomputed is None else plan.recomputed.tolist()
        for row, (tokens, slot) in enumerate(zip(plan.step.query_lens, plan.slots.tolist(), strict=True)):
            length = tokens - old[row]
            if self.is_real(slot):
                state = self.begin(cache, slot, int(plan.step.context_lens[row]))
                for index in range(length):
                    at = token + old[row] + index
                    out[at] = self.advance(parameters, x[at].double(), [gate[at].double() for gate in gates], state)
                    for target in self.targets(plan, row, index + 1, length):
                        self.keep(cache, target, state)
            token += tokens

    def step(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: StateMetadata, out: Tensor
    ) -> None:
        """The same."""
        self.scan(x, gates, parameters, cache, plan, out)

    def is_real(self, slot: int) -> bool:
        """Whether a row of this slot is a sequence."""
        return slot >= 0

    def begin(self, cache: StateCache, slot: int, context: int) -> SequenceState:
        """What a sequence remembers before the step."""
        if context == 0:
            return SequenceState.zeros(self.spec)
        return SequenceState(
            cache.logical_recurrent[slot].double() if self.spec.recurrent else None,
            cache.logical_conv[slot].double() if self.spec.conv_channels else None,
        )

    def advance(self, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState) -> Tensor:
        """One token's output; the state moves on."""
        return advance(self.spec, parameters, x, gates, state)

    def targets(self, plan: StateMetadata, row: int, tokens: int, length: int) -> list[int]:
        """The slots that get a sequence's state after so many of its `length` new tokens."""
        found = []
        if plan.step.num_decodes:
            found += plan.out_slots[row, tokens - 1 : tokens].tolist()
        elif tokens == length:
            found += plan.out_slots[row, :1].tolist()
        if plan.checkpoints is not None:
            found += [
                slot
                for sequence, after, slot in plan.checkpoints.tolist()
                if sequence == row and self.is_due(after, tokens, length)
            ]
        return [slot for slot in found if self.is_real(slot)]

    def is_due(self, after: int, tokens: int, length: int) -> bool:
        """Whether a checkpoint that is asked for after so many tokens is written now."""
        return after == tokens

    def keep(self, cache: StateCache, slot: int, state: SequenceState) -> None:
        """Write a state to a slot."""
        if state.recurrent is not None:
            cache.logical_recurrent[slot] = state.recurrent.to(self.spec.state_dtype)
        if state.conv is not None:
            cache.logical_conv[slot] = state.conv.to(self.spec.dtype)
