"""Checks of state backends: claims, outputs and states, chunked prompts, draft tokens and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.kernel import GraphLevel
from headway.core.contract.state import StateBackend, StateMetadata
from headway.core.oracle.cells import Finding, Skipped, placed
from headway.core.oracle.state_cases import StateCase, make_state_case
from headway.testing.diagnosis.states import Judge
from headway.testing.kit.checks import every
from headway.testing.kit.state_course import Course, StateParts, StateSession
from headway.testing.kit.states import MOST_DRAFTS, WORK, StateCell, StateStage

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
