"""Times of a state backend's calls, for every cut that its kernels can be given."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch

from headway.backends.states.triton.arguments import StateTuning
from headway.backends.states.triton.backend import TritonStates
from headway.core.contract.state import KDA, MAMBA1, MAMBA2, StateCache, StateLayout, StateSpec
from headway.core.oracle.cells import Finding
from headway.core.oracle.state_cases import StateCase, make_state_case
from headway.testing.diagnosis.state_verdict import Judge, distance
from headway.tuning.measure.timing import Timer

STEP_CUTS = tuple({"step_value": value, "step_warps": warps} for value, warps in ((32, 4), (64, 4), (32, 2)))
WRONG = 1.6e-2
"""A relative error that no rounding to bfloat16 explains."""
SCAN_CUTS = (
    tuple(
        {"rows": rows, "run": run, "row_warps": warps} for rows, run, warps in ((64, 16, 4), (64, 8, 4), (32, 16, 2), (32, 8, 4))
    ),
    tuple({"chunk_warps": warps} for warps in (4, 2)),
    tuple(
        {"walk_turned": turned, "walk_value": value, "walk_stages": stages, "walk_warps": warps}
        for turned, value, stages, warps in (
            (False, 32, 3, 4),
            (False, 32, 2, 4),
            (True, 64, 2, 4),
            (True, 64, 3, 4),
            (True, 128, 2, 8),
        )
    ),
)
"""Cuts of the convolution, of what lies within chunks, and of the walk along them: each after the best of those before."""


@dataclass
class StateTimes:
    """One size, its floor, and the time of every cut that was tried, in microseconds."""

    name: str
    floor_us: float
    tried: list[tuple[dict[str, Any], float]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Cuts that did not compile or run, with the exception's first line."""
    alone_us: float = 0.0
    """The best cut, called once in a graph with the L2 cache flushed before (`scan`: called without a graph)."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Microseconds of each kernel of the best cut."""

    @property
    def best(self) -> tuple[dict[str, Any], float]:
        """The fastest cut."""
        return min(self.tried, key=lambda each: each[1])


@dataclass(frozen=True, slots=True)
class StudyLayer:
    """What is timed."""

    spec: StateSpec
    layout: StateLayout
    read_gbps: float
    num_layers: int
    """Layers in the graph of a step, each with a pool of its own."""
    timer: Timer
    until: float
    """`time.monotonic()` after which nothing more is tried."""

    def floor_us(self, num_seqs: int, num_tokens: int) -> float:
        """Microseconds in which memory moves what must move: states and inputs once in and once out."""
        spec, size = self.spec, self.spec.dtype.itemsize
        moved = 2 * num_seqs * self.layout.bytes_per_slot(spec) + num_tokens * size * (spec.input_channels + spec.out_channels)
        gates = {KDA: spec.num_heads * (spec.key_dim + 1), MAMBA2: spec.num_heads, MAMBA1: spec.num_heads + 2 * spec.key_dim}
        return (moved + num_tokens * size * gates.get(spec.kind, 2 * spec.num_heads)) / self.read_gbps / 1e3


def errors(case: StateCase, backend: TritonStates) -> tuple[float, float]:
    """Run a case and return the relative errors of the output and of the worst state.

    :raises Finding: anything is wrong, or was touched that is nobody's to change.
    """
    judge = Judge.of(case)
    out, expected = judge.run(backend).cpu(), judge.expected
    live = ~expected.out.isnan().any(1)
    recurrent = {slot: state.recurrent for slot, state in expected.written.items() if state.recurrent is not None}
    worst = max((distance(case.cache.logical_recurrent[slot].cpu(), right) for slot, right in recurrent.items()), default=0.0)
    return distance(out[live], expected.out[live]), worst


def check(layer: StudyLayer) -> list[tuple[str, float, float]]:
    """Return errors of the output and of the states, by case, against float64; infinite where something is wrong."""
    cases: dict[str, tuple[list[tuple[int, int]], int, dict[str, Any]]] = {
        "step": ([(1, 21)] * 5, 2, {}),
        "step of 40": ([(1, 21)] * 40, 0, {}),
        "step, drafts": ([(4, 24), (1, 10), (8, 308)], 2, {}),
        "scan": ([(300, 300), (129, 199), (9, 18), (64, 65)], 0, {}),
        "scan of 9": ([(70, 70)] * 9, 0, {}),
        "scan, one prompt": ([(1000, 1000)], 0, {}),
    }
    found = []
    for seed, (name, (lens, padding_rows, cut)) in enumerate(cases.items()):
        case = make_state_case(lens, layer.spec, layer.layout, seed=seed, padding_rows=padding_rows)
        backend = TritonStates(layer.spec, layer.layout)
        backend.tuning = replace(backend.tuning, **cut)
        try:
            found.append((name, *errors(case, backend)))
        except Finding as wrong:
            found.append((f"{name}: {wrong}", math.inf, math.inf))
    return found


def _timed(layer: StudyLayer, lens: Sequence[tuple[int, int]]) -> StateCase:
    """A case as models make it: the convolution has no bias."""
    case = make_state_case(lens, layer.spec, layer.layout, checkpoints=False)
    return replace(case, parameters=replace(case.parameters, conv_bias=None))


def _with_own_states(case: StateCase) -> StateCase:
    """The case with a pool of its own, as another layer has."""
    cache = case.cache
    return replace(case, cache=StateCache({name: each.clone() for name, each in cache.tensors.items()}, cache.layout, cache.spec))


def time_step(layer: StudyLayer, num_seqs: int, cuts: Sequence[dict[str, Any]]) -> StateTimes:
    """Time the decode of one new token of each sequence."""
    case = _timed(layer, [(1, 101)] * num_seqs)
    cases = [case, *(_with_own_states(case) for _ in range(layer.num_layers - 1))]
    cell = StateTimes(f"step {num_seqs}", layer.floor_us(num_seqs, num_seqs))
    for cut in _within(layer, cuts):
        _try(layer, cell, cut, lambda cut: _captured(layer, cases, cut).median_us / len(cases))
    if cell.tried:
        best = cell.best[0]
        cell.alone_us = _captured(layer, cases[:1], best).median_us
        cell.kernels = kernel_times(_call(layer, cases[0], StateTuning(**best)))
    return cell


def time_scan(layer: StudyLayer, num_seqs: int, length: int, cuts: Sequence[Sequence[dict[str, Any]]]) -> StateTimes:
    """Time prompts without a context; a graph spares them the host's launches, which a busy GPU hides in life."""
    case = _timed(layer, [(length, length)] * num_seqs)
    cell = StateTimes(f"scan {num_seqs} x {length}", layer.floor_us(num_seqs, num_seqs * length))
    best: dict[str, Any] = {}
    for group in cuts:
        for cut in _within(layer, group):
            _try(layer, cell, {**best, **cut}, lambda cut: _captured(layer, [case], cut).median_us)
        best = cell.best[0] if cell.tried else best
    if cell.tried:
        call = _call(layer, case, StateTuning(**best))
        cell.alone_us = layer.timer.time(call, layer.spec.device).median_us
        cell.kernels = kernel_times(call)
    return cell


def kernel_times(call: Callable[[], object], runs: int = 10) -> dict[str, float]:
    """Median microseconds of each kernel that a call launches, one call after another."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if event.device_time_total > 0:
            found.setdefault(event.name, []).append(event.device_time_total)
    return {name: median(times) for name, times in found.items() if len(times) >= runs}


def _within(layer: StudyLayer, cuts: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (cut for number, cut in enumerate(cuts) if number == 0 or time.monotonic() < layer.until)


def _try(layer: StudyLayer, cell: StateTimes, cut: dict[str, Any], measure: Callable[[dict[str, Any]], float]) -> None:
    """Time a cut, if its answers are right."""
    lens = [(1, 21)] * 5 if "step" in cell.name else [(200, 200), (65, 135)]
    backend = TritonStates(layer.spec, layer.layout)
    backend.tuning = StateTuning(**cut)
    try:
        found = errors(make_state_case(lens, layer.spec, layer.layout, seed=len(cell.tried)), backend)
        if not max(found) < WRONG:
            raise RuntimeError(f"wrong: errors of {found[0]:.1e} and {found[1]:.1e}")
        cell.tried.append((cut, measure(cut)))
    except Exception as error:  # a cut that this GPU cannot run, or runs wrongly, is a result too
        cell.faults.append(f"{cut}: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}")


def _call(layer: StudyLayer, case: StateCase, tuning: StateTuning) -> Callable[[], None]:
    """A layer's call with everything made beforehand."""
    backend = TritonStates(layer.spec, layer.layout)
    backend.tuning = tuning
    plan = backend.plan(case.metadata)
    out = case.x.new_empty(case.x.shape[0], layer.spec.out_channels)
    run = backend.step if case.metadata.step.num_decodes else backend.scan
    return lambda: run(case.x, case.gates, case.parameters, case.cache, plan, out)


def _captured(layer: StudyLayer, cases: Sequence[StateCase], cut: dict[str, Any]) -> Any:
    """The time of a replay in which each case runs once."""
    calls = [_call(layer, case, StateTuning(**cut)) for case in cases]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return layer.timer.time(graph.replay, layer.spec.device)


def as_json(layer: StudyLayer, checks: Sequence[tuple[str, float, float]], cells: Sequence[StateTimes]) -> dict[str, Any]:
    """Everything that was found."""
    return {
        "layer": str(layer.spec),
        "layout": layer.layout.name,
        "read_gbps": layer.read_gbps,
        "layers_in_a_graph": layer.num_layers,
        "errors": [list(each) for each in checks],
        "cells": [asdict(cell) for cell in cells],
    }
