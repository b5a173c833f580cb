"""Checks of state backends: claims, outputs and states, draft tokens, graphs, and sequences that grow, fork and move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headway.core.contract.kernel import GraphLevel
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.state import (
    CHECKPOINT_TOKENS,
    StateBackend,
    StateCache,
    StateLayout,
    StateMetadata,
    StateParameters,
    StateSpec,
)
from headway.core.oracle.cells import Finding, Skipped, placed
from headway.core.oracle.oracle import distance
from headway.core.oracle.state_cases import StateCase, make_state_case, random_inputs, random_parameters, run_layers
from headway.core.oracle.state_reference import SequenceState, advance
from headway.testing.broken.kernels import PlainStates
from headway.testing.diagnosis.states import ROW_FACTOR, Judge
from headway.testing.kit.checks import every
from headway.testing.kit.states import MOST_DRAFTS, WORK, StateCell, StateStage

_LONGEST = 1 << 16
_LAYERS = 2
_NAN = "NaN: reads a slot that holds nobody's state"
_LAYER = "right in the first layer: keeps something of a layer, its weights or its states, for the next one over the plan"


@dataclass(frozen=True)
class StateParts:
    """Two backends, one for prompts and extends and one for decode. Each is the subject, or the reference if the subject lacks
    support."""

    scans: StateBackend
    steps: StateBackend
    tolerance: float

    @classmethod
    def of(cls, stage: StateStage, cell: StateCell) -> StateParts:
        """Return the backends for a cell's layer.

        :raises Skipped: if the subject supports neither prompts and extends nor decode.
        """
        own, spec = stage.make(cell), stage.spec(cell)
        plain = PlainStates(spec, own.layout)
        served = {phase for phase in Phase if stage.supports(cell, phase)}
        scans, steps = {Phase.PREFILL, Phase.EXTEND} <= served, Phase.DECODE in served
        if not (scans or steps):
            raise Skipped("needs a backend of prompts and extensions, or of decodes")
        tolerance = max(float(own.tolerance[spec.dtype]), float(own.tolerance.get(spec.state_dtype, 0.0)))
        return cls(own if scans else plain, own if steps else plain, ROW_FACTOR * tolerance)


@dataclass
class LayerTokens:
    """Inputs of a sequence's tokens in one layer, with the results of a single run over all tokens."""

    inputs: list[Tensor]
    """x and the gates, each [length, ...]."""
    expected: Tensor
    """float64 [length, out_channels]: expected outputs."""
    last: SequenceState
    """Expected state after the last token."""


@dataclass(eq=False)
class StateTokens:
    """One sequence: all of its tokens, including those not yet run, and its progress."""

    layers: list[LayerTokens]
    slot: int
    done: int = 0

    @property
    def left(self) -> int:
        """Number of tokens that have not yet run."""
        return len(self.layers[0].expected) - self.done


@dataclass
class StateTurn:
    """Work of one sequence in a step."""

    seq: StateTokens
    count: int
    """Number of new tokens."""
    accepted: int = 0
    """Number of accepted tokens of a decode; the remaining new tokens are rejected drafts. 0 means a prompt."""
    out_slots: list[int] = field(default_factory=list)
    checkpoint: tuple[int, int] | None = None
    """(number of new tokens after which the state is stored, slot that receives the state). None means no checkpoint."""


class StateSession:
    """Backend instances that plan each step once for two layers, together with the layers' slots and the sequences.

    The most recently freed slot is reused first. Slots with odd indices are filled with NaN when freed; other slots are left
    unchanged.
    """

    def __init__(self, served: StateParts, spec: StateSpec, layout: StateLayout, num_slots: int = 64, seed: int = 0) -> None:
        self.served = served
        self.spec = spec
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters: list[StateParameters] = [random_parameters(spec, self.generator) for _ in range(_LAYERS)]
        self.caches: list[StateCache] = [layout.allocate(spec, num_slots) for _ in range(_LAYERS)]
        for tensor in self._tensors():
            tensor.copy_(torch.randn(tensor.shape, generator=self.generator))
            tensor[::2] = torch.nan
        self._free: list[int] = torch.randperm(num_slots, generator=self.generator).tolist()

    def _tensors(self) -> list[Tensor]:
        return [tensor for cache in self.caches for tensor in cache.tensors.values()]

    def take(self) -> int:
        """Allocate a slot, and return its index."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Free a slot."""
        for tensor in self._tensors():
            if slot % 2:
                tensor[slot] = torch.nan
        self._free.append(slot)

    def copy(self, source: int, target: int) -> None:
        """Copy a slot's states to another slot, as an engine does to restore or fork a sequence."""
        for tensor in self._tensors():
            tensor[target] = tensor[source]

    def swap(self, one: StateTokens, other: StateTokens) -> None:
        """Exchange the slots of two sequences."""
        for tensor in self._tensors():
            tensor[[one.slot, other.slot]] = tensor[[other.slot, one.slot]]
        one.slot, other.slot = other.slot, one.slot

    def move(self, seq: StateTokens) -> None:
        """Move a sequence to a different slot."""
        old = seq.slot
        seq.slot = self.take()
        self.copy(old, seq.slot)
        self.give_back(old)

    def fork(self, seq: StateTokens) -> StateTokens:
        """Return a new sequence with the same tokens that continues from a copy of a sequence's state."""
        found = replace(seq, slot=self.take())
        self.copy(seq.slot, found.slot)
        return found

    def open(self, length: int, prefix: StateTokens | None = None, shared: int = 0, checkpoint: int = -1) -> StateTokens:
        """Start a sequence. prefix: sequence with the same first `shared` tokens; its state after these tokens is in slot
        `checkpoint`."""
        layers = []
        for number, parameters in enumerate(self.parameters):
            inputs = random_inputs(self.spec, length, self.generator, strided=True)
            if prefix is not None:
                for own, other in zip(inputs, prefix.layers[number].inputs, strict=True):
                    own[:shared] = other[:shared]
            state = SequenceState.zeros(self.spec)
            rows = [
                advance(self.spec, parameters, x, gates, state)
                for x, *gates in zip(*(part.cpu().double() for part in inputs), strict=True)
            ]
            layers.append(LayerTokens(inputs, torch.stack(rows), state))
        return StateTokens(layers, self.take() if prefix is None else checkpoint, shared)

    def step(self, work: Sequence[StateTurn]) -> None:
        """Run one step, check its output, and advance the sequences. In `work`, prompts and extends come first.

        :raises Finding: if an output is wrong.
        """
        for number, turn in enumerate(work):
            own = [turn.seq.slot] if (number + turn.seq.done) % 3 == 0 else []
            turn.out_slots = own + [self.take() for _ in range(max(turn.accepted and turn.count, 1) - len(own))]
        metadata = self._metadata(work)
        found = run_layers(self.served.scans, self.served.steps, [self._case(work, metadata, layer) for layer in range(_LAYERS)])
        start = 0
        for turn in work:
            seq, held = turn.seq, turn.accepted or turn.count
            for layer, out in enumerate(found):
                right = seq.layers[layer].expected[seq.done : seq.done + held]
                self._judge(turn, out[start : start + held].cpu(), right, layer)
            start += turn.count
            seq.done += held
            kept = turn.out_slots[turn.accepted - 1] if turn.accepted else turn.out_slots[0]
            for slot in {seq.slot, *turn.out_slots} - {kept}:
                self.give_back(slot)
            seq.slot = kept

    def end(self, seq: StateTokens) -> None:
        """Check a sequence's final state, and free its slot.

        :raises Finding: if the state is wrong.
        """
        for layer, cache in enumerate(self.caches):
            last = seq.layers[layer].last
            for name, logical, right in (
                ("recurrence", cache.logical_recurrent if self.spec.recurrent else None, last.recurrent),
                ("convolution", cache.logical_conv if self.spec.conv_channels else None, last.conv),
            ):
                if logical is None or right is None:
                    continue
                error = distance(logical[seq.slot].cpu(), right)
                if not error <= self.served.tolerance:
                    text = (
                        f"state of the {name}, layer {layer}, after all {seq.done} tokens: must be what one run over them leaves"
                    )
                    raise Finding(text, error=error, tolerance=self.served.tolerance / ROW_FACTOR)
        self.give_back(seq.slot)

    def _metadata(self, work: Sequence[StateTurn]) -> StateMetadata:
        device, width = self.spec.device, max(len(turn.out_slots) for turn in work)
        counts, contexts = [turn.count for turn in work], [turn.seq.done for turn in work]
        drafts = [turn.count - 1 if turn.accepted else -1 for turn in work]
        step = AttentionMetadata.build(counts, contexts, [[0]] * len(work), _LONGEST, device, num_draft_tokens=drafts)
        slots = torch.tensor([turn.seq.slot for turn in work], dtype=torch.int32)
        outs = torch.tensor([turn.out_slots + [-1] * (width - len(turn.out_slots)) for turn in work], dtype=torch.int32)
        kept = [(row, *turn.checkpoint) for row, turn in enumerate(work) if turn.checkpoint is not None]
        marks = torch.tensor(kept, dtype=torch.int32) if kept else None
        placed = None if marks is None else marks.to(device)
        return StateMetadata(step, slots.to(device), outs.to(device), slots, outs, placed, marks)

    def _case(self, work: Sequence[StateTurn], metadata: StateMetadata, layer: int) -> StateCase:
        parts = zip(*(self._inputs(turn, layer) for turn in work), strict=True)
        x, *gates = (torch.cat(each) for each in parts)
        return StateCase(self.spec, self.parameters[layer], metadata, self.caches[layer], x, gates)

    def _inputs(self, turn: StateTurn, layer: int) -> list[Tensor]:
        seq, held = turn.seq, turn.accepted or turn.count
        rows = [part[seq.done : seq.done + held] for part in seq.layers[layer].inputs]
        wrong = random_inputs(self.spec, turn.count - held, self.generator)
        return [torch.cat(pair) for pair in zip(rows, wrong, strict=True)]

    def _judge(self, turn: StateTurn, got: Tensor, right: Tensor, layer: int) -> None:
        error = distance(got, right)
        if error <= self.served.tolerance:
            return
        how = (
            f"a decode of which {turn.accepted} of {turn.count} tokens hold"
            if turn.accepted
            else f"{turn.count} tokens of a prompt"
        )
        raise Finding(
            f"{how}, after {turn.seq.done} tokens in steps of other sizes, must be what one run over all of them returns "
            f"(layer {layer} of {_LAYERS} over one plan)",
            guess=_NAN if got.isnan().any() else _LAYER if layer else "",
            error=error,
            tolerance=self.served.tolerance / ROW_FACTOR,
        )


_SIDE_BY_SIDE = 4
_LENGTHS = (20, 64, 33, 90, 41, 7)
"""Lengths in tokens of the sequences that follow the first three. Each of these sequences starts when an earlier sequence has
ended."""
_CHUNK_SIZES = (1, 2, 64, 3, 5, 37)
"""Numbers of new tokens of a prompt in successive steps. They include fewer tokens than the convolution has taps, a full chunk,
and parts of a chunk."""


class Course:
    """Run of sequences that are chunked anywhere, verify draft tokens, reuse prefixes, are moved, forked and rolled back, and
    end."""

    def __init__(self, session: StateSession, drafts: int) -> None:
        self._session = session
        self._drafts = drafts
        self._numbers = torch.Generator().manual_seed(2)
        self._steps = 0
        self._set_back = False

    def run(self) -> str:
        """Run all sequences to their ends, and return a summary of the run.

        :raises Finding: if an output or a state is wrong.
        """
        session, waiting = self._session, list(_LENGTHS)
        checkpoint, first, second = session.take(), session.open(170), session.open(140)
        session.step([StateTurn(first, 100, checkpoint=(CHECKPOINT_TOKENS, checkpoint)), StateTurn(second, 1)])
        running = [first, second, session.open(120, first, CHECKPOINT_TOKENS, checkpoint)]
        count = len(running)
        while running:
            while waiting and len(running) < _SIDE_BY_SIDE:
                running.append(session.open(waiting.pop(0)))
                count += 1
            self._change_slots(running)
            prompts: list[StateTurn] = []
            decodes: list[StateTurn] = []
            for number, seq in enumerate(running):
                turn = self._turn(seq, number)
                (decodes if turn.accepted else prompts).append(turn)
            session.step(prompts + decodes)
            self._steps += 1
            for seq in [seq for seq in running if not seq.left]:
                session.end(seq)
                running.remove(seq)
        return f"{self._steps} steps of {count} sequences"

    def _draw(self) -> int:
        return int(torch.randint(1 << 30, (1,), generator=self._numbers))

    def _turn(self, seq: StateTokens, number: int) -> StateTurn:
        draw = self._draw()
        if seq.done and (number + self._steps) % 2:
            held = min(seq.left, 1 + draw % (self._drafts + 1))
            return StateTurn(seq, min(held + draw % 3, self._drafts + 1), accepted=held)
        return StateTurn(seq, min(seq.left, _CHUNK_SIZES[draw % len(_CHUNK_SIZES)]))

    def _change_slots(self, running: list[StateTokens]) -> None:
        """Restore, fork and move states between steps without calling the backend, as an engine does."""
        session, begun = self._session, [seq for seq in running if seq.done]
        if len(begun) > 1 and self._steps % 4 == 1:
            session.swap(begun[0], begun[-1])
        if begun and self._steps % 4 == 3:
            session.move(begun[-1])
        if begun and self._steps % 6 == 2 and len(running) < _SIDE_BY_SIDE + 2:
            running.append(session.fork(begun[0]))
        if len(begun) > 1 and not self._set_back and self._steps > 4:
            # One sequence continues, and is then rolled back to its earlier state, in its current slot.
            self._set_back = True
            seq = max(begun, key=lambda each: each.left)
            kept, done = session.fork(seq), seq.done
            session.step([StateTurn(seq, 1, accepted=1)])
            session.copy(kept.slot, seq.slot)
            seq.done = done
            session.give_back(kept.slot)


_ROWS = 6


def claims(stage: StateStage, cell: StateCell) -> str:
    """Check the class against the contract as far as possible without running it."""
    every.claims(stage)
    for kind in stage.claims.kinds:
        if not any(row.kind == kind for row, _ in stage.rows):
            why = stage.refusal_of(kind)
            raise Finding(f"kind {kind} is claimed, and no layer of it is accepted: {why}", guess="a claim that does not hold")
    room = stage.make(stage.rows[0][0]).workspace_bytes(2048, 64)
    if not isinstance(room, int) or room < 0:
        raise Finding(f"workspace_bytes() is {room!r}; needs bytes, 0 or more", guess="a claim that does not hold")
    return ""


def answer(stage: StateStage, cell: StateCell) -> str:
    """Check output and states against float64: in place with strided rows, out of place, and with consecutive slots."""
    Judge.of(stage.case(cell, strided=True)).run(stage.make(cell))
    Judge.of(stage.case(cell, in_place=False, seed=1)).run(stage.make(cell))
    if cell.work == WORK[0] and cell.phase in ("decode", "verify", "ragged"):
        Judge.of(stage.case(cell, in_order=True, padding=0)).run(stage.make(cell))
    return ""


def session(stage: StateStage, cell: StateCell) -> str:
    """Run sequences that are chunked anywhere, verify draft tokens, share prefixes, move and end. Compare them with runs that
    process all tokens at once."""
    drafts = min(stage.claims.max_draft_tokens, MOST_DRAFTS)
    running = StateSession(StateParts.of(stage, cell), stage.spec(cell), stage.layouts[cell.layout])
    return Course(running, drafts).run()


def graph(stage: StateStage, cell: StateCell) -> str:
    """Plan a decode step once over static tensors, and replay it with other slots, other sequences and padding rows.

    Sequences with fewer draft tokens than the graph's width are padded with NaN tokens, which must not change a state.
    """
    tokens = min(3, stage.claims.max_draft_tokens + 1) if cell.phase == "verify" else 1
    needed = GraphLevel.UNIFORM if cell.phase == "verify" else GraphLevel.DECODE
    if stage.subject.backend.graph_level < needed:
        raise Skipped(f"graph_level: needs {needed.name}, got {stage.subject.backend.graph_level.name}, so no engine captures it")
    static = _static_case(stage, cell, [tokens] * _ROWS, tokens, seed=0)
    recorded = _Recorded(stage.make(cell), static)
    for number, real in enumerate((_ROWS, 2, 5, _ROWS, 1)):
        now = _static_case(stage, cell, [tokens - (row + number) % tokens for row in range(real)], tokens, seed=number + 1)
        judge = recorded.load(now)
        recorded.launches.replay()
        with placed(f"replay {number + 1} of a captured step, with {_ROWS - real} padding rows"):
            judge.judge(recorded.out(), stage.subject.backend.tolerance)
    return ""


def _static_case(stage: StateStage, cell: StateCell, counts: Sequence[int], most: int, seed: int) -> StateCase:
    """Return a step of sequences with these numbers of new tokens, plus padding rows. most: maximum number of tokens per sequence
    in any replay."""
    real, lens = len(counts), [(count, 9 + row) for row, count in enumerate(counts)]
    slots = _ROWS * (most + 1) - real - sum(counts) + 3  # every replay has a pool of the same size
    spec, layout = stage.spec(cell), stage.layouts[cell.layout]
    return make_state_case(lens, spec, layout, seed=seed, padding_rows=_ROWS - real, spare_slots=slots, in_place=seed % 2 == 0)


class _Recorded:
    """Static tensors, plan and, on a GPU, the CUDA graph of a step."""

    def __init__(self, backend: StateBackend, static: StateCase) -> None:
        decode = static.metadata.decode
        assert decode is not None
        self._backend = backend
        self._static = static
        self._metadata = decode
        self._width = decode.step.max_query_len
        if self._width > 1:
            none = torch.zeros(_ROWS, dtype=torch.int64, device=static.spec.device)
            self._metadata = replace(decode, recomputed=none)
        self._out = static.x.new_zeros(static.x.shape[0], static.spec.out_channels)
        self._new = torch.empty(0)
        """Row indices of the new tokens: the last rows of each sequence."""
        self._plan = backend.plan_for_capture(self._metadata)
        self.launches = every.Recorded(self._run, static.spec.device)

    def load(self, now: StateCase) -> Judge:
        """Update the static tensors for a step, and return the step's judge."""
        static, lens = self._static, now.metadata.step.query_lens
        ends = range(self._width, self._width * _ROWS + 1, self._width)
        places = [at for end, length in zip(ends, lens, strict=True) for at in range(end - length, end)]
        self._new = torch.tensor(places, device=static.spec.device)
        for old, new in zip((static.x, *static.gates), (now.x, *now.gates), strict=True):
            old.fill_(torch.nan)
            old.index_copy_(0, self._new, new)
        pairs = [(tensor, now.cache.tensors[name]) for name, tensor in static.cache.tensors.items()]
        pairs += [(getattr(static.parameters, name), getattr(now.parameters, name)) for name in vars(now.parameters)]
        for old, new in pairs:
            if old is not None and new is not None:
                old.copy_(new)
        self._load_slots(now.metadata, lens)
        self._out.fill_(torch.nan)
        return Judge.of(StateCase(static.spec, static.parameters, now.metadata, static.cache, now.x, now.gates))

    def _load_slots(self, now: StateMetadata, lens: Sequence[int]) -> None:
        static, step = self._metadata, self._metadata.step
        static.slots.copy_(now.slots)
        static.out_slots.fill_(-1)
        static.out_slots[:, : now.out_slots.shape[1]] = now.out_slots
        step.seq_lens.copy_(now.step.seq_lens)
        step.context_lens.copy_((step.seq_lens - self._width).clamp(min=0))
        if static.recomputed is not None:
            static.recomputed.copy_(self._width - torch.tensor(lens))

    def out(self) -> Tensor:
        return self._out.index_select(0, self._new)

    def _run(self) -> None:
        case = self._static
        self._backend.step(case.x, case.gates, case.parameters, case.cache, self._plan, self._out)
