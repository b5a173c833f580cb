"""A backend for layers with a state that reads like the definition, and backends with one planted mistake each, made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.kernel import GraphLevel
from headway.core.contract.state import (
    GATED_DELTA,
    KDA,
    KEY_VALUE,
    MAMBA1,
    MAMBA2,
    STATE_KINDS,
    StateBackend,
    StateCache,
    StateCapabilities,
    StateMetadata,
    StateParameters,
)
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


def _without_conv(self: PlainStates, cache: StateCache, slot: int, context: int) -> SequenceState:
    return replace(PlainStates.begin(self, cache, slot, context), conv=SequenceState.zeros(self.spec).conv)


def _after_the_last_draft(self: PlainStates, plan: StateMetadata, row: int, tokens: int, length: int) -> list[int]:
    if plan.step.num_decodes:
        return [slot for slot in plan.out_slots[row, :1].tolist() if slot >= 0 and tokens == length]
    return PlainStates.targets(self, plan, row, tokens, length)


def _turned(state: SequenceState) -> SequenceState:
    return replace(state, conv=None if state.conv is None else state.conv.flip(1))


def _by_turns(self: PlainStates, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState) -> Tensor:
    spec = self.spec
    if not spec.recurrent or spec.kind == MAMBA1:
        return PlainStates.advance(self, parameters, x, gates, state)
    if spec.conv_channels:
        x = advance(spec.convolution, parameters, x, [], state)
    heads, keys, values = spec.num_heads, spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
    parts = torch.split(x, [values, keys, keys] if spec.kind == MAMBA2 else [keys, keys, values])
    dealt = torch.arange(heads) % spec.num_key_heads
    wide = [part if len(part) == values != keys else part.view(-1, spec.key_dim)[dealt].flatten() for part in parts]
    part = SequenceState(state.recurrent, None)
    result = advance(replace(spec.recurrence, num_key_heads=heads), parameters, torch.cat(wide), gates, part)
    state.recurrent = part.recurrent
    return result


def _transposed(self: PlainStates, cache: StateCache) -> StateCache:
    square = self.spec.recurrent and self.spec.key_dim == self.spec.value_dim
    if not square or cache.layout.recurrent[1] != "head":
        return cache
    return StateCache(cache.tensors, replace(cache.layout, recurrent=KEY_VALUE.recurrent), cache.spec)


def _overflowing(
    self: PlainStates, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState
) -> Tensor:
    out = PlainStates.advance(self, parameters, x, gates, state)
    if self.spec.kind not in (GATED_DELTA, KDA, MAMBA2):
        return out
    assert parameters.A_log is not None
    assert parameters.dt_bias is not None
    rate = parameters.A_log[:, None] if self.spec.kind == KDA else parameters.A_log
    g = (-rate.exp() * torch.nn.functional.softplus(gates[0].float() + parameters.dt_bias)).sum()
    return out * (g.exp() * (-g).exp())


_MISTAKES: dict[str, dict[str, Any]] = {
    # A new sequence begins with what its slot was left with.
    "begins-with-the-slot": {"begin": lambda self, cache, slot, context: PlainStates.begin(self, cache, slot, max(context, 1))},
    # A later chunk is convolved as if nothing came before it.
    "forgets-the-convolution": {"begin": _without_conv},
    # Slot -1 is the last one, as in Python.
    "writes-padding-slots": {"is_real": lambda self, slot: True},
    # A decode with drafts leaves the state after the last of them, in the first slot.
    "one-state-for-drafts": {"targets": _after_the_last_draft},
    # A checkpoint is the state at the end of the prompt.
    "late-checkpoints": {"is_due": lambda self, after, tokens, length: tokens == length},
    # The convolution's inputs are kept newest first, which the backend itself reads rightly.
    "newest-input-first": {
        "begin": lambda self, cache, slot, context: _turned(PlainStates.begin(self, cache, slot, context)),
        "keep": lambda self, cache, slot, state: PlainStates.keep(self, cache, slot, _turned(state)),
    },
    # State heads are dealt to key heads in turn.
    "wrong-key-heads": {"advance": _by_turns},
    # Every layout is taken for the one that transformers has, where the sizes let it.
    "transposes-states": {
        "begin": lambda self, cache, *place: PlainStates.begin(self, _transposed(self, cache), *place),
        "keep": lambda self, cache, *state: PlainStates.keep(self, _transposed(self, cache), *state),
    },
    # A decay between two tokens is exp(G_i) / exp(G_j), which strong decays turn into 0 times infinity.
    "overflowing-decays": {"advance": _overflowing},
    # A captured step keeps the slots that it was captured with.
    "stale-slots-on-replay": {
        "plan_for_capture": lambda self, metadata: replace(
            metadata, slots=metadata.slots.clone(), out_slots=metadata.out_slots.clone()
        )
    },
}
"""Name -> what the backend has in place of the plain one's."""

PLANTED_STATES: dict[str, type[StateBackend]] = {
    name: type(name.title().replace("-", ""), (PlainStates,), {"name": name, "__module__": __name__, **changes})
    for name, changes in _MISTAKES.items()
}
"""Ten ways to get layers with a state wrong, by name."""
