"""Predicts measured points, and how far predictions are off."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from headway.bench.studies.plan.points import DEEPSEEK_V2_LITE, RESULTS, MeasuredPoint
from headway.core.contract.metadata import Phase
from headway.core.engine.data.groups import page_format
from headway.core.select.costs import Shape
from headway.plan.attention_times import AttentionTimes, MeasuredLayer, layout_of
from headway.plan.demand import Demand
from headway.plan.devices import GPU_KINDS, Utilisation
from headway.plan.model_costs import (
    EngineLimits,
    EngineMemory,
    PlannedModel,
    RankCosts,
    rank_costs,
    read_planned_model,
    weight_format,
)
from headway.plan.simulation import Latencies, Replica, SimulatedRequest
from headway.plan.step_time import StepParts, StepPredictor, StepWork
from headway.tuning.table.files import read_table

_LONGEST = 16384
_PAGES = 400_000
"""Pages of 16 tokens: none of the points was short of memory."""
SHARES = ("product_read", "product_matrix", "element_read", "decode_read", "prefill_matrix", "state_read")
"""Fields of `Utilisation` that lie between 0 and 1."""
ATTENTION = ("decode_read", "decode_us", "prefill_matrix", "prefill_us")
"""Fields that crossover tables tell: a kernel's time by the data sheet."""
FITTED = tuple(
    each.name
    for each in fields(Utilisation)
    if each.name not in ATTENTION
    and not each.name.startswith(("state", "scan", "narrow", "host_us", "host_sequence", "host_mixed"))
)
"""Fields that whole generations tell."""


@cache
def read_model(name: str, num_layers: int | None) -> PlannedModel:
    """A model's sizes, of its first layers alone where fewer were measured."""
    if name == "deepseek-v2-lite":
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(DEEPSEEK_V2_LITE))
            return _read_folder(folder, num_layers)
    return _read_folder(name, num_layers)


def _read_folder(name: str, num_layers: int | None) -> PlannedModel:
    config, dtype = read_planned_model(name)
    return PlannedModel(replace(config, layers=config.layers[:num_layers]), dtype)


@cache
def h200_tables() -> tuple[MeasuredLayer, ...]:
    """The crossover tables of an H200 that the repository holds."""
    return tuple(MeasuredLayer.of(read_table(RESULTS / f"crossover-{heads}-8-128.json")) for heads in (16, 32))


class _Recorder:
    """Stands in for `StepPredictor`: every step takes a second, so that a token's time is the number of its step."""

    def __init__(self) -> None:
        self.works: list[StepWork] = []

    def step(self, work: StepWork) -> StepParts:
        """Write a step down."""
        self.works.append(work)
        return StepParts(products=1e6)


@dataclass(frozen=True)
class Trace:
    """The steps of a point, which no time changes, because all requests come at once."""

    works: Sequence[StepWork]
    first: Sequence[int]
    """The step of each request's first token, and of its last."""
    last: Sequence[int]


@cache
def trace(point: MeasuredPoint) -> Trace:
    """Run the scheduler over a point."""
    recorder = _Recorder()
    found = _replica(point, recorder).run(_requests(point))
    first = [round(each) - 1 for each in found.first_token]
    more = point.output_len - 1
    last = [step + round(each * more) for step, each in zip(first, found.per_token, strict=True)] if more else first
    return Trace(recorder.works, first, last)


def step_times(point: MeasuredPoint, reached: Utilisation) -> StepPredictor:
    """The times of a point's steps."""
    gpu = GPU_KINDS[point.gpu]
    return StepPredictor(gpu, _costs(point), reached, AttentionTimes(gpu, reached, h200_tables() if point.gpu == "h200" else ()))


def _costs(point: MeasuredPoint) -> RankCosts:
    model = read_model(point.model, point.num_layers)
    return rank_costs(*model, point.ranks, point.kv_cache_dtype, weight_format(point.weights))


def _replica(point: MeasuredPoint, times: Any, request_seconds: float = 0.0) -> Replica:
    caches = _costs(point).layers.cached
    pages = page_format(caches, [layout_of(spec) for spec in caches], 16, _LONGEST)
    return Replica(
        times, EngineMemory(pages, _PAGES, EngineLimits(point.max_num_seqs, _LONGEST)), request_seconds=request_seconds
    )


def _requests(point: MeasuredPoint) -> list[SimulatedRequest]:
    return [SimulatedRequest(0.0, point.input_len, point.output_len)] * point.batch


def latencies(point: MeasuredPoint, reached: Utilisation) -> Latencies:
    """What the requests of a point see by the simulation, as `headway plan` makes it."""
    return _replica(point, step_times(point, reached), 1e-6 * reached.request_us).run(_requests(point))


def simulate(point: MeasuredPoint, reached: Utilisation) -> float:
    """A point's figure by the simulation."""
    found = latencies(point, reached)
    if point.metric == "seconds":
        return found.seconds
    return 1e3 * statistics.mean(found.first_token if point.metric == "first_token_ms" else found.per_token)


def predict(point: MeasuredPoint, reached: Utilisation) -> float:
    """The same figure out of the point's trace, a hundred times as fast."""
    times, steps = step_times(point, reached), trace(point)
    ends: list[float] = []
    seen: list[float] = []
    launched = 1e-6 * reached.request_us
    for number, work in enumerate(steps.works):
        free, busy = max(launched, ends[number - 2] if number > 1 else 0.0), ends[-1] if ends else 0.0
        launched, end = times.step(work).times(free, busy)
        if ends:
            seen.append(max(launched, ends[-1]))
        ends.append(end)
    seen.append(ends[-1])
    first, last = ([seen[step] for step in each] for each in (steps.first, steps.last))
    if point.metric == "seconds":
        return seen[-1]
    if point.metric == "first_token_ms":
        return 1e3 * statistics.mean(first)
    return 1e3 * (statistics.mean(last) - statistics.mean(first)) / (point.output_len - 1)


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions."""

    values: Sequence[float]
    """Predicted over measured, less 1."""

    @property
    def median(self) -> float:
        """Median of their sizes."""
        return statistics.median(map(abs, self.values))

    @property
    def worst(self) -> float:
        """The largest size."""
        return max(map(abs, self.values))

    @property
    def mean(self) -> float:
        """Mean of their sizes."""
        return statistics.mean(map(abs, self.values))

    @property
    def loss(self) -> float:
        """What a fit makes small: the mean size, and a tenth of the worst."""
        return self.mean + 0.1 * self.worst


def errors(points: Sequence[MeasuredPoint], reached: Utilisation) -> Errors:
    """How far the predictions of these points are off."""
    return Errors([predict(point, reached) / point.measured - 1 for point in points])


def halves(points: Sequence[MeasuredPoint]) -> tuple[list[MeasuredPoint], list[MeasuredPoint]]:
    """Every second point to choose utilisations from, and the others to judge them by."""
    return list(points[::2]), list(points[1::2])


def kernel_cells() -> list[tuple[MeasuredLayer, Shape]]:
    """Every point of the grids of attention tables at which a backend has a time."""
    found = [
        (table, shape)
        for table in h200_tables()
        for phase in Phase
        for shape in table.costs.shapes[phase]
        if math.isfinite(table.fastest_us(shape)) and (phase is not Phase.DECODE or shape.query_len == 1)
    ]
    return sorted(found, key=lambda each: (str(each[0].spec), str(each[1])))


def kernel_errors(cells: Sequence[tuple[MeasuredLayer, Shape]], reached: Utilisation) -> Errors:
    """How far attention by the data sheet is off where a table tells."""
    times = AttentionTimes(GPU_KINDS["h200"], reached)
    found = []
    for table, shape in cells:
        alone = reached.alone_us if shape.phase is Phase.DECODE else 0.0
        found.append(times.data_sheet_us(table.spec, shape) / (table.fastest_us(shape) - alone) - 1)
    return Errors(found)


def fit(
    loss: Callable[[Utilisation], float],
    names: Sequence[str],
    start: Utilisation,
    rounds: int = 7,
    told: Callable[[str], None] = lambda line: None,
) -> Utilisation:
    """Choose utilisations by a search along one after the other, with steps that shrink."""
    best, least, step = start, loss(start), 0.3
    for number in range(rounds):
        for name in names:
            for factor in (1 - step, 1 + step):
                value = getattr(best, name) * factor
                tried = replace(best, **{name: min(value, 1.0) if name in SHARES else value})
                found = loss(tried)
                if found < least:
                    best, least = tried, found
        told(f"round {number + 1} of {rounds}: loss {least:.4f}")
        step *= 0.65
    return best


def fit_all(points: Sequence[MeasuredPoint], start: Utilisation, told: Callable[[str], None] = lambda line: None) -> Utilisation:
    """Choose every utilisation: of attention from half of the kernels' times, of the rest from these points; and once again,
    because the second changes how long a kernel alone takes to start."""
    cells = kernel_cells()[::2]
    for _ in range(2):
        start = fit(lambda tried: kernel_errors(cells, tried).mean, ATTENTION, start, told=told)
        start = fit(lambda tried: errors(points, tried).loss, FITTED, start, told=told)
    return start


def arrivals(reached: Utilisation) -> list[tuple[str, float, float]]:
    """(what, measured, predicted) of Poisson arrivals at a server; what HTTP adds to the first token is not predicted."""
    found = []
    for cell in json.loads((RESULTS / "server.json").read_text(encoding="utf-8"))["own_process"]["online"].values():
        point = MeasuredPoint("qwen3-0.6b", None, 1, 512, 128, "per_token_ms", 0.0, "server.json")
        requests = Demand(512, 128, cell["rate"]).arrivals(1, cell["completed"])
        result = _replica(point, step_times(point, reached), 1e-6 * reached.request_us).run(requests)
        for percentile in (50, 95):
            for name, got in (
                ("time_to_first_token_ms", result.first_token_ms(percentile)),
                ("time_per_output_token_ms", result.per_token_ms(percentile)),
            ):
                found.append((f"{cell['rate']:g}/s, {name} p{percentile}", cell[name][f"p{percentile}"], got))
    return found
