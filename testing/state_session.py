"""A backend for layers with a state along the calls of an engine: sequences that are cut, guess, take a prefix up and go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.state import StateLayout, StateMetadata, StateSpec
from headway.core.contract.state_backend import StateBackend
from headway.testing.cells import Finding
from headway.testing.state_cases import StateCase, random_inputs, random_parameters, run_states
from headway.testing.state_reference import SequenceState, advance
from headway.testing.state_verdict import ROW_FACTOR, distance

_LONGEST = 1 << 16


@dataclass
class StateTokens:
    """One sequence: all tokens that it will have, what a lone run over them returns, and how far it has come."""

    inputs: list[Tensor]
    """x and gates, [length, ...]"""
    expected: Tensor
    """float64 [length, out_channels]"""
    slot: int
    done: int = 0

    @property
    def left(self) -> int:
        """Tokens that have not run."""
        return len(self.expected) - self.done


@dataclass
class StateTurn:
    """What one sequence does in a step."""

    seq: StateTokens
    count: int
    """New tokens."""
    accepted: int = 0
    """How many new tokens of a decode hold; the others are guesses that the sequence will not have. 0: a prompt."""
    out_slots: list[int] = field(default_factory=list)
    checkpoint: tuple[int, int] | None = None
    """Tokens of this step after which the state is kept, and where."""


class StateSession:
    """One instance, one layer's pool of slots, and sequences in it. A slot that is given back is filled with NaN."""

    def __init__(self, backend: StateBackend, spec: StateSpec, layout: StateLayout, num_slots: int, seed: int = 0) -> None:
        self.backend, self.spec = backend, spec
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = random_parameters(spec, self.generator)
        self.cache = layout.allocate(spec, num_slots)
        for tensor in self.cache.tensors.values():
            tensor.fill_(torch.nan)
        self._free: list[int] = torch.randperm(num_slots, generator=self.generator).tolist()

    def take(self) -> int:
        """Hand out a slot."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Take a slot back."""
        for tensor in self.cache.tensors.values():
            tensor[slot] = torch.nan
        self._free.insert(0, slot)

    def open(self, length: int, prefix: StateTokens | None = None, shared: int = 0, checkpoint: int = -1) -> StateTokens:
        """Begin a sequence. prefix: one whose first `shared` tokens it has, and whose state after them lies in `checkpoint`."""
        inputs = random_inputs(self.spec, length, self.generator, strided=True)
        if prefix is not None:
            for own, other in zip(inputs, prefix.inputs, strict=True):
                own[:shared] = other[:shared]
        state = SequenceState.zeros(self.spec)
        rows = [
            advance(self.spec, self.parameters, x.cpu().double(), [gate.cpu().double() for gate in gates], state)
            for x, *gates in zip(*inputs, strict=True)
        ]
        slot = self.take() if prefix is None else checkpoint
        return StateTokens(inputs, torch.stack(rows), slot, shared)

    def step(self, work: Sequence[StateTurn]) -> None:
        """Run one step, judge its output, and let the sequences move on; prompts and extensions come first in `work`.

        :raises Finding: an output is wrong.
        """
        for turn in work:
            turn.out_slots = [self.take() for _ in range(max(turn.accepted and turn.count, 1))]
        out = run_states(self.backend, self._case(work))
        start = 0
        for turn in work:
            held = turn.accepted or turn.count
            self._judge(turn, out[start : start + held].cpu(), turn.seq.expected[turn.seq.done : turn.seq.done + held])
            start += turn.count
            turn.seq.done += held
            kept = turn.out_slots[turn.accepted - 1] if turn.accepted else turn.out_slots[0]
            for slot in {turn.seq.slot, *turn.out_slots} - {kept}:
                self.give_back(slot)
            turn.seq.slot = kept

    def _case(self, work: Sequence[StateTurn]) -> StateCase:
        device, width = self.spec.device, max(len(turn.out_slots) for turn in work)
        counts, contexts = [turn.count for turn in work], [turn.seq.done for turn in work]
        drafts = [turn.count - 1 if turn.accepted else -1 for turn in work]
        step = AttentionMetadata.build(counts, contexts, [[0]] * len(work), _LONGEST, device, num_draft_tokens=drafts)
        slots = torch.tensor([turn.seq.slot for turn in work], dtype=torch.int32)
        outs = torch.tensor([turn.out_slots + [-1] * (width - len(turn.out_slots)) for turn in work], dtype=torch.int32)
        kept = [(row, *turn.checkpoint) for row, turn in enumerate(work) if turn.checkpoint is not None]
        marks = torch.tensor(kept, dtype=torch.int32) if kept else None
        placed = None if marks is None else marks.to(device)
        metadata = StateMetadata(step, slots.to(device), outs.to(device), slots, outs, placed, marks)
        x, *gates = (torch.cat(parts) for parts in zip(*(self._inputs(turn) for turn in work), strict=True))
        return StateCase(self.spec, self.parameters, metadata, self.cache, x, gates)

    def _inputs(self, turn: StateTurn) -> list[Tensor]:
        seq, held = turn.seq, turn.accepted or turn.count
        rows = [part[seq.done : seq.done + held] for part in seq.inputs]
        wrong = random_inputs(self.spec, turn.count - held, self.generator)
        return [torch.cat(pair) for pair in zip(rows, wrong, strict=True)]

    def _judge(self, turn: StateTurn, got: Tensor, right: Tensor) -> None:
        tolerance = max(
            float(self.backend.tolerance[self.spec.dtype]), float(self.backend.tolerance.get(self.spec.state_dtype, 0.0))
        )
        error = distance(got, right)
        if error <= ROW_FACTOR * tolerance:
            return
        how = (
            f"a decode of which {turn.accepted} of {turn.count} tokens hold"
            if turn.accepted
            else f"{turn.count} tokens of a prompt"
        )
        raise Finding(
            f"{how}, after {turn.seq.done} tokens in steps of other sizes, must be what one run over all of them returns",
            guess="NaN: reads a slot that holds nobody's state" if got.isnan().any() else "",
            error=error,
            tolerance=tolerance,
        )
