"""Measuring backends of layers with a state: every one over every layout at the points of a grid, kept as a table."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from headway.core.contract.errors import UnsupportedError
from headway.core.contract.kernel import CompileAhead, GraphLevel
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import STATE
from headway.core.contract.state import StateBackend, StateLayout, StateSpec
from headway.core.contract.support import Reason
from headway.core.oracle.state_cases import StateCase, make_state_case, run_states
from headway.core.oracle.state_reference import SequenceState, StateAnswer, advance, answer, state_of
from headway.core.select.state_candidates import VERBS, StateCandidates
from headway.core.system.json_files import write_json
from headway.core.system.provenance import Origin
from headway.core.system.terminal import progress_bar
from headway.registry import Registry
from headway.tuning.measure.device import crowding, identify_device
from headway.tuning.measure.graph_replay import captured
from headway.tuning.measure.points import StatePoint, state_grid
from headway.tuning.measure.self_test import record_of, told
from headway.tuning.measure.timing import Budget, InterleavedTimer, Timing, host_us, on_device
from headway.tuning.table.compare import differences
from headway.tuning.table.files import read_table
from headway.tuning.table.noise import LEAST_DIFFERENCE
from headway.tuning.table.schema import Cell, CrossoverTable, StateSpecRecord

_SELF_TEST = {
    Phase.PREFILL: ((70, 70), (20, 50), (5, 5)),
    Phase.DECODE: ((1, 40), (1, 2), (4, 9)),
}
"""(query_len, kv_len) of the sequences of the step that a backend computes right before it is timed: chunks that end early,
prompts behind a context, drafts."""
_CHECKED = 16
"""Tokens of the first and of the last sequence that are held to float64 at every point."""


@dataclass(frozen=True)
class StateContender:
    """One backend over one layout in one phase, PREFILL (scan) or DECODE (step)."""

    name: str
    layout: StateLayout
    phase: Phase
    backend: StateBackend
    convolution: str
    """The backend that applies the convolution, where that is another."""

    @property
    def tolerance(self) -> float:
        """Largest relative error of the output and of states."""
        return self.backend.tolerance[self.backend.spec.dtype]

    def __str__(self) -> str:
        return f"{VERBS[self.phase]} of {self.name} over {self.layout.name}"


def state_contenders(registry: Registry, spec: StateSpec, names: Sequence[str]) -> list[StateContender]:
    """Every backend of `names` over every layout in both phases, where it can serve the layer."""
    able = StateCandidates(registry.states, [spec])
    return [
        StateContender(name, layout, phase, able.instances(name, layout, phase)[spec], able.helper(name, layout, phase))
        for phase in VERBS
        for layout in registry.states.layouts.values()
        for name in names
        if able.serves(name, layout, phase)
    ]


@dataclass(frozen=True)
class SelfTestStep:
    """A small step of one phase with its float64 answer, which any contender of the phase may be held to."""

    case: StateCase
    answer: StateAnswer

    @classmethod
    def of(cls, spec: StateSpec, layout: StateLayout, phase: Phase) -> SelfTestStep:
        """Draw the numbers, over any layout."""
        case = make_state_case(_SELF_TEST[phase], spec, layout)
        return cls(case, answer(case))

    def run(self, contender: StateContender) -> tuple[StateCase, Tensor]:
        """Run the step over the contender's layout: the case afterwards, and the output."""
        case = relaid(self.case, contender.layout)
        return case, run_states(contender.backend, case)

    def error(self, contender: StateContender) -> float:
        """The relative error of the output or of the worst state, the larger; infinite where another slot was touched."""
        case, out = self.run(contender)
        errors = [relative(out, self.answer.out)]
        for slot, wanted in self.answer.written.items():
            got = state_of(case, slot)
            for mine, theirs in ((got.recurrent, wanted.recurrent), (got.conv, wanted.conv)):
                if mine is not None and theirs is not None:
                    errors.append(relative(mine, theirs))
        others = [slot for slot in range(case.cache.num_slots) if slot not in self.answer.written]
        before = relaid(self.case, contender.layout).cache.tensors
        same = all(
            torch.equal(tensor[others].nan_to_num(7.0), before[name][others].nan_to_num(7.0))
            for name, tensor in case.cache.tensors.items()
        )
        return max(errors) if same else math.inf


def relaid(case: StateCase, layout: StateLayout) -> StateCase:
    """The same case over states of its own in another layout, or in the same."""
    cache = layout.allocate(case.spec, case.cache.num_slots)
    if case.spec.recurrent:
        cache.logical_recurrent.copy_(case.cache.logical_recurrent)
    if case.spec.conv_channels:
        cache.logical_conv.copy_(case.cache.logical_conv)
    return replace(case, cache=cache)


def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, infinite where either is no number."""
    got, want = got.detach().cpu().double(), want.cpu()
    error = float((got - want).norm() / want.norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class TimedState:
    """A contender on a point's step: `call` runs one layer, again and again with the same result."""

    call: Callable[[], object]
    out: Tensor
    plan: Callable[[], object] | None
    """Makes the step's plan once more; None: a graph has none."""


class StatePointStep:
    """One point's step: the same numbers over every layout, and the float64 rows that outputs are held to."""

    def __init__(
        self, point: StatePoint, spec: StateSpec, layouts: Sequence[StateLayout], seed: int, *, checked: bool = True
    ) -> None:
        """checked: whether `error` will be asked for, whose answers take a while."""
        # In place a state would move on with every run, and might grow beyond all numbers.
        case = make_state_case(
            point.lens, spec, layouts[0], seed=seed, spare_slots=0, checkpoints=False, in_place=False, draw_on=spec.device
        )
        self.cases = {layout.name: case if not number else relaid(case, layout) for number, layout in enumerate(layouts)}
        rows, expected = _expected(case) if checked else ([], torch.empty(0))
        self._rows = rows
        self._expected = expected

    def timed(self, contender: StateContender) -> TimedState:
        """Make a contender's call: on a GPU a step is a graph's replay where the backend can be captured."""
        case, backend = self.cases[contender.layout.name], contender.backend
        out = case.x.new_full((case.x.shape[0], case.spec.out_channels), torch.nan)
        metadata, decodes = case.metadata, contender.phase is Phase.DECODE
        serve = backend.step if decodes else backend.scan
        level = GraphLevel.DECODE if metadata.step.max_query_len == 1 else GraphLevel.UNIFORM
        in_graph = decodes and case.x.device.type == "cuda" and backend.graph_level >= level
        plan = backend.plan_for_capture(metadata) if in_graph else backend.plan(metadata)

        def layer() -> None:
            serve(case.x, case.gates, case.parameters, case.cache, plan, out)

        if in_graph:
            return TimedState(captured(layer).replay, out, None)
        return TimedState(layer, out, lambda: backend.plan(metadata))

    def launch(self, contender: StateContender) -> None:
        """Run a contender whatever comes of it, so that its kernels are compiled."""
        with suppress(Exception):  # the run that counts will meet it again, and name it
            case = self.cases[contender.layout.name]
            run_states(contender.backend, case)

    def error(self, out: Tensor) -> float:
        """The relative error of the tokens that are held to float64."""
        return relative(out[self._rows], self._expected)


def _expected(case: StateCase) -> tuple[list[int], Tensor]:
    """The first tokens of the first and of the last sequence: their rows, and what float64 makes of them."""
    step, rows, answers = case.metadata.step, [], []
    last = step.num_seqs - 1
    for sequence in dict.fromkeys((0, last)):
        length, first = step.query_lens[sequence], sum(step.query_lens[:sequence])
        empty = step.kv_lens[sequence] == length
        state = SequenceState.zeros(case.spec) if empty else state_of(case, int(case.metadata.slots_cpu[sequence]))
        for row in range(first, first + min(length, _CHECKED)):
            gates = [gate[row].cpu().double() for gate in case.gates]
            answers.append(advance(case.spec, case.parameters, case.x[row].cpu().double(), gates, state))
            rows.append(row)
    return rows, torch.stack(answers)


_FAR = 4.0
"""Times the fastest: a call that takes that long, and longer than the timer's `long_ms`, is timed roughly."""
Tell = Callable[[str, str], None]
"""(names of the backends that are about to run, what they are about to do)"""


@dataclass(frozen=True)
class StateOptions:
    """What to measure; the defaults suit the device."""

    spec: StateSpec
    backends: Sequence[str] | None = None
    """None: all that are available here."""
    grid: Sequence[StatePoint] | None = None
    """None: the device's usual points."""
    turns: InterleavedTimer = field(default_factory=InterleavedTimer)
    budget: float | None = None
    """Seconds of measuring, to which compiling kernels adds at most twice as many; None: everything is measured."""
    seed: int = 0
    output: Path | None = None
    """Written anew after each point."""
    resume: bool = False
    """Go on with the table at `output`."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Backends that are not called -> why: they stand in the table as not usable."""
    command: str = ""
    compile_ahead: CompileAhead | None = None
    """What the device's kernels are compiled in, before the first point; None: each when it is needed."""

    @property
    def points(self) -> Sequence[StatePoint]:
        """The grid."""
        return state_grid(self.spec.device.type) if self.grid is None else self.grid


def run_state_level(
    options: StateOptions, registry: Registry, console: Console | None = None, tell: Tell = lambda names, point: None
) -> CrossoverTable:
    """Measure the grid. What a backend does wrong is in the table, never an exception.

    console: where the progress bar goes; None shows none.

    :raises HeadwayError: unknown backends, none that can serve the layer, or a table that cannot be resumed.
    """
    with torch.no_grad(), on_device(options.spec.device), progress_bar(console) as progress:
        budget, asked = Budget(options.budget), list(options.backends or registry.states.entries)
        for name in asked:
            registry.states.backend(name)  # raises, naming all that are registered
        able = [name for name in asked if name not in options.excluded and registry.states.availability(name)]
        contenders = state_contenders(registry, options.spec, able)
        layouts = list(dict.fromkeys(contender.layout for contender in contenders))
        tests = {phase: SelfTestStep.of(options.spec, layouts[0], phase) for phase in VERBS} if layouts else {}
        task = progress.add_task("compiling", total=len(options.points))
        if options.compile_ahead is not None and layouts:
            with options.compile_ahead():
                _launch_all(options, contenders, layouts, tests)
        wrong = {} if not layouts else dict(_self_tests(contenders, tests, tell))
        table = _begin(options, registry, asked, wrong)
        contenders = [contender for contender in contenders if contender.name not in wrong]
        budget.begin()
        for point in _todo(options, table, budget):
            progress.update(task, advance=1, description=str(point))
            rivals = [contender for contender in contenders if contender.phase is point.phase]
            table.cells += _measure_point(point, options, rivals, tell)
            _save(table, options.output)
        measured = {cell.point for cell in table.cells}
        table.complete = all(point.key in measured for point in options.points)
        table.busy = table.busy or crowding()
        if table.cells:
            _save(table, options.output)
    return table


def _todo(options: StateOptions, table: CrossoverTable, budget: Budget) -> Iterator[StatePoint]:
    """The points that a table lacks, until the time is up; at least one of each verb, so that every start gets on."""
    done, slowest = {cell.point for cell in table.cells}, 0.0
    tried = set[str]()
    for point in options.points:
        if point.key in done or (point.verb in tried and budget.left is not None and budget.left <= slowest):
            continue
        before = budget.spent
        tried.add(point.verb)
        yield point
        slowest = max(0.5 * slowest, budget.spent - before)


def _launch_all(
    options: StateOptions,
    contenders: Sequence[StateContender],
    layouts: Sequence[StateLayout],
    tests: Mapping[Any, SelfTestStep],
) -> None:
    """Run everything that will be measured, so that the kernels are compiled together."""
    for contender in contenders:
        with suppress(Exception):  # the test that counts will meet it again, and name it
            tests[contender.phase].run(contender)
    for point in options.points:
        with suppress(torch.OutOfMemoryError):
            step = StatePointStep(point, options.spec, layouts, options.seed, checked=False)
            for contender in contenders:
                if contender.phase is point.phase:
                    step.launch(contender)


def _self_tests(contenders: Sequence[StateContender], tests: Mapping[Any, SelfTestStep], tell: Tell) -> Iterator[tuple[str, str]]:
    """Backends that compute a small step wrong, each with what is wrong first."""
    failed = set()
    for contender in contenders:
        if contender.name in failed:
            continue
        tell(contender.name, f"the self-test, {contender}")
        try:
            error = tests[contender.phase].error(contender)
            why = f"relative error {error:.2g}, tolerance {contender.tolerance:.2g}" if error > contender.tolerance else ""
        except (Exception, SystemExit) as raised:
            why = told(raised)
        if why:
            failed.add(contender.name)
            yield contender.name, f"self-test, {contender}: {why}"


def _measure_point(point: StatePoint, options: StateOptions, rivals: Sequence[StateContender], tell: Tell) -> list[Cell]:
    tell(",".join(dict.fromkeys(contender.name for contender in rivals)), str(point))
    device, cells, ready = options.spec.device, list[Cell](), list[tuple[StateContender, TimedState, float, float]]()
    if not rivals:
        return cells
    try:
        step = StatePointStep(point, options.spec, list(dict.fromkeys(contender.layout for contender in rivals)), options.seed)
    except torch.OutOfMemoryError as raised:
        return [_cell(point, contender, "oom", told(raised)) for contender in rivals]
    for contender in rivals:
        tell(contender.name, f"{point}, {contender}")
        try:
            timed = step.timed(contender)
            timed.call()
            error = step.error(timed.out)
            if error > contender.tolerance:
                why = f"relative error {error:.2g}, tolerance {contender.tolerance:.2g}"
                cells.append(_cell(point, contender, "incorrect", why))
                continue
            ready.append((contender, timed, error, options.turns.estimate(timed.call, device)))
        except (Exception, SystemExit) as raised:
            status = "oom" if isinstance(raised, torch.OutOfMemoryError) else "error"
            cells.append(_cell(point, contender, status, told(raised)))
    best = min((us for _, _, _, us in ready), default=0.0)
    slow = [each for each in ready if each[3] > max(_FAR * best, 1e3 * options.turns.long_ms)]
    for contender, timed, error, us in slow:
        why = f"{us / best:.1f} times the fastest in a rough timing"
        cells.append(_cell(point, contender, "dropped", why, timed, error, timing=Timing(us, us, us)))
    near = [each for each in ready if each not in slow]
    timings = options.turns.time([timed.call for _, timed, _, _ in near], device)
    for (contender, timed, error, _), timing in zip(near, timings, strict=True):
        if isinstance(timing, Exception):
            cells.append(_cell(point, contender, "error", told(timing)))
        else:
            cells.append(_cell(point, contender, "ok", "", timed, error, timing, options))
    return cells


def _cell(
    point: StatePoint,
    contender: StateContender,
    status: str,
    reason: str,
    timed: TimedState | None = None,
    error: float | None = None,
    timing: Timing | None = None,
    options: StateOptions | None = None,
) -> Cell:
    """What became of one contender. options: the host's times are taken, too."""
    found: dict[str, Any] = {
        "phase": point.verb,
        "case": point.case,
        "batch": point.batch,
        "query_len": point.query_len,
        "kv_len": point.query_len,
        "kernel": contender.name,
        "layout": contender.layout.name,
        "variant": f"convolution by {contender.convolution}" if contender.convolution else "",
        "status": status,
        "reason": reason,
        "relative_error": error,
    }
    if timed is not None and timing is not None:
        found |= {"median_us": timing.median_us, "p20_us": timing.p20_us, "p80_us": timing.p80_us, "drift": timing.drift}
        found["graph"] = timed.plan is None
        if timed.plan is not None and options is not None:
            device, seconds = options.spec.device, options.turns.host_seconds
            found["plan_us"] = host_us(timed.plan, device, seconds)
            found["host_us"] = host_us(timed.call, device, seconds) if device.type == "cuda" else None
    return Cell.model_validate(found)


def _begin(options: StateOptions, registry: Registry, asked: Sequence[str], wrong: Mapping[str, str]) -> CrossoverTable:
    records = []
    for name in asked:
        here = registry.states.availability(name)
        reason = options.excluded.get(name) or (wrong.get(name, "") if here else here.brief)
        records.append(record_of(registry, name, bool(here), reason, STATE))
    serving = [record.name for record in records if record.usable]
    if not serving:
        reasons = [Reason(record.name, "a backend that runs and passes its self-test", record.reason) for record in records]
        raise UnsupportedError(f"a table of states for {options.spec}", reasons)
    table = CrossoverTable(
        kind="state",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=options.command or " ".join(sys.argv),
        origin=Origin.here(),
        busy=crowding(),
        complete=False,
        device=identify_device(options.spec.device),
        spec=StateSpecRecord.of(options.spec),
        noise=LEAST_DIFFERENCE,
        kernels=records,
        cells=[],
    )
    return _resumed(table, options) if options.resume else table


def _resumed(table: CrossoverTable, options: StateOptions) -> CrossoverTable:
    """The new table with the cells of the old one, as far as their backends may still be called.

    :raises UnsupportedError: the old one is of another machine or layer.
    """
    path = options.output
    if path is None or not path.exists():
        return table
    old = read_table(path, "state")
    reasons = differences(old, table.device, table.spec, {r.name: (r.owner, r.version) for r in table.kernels})
    if reasons:
        raise UnsupportedError(f"the table of states {path}", reasons, "measure anew, or into another file")
    usable = {record.name for record in table.kernels if record.usable}
    table.cells = [cell for cell in old.cells if cell.kernel in usable]
    return table


def _save(table: CrossoverTable, path: Path | None) -> None:
    if path is not None:
        write_json(table, path)
