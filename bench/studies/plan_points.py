"""End-to-end generations in bench/results as points, predictions of `headway plan` for these points, and the errors."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

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

RESULTS: Final = Path(__file__).resolve().parents[1] / "results" / "h200"
Metric = Literal["seconds", "first_token_ms", "per_token_ms"]
WEIGHT_FORMS: Final = {"bf16": "model", "fp8": "fp8", "fp8-blocks": "fp8", "w4a16": "int4", "mxfp4": "mxfp4"}
"""Format name in headway.bench.studies.weight_shapes -> weight format of `headway plan`."""

DEEPSEEK_V2_LITE: Final = Path(__file__).parent / "deepseek-v2-lite.json"
"""Configuration of deepseek-ai/DeepSeek-V2-Lite with 12 of its 27 layers, as measured."""


@dataclass(frozen=True)
class MeasuredPoint:
    """One metric of one workload: `batch` requests with the same lengths, all sent at once."""

    model: str
    """Name in models/shapes, or deepseek-v2-lite."""
    num_layers: int | None
    """Number of measured layers, counted from the first. None means all."""
    batch: int
    input_len: int
    output_len: int
    metric: Metric
    measured: float
    file: str
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 256
    gpu: str = "h200"
    """Kind of GPU in `headway plan`."""
    ranks: int = 1
    """Number of the engine's GPUs."""
    weights: str = "model"
    """Weight format of `headway plan`."""

    def __str__(self) -> str:
        others = [each for each in (self.kv_cache_dtype, self.weights) if each not in ("auto", "model")]
        return " ".join([f"{self.model} {self.batch} x {self.input_len}/{self.output_len}", *others])


def measured_points() -> list[MeasuredPoint]:
    """Return every point, in an order independent of the measurements. Repeated measurements become one point with their
    median."""
    runs: dict[MeasuredPoint, list[MeasuredPoint]] = {}
    for each in (*_throughput(), *_engine_level(), *_experts(), *_wide(), *_generations()):
        runs.setdefault(replace(each, measured=0.0, file=""), []).append(each)
    found = [
        replace(same[0], measured=statistics.median(each.measured for each in same), file=", ".join(each.file for each in same))
        for same in runs.values()
    ]
    return sorted(found, key=lambda each: (each.model, each.metric, each.batch, each.input_len, each.kv_cache_dtype))


def weight_points() -> list[MeasuredPoint]:
    """Return times per token with other weight formats on an H100, from bench/results/h100/weights-MODEL-FORM.json."""
    found = []
    for form, weights in WEIGHT_FORMS.items():
        for path in sorted((RESULTS.parent / "h100").glob(f"weights-*-{form}.json")):
            model = path.stem.removeprefix("weights-").removesuffix(f"-{form}")
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
                shape = (model, None, cell["batch_size"], cell["input_len"], cell["output_len"])
                measured = cell["time_per_output_token_ms"]
                found.append(MeasuredPoint(*shape, "per_token_ms", measured, path.name, gpu="h100", weights=weights))
    return found


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _throughput() -> Iterator[MeasuredPoint]:
    """Yield mean times per token and first-token times of `headway bench throughput`. First-token times of 2026-11-21 are
    excluded, since that engine ran prompts without graphs; the first-token time of 8,190 tokens was measured later."""
    for path in sorted(RESULTS.glob("throughput-*.json")):
        read = json.loads(path.read_text(encoding="utf-8"))
        cache = "fp8_e4m3" if "fp8_e4m3" in read["command"] else "auto"
        for cell in read["cells"]:
            if cell["input_len"] is None:
                continue
            shape = (read["model"], None, cell["batch_size"], cell["input_len"], cell["output_len"])
            if cell["output_len"] > 2:
                yield MeasuredPoint(*shape, "per_token_ms", cell["time_per_output_token_ms"], path.name, cache)
            else:
                yield MeasuredPoint(*shape, "first_token_ms", cell["time_to_first_token_ms"], path.name, cache)


def _engine_level() -> Iterator[MeasuredPoint]:
    """Yield the points of engine-level runs with `auto`."""
    read = _read("crossover-engine.json")
    for cell in read["cells"]:
        if cell["backend"] == "auto":
            shape = (read["model"], None, cell["batch"], cell["query_len"], cell["kv_len"] - cell["query_len"])
            yield MeasuredPoint(*shape, "seconds", cell["median_us"] * 1e-6, "crossover-engine.json")


def _experts() -> Iterator[MeasuredPoint]:
    """Yield the points of models with experts, using the best pass of each batch size."""
    shapes: Mapping[str, Any] = _read("experts-vllm.json")["shapes"]
    for model, shape in shapes.items():
        for batch, cell in shape["batches"].items():
            seconds = int(batch) * 512 / cell["headway_tok_s"]
            yield MeasuredPoint(model, shape["layers"], int(batch), 512, 512, "seconds", seconds, "experts-vllm.json")


def _wide() -> Iterator[MeasuredPoint]:
    """Yield points with more than 256 sequences, and first-token times of single requests."""
    read = _read("engine-wide.json")
    for batch in (320, 512):
        seconds = batch * 256 / read["median"][f"{batch} x 256/256"]
        yield MeasuredPoint("qwen3-0.6b", None, batch, 256, 256, "seconds", seconds, "engine-wide.json", max_num_seqs=512)
    for length, ms in read["first_token_ms"].items():
        yield MeasuredPoint("qwen3-0.6b", None, 1, int(length), 1, "first_token_ms", ms, "engine-wide.json")


def _generations() -> Iterator[MeasuredPoint]:
    """Yield the points measured by `measure`."""
    for each in _read("plan-points.json")["points"]:
        yield MeasuredPoint(**{name: value for name, value in each.items() if name != "predicted"} | {"file": "plan-points.json"})


_LONGEST = 16384
_PAGES = 400_000
"""Number of pages of 16 tokens, more than any point needs."""
SHARES = ("product_read", "product_matrix", "element_read", "decode_read", "prefill_matrix", "state_read")
"""Fields of `Utilisation` between 0 and 1."""
ATTENTION = ("decode_read", "decode_us", "prefill_matrix", "prefill_us")
"""Fields fitted to crossover tables. They determine a kernel's time predicted from the data sheet."""
FITTED = tuple(
    each.name
    for each in fields(Utilisation)
    if each.name not in ATTENTION
    and not each.name.startswith(("state", "scan", "narrow", "host_us", "host_sequence", "host_mixed"))
)
"""Fields fitted to end-to-end generations."""


@cache
def read_model(name: str, num_layers: int | None) -> PlannedModel:
    """Return a model's sizes, with only the measured layers."""
    if name == "deepseek-v2-lite":
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(DEEPSEEK_V2_LITE.read_text())
            return _read_folder(folder, num_layers)
    return _read_folder(name, num_layers)


def _read_folder(name: str, num_layers: int | None) -> PlannedModel:
    config, dtype = read_planned_model(name)
    return PlannedModel(replace(config, layers=config.layers[:num_layers]), dtype)


@cache
def h200_tables() -> tuple[MeasuredLayer, ...]:
    """Return the times in the repository's crossover tables for an H200."""
    return tuple(MeasuredLayer.of(read_table(RESULTS / f"crossover-{heads}-8-128.json")) for heads in (16, 32))


class _Recorder:
    """Replacement for `StepPredictor` in which every step takes a second, so that a token's time is its step's index."""

    def __init__(self) -> None:
        self.works: list[StepWork] = []

    def step(self, work: StepWork) -> StepParts:
        """Record a step's work."""
        self.works.append(work)
        return StepParts(products=1e6)


@dataclass(frozen=True)
class Trace:
    """Steps of a point, which do not depend on step times, because all requests arrive at once."""

    works: Sequence[StepWork]
    first: Sequence[int]
    """Index of the step that generates each request's first token. `last` has the index for the last token."""
    last: Sequence[int]


@cache
def trace(point: MeasuredPoint) -> Trace:
    """Run the scheduler on a point. Return its steps."""
    recorder = _Recorder()
    found = _replica(point, recorder).run(_requests(point))
    first = [round(each) - 1 for each in found.first_token]
    more = point.output_len - 1
    last = [step + round(each * more) for step, each in zip(first, found.per_token, strict=True)] if more else first
    return Trace(recorder.works, first, last)


def step_times(point: MeasuredPoint, reached: Utilisation) -> StepPredictor:
    """Return the predictor for a point's steps."""
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
    """Return the latencies of a point from the simulation, as in `headway plan`."""
    return _replica(point, step_times(point, reached), 1e-6 * reached.request_us).run(_requests(point))


def simulate(point: MeasuredPoint, reached: Utilisation) -> float:
    """Return a point's metric from the simulation."""
    found = latencies(point, reached)
    if point.metric == "seconds":
        return found.seconds
    return 1e3 * statistics.mean(found.first_token if point.metric == "first_token_ms" else found.per_token)


def predict(point: MeasuredPoint, reached: Utilisation) -> float:
    """Return a point's metric from its trace, a hundred times as fast as `simulate`."""
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
    """Predicted divided by measured, minus 1."""

    @property
    def median(self) -> float:
        """Median of the absolute errors."""
        return statistics.median(map(abs, self.values))

    @property
    def worst(self) -> float:
        """Largest absolute error."""
        return max(map(abs, self.values))

    @property
    def mean(self) -> float:
        """Mean of the absolute errors."""
        return statistics.mean(map(abs, self.values))

    @property
    def loss(self) -> float:
        """Loss that a fit minimizes: mean plus a tenth of the largest absolute error."""
        return self.mean + 0.1 * self.worst


def errors(points: Sequence[MeasuredPoint], reached: Utilisation) -> Errors:
    """Return the relative errors of the predictions for these points."""
    return Errors([predict(point, reached) / point.measured - 1 for point in points])


def halves(points: Sequence[MeasuredPoint]) -> tuple[list[MeasuredPoint], list[MeasuredPoint]]:
    """Return every second point, to fit utilizations, and the other points, to test them."""
    return list(points[::2]), list(points[1::2])


def kernel_cells() -> list[tuple[MeasuredLayer, Shape]]:
    """Return every point of the attention tables' grids at which a backend has a time."""
    found = [
        (table, shape)
        for table in h200_tables()
        for phase in Phase
        for shape in table.costs.shapes[phase]
        if math.isfinite(table.fastest_us(shape)) and (phase is not Phase.DECODE or shape.query_len == 1)
    ]
    return sorted(found, key=lambda each: (str(each[0].spec), str(each[1])))


def kernel_errors(cells: Sequence[tuple[MeasuredLayer, Shape]], reached: Utilisation) -> Errors:
    """Return the errors of attention times predicted from the data sheet, compared with the tables."""
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
    report: Callable[[str], None] = lambda line: None,
) -> Utilisation:
    """Return utilizations from a coordinate search with decreasing steps."""
    best, least, step = start, loss(start), 0.3
    for number in range(rounds):
        for name in names:
            for factor in (1 - step, 1 + step):
                value = getattr(best, name) * factor
                tried = replace(best, **{name: min(value, 1.0) if name in SHARES else value})
                found = loss(tried)
                if found < least:
                    best, least = tried, found
        report(f"round {number + 1} of {rounds}: loss {least:.4f}")
        step *= 0.65
    return best


def fit_all(
    points: Sequence[MeasuredPoint], start: Utilisation, report: Callable[[str], None] = lambda line: None
) -> Utilisation:
    """Return all utilizations. The attention fields are fitted to half of the kernel times, and the other fields to these points.
    Both fits run twice, because the second fit changes the start time of a single kernel, which the first fit uses."""
    cells = kernel_cells()[::2]
    for _ in range(2):
        start = fit(lambda tried: kernel_errors(cells, tried).mean, ATTENTION, start, report=report)
        start = fit(lambda tried: errors(points, tried).loss, FITTED, start, report=report)
    return start


def arrivals(reached: Utilisation) -> list[tuple[str, float, float]]:
    """Return (name, measured, predicted) for Poisson arrivals at a server; HTTP overhead of the first token is not predicted."""
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
