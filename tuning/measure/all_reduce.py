"""Measured times of the all-reduce kernels for each message size in bytes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.core.contract.ranks import AllReduceKernel, AsyncAllReduceKernel, RankGroup
from headway.core.engine.ranks.torch_ranks import BYTES, SIZES, describe_sums
from headway.core.select.costs import AxisTimes
from headway.registry.records import BUILTIN_OWNER
from headway.tuning.measure.counted_layer import INTERLEAVED, CountedLayer, Times, timed_table
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.find_table import find_table, usable_table
from headway.tuning.measure.measure_point import new_cell
from headway.tuning.measure.points import Point, counted_points
from headway.tuning.measure.timing import Budget, Timing
from headway.tuning.table.convert import source_of, to_times
from headway.tuning.table.schema import CrossoverTable, DeviceIdentity, KernelRecord, RanksRecord

if TYPE_CHECKING:
    from headway.core.engine.ranks.torch_ranks import TorchRanks
    from headway.core.select.kernels import KernelRegistry

_CALLS = 100
"""Number of calls in the CUDA graph that is timed. Many calls average out the skew between the launches of two processes, which
is tens of microseconds."""
_REPLAYS = 7
_TOLERANCE = 2.0**-6
"""Maximum error of bfloat16 sums that are rounded after each rank, relative to the largest element."""
_CHECK_SECONDS = 30.0
"""Maximum seconds that a check waits for a sum, since a different rank may first have to compile the kernel."""
_END = -1
_OVERLAPS = "overlaps with the linear layers of prompts with thousands of tokens"
_LEFT_OUT = "only one kernel overlaps with linear layers, the first one that is registered and runs here: %s"
log = logging.getLogger("headway")


def choose_all_reduce(ranks: TorchRanks, kernels: KernelRegistry[AllReduceKernel, Any], budget: float) -> None:
    """Select the fastest all-reduce kernel for each size by measured times. Every rank must call this function.

    budget: seconds that may be spent on measuring. If 0, nothing is measured. Without a stored table, a tensor is then summed by
    the first kernel that supports it.
    """
    joined = _joined(ranks, kernels)
    overlapping = [each for each in joined if isinstance(each, AsyncAllReduceKernel)]
    overlapped = overlapping[0] if overlapping else None
    for each in overlapping[1:] if ranks.rank == 0 else ():
        log.info("all-reduce: leaving out %s: %s", each.name, _LEFT_OUT % overlapping[0].name)
    sums = [each for each in joined if not isinstance(each, AsyncAllReduceKernel)]
    ranks.sum_by(sums, None, overlapped)
    if len(sums) == 1:
        return
    names, wanted, group = [each.name for each in sums], counted_points("bytes", SIZES), _record(ranks.size)
    layer = SumLayer(group, identify_device(ranks.device), names, wanted, ranks.device, INTERLEAVED, None, ranks)
    us, source = torch.full((len(sums), len(SIZES)), math.nan, device=ranks.device), "stored by rank 0"
    if ranks.rank > 0:
        layer.follow()
    else:
        table = find_table(layer, budget)
        layer.agree(None)
        if table is not None:
            times, source = to_times(table, SIZES), source_of(table)
            us = torch.tensor([[each or math.nan for each in times[name]] for name in layer.kernels], device=ranks.device)
    us = ranks.broadcast(us)
    if not bool(us.isnan().all()):
        rows = zip(layer.kernels, us.tolist(), strict=True)
        by_name = {name: [None if math.isnan(each) else each for each in row] for name, row in rows}
        ranks.sum_by(sums, AxisTimes(BYTES, by_name, source), overlapped)
    if ranks.rank == 0:
        rule = f"{', else '.join(layer.kernels)}, the first that supports the tensor (not measured)"
        more = "" if overlapped is None else f"; {overlapped.name}: {_OVERLAPS}"
        log.info("all-reduce: %s%s", rule if ranks.times is None else describe_sums(ranks.times), more)


def explain_sums(kernels: KernelRegistry[AllReduceKernel, Any], spec: RankGroup, in_order: bool = False) -> dict[str, Any]:
    """Return the sizes from which each all-reduce kernel is used, the source of this choice, and the reasons against other
    kernels. Nothing is measured. in_order: True if the ranks sum in rank order (deterministic mode)."""
    common: dict[str, Any] = {"sums": f"sums over {spec.size} ranks", "unit": BYTES.unit, "us": {}}
    if in_order:
        return {**common, "ways": {1: "all-gather"}, "refused": {}, "by": "deterministic mode, which adds in rank order"}
    found = {name: kernels.supports(name, spec) for name in kernels.meant_for(spec.device.type)}
    classes = {name: kernels.backend(name) for name, support in found.items() if support}
    overlapping = [name for name, kernel in classes.items() if issubclass(kernel, AsyncAllReduceKernel)]
    able = {name: kernel.capabilities.max_bytes for name, kernel in classes.items() if name not in overlapping}
    refused = {name: support.brief for name, support in found.items() if not support}
    for name in overlapping[1:]:
        refused[name] = _LEFT_OUT % overlapping[0]
    common |= {"refused": refused, "overlapped": dict.fromkeys(overlapping[:1], _OVERLAPS)}
    names, source = list(able), "the first that supports the tensor; the first start with this number of ranks measures"
    times = None
    if len(names) == 1:
        return {**common, "ways": {1: names[0]}, "by": "no other kernel runs here"}
    if (table := usable_table(_record(spec.size), identify_device(spec.device), names)) is not None:
        times, source = AxisTimes(BYTES, to_times(table, SIZES), source_of(table)), source_of(table)

    def serving(count: int) -> str:
        candidates = [name for name, most in able.items() if most is None or count <= most]
        return (times.fastest(count, candidates) if times is not None else None) or candidates[0 if times is None else -1]

    return {**common, "ways": BYTES.changes(serving), "by": source}


def sums_table(device: DeviceIdentity, size: int, us: Times) -> CrossoverTable:
    """Return the crossover table for `size` ranks. us: kernel -> microseconds per all-reduce, for each size in SIZES."""
    points = counted_points("bytes", SIZES)
    timed = [(name, *found) for name, times in us.items() for found in zip(points, times, strict=True)]
    cells = [new_cell(point, name, None, "ok", median_us=time) for name, point, time in timed if time is not None]
    records = [KernelRecord(name=name, owner=BUILTIN_OWNER, available=True) for name in us]
    return timed_table(_record(size), device, records, cells).model_copy(update={"complete": True})


def _record(size: int) -> RanksRecord:
    return RanksRecord(layer=f"{size} ranks")


@dataclass(frozen=True)
class SumLayer(CountedLayer):
    """All-reduce over ranks, measured at several sizes in bytes. Rank 0 requests sizes, and all ranks time them together."""

    ranks: TorchRanks

    def able(self, count: int) -> list[str]:
        x = self._x(count)
        return [each.name for each in self.ranks.sums if each.takes(x)]

    def check(self, name: str, count: int) -> None:
        """Do nothing: kernels have already been checked when the ranks joined."""

    def call(self, name: str, count: int) -> Callable[[], object]:
        return partial(next(each for each in self.ranks.sums if each.name == name), self._x(count))

    def layers(self, count: int) -> int:
        return 1

    def ready(self, counts: Collection[int]) -> AbstractContextManager[object]:
        self.agree(counts)
        return nullcontext()

    def time(self, calls: Sequence[Callable[[], object]]) -> list[Timing | Exception]:
        return [time_sum(self.ranks, call) for call in calls]

    def measure(self, wanted: Sequence[Point], seconds: float, old: CrossoverTable | None, *, resume: bool) -> CrossoverTable:
        """Measure all points regardless of the budget: ranks that stop at different points would wait for each other."""
        return super().measure(wanted, math.inf, old, resume=resume)

    def agree(self, counts: Collection[int] | None) -> list[int] | None:
        """Return the sizes that rank 0 measures next, or None at the end. counts: sizes that rank 0 requests; ignored on other
        ranks."""
        asked = [_END] * len(SIZES) if counts is None else [int(size in counts) for size in SIZES]
        found = self.ranks.broadcast(torch.tensor(asked, device=self.on)).tolist()
        return None if _END in found else [size for size, wanted in zip(SIZES, found, strict=True) if wanted]

    def follow(self) -> None:
        """Time the sizes that rank 0 requests until rank 0 ends."""
        with torch.inference_mode():
            while (counts := self.agree(())) is not None:
                list(self._cells(counted_points("bytes", counts), Budget(math.inf)))

    def _x(self, count: int) -> Tensor:
        return torch.zeros(count // 2, dtype=torch.bfloat16, device=self.on)


def _joined(ranks: TorchRanks, kernels: KernelRegistry[AllReduceKernel, Any]) -> list[AllReduceKernel]:
    """Return the kernels that run on every rank with correct sums, then the process group's kernel. The log names excluded
    kernels."""
    group, found = ranks.sums[-1], list[AllReduceKernel]()
    for name in kernels.meant_for(ranks.device.type):
        if name == group.name:
            continue
        made: AllReduceKernel | None = None
        support = kernels.supports(name, ranks.group)
        why = "" if support else support.brief
        if _all(ranks, bool(support)):
            try:
                made = kernels.backend(name).join(ranks.group)
            except RuntimeError as error:
                why = " ".join(str(error).split())
            if _all(ranks, made is not None) and made is not None:
                why = _wrong(ranks, made)
                if _all(ranks, not why):
                    found.append(made)
                    continue
        log.warning("all-reduce: excluding %s; %s is used instead: %s", name, group.name, why or "another rank logs the reason")
    return [*found, group]


def _all(ranks: TorchRanks, ok: bool) -> bool:
    """Return whether `ok` is true on every rank. Every rank must call this function."""
    return bool(ranks.all_gather(torch.tensor([ok], dtype=torch.int32, device=ranks.device)).min())


def _wrong(ranks: TorchRanks, kernel: AllReduceKernel) -> str:
    """Return a description of how a kernel's sums differ from sums over gathered tensors, or "" if the kernel's sums are
    correct."""
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    for number, count in enumerate((8, 5000, 200_000, 24, 100_000, 48, 2**18, 2**24 + 8, 2**23 + 24)):
        x = torch.empty(count, dtype=torch.bfloat16, device=ranks.device).normal_(generator=generator)
        if not kernel.takes(x):
            continue
        expected = ranks.all_gather(x).float().sum(0)
        onto = torch.full_like(x, 3.0) if number % 2 else None
        found = kernel(x, onto).clone()
        if not _is_done(ranks.device):
            kernel.abort()
            return f"a sum of {count} elements has not ended in {_CHECK_SECONDS:g} s: GPUs do not see what others write"
        error = float((found.float() - expected - (0.0 if onto is None else 3.0)).abs().max() / expected.abs().max())
        if not error < _TOLERANCE:
            return f"a sum of {count} elements is off by {error:.1e}"
        if int((ranks.all_gather(found) != found).sum()):
            return f"ranks got other bits of a sum of {count} elements"
    return ""


def _is_done(device: torch.device) -> bool:
    """Wait at most `_CHECK_SECONDS` for a device to finish its work, and return whether the work is finished."""
    if device.type == "cpu":
        return True
    event: Any = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    until = time.monotonic() + _CHECK_SECONDS
    while not (done := bool(event.query())) and time.monotonic() < until:
        time.sleep(0.0005)
    return done


def time_sum(
    ranks: TorchRanks, call: Callable[[], object], capture: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Timing:
    """Return the time of a call on the slowest rank; on a GPU, the call is timed in a CUDA graph. Every rank must call this
    function.

    capture: context manager that a library needs around graph capture.
    """
    times = _host_times(call) if ranks.device.type == "cpu" else _graph_times(ranks, call, capture)
    slowest = ranks.all_gather(torch.tensor(sorted(times), device=ranks.device)).amax(0).tolist()
    return Timing(slowest[_REPLAYS // 2], slowest[_REPLAYS // 5], slowest[-1 - _REPLAYS // 5])


def _host_times(call: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(_REPLAYS):
        began = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - began))
    return times


def _graph_times(
    ranks: TorchRanks, call: Callable[[], object], capture: Callable[[], AbstractContextManager[object]]
) -> list[float]:
    stream: torch.cuda.Stream = torch.cuda.Stream(ranks.device)
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(ranks.device))
    with torch.cuda.stream(stream):
        call()  # compiles the kernel and connects the ranks
        torch.cuda.synchronize(ranks.device)
        with capture(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(_CALLS):
                call()
        times: list[float] = []
        for _ in range(_REPLAYS):
            _all(ranks, True)  # a barrier, so that the ranks start together
            begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(ranks.device)
            times.append(begin.elapsed_time(end) * 1e3 / _CALLS)
    torch.cuda.current_stream(ranks.device).wait_stream(stream)
    return times
