"""Measurement of a layer: every kernel on every layout and block size over the grid, stored as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.kernel import CompileAhead
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateSpec
from headway.core.contract.support import Reason
from headway.core.system.json_files import write_json
from headway.core.system.terminal import progress_bar
from headway.registry import Registry
from headway.tuning.measure.device import crowding, identify_device, new_table, rates_of
from headway.tuning.measure.kinds import GRAPH_LEN, MeasuredKind, measured_kind
from headway.tuning.measure.measure_point import Bench, measure_point
from headway.tuning.measure.points import ROUNDS, Point, midpoints
from headway.tuning.measure.self_test import record_of
from headway.tuning.measure.timing import Budget, InterleavedTimer, on_device
from headway.tuning.measure.workloads import Pair
from headway.tuning.table.compare import differences
from headway.tuning.table.files import read_table
from headway.tuning.table.noise import noise_of
from headway.tuning.table.schema import Cell, CrossoverTable, KernelRecord, PhaseName, points

BLOCK_SIZES = (16, 256)
"""Default block sizes. Every built-in backend supports one of them. Sizes in between cost about as much as the larger one."""
_WITH_RATES = 60.0
"""Minimum budget in seconds of a run that also measures the GPU's rates, which take about a second. With the rates, times can be
derived for another kind of GPU."""
_FIRST = 1
"""Highest grid level whose kernels are compiled ahead if time is limited. Kernels for later points are compiled when they are
first needed."""


@dataclass(frozen=True)
class CrossoverOptions:
    """Options of a measurement. The defaults suit the device."""

    spec: AttentionSpec | StateSpec
    backends: Sequence[str] | None = None
    """Names of the backends to measure. None means all that are available here."""
    layouts: Sequence[str] | None = None
    """Names of the layouts to measure. None means all layouts that any of the backends supports."""
    block_sizes: Sequence[int | None] = BLOCK_SIZES
    grid: Sequence[Point] | None = None
    """Points to measure. None means the usual points of the device."""
    refine: int = ROUNDS
    """Number of rounds that add points after the grid, within the budget, between neighbours with different fastest backends."""
    timer: InterleavedTimer = field(default_factory=InterleavedTimer)
    budget: float | None = None
    """Seconds for measuring; compiling adds at most twice this time. None means no limit."""
    graph_len: int = GRAPH_LEN
    seed: int = 0
    output: Path | None = None
    """File of the table, rewritten after each point: an interrupted run loses nothing."""
    resume: bool = False
    """True to continue the table at `output`."""
    interruptible: bool = True
    """True if Ctrl-C ends the run and returns its results. If False, Ctrl-C ends the program."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Backend that must not be called -> reason. The table lists these backends as not usable."""
    given_up: Mapping[PhaseName, Mapping[str, str]] = field(default_factory=dict)
    """Phase -> backend that is not measured -> reason, which is stored in the backend's cells."""
    command: str = ""
    compile_ahead: CompileAhead | None = None
    """Context manager in which the device's kernels are compiled before the first point. None compiles each when it is needed."""


def run_kernel_level(
    options: CrossoverOptions,
    registry: Registry,
    console: Console | None = None,
    report: Callable[[str, str], None] = lambda names, point: None,
) -> CrossoverTable:
    """Measure the grid. Faults of a backend are recorded in the table and not raised; Ctrl-C ends the run and returns its
    results.

    console: console that shows a progress bar; None shows no progress bar. report: function called with the names of the backends
    that are about to run, and the point.

    :raises HeadwayError: if backends or layouts are unknown, if no backend can run, or if the table cannot be resumed.
    """
    with torch.no_grad(), on_device(options.spec.device), progress_bar(console) as progress:
        measured = measured_kind(registry, options.spec, options.graph_len, options.seed)
        kernels = registry.of(measured.kind)
        for name in options.backends or ():
            kernels.backend(name)  # raises an error that lists the registered names
        names = list(dict.fromkeys(kernels.entries if options.backends is None else options.backends))
        pairs = measured.pairs(options.layouts, options.block_sizes)
        todo = list(measured.grid if options.grid is None else options.grid)
        bench = Bench(measured, options.timer, Budget(options.budget), report)
        task = progress.add_task("compiling", total=len(todo))
        old = _old_table(options, measured)
        done = set() if old is None else {cell.point for cell in old.cells}
        if options.compile_ahead is not None:
            first = [point for point in todo if options.budget is None or point.level <= _FIRST]
            missing = [point for point in first if point.key not in done]
            able = [name for name in names if name not in options.excluded and kernels.availability(name)]
            with options.compile_ahead():
                measured.compile(missing, able, pairs, options.given_up)
        table = _begin(options, bench, names, pairs, old)
        candidates = [record.name for record in table.kernels if record.usable]
        bench.budget.begin()
        progress.update(task, description="crossover", completed=sum(p.key in done for p in todo))
        search = _Search(bench, candidates, pairs, options.given_up)
        try:
            for turn in range(1 + options.refine):
                between = turn > 0
                wanted = midpoints(table.cells, table.noise) if between else todo
                if between and not wanted:
                    break
                if between:
                    progress.update(task, total=len(wanted), completed=0)
                for point, cells in search.measure(wanted, table.cells):
                    table.cells += [cell.model_copy(update={"between": between}) for cell in cells]
                    table.noise = noise_of(table.cells)
                    table.cut_short = True
                    if options.output is not None:
                        write_json(table, options.output)
                    progress.update(task, advance=1, description=f"{point.phase} {point.case}")
                reached = {cell.point for cell in table.cells}
                table.complete = all(point.key in reached for point in todo)
        except KeyboardInterrupt:
            if options.interruptible:
                return table
            raise
        table.cut_short = False
        table.busy = table.busy or crowding()
        if (table.cells or not todo) and options.output is not None:  # a run that measured nothing keeps an existing file
            write_json(table, options.output)
    return table


class _Search:
    """Measurement of points in sequence. With a time limit, slow candidates are dropped between the levels of the grid."""

    def __init__(
        self, bench: Bench, names: Sequence[str], pairs: Sequence[Pair], given_up: Mapping[PhaseName, Mapping[str, str]]
    ) -> None:
        self._bench = bench
        self._names = names
        self._pairs = pairs
        self._given_up = given_up
        self._dropped = dict(given_up)
        self._level = 0
        self._slowest = 0.0
        self._tried = set[PhaseName]()

    def measure(self, todo: Sequence[Point], cells: list[Cell]) -> Iterator[tuple[Point, list[Cell]]]:
        """Measure the points of `todo` that `cells` lacks until the time is used up; the first search measures at least one
        point.

        cells: cells of the table so far. The caller must append the yielded cells to this list.
        """
        bench = self._bench
        done = {cell.point for cell in cells}
        for point in todo:
            remaining = bench.budget.left
            if remaining is not None:
                if self._slowest and remaining < self._slowest and (point.phase in self._tried or not bench.measured.each_phase):
                    continue
                if point.level > self._level and cells:
                    self._level = point.level
                    self._pairs = surviving_pairs(cells, self._pairs)
                    found = {phase: slower_candidates(cells, phase, self._names) for phase in {cell.phase for cell in cells}}
                    self._dropped = {phase: {**lost, **self._given_up.get(phase, {})} for phase, lost in found.items()}
            if point.key in done:
                continue
            before = bench.budget.spent
            self._tried.add(point.phase)
            yield point, measure_point(point, bench, self._names, self._pairs, self._dropped.get(point.phase, {}))
            self._slowest = max(0.5 * self._slowest, bench.budget.spent - before)


def _begin(
    options: CrossoverOptions, bench: Bench, names: Sequence[str], pairs: Sequence[Pair], old: CrossoverTable | None
) -> CrossoverTable:
    """Return the table before its first point, with the cells of `old`."""
    measured = bench.measured
    records = [_examined(bench, name, pairs, options.excluded.get(name, "")) for name in names]
    if not any(record.usable for record in records):
        reasons = [Reason(record.name, "a backend that runs and passes its self-test", record.reason) for record in records]
        raise UnsupportedError(f"a crossover table for {options.spec}", reasons)
    graphs = bench.device.type == "cuda" and any(measured.replays(record.name) for record in records if record.usable)
    graph_len = options.graph_len if graphs else None
    whole = bench.device.type == "cuda" and (options.budget is None or options.budget >= _WITH_RATES)
    table = new_table(measured.record, identify_device(bench.device), records, options.command, graph_len)
    table.rates = rates_of(bench.device, measured.spec.dtype) if whole else None
    table.busy = crowding()
    return table if old is None else _resumed(table, old, options)


def _examined(bench: Bench, name: str, pairs: Sequence[Pair], excluded: str) -> KernelRecord:
    """Return a kernel's record: whether the kernel is available, supports the layer and passes its self-test. excluded: reason
    why the kernel must not be called, or ""."""
    measured = bench.measured
    if excluded:
        return record_of(measured.registry, name, True, excluded, measured.kind)
    here = measured.registry.of(measured.kind).availability(name)
    if here:
        bench.report(name, "its self-test")
    return record_of(measured.registry, name, bool(here), measured.fault(name, pairs) if here else here.brief, measured.kind)


def _old_table(options: CrossoverOptions, measured: MeasuredKind) -> CrossoverTable | None:
    """Return the table to continue, or None if there is none, or if all its times are derived.

    :raises ConfigError: if no output file is given.
    :raises TableError: if the file cannot be read.
    """
    if not options.resume:
        return None
    if options.output is None:
        raise ConfigError("--resume", "the file to go on with", "none", "name it with --output")
    old = read_table(options.output, measured.kind.name) if options.output.exists() else None
    return None if old is None or old.derived else old


def _resumed(table: CrossoverTable, old: CrossoverTable, options: CrossoverOptions) -> CrossoverTable:
    """Return the new table with the cells of the old one.

    :raises UnsupportedError: if the old table is for a different machine, layer or set of backends.
    """
    excluded = options.excluded
    reasons = differences(
        old, table.device, table.spec, {record.name: (record.owner, record.version) for record in table.kernels}
    )
    cells = [cell for cell in old.cells if cell.kernel not in excluded]
    before = [record.name for record in old.kernels if record.usable and record.name not in excluded]
    now = [record.name for record in table.kernels if record.usable]
    if before != now:
        reasons += [Reason("backends", ", ".join(before), ", ".join(now))]
    if reasons:
        raise UnsupportedError(
            f"--resume {options.output}: the table", reasons, "measure anew without --resume, or into another file"
        )
    table.cells = cells
    table.noise = old.noise
    table.prior = old.prior
    return table


# Successive halving: if time is short, clearly slower candidates are dropped in favour of points that decide between the others.
# After each level of the grid (corners, middles, the rest), half of the layouts and block sizes stay, and in each phase half of
# the backends, plus those that came near the fastest anywhere. After Jamieson and Talwalkar (2016), with times instead of losses.
_UNDECIDED = 1.15
"""Ratio of the mean time to the fastest mean time, below which the corners of a grid do not decide between layouts and block
sizes. All pairs below this ratio stay, because noise in these few points must not decide what `auto` chooses."""
NEAR = 1.15
"""Ratio to the fastest time. A backend that is within this ratio at one point may win at another."""


def surviving_pairs(cells: Sequence[Cell], pairs: Sequence[Pair]) -> list[Pair]:
    """Return the better half of the layouts and block sizes, by geometric mean of their fastest times, plus the pairs that are
    too close to decide.

    The order is preserved, smallest blocks first. A pair is dropped if no backend supports it at some point.
    """
    measured = points(cells)

    def loss(pair: Pair) -> float:
        total = 0.0
        for rivals in measured.values():
            key = (pair[0].name, pair[1])
            times = [cell.layer_us for cell in rivals if (cell.layout, cell.block_size) in (key, (None, None))]
            total += math.log(min((us for us in times if us is not None), default=math.inf))
        return total / max(len(measured), 1)

    losses = [loss(pair) for pair in pairs]
    limit = max(min(losses) + math.log(_UNDECIDED), sorted(losses)[math.ceil(len(pairs) / 2) - 1])
    return [pair for pair, lost in zip(pairs, losses, strict=True) if lost <= limit and lost < math.inf] or list(pairs[:1])


def slower_candidates(cells: Sequence[Cell], phase: str, names: Sequence[str]) -> dict[str, str]:
    """Return backend to drop in a phase -> reason. At least one backend always stays."""
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for (found, _), rivals in points(cells).items():
        timed = [(cell.kernel, cell.layer_us) for cell in rivals if cell.layer_us is not None]
        if found != phase or not timed:
            continue
        best = min(us for _, us in timed)
        for name in names:
            own = [us / best for backend, us in timed if backend == name]
            if own:
                ratios[name].append(min(own))
    known = [name for name in names if ratios[name]]
    ranked = sorted(known, key=lambda name: sum(map(math.log, ratios[name])) / len(ratios[name]))
    worse = ranked[max(1, math.ceil(len(ranked) / 2)) :]
    return {
        name: f"at best {min(ratios[name]):.2f} times the fastest at the first {len(ratios[name])} points: given up to save time"
        for name in worse
        if min(ratios[name]) > NEAR
    }
