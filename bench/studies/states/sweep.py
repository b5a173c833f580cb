"""Times of a state backend's calls, for every cut that its kernels can be given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from statistics import median
from typing import Any

import torch

from headway.backends.states.triton.backend import TritonStates
from headway.backends.states.triton.tuning import StateTuning
from headway.bench.studies.states.case import SlotCase, errors, make_case
from headway.core.contract.backend import Lengths
from headway.core.contract.state import KDA, MAMBA1, MAMBA2, StateLayout, StateSpec
from headway.tuning.measure.timing import Timer

STEP_CUTS = tuple(
    {"step_value": value, "step_warps": warps, "step_fused": fused}
    for fused, value, warps in product((True, False), (16, 32, 64, 128), (2, 4, 8))
    if 8 <= value * 4 // warps <= 128
)
"""A thread holds 8 to 128 numbers of a state whose keys are 128 long."""
SCAN_CUTS = (
    tuple({"rows": rows, "row_warps": warps} for rows, warps in product((16, 32, 64), (4, 8))),
    tuple({"chunk_warps": warps} for warps in (2, 4, 8)),
    tuple(
        {"walk_value": value, "walk_stages": stages, "walk_warps": warps}
        for value, stages, warps in (
            (16, 2, 4),
            (16, 3, 4),
            (32, 2, 4),
            (32, 3, 4),
            (32, 2, 8),
            (64, 1, 4),
            (64, 2, 4),
            (64, 2, 8),
        )
    ),
)
"""Cuts of the convolution, of what lies within chunks, and of the walk along them: each after the best of those before."""


@dataclass
class StateCell:
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


def check(layer: StudyLayer) -> list[tuple[str, float, float]]:
    """Return errors of the output and of the states, by case, against float64."""
    cases: dict[str, tuple[list[Lengths], dict[int, list[int]], dict[str, Any]]] = {
        "step": ([Lengths(1, 20)] * 5, {}, {}),
        "step, drafts": ([Lengths(4, 20, 3), Lengths(1, 9), Lengths(8, 300, 7)], {}, {}),
        "step, two launches": ([Lengths(1, 20)] * 5, {}, {"step_fused": False}),
        "scan": ([Lengths(300, 0), Lengths(129, 70), Lengths(2, 9), Lengths(64, 1)], {0: [64, 256], 1: [128], 3: [64]}, {}),
        "scan, one prompt": ([Lengths(2000, 0)], {0: [1024]}, {}),
    }
    found = []
    for seed, (name, (lens, checkpoints, cut)) in enumerate(cases.items()):
        case = make_case(
            layer.spec, layer.layout, lens, seed=seed, checkpoints=checkpoints, pad_rows=2 * (lens[0].num_drafts > 0)
        )
        backend = TritonStates(layer.spec, layer.layout)
        backend.tuning = replace(backend.tuning, **cut)
        found.append((name, *errors(case, backend)))
    return found


def time_step(layer: StudyLayer, num_seqs: int, cuts: Sequence[dict[str, Any]]) -> StateCell:
    """Time the decode of one new token of each sequence."""
    lens = [Lengths(1, 100)] * num_seqs
    cases = [make_case(layer.spec, layer.layout, lens, seed=i, bias=False) for i in range(layer.num_layers)]
    cell = StateCell(f"step {num_seqs}", layer.floor_us(num_seqs, num_seqs))
    for cut in _within(layer, cuts):
        _try(cell, cut, lambda cut: _captured(layer, cases, cut).median_us / len(cases))
    if cell.tried:
        best = cell.best[0]
        cell.alone_us = _captured(layer, cases[:1], best).median_us
        cell.kernels = kernel_times(_call(layer, cases[0], StateTuning(**best)))
    return cell


def time_scan(layer: StudyLayer, num_seqs: int, length: int, cuts: Sequence[Sequence[dict[str, Any]]]) -> StateCell:
    """Time prompts without a context; a graph spares them the host's launches, which a busy GPU hides in life."""
    case = make_case(layer.spec, layer.layout, [Lengths(length, 0)] * num_seqs, bias=False)
    cell = StateCell(f"scan {num_seqs} x {length}", layer.floor_us(num_seqs, num_seqs * length))
    best: dict[str, Any] = {}
    for group in cuts:
        for cut in _within(layer, group):
            _try(cell, {**best, **cut}, lambda cut: _captured(layer, [case], cut).median_us)
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


def _try(cell: StateCell, cut: dict[str, Any], measure: Callable[[dict[str, Any]], float]) -> None:
    try:
        cell.tried.append((cut, measure(cut)))
    except Exception as error:  # a cut that this GPU cannot run is a result too
        cell.faults.append(f"{cut}: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}")


def _call(layer: StudyLayer, case: SlotCase, tuning: StateTuning) -> Callable[[], None]:
    """A layer's call with everything made beforehand."""
    backend = TritonStates(layer.spec, layer.layout)
    backend.tuning = tuning
    plan = backend.plan(case.metadata)
    out = case.x.new_empty(case.x.shape[0], layer.spec.out_channels)
    run = backend.step if case.metadata.step.num_decodes else backend.scan
    return lambda: run(case.x, case.gates, case.parameters, case.cache, plan, out)


def _captured(layer: StudyLayer, cases: Sequence[SlotCase], cut: dict[str, Any]) -> Any:
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


def as_json(layer: StudyLayer, checks: Sequence[tuple[str, float, float]], cells: Sequence[StateCell]) -> dict[str, Any]:
    """Everything that was found."""
    return {
        "layer": str(layer.spec),
        "layout": layer.layout.name,
        "read_gbps": layer.read_gbps,
        "layers_in_a_graph": layer.num_layers,
        "errors": [list(each) for each in checks],
        "cells": [asdict(cell) for cell in cells],
    }
