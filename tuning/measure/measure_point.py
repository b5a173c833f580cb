"""Measurement of one point: every kernel with every layout and block size that it supports is checked, then timed in rounds."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.tuning.measure.contender import Contender, InputsChangedError, checked, failed, incorrect
from headway.tuning.measure.kinds import MeasuredKind, PointInputs
from headway.tuning.measure.points import Point
from headway.tuning.measure.timing import Budget, InterleavedTimer, Timing, host_us
from headway.tuning.measure.workloads import Pair
from headway.tuning.table.convert import CORE_PHASE
from headway.tuning.table.noise import mark_ties
from headway.tuning.table.schema import Cell


def new_cell(point: Point, name: str, pair: Pair | None, status: str, **found: Any) -> Cell:
    """Return a cell of a kernel. pair: layout and block size; None if no cache is read or the cell applies to all pairs."""
    return Cell(
        phase=point.phase,
        case=point.case,
        batch=point.batch,
        query_len=point.query_len,
        kv_len=point.kv_len,
        kernel=name,
        layout=pair[0].name if pair else None,
        block_size=pair[1] if pair else None,
        status=status,  # type: ignore[arg-type]
        **found,
    )


def wrong_answer(point: Point, name: str, pair: Pair | None, error: float, contender: Contender, when: str = "") -> Cell:
    """Return the cell of a kernel whose relative error exceeds its tolerance. when: text that names the run with the wrong
    answer, if it was not the first."""
    found = incorrect(error, contender, when)
    measured = {"relative_error": found.relative_error, "tolerance": found.tolerance, "variant": found.kernel}
    return new_cell(point, name, pair, "incorrect", reason=found.reason, **measured)


def failure(point: Point, name: str, pair: Pair | None, error: Exception) -> Cell:
    """Return the cell of a kernel that raised an error, ran out of memory or wrote to its inputs."""
    if isinstance(error, InputsChangedError):
        return new_cell(point, name, pair, "incorrect", reason=str(error))
    status = "oom" if isinstance(error, (torch.OutOfMemoryError, MemoryError)) else "error"
    return new_cell(point, name, pair, status, reason=failed(error).reason)


CLEAR_LOSS = 4.0
"""Ratio to the fastest time. A kernel above this ratio in its first runs is not timed further if that would take long."""
_MUCH_SLOWER = 8.0
"""Ratio to the fastest time. A kernel that is above this ratio or runs out of memory with one layout is not tried with the other
layouts at this point."""


@dataclass(frozen=True)
class Bench:
    """Parameters of a measurement that are the same for all points."""

    measured: MeasuredKind
    timer: InterleavedTimer
    budget: Budget = field(default_factory=Budget)
    """Time budget. Its attribute `compiling` counts the time spent on compiling."""
    report: Callable[[str, str], None] = lambda names, point: None
    """Function called with the names of the kernels that are about to run, and the point."""

    @property
    def device(self) -> torch.device:
        """Device of the layer."""
        found: torch.device = self.measured.spec.device
        return found


@dataclass
class _Runner:
    name: str
    place: Pair | None
    contender: Contender
    graph: bool
    error: float
    estimate_us: float
    host: dict[str, float] = field(default_factory=dict)


def measure_point(
    point: Point, bench: Bench, names: Sequence[str], pairs: Sequence[Pair], dropped: Mapping[str, str]
) -> list[Cell]:
    """Return the cells of a point, with ties marked. Exceptions of kernels are recorded as cells.

    dropped: kernel that is not measured in this phase -> reason, which is stored in the kernel's cell.
    """
    cells = [new_cell(point, name, None, "dropped", reason=dropped[name]) for name in names if name in dropped]
    measured, phase = bench.measured, CORE_PHASE[point.phase]
    refused: dict[str, str] = {}
    served: set[str] = set()
    much_slower: dict[str, str] = {}
    expected: Any = None
    best_us = float("inf")
    for pair in pairs:
        here = []
        for name in names:
            if name in dropped or (name in served and measured.place(name, phase, pair) is None):
                continue
            support = measured.supports(name, pair, phase)
            if support and name in much_slower:
                status = "oom" if "out of memory" in much_slower[name] else "dropped"
                cells.append(new_cell(point, name, pair, status, reason=f"{much_slower[name]}: not tried here"))
            elif support:
                served.add(name)
                here.append(name)
            else:
                refused.setdefault(name, support.brief)
        if not here:
            continue
        inputs: PointInputs | None = None
        try:
            inputs = measured.inputs(point, pair, expected)
            expected = inputs.expected
        except Exception as error:  # usually out of memory; the next layout may still fit
            cells += [failure(point, name, measured.place(name, phase, pair), error) for name in here]
        else:
            found, best_us = _measure_pair(point, bench, here, pair, inputs, best_us)
            cells += found
            slower = {cell.kernel: (cell.median_us or 0.0) / best_us for cell in found if cell.status == "dropped"}
            where = " ".join(str(each) for each in (pair[0].name, pair[1]) if each is not None)
            much_slower |= {
                name: f"{factor:.0f} times the fastest on {where}" for name, factor in slower.items() if factor > _MUCH_SLOWER
            }
            much_slower |= {cell.kernel: f"out of memory on {where}" for cell in found if cell.status == "oom"}
        large = inputs is None or inputs.large
        inputs = None
        if large and bench.device.type == "cuda":
            gc.collect()  # libraries' wrappers hold caches in reference cycles
            torch.cuda.empty_cache()
    never = [name for name in refused if name not in served]
    return mark_ties(cells + [new_cell(point, name, None, "unsupported", reason=refused[name]) for name in never])


def _measure_pair(
    point: Point, bench: Bench, names: Sequence[str], pair: Pair, inputs: PointInputs, best_us: float
) -> tuple[list[Cell], float]:
    """Return the cells of one layout and block size, and the shortest time so far at this point."""
    cells: list[Cell] = []
    runners: list[_Runner] = []
    for name in names:
        made = _prepare(point, bench, name, pair, inputs)
        (cells if isinstance(made, Cell) else runners).append(made)  # type: ignore[arg-type]
    best_us = min([best_us, *(runner.estimate_us for runner in runners)])
    for runner in runners:
        if _given_up(runner.estimate_us, best_us, bench.timer) and 2e-3 * runner.estimate_us <= bench.timer.long_ms:
            # other work on the machine may have slowed the first two runs
            again = bench.timer.estimate(runner.contender.call, bench.device)
            runner.estimate_us = min(runner.estimate_us, again)
    best_us = min([best_us, *(runner.estimate_us for runner in runners)])
    kept = [runner for runner in runners if not _given_up(runner.estimate_us, best_us, bench.timer)]
    for runner in runners:
        if runner not in kept:
            us = runner.estimate_us
            reason = f"{us / best_us:.1f} times the fastest in its first runs: not timed further"
            cells.append(_timed(point, runner, "dropped", Timing(us, us, us), reason))
    bench.report(",".join(runner.name for runner in runners), f"{point.phase} {point.case}")
    for runner in list(kept):
        try:
            _time_host(runner, bench)
        except Exception as error:
            kept.remove(runner)
            cells.append(_blamed(point, runner.name, runner.place, error, inputs))
    times = bench.timer.time([runner.contender.call for runner in kept], bench.device, lambda: inputs.check(with_cache=False))
    # a write in some round is undone here; a kernel that writes again gets an error cell below
    with suppress(InputsChangedError):
        inputs.check()
    cells += [_finish(point, runner, timing, inputs, bench) for runner, timing in zip(kept, times, strict=True)]
    return cells, best_us


def _given_up(us: float, best_us: float, timer: InterleavedTimer) -> bool:
    return us > CLEAR_LOSS * best_us and timer.needed_ms(us) > timer.long_ms


def _prepare(point: Point, bench: Bench, name: str, pair: Pair, inputs: PointInputs) -> _Runner | Cell:
    place = bench.measured.place(name, CORE_PHASE[point.phase], pair)
    bench.report(name, f"{point.phase} {point.case}")
    try:
        began = time.perf_counter()
        contender, graph = inputs.contender(name)
        found = checked(contender)
        first = time.perf_counter() - began
        inputs.check()
        if not found <= contender.tolerance:
            return wrong_answer(point, name, place, found, contender)
        estimate_us = bench.timer.estimate(contender.call, bench.device)
        bench.budget.compiling += max(0.0, first - 1e-6 * estimate_us)
        inputs.check(with_cache=False)
        return _Runner(name, place, contender, graph, found, estimate_us)
    except Exception as error:
        return _blamed(point, name, place, error, inputs)


def _finish(point: Point, runner: _Runner, timing: Timing | Exception, inputs: PointInputs, bench: Bench) -> Cell:
    """Return the cell of a timed kernel after a second check: an answer that changes over repeated calls is a race."""
    contender = runner.contender
    if isinstance(timing, Exception):
        return failure(point, runner.name, runner.place, timing)
    try:
        found = checked(contender)
        inputs.check()
        if not found <= contender.tolerance:
            return wrong_answer(point, runner.name, runner.place, found, contender, " after repeated calls, right at the first")
        runner.error = max(runner.error, found)
        _time_host(runner, bench)
    except Exception as error:
        return _blamed(point, runner.name, runner.place, error, inputs)
    return _timed(point, runner, "ok", timing)


def _blamed(point: Point, name: str, place: Pair | None, error: Exception, inputs: PointInputs) -> Cell:
    """Return the cell of a kernel that raised. Its writes to the inputs are undone first, so that they do not affect other
    kernels."""
    with suppress(InputsChangedError):
        inputs.check()
    return failure(point, name, place, error)


def _time_host(runner: _Runner, bench: Bench) -> None:
    """Measure the host time of plan and launches, and store the minimum of all measurements. Called before and after the device
    rounds: other work on the host can only add time, and may last longer than all runs of one call."""
    device = bench.device
    calls = {"plan_us": runner.contender.plan, "host_us": None if runner.graph or device.type == "cpu" else runner.contender.call}
    for what, call in calls.items():
        if call is not None:
            runner.host[what] = min(host_us(call, device, bench.timer.host_seconds), runner.host.get(what, math.inf))


def _timed(point: Point, runner: _Runner, status: str, timing: Timing, reason: str = "") -> Cell:
    return new_cell(
        point,
        runner.name,
        runner.place,
        status,
        reason=reason,
        variant=runner.contender.kernel,
        graph=runner.graph,
        median_us=timing.median_us,
        p20_us=timing.p20_us,
        p80_us=timing.p80_us,
        drift=timing.drift,
        relative_error=runner.error,
        tolerance=runner.contender.tolerance,
        **runner.host,
    )
