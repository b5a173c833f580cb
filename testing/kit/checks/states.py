"""What a backend for layers with a state is held to: claims, answers and states, cuts, drafts, graphs, the same bits, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.kernel import GraphLevel
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.contract.state import CONV, MAMBA1, STATE_KINDS, StateBackend, StateMetadata
from headway.core.oracle.cells import PHASES, Finding, Skipped, check_refusal, placed
from headway.core.oracle.state_cases import StateCase, make_state_case, run_states
from headway.testing.diagnosis.state_verdict import Judge, same_bits
from headway.testing.kit.checks.graphs import capture
from headway.testing.kit.checks.steps import no_growth, no_waiting
from headway.testing.kit.state_session import Course, Served, StateSession
from headway.testing.kit.state_subject import CONVOLUTIONS, WORK, StateCell, StateSubject

Lens = list[tuple[int, int]]
LENS: dict[str, dict[str, Lens]] = {
    "edges": {
        "prefill": [(1, 1), (150, 150), (7, 7), (64, 64), (65, 65), (2, 2), (33, 33), (128, 128)],
        "extend": [(130, 140), (9, 10), (64, 200), (20, 21), (63, 300), (1, 9), (2, 5), (3, 40)],
        "decode": [(1, 2), (1, 30), (1, 9), (1, 70), (1, 5)],
        "verify": [(4, 9), (4, 5), (4, 30), (4, 12)],
        "ragged": [(1, 4), (8, 20), (3, 30), (5, 6), (1, 2)],
        "mixed": [(70, 70), (9, 12), (64, 100), (1, 1), (1, 7), (4, 9), (1, 30)],
    },
    "many": {
        "prefill": [(1 + n % 9, 1 + n % 9) for n in range(70)],
        "decode": [(1, 2 + n) for n in range(120)],
        "ragged": [(1 + n % 4, 9 + n) for n in range(70)],
    },
    "long": {
        "prefill": [(1090, 1090), (3, 3)],
        "extend": [(520, 3000), (513, 514), (2, 5)],
    },
}
"""Work -> phase -> (query_len, kv_len) of each sequence of a step."""
_SCANS, _STEPS = ("prefill", "extend"), ("decode", "verify", "ragged")
_PADDED = ("decode", "verify", "ragged", "mixed")
_ROWS = 6
_MOST_DRAFTS = 7


def claims(subject: StateSubject, cell: StateCell) -> str:
    """The class keeps to the contract as far as that can be seen without running it."""
    backend, said = subject.backend, subject.claims
    for dtype in said.dtypes:
        if dtype not in backend.tolerance:
            raise Finding(f"tolerance has no number for {DTYPE_NAMES.get(dtype, dtype)}, which is claimed")
    if not subject.rows:
        raise Finding("it accepts no layer of the kit's; needs at least one of a kind, layout and element type that it claims")
    for kind in said.kinds:
        if not any(row.kind == kind for row, _ in subject.rows):
            why = subject.refusal_of(kind)
            raise Finding(f"kind {kind} is claimed, and no layer of it is accepted: {why}", guess="a claim that does not hold")
    room = subject.make(subject.rows[0][0]).workspace_bytes(2048, 64)
    if not isinstance(room, int) or room < 0:
        raise Finding(f"workspace_bytes() is {room!r}; needs bytes, 0 or more", guess="a claim that does not hold")
    return ""


def refuse(subject: StateSubject, cell: StateCell) -> str:
    """A value that is not claimed is refused, with reasons that say what was needed and what was got."""
    asked = [phase for phase in Phase if (phase in subject.claims.phases if cell.phase == "-" else cell.phase == phase.value)]
    answers = [subject.supports(cell, phase) for phase in asked]
    if any(answers):
        value = getattr(cell, cell.about)
        raise Finding(f"{cell.about}={value} must be refused: nothing claims it", guess="accepts what it does not claim")
    for support in answers:
        check_refusal(support)
    return str(answers[0]).removeprefix("no: ")


def tolerance(subject: StateSubject, cell: StateCell) -> str:
    """The declared tolerance is no looser than the contract's own, which float32 inside keeps."""
    dtype = subject.spec(cell).dtype
    declared, most = float(subject.backend.tolerance[dtype]), float(StateBackend.tolerance[dtype])
    if not 0 < declared <= most:
        raise Finding(
            f"tolerance for {cell.dtype} must be at most {most:.2g}, which float32 inside keeps; declared is {declared:.2g}",
            guess="a tolerance that would let wrong answers pass",
        )
    return f"declared {declared:.2g}, at most {most:.2g}"


def answer(subject: StateSubject, cell: StateCell) -> str:
    """Check output and states against float64: in place from strided rows, out of place, and in slots that follow one another."""
    Judge.of(_case(subject, cell, strided=True)).run(subject.make(cell))
    Judge.of(_case(subject, cell, in_place=False, seed=1)).run(subject.make(cell))
    if cell.work == WORK[0] and cell.phase in _STEPS:
        Judge.of(_case(subject, cell, in_order=True, padding=0)).run(subject.make(cell))
    return ""


def _case(subject: StateSubject, cell: StateCell, *, padding: int = 2, seed: int = 0, **how: Any) -> StateCase:
    """Make a step of a cell. padding: rows of it, where an engine has some; how: see `make_state_case`."""
    most = subject.claims.max_draft_tokens + 1
    wanted = LENS[cell.work][cell.phase]
    decodes = cell.phase not in _SCANS
    lens = [(min(new, most), kv) if decodes and kv > new and new <= _MOST_DRAFTS + 1 else (new, kv) for new, kv in wanted]
    rows, seed = (padding if cell.phase in _PADDED else 0), seed + len(str(cell))
    spec, layout = subject.spec(cell), subject.layouts[cell.layout]
    return make_state_case(lens, spec, layout, padding_rows=rows, seed=seed, regime=cell.decays, decodes=decodes, **how)


def session(subject: StateSubject, cell: StateCell) -> str:
    """Check sequences that are cut anywhere, verify drafts, share prefixes, move and end against lone runs over all tokens."""
    drafts = min(subject.claims.max_draft_tokens, _MOST_DRAFTS)
    running = StateSession(Served.of(subject, cell), subject.spec(cell), subject.layouts[cell.layout])
    return Course(running, drafts).run()


def repeat(subject: StateSubject, cell: StateCell) -> str:
    """The same step leaves the same bits."""
    backend = subject.make(cell)
    left = []
    for _ in range(3):
        case = _case(subject, cell)
        left.append([run_states(backend, case), *case.cache.tensors.values()])
    real = torch.repeat_interleave(case.metadata.slots_cpu >= 0, torch.tensor(case.metadata.step.query_lens)).to(case.x.device)
    for again in left[1:]:
        for one, other in zip(left[0], again, strict=True):
            rows = real if one is left[0][0] else slice(None)
            if not same_bits(one[rows], other[rows]):
                raise Finding("the same step must leave the same bits", guess="non-deterministic")
    return ""


def memory(subject: StateSubject, cell: StateCell) -> str:
    """Memory does not grow from step to step."""
    backend = subject.make(cell)
    cases = [_case(subject, cell.plain("memory", phase=phase)) for phase in sorted(subject.phases(cell))]
    number = 0

    def steps(count: int) -> None:
        nonlocal number
        for _ in range(count):
            number += 1
            with torch.inference_mode():
                run_states(backend, cases[number % len(cases)])

    return no_growth(steps, subject.device)


def sync(subject: StateSubject, cell: StateCell) -> str:
    """No call waits for the device; on a CPU there is none to wait for."""
    if subject.device.type != "cuda":
        raise Skipped("a CPU has no queue to wait for")
    backend, case = subject.make(cell), _case(subject, cell)
    run_states(backend, case)  # compiles
    out = case.x.new_empty(case.x.shape[0], case.spec.out_channels)
    calls = []
    n = case.metadata.step.num_prefill_tokens
    if case.metadata.prefill is not None:
        calls.append((backend.scan, slice(0, n), backend.plan(case.metadata.prefill)))
    if case.metadata.decode is not None:
        calls.append((backend.step, slice(n, None), backend.plan(case.metadata.decode)))
    with no_waiting("scan and step"):
        for call, rows, plan in calls:
            call(case.x[rows], [gate[rows] for gate in case.gates], case.parameters, case.cache, plan, out[rows])
    return ""


def graph(subject: StateSubject, cell: StateCell) -> str:
    """A decode planned once over static tensors, then replayed for other slots, other sequences and padding rows.

    Sequences with fewer drafts than the graph is wide are filled up by tokens that hold NaN: a state must not see them.
    """
    tokens = min(3, subject.claims.max_draft_tokens + 1) if cell.phase == "verify" else 1
    needed = GraphLevel.UNIFORM if cell.phase == "verify" else GraphLevel.DECODE
    if subject.backend.graph_level < needed:
        raise Skipped(f"graph_level: needs {needed.name}, got {subject.backend.graph_level.name}, so no engine captures it")
    static = _static_case(subject, cell, [tokens] * _ROWS, tokens, seed=0)
    recorded = _Recorded(subject.make(cell), static)
    for number, real in enumerate((_ROWS, 2, 5, _ROWS, 1)):
        now = _static_case(subject, cell, [tokens - (row + number) % tokens for row in range(real)], tokens, seed=number + 1)
        judge = recorded.load(now)
        recorded.replay()
        with placed(f"replay {number + 1} of a captured step, with {_ROWS - real} padding rows"):
            judge.judge(recorded.out(), subject.backend.tolerance)
    return ""


def _static_case(subject: StateSubject, cell: StateCell, counts: Sequence[int], most: int, seed: int) -> StateCase:
    """A step of sequences with these many new tokens, and padding rows. most: of a sequence, in any replay."""
    real, lens = len(counts), [(count, 9 + row) for row, count in enumerate(counts)]
    slots = _ROWS * (most + 1) - real - sum(counts) + 3  # the pool of every replay is as large
    spec, layout = subject.spec(cell), subject.layouts[cell.layout]
    return make_state_case(lens, spec, layout, seed=seed, padding_rows=_ROWS - real, spare_slots=slots, in_place=seed % 2 == 0)


class _Recorded:
    """The static tensors of a step, what was planned over them, and on a GPU the graph."""

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
        """Rows of the new tokens: a sequence's last ones."""
        self._plan = backend.plan_for_capture(self._metadata)
        self._run()
        self._graph = capture(self._run) if static.spec.device.type == "cuda" else None

    def load(self, now: StateCase) -> Judge:
        """Bring the static tensors up to date with a step, whose verdict is prepared."""
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

    def replay(self) -> None:
        if self._graph is None:
            self._run()
            return
        self._graph.replay()
        torch.cuda.synchronize()

    def out(self) -> Tensor:
        return self._out.index_select(0, self._new)

    def _run(self) -> None:
        case = self._static
        self._backend.step(case.x, case.gates, case.parameters, case.cache, self._plan, self._out)


_RECURRENT = tuple(kind for kind in STATE_KINDS if kind != CONV)
_UNCLAIMED: dict[str, tuple[str | int, tuple[str, ...]]] = {
    "dtype": ("float64", STATE_KINDS),
    "state_dtype": ("float64", _RECURRENT),
    "key_dim": (24, _RECURRENT),
    "value_dim": (24, tuple(kind for kind in _RECURRENT if kind != MAMBA1)),
    "conv": (CONVOLUTIONS[0], _RECURRENT),
}
"""Axis -> a value that need not be claimed, and the kinds whose layers have the axis."""


def refusals(subject: StateSubject, plain: StateCell) -> list[StateCell]:
    """The cells of `refuse`: one value of each axis that is not claimed, in a layer that is accepted but for it."""
    claims, found = subject.claims, []
    claimed: dict[str, object] = {
        "dtype": torch.float64 in claims.dtypes,
        "state_dtype": torch.float64 in claims.state_dtypes,
        "key_dim": claims.key_dims is None or 24 in claims.key_dims,
        "value_dim": claims.value_dims is None or 24 in claims.value_dims,
        "conv": claims.convolution,
    }
    for axis, (value, kinds) in _UNCLAIMED.items():
        row = None if claimed[axis] else subject.plainest(*kinds)
        found += [] if row is None else [row[0].plain("refuse", axis).having({axis: value})]
    for kind in (kind for kind in STATE_KINDS if kind not in claims.kinds):
        asked = plain.plain("refuse", "kind", kind=kind, conv=CONVOLUTIONS[0] if kind == CONV else plain.conv)
        found += [cell] if (cell := subject.whole(asked)) is not None else []
    other = next((name for name, layout in subject.layouts.items() if claims.layouts and layout not in claims.layouts), "")
    found += [plain.plain("refuse", "layout", layout=other)] if other else []
    found += [plain.plain("refuse", "phase", phase=phase.value) for phase in Phase if phase not in claims.phases]
    return found


STATE_PHASES = tuple(PHASES)
