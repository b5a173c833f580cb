"""Ten ways to get layers with a state wrong, each a few lines beside the plain backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.state import GATED_DELTA, KDA, KEY_VALUE, MAMBA1, MAMBA2, StateCache, StateMetadata, StateParameters
from headway.core.contract.state_backend import StateBackend
from headway.core.oracle.state_reference import SequenceState, advance
from headway.testing.broken.plain_states import PlainStates


class BeginsWithTheSlot(PlainStates):
    """A new sequence begins with what its slot was left with."""

    name = "begins-with-the-slot"

    def begin(self, cache: StateCache, slot: int, context: int) -> SequenceState:
        """The slot, whatever the context."""
        return super().begin(cache, slot, max(context, 1))


class ForgetsTheConvolution(PlainStates):
    """A later chunk is convolved as if nothing came before it."""

    name = "forgets-the-convolution"

    def begin(self, cache: StateCache, slot: int, context: int) -> SequenceState:
        """The recurrence's state alone."""
        return replace(super().begin(cache, slot, context), conv=SequenceState.zeros(self.spec).conv)


class WritesPaddingSlots(PlainStates):
    """Slot -1 is the last one, as in Python."""

    name = "writes-padding-slots"

    def is_real(self, slot: int) -> bool:
        """Every row."""
        return True


class OneStateForDrafts(PlainStates):
    """A decode with drafts leaves the state after the last of them, in the first slot."""

    name = "one-state-for-drafts"

    def targets(self, plan: StateMetadata, row: int, tokens: int, length: int) -> list[int]:
        """Nothing before the last token."""
        if plan.step.num_decodes:
            return [slot for slot in plan.out_slots[row, :1].tolist() if slot >= 0 and tokens == length]
        return super().targets(plan, row, tokens, length)


class LateCheckpoints(PlainStates):
    """A checkpoint is the state at the end of the prompt."""

    name = "late-checkpoints"

    def is_due(self, after: int, tokens: int, length: int) -> bool:
        """After the last token."""
        return tokens == length


class NewestInputFirst(PlainStates):
    """The convolution's inputs are kept newest first, which the backend itself reads rightly."""

    name = "newest-input-first"

    def begin(self, cache: StateCache, slot: int, context: int) -> SequenceState:
        """Turned round."""
        return self._turned(super().begin(cache, slot, context))

    def keep(self, cache: StateCache, slot: int, state: SequenceState) -> None:
        """Turned round."""
        super().keep(cache, slot, self._turned(state))

    @staticmethod
    def _turned(state: SequenceState) -> SequenceState:
        return replace(state, conv=None if state.conv is None else state.conv.flip(1))


class WrongKeyHeads(PlainStates):
    """State heads are dealt to key heads in turn."""

    name = "wrong-key-heads"

    def advance(self, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState) -> Tensor:
        """The convolution, and then the recurrence of a layer whose key heads were dealt out in turn."""
        spec = self.spec
        if not spec.recurrent or spec.kind == MAMBA1:
            return super().advance(parameters, x, gates, state)
        if spec.conv_channels:
            x = advance(spec.convolution, parameters, x, [], state)
        heads, keys, values = spec.num_heads, spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
        parts = x.split((values, keys, keys) if spec.kind == MAMBA2 else (keys, keys, values))  # type: ignore[no-untyped-call]
        dealt = torch.arange(heads) % spec.num_key_heads
        wide = [part if len(part) == values != keys else part.view(-1, spec.key_dim)[dealt].flatten() for part in parts]
        part = SequenceState(state.recurrent, None)
        result = advance(replace(spec.recurrence, num_key_heads=heads), parameters, torch.cat(wide), gates, part)
        state.recurrent = part.recurrent
        return result


class TransposesStates(PlainStates):
    """Every layout is taken for the one that transformers has, where the sizes let it."""

    name = "transposes-states"

    def begin(self, cache: StateCache, slot: int, context: int) -> SequenceState:
        """The slot's memory as if key came before value."""
        return super().begin(self._taken(cache), slot, context)

    def keep(self, cache: StateCache, slot: int, state: SequenceState) -> None:
        """The same way back."""
        super().keep(self._taken(cache), slot, state)

    def _taken(self, cache: StateCache) -> StateCache:
        square = self.spec.recurrent and self.spec.key_dim == self.spec.value_dim
        if not square or cache.layout.recurrent[1] != "head":
            return cache
        return StateCache(cache.tensors, replace(cache.layout, recurrent=KEY_VALUE.recurrent), cache.spec)


class OverflowingDecays(PlainStates):
    """A decay between two tokens is exp(G_i) / exp(G_j), which strong decays turn into 0 times infinity."""

    name = "overflowing-decays"

    def advance(self, parameters: StateParameters, x: Tensor, gates: Sequence[Tensor], state: SequenceState) -> Tensor:
        """The output times exp(g) exp(-g) in float32."""
        out = super().advance(parameters, x, gates, state)
        if self.spec.kind not in (GATED_DELTA, KDA, MAMBA2):
            return out
        assert parameters.A_log is not None
        assert parameters.dt_bias is not None
        rate = parameters.A_log[:, None] if self.spec.kind == KDA else parameters.A_log
        g = (-rate.exp() * torch.nn.functional.softplus(gates[0].float() + parameters.dt_bias)).sum()
        return out * (g.exp() * (-g).exp())


class StaleSlotsOnReplay(PlainStates):
    """A captured step keeps the slots that it was captured with."""

    name = "stale-slots-on-replay"

    def plan_for_capture(self, metadata: StateMetadata) -> StateMetadata:
        """Copies of the static tensors."""
        return replace(metadata, slots=metadata.slots.clone(), out_slots=metadata.out_slots.clone())


PLANTED_STATES: dict[str, type[StateBackend]] = {
    each.name: each
    for each in (
        BeginsWithTheSlot,
        ForgetsTheConvolution,
        WritesPaddingSlots,
        OneStateForDrafts,
        LateCheckpoints,
        NewestInputFirst,
        WrongKeyHeads,
        TransposesStates,
        OverflowingDecays,
        StaleSlotsOnReplay,
    )
}
