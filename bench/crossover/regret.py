"""Regret of `auto`: its choices at unmeasured points, compared with the fastest candidate at each point."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from statistics import fmean
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from headway.bench.crossover.report import pairs_of, view
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.engine.execution.graph_set import as_run
from headway.core.oracle.cases import parse_case
from headway.core.select.choice import MeasuredChoice
from headway.core.select.costs import Shape, StepCosts
from headway.core.select.kernels import Placement
from headway.core.select.request import LayerSpecs, Workload
from headway.core.select.selector import Selector
from headway.core.speculation.proposers import is_captured
from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin, command_line
from headway.core.system.terminal import progress_bar
from headway.registry import Registry, create_registry
from headway.tuning.measure.derive import derive, distance, is_similar, limits_between
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.kinds import GRAPH_LEN, measured_kind
from headway.tuning.measure.measure_point import Bench, measure_point
from headway.tuning.measure.points import Point, held_out
from headway.tuning.measure.timing import InterleavedTimer, on_device
from headway.tuning.table.convert import CORE_PHASE, source_of, to_costs
from headway.tuning.table.noise import MOST_DRIFT, launch_us
from headway.tuning.table.schema import Cell, CrossoverTable, DeviceIdentity, SpecRecord, points

_TIMER = InterleavedTimer(rounds=5)
LAYERS = 32
"""Assumed number of layers of a model. All layers share the cost of one plan."""


class RegretTrial(BaseModel):
    """Regret of the choice at one held-out point."""

    model_config = ConfigDict(extra="forbid")

    phase: str
    case: str
    seed: int | None = None
    """Seed with which the point was drawn. None if the point was not drawn, and in files from before 2026-11-22."""
    chosen: str
    best: str
    chosen_us: float
    """Time of a step with the chosen backend in microseconds: plan and all layers."""
    best_us: float
    """Time of a step in microseconds with the fastest backend for the layout and block size that `auto` chose."""
    times_us: dict[str, float]
    """Microseconds keyed by backend, layout and block size, such as `triton nhd 256`, or only by backend if the backend reads no
    cache."""

    @property
    def regret(self) -> float:
        """Time of the choice divided by the time of the best backend."""
        return self.chosen_us / self.best_us

    @property
    def regret_anywhere(self) -> float:
        """Regret over all layouts and block sizes, between which an engine cannot switch from step to step."""
        return self.chosen_us / min(self.times_us.values())


class RegretReport(ResultFile):
    """Result of one run over held-out points."""

    written_by: ClassVar[str] = "headway table regret --output"
    schema_: Literal["headway.regret/1"] = Field(default="headway.regret/1", alias="schema")
    command: str
    origin: Origin | None = None
    """The code that wrote the file. None in files from before 2026-11-22."""
    date: str
    table_date: str
    device: DeviceIdentity
    spec: SpecRecord
    selection: str
    layers: int
    seed: int
    """The first seed, if points were drawn with several."""
    geometric_mean: float
    worst: float
    geometric_mean_anywhere: float
    """Geometric mean of the regret over all measured layouts and block sizes."""
    worst_anywhere: float
    trials: list[RegretTrial]
    untimed: list[str]
    """Points at which the choice, or every backend, had no time, with reasons."""

    @property
    def places(self) -> set[str]:
        """Layouts and block sizes, such as `nhd 256`, for which at least one backend has a time."""
        return {place for trial in self.trials for _, _, place in (key.partition(" ") for key in trial.times_us) if place}

    def of_seed(self, seed: int) -> tuple[float, float]:
        """Return the geometric mean and the maximum of the regret at the points of one seed."""
        regrets = [trial.regret for trial in self.trials if trial.seed == seed] or [1.0]
        return _geometric_mean(regrets), max(regrets)


def measure_regret(
    table: CrossoverTable,
    registry: Registry,
    device: torch.device,
    count: int,
    seeds: Sequence[int],
    workload: Workload,
    layers: int = LAYERS,
    console: Console | None = None,
    anywhere: bool = False,
    others: Iterable[tuple[str, int]] = (),
    until: float = math.inf,
    timer: InterleavedTimer = _TIMER,
) -> RegretReport:
    """Measure `count` random points per seed, within the grid's range but off the grid, in the order drawn.

    The points count as steps of one engine: hysteresis within the noise applies, and steps that would replay a graph are chosen
    and timed as such. Candidates are timed in rounds, for the layout and block size that `auto` chooses for the workload.
    anywhere: True to time all other layouts and block sizes of the table as well. others: further layouts and block sizes to
    time, so that `judge_again` can evaluate other tables. until: value of time.perf_counter() after which measuring stops; the
    next point is reported as untimed.
    :raises ConfigError: if the table has no times for any layout, so that there is no choice to evaluate.
    """
    spec = table.attention.to_spec(device)
    selector = Selector(registry, LayerSpecs([spec] * layers), costs={spec: to_costs(table)}, workload=workload)
    usable = {record.name for record in table.kernels if record.usable}
    names = [name for name in registry.able(device) if name in usable]
    if selector.main.costs is None:
        raise _no_choice(table, names)
    chosen = selector.selection
    known = {cell.case for cell in table.cells}
    drawn = ((seed, held_out(device.type, count, seed, known)) for seed in seeds)
    # Encoder layers only have prefill: drop the other points.
    draws = [[(seed, point) for point in found if point.shape.phase in chosen.names] for seed, found in drawn]
    # If time may run out, interleave the seeds' points.
    points = list(chain(*draws) if until == math.inf else chain(*zip(*draws, strict=True)))
    pairs = [(chosen.layout, chosen.block_size)]
    more = [(layout, size) for layout, size in pairs_of(table) if layout and size] if anywhere else list(others)
    pairs += [pair for name, size in dict.fromkeys(more) if (pair := (registry.layout(name).layout, size)) != pairs[0]]
    trials: list[RegretTrial] = []
    untimed: list[str] = []
    with torch.no_grad(), on_device(device), progress_bar(console) as progress:
        task = progress.add_task("regret", total=len(points))
        for seed, point in points:
            if time.perf_counter() > until:
                untimed.append(f"{point.phase} {point.case} and those after it: the time did not suffice")
                break
            bench = Bench(measured_kind(registry, spec, table.graph_len or GRAPH_LEN, seed), timer)
            cells = measure_point(point, bench, names, pairs, {})
            shape = as_run(point.shape, device.type)
            name = next(iter(selector.backends_of(shape).values())).name
            place = f"{chosen.layout.name} {chosen.block_size}"
            times = _times_us(cells, layers, _replaying(registry, names, shape))
            trial = _trial(point.phase, point.case, name, times, place, seed)
            if trial is None:
                reasons = "; ".join(f"{cell.kernel} {cell.status} {cell.reason}" for cell in cells if cell.median_us is None)
                untimed.append(f"{point.phase} {point.case}, choice {name}: {reasons}")
            else:
                trials.append(trial)
            progress.update(task, advance=1, description=f"{point.phase} {point.case}")
    return _report(table, identify_device(device), str(chosen), layers, seeds[0], trials, untimed)


def judge_again(report: RegretReport, table: CrossoverTable, workload: Workload) -> RegretReport:
    """Evaluate the choices with a table, using the times of an earlier report. Measures nothing and runs on any machine. report:
    from `measure_regret` with `anywhere`, since otherwise the layout and block size chosen now may have no times.
    :raises ConfigError: if the table and the times are for different layers, or the table has no times for any layout.
    """
    if report.spec.key != table.spec.key:
        need = f"times of the table's layer, {table.spec}"
        raise ConfigError("--trials", need, f"those of {report.spec}", "--output of headway table regret on such a table")
    timed = {(CORE_PHASE[cell.phase], cell.kernel, cell.layout, cell.block_size) for cell in table.cells if cell.layer_us}
    names = [record.name for record in table.kernels if record.usable]

    def able(phase: Phase, place: Placement[CacheLayout]) -> list[str]:
        return [name for name in names if {(phase, name, place.layout.name, place.block_size), (phase, name, None, None)} & timed]

    known = pairs_of(table)
    registry = create_registry(load_entry_points=False)
    layouts = [info.layout for info in registry.layouts.values()]
    sizes = sorted({size for _, size in known if size})  # in an engine's order, which breaks ties
    places = [Placement(layout, size) for size in sizes for layout in layouts if (layout.name, size) in known]
    found = MeasuredChoice([(to_costs(table), report.layers)], workload, workload.steps()).select(places, able)
    if found is None:
        raise _no_choice(table, names)
    selection, chooser = found
    place = f"{selection.layout.name} {selection.block_size}"
    trials, untimed = [], []
    for old in report.trials:
        (query_len, kv_len), *others = parse_case(old.case)
        shape = as_run(Shape(CORE_PHASE[old.phase], 1 + len(others), query_len, kv_len), table.device.type)
        name = selection.names[shape.phase]
        if ranked := chooser.costs.ranking(shape, _replaying(registry, selection.all_for(shape.phase), shape)):
            name = ranked[0][0]
        elif shape.phase in chooser.names:
            name = chooser.choose(shape.phase, shape.batch, query_len, kv_len) or name
        trial = _trial(old.phase, old.case, name, old.times_us, place, old.seed)
        if trial is None:
            untimed.append(f"{old.phase} {old.case}, choice {name} {place}: no time in the report")
        else:
            trials.append(trial)
    return _report(table, report.device, str(selection), report.layers, report.seed, trials, untimed + report.untimed)


def leave_one_out(table: CrossoverTable, layers: int = LAYERS) -> RegretReport:
    """Return the regret that a lookup at each measured point would have if the point were not in the table. Measures nothing.

    Uses the layout and block size with the lowest time. Points outside the range of the other points are left out, since a lookup
    knows only the nearest edge there. A grid without the point is coarser, so the actual regret is lower.
    :raises ConfigError: if the table is an engine-level table.
    """
    if table.level != "kernel":
        raise _no_choice(table, ())
    shown = view(table)
    layout, block_size = shown.pair[0] or "", shown.pair[1] or 0
    trials: list[RegretTrial] = []
    for row in shown.rows:
        first = row.first
        point = Point(first.phase, first.batch, first.query_len, first.kv_len)
        rest = table.model_copy(update={"cells": [cell for cell in table.cells if cell.point != first.point]})
        costs = StepCosts([(to_costs(rest), layers)], layout, block_size)
        ranked = costs.ranking(point.shape, shown.backends) if costs.covers(point.shape) else []
        times = _times_us(row.cells.values(), layers)
        trial = _trial(first.phase, first.case, ranked[0][0], times, f"{layout} {block_size}") if ranked else None
        if trial is not None:
            trials.append(trial)
    return _report(table, table.device, f"leave one out, {shown.where}", layers, 0, trials, [])


def as_replay(cell: Cell) -> Cell:
    """Return a verify cell as a graph replay if engines replay such a step. Tables before 2026-11-27 timed verification without a
    graph, so only the device time of such a cell is used."""
    if cell.graph or cell.phase != "verify" or not is_captured(cell.batch, cell.query_len):
        return cell
    return cell.model_copy(update={"graph": True, "host_us": None})


def derived_regret(table: CrossoverTable, sources: Sequence[CrossoverTable], layers: int = LAYERS) -> RegretReport:
    """Return the regret of choices by times derived from tables of other layers or GPUs, at all points and with all layouts and
    block sizes that a table measured. Measures nothing. Times whose rounds differ by more than a quarter do not count.
    :raises ConfigError: if times cannot be derived from one of `sources`.
    """
    for each in sources:
        if table.level != "kernel" or each.level != "kernel" or not is_similar(each.attention, table.attention):
            need = f"a table of level kernel for a layer similar to {table.spec}"
            raise ConfigError("--derived-from", need, f"one of level {each.level} for {each.spec}")
    known = {cell.point: Point(cell.phase, cell.batch, cell.query_len, cell.kv_len) for cell in table.cells}
    names = [record.name for record in table.kernels if record.usable]
    near = sorted(sources, key=lambda each: (each.device.name != table.device.name, distance(each.attention, table.attention)))
    scaled = [(each, limits_between(each, table.device, table.rates)) for each in near]
    derived = derive(scaled, table.attention, list(known.values()), names)
    costs, registry = to_costs(derived), create_registry(load_entry_points=False)
    replaying = {cell.kernel for cell in table.cells if cell.graph}
    launches = launch_us(table.cells)
    cells = [each.model_copy(update={"host_us": each.host_us and launches[each.kernel, each.phase]}) for each in table.cells]
    measured = points([as_replay(cell) if cell.kernel in replaying else cell for cell in cells])
    trials: list[RegretTrial] = []
    untimed: list[str] = []
    for layout, size in (pair for pair in pairs_of(table) if pair[0] and pair[1]):
        steps, place = StepCosts([(costs, layers)], layout or "", size or 0), f"{layout} {size}"
        for key, cells in measured.items():
            shape = as_run(known[key].shape, table.device.type)
            captured = _replaying(registry, names, shape)
            ranked = steps.ranking(shape, captured) or steps.ranking(replace(shape, captured=False), names)
            steady = [cell for cell in cells if (cell.drift or 0.0) <= MOST_DRIFT]
            trial = _trial(*key, ranked[0][0], _times_us(steady, layers, captured), place) if ranked else None
            if trial is not None:
                trials.append(trial)
            elif ranked and any((cell.layout, cell.block_size) == (layout, size) and cell.median_us for cell in cells):
                untimed.append(f"{' '.join(key)} {place}, choice {ranked[0][0]}: no time, or one that varied by a quarter")
    return _report(table, table.device, source_of(derived), layers, 0, trials, untimed)


def _report(
    table: CrossoverTable,
    device: DeviceIdentity,
    selection: str,
    layers: int,
    seed: int,
    trials: list[RegretTrial],
    untimed: list[str],
) -> RegretReport:
    regrets = [trial.regret for trial in trials] or [1.0]
    anywhere = [trial.regret_anywhere for trial in trials] or [1.0]
    return RegretReport(
        command=command_line(),
        origin=Origin.here(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        table_date=table.date,
        device=device,
        spec=table.attention,
        selection=selection,
        layers=layers,
        seed=seed,
        geometric_mean=_geometric_mean(regrets),
        worst=max(regrets),
        geometric_mean_anywhere=_geometric_mean(anywhere),
        worst_anywhere=max(anywhere),
        trials=trials,
        untimed=untimed,
    )


def _no_choice(table: CrossoverTable, names: Collection[str]) -> ConfigError:
    """Return the error for a table that leads to no choice. names: the table's candidate backends."""
    need = "a table of level kernel with times for every phase"
    if table.level != "kernel":
        return ConfigError("regret", need, f"one of level {table.level}")
    measured = ", ".join(record.name for record in table.kernels if record.usable)
    if measured and not names:
        return ConfigError("regret", f"{need} of backends that can run here", f"times of {measured} on {table.device.name}")
    timed = {CORE_PHASE[cell.phase] for cell in table.cells if cell.layer_us is not None and cell.kernel in names}
    missing = [phase.value for phase in Phase if phase not in timed]
    return ConfigError("regret", need, f"one without times for {', '.join(missing) or 'all over one layout'}")


def _geometric_mean(numbers: Sequence[float]) -> float:
    return math.exp(fmean(map(math.log, numbers)))


def _replaying(registry: Registry, names: Iterable[str], shape: Shape) -> list[str]:
    """Return the backends in `names` whose graph an engine replays for a shape; empty if the shape is not captured."""
    known = [name for name in names if shape.captured and name in registry.backends]
    return [name for name in known if registry.backend(name).captures(shape.query_len)]


def _times_us(cells: Iterable[Cell], layers: int, replaying: Collection[str] = ()) -> dict[str, float]:
    """Return times in the format of `RegretTrial.times_us`. replaying: backends whose plan and launches cost no host time."""
    found = {}
    for cell in cells:
        in_graph = cell.kernel in replaying
        us, plan_us = (cell.median_us, 0.0) if in_graph else (cell.layer_us, cell.plan_us or 0.0)
        if us is not None:
            found[f"{cell.kernel} {cell.layout} {cell.block_size}" if cell.layout else cell.kernel] = plan_us + layers * us
    return found


def _trial(
    phase: str, case: str, chosen: str, times_us: Mapping[str, float], place: str, seed: int | None = None
) -> RegretTrial | None:
    """Return the trial of a choice for `place`, such as `nhd 256`; None if the chosen backend has no time for this layout and
    block size."""
    here = {key.removesuffix(f" {place}"): us for key, us in times_us.items() if key.endswith(f" {place}") or " " not in key}
    if chosen not in here:
        return None
    best = min(here, key=here.__getitem__)
    return RegretTrial(
        phase=phase,
        case=case,
        seed=seed,
        chosen=chosen,
        best=best,
        chosen_us=here[chosen],
        best_us=here[best],
        times_us=dict(times_us),
    )
