"""Measured times of the ways of summing over ranks, by the number of bytes."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.core.engine.ranks.torch_ranks import BYTES, SIZES, AllReduce, describe_sums
from headway.core.select.costs import AxisTimes
from headway.registry.records import BUILTIN_OWNER
from headway.tuning.measure.counted_layer import Times, save_table, timed_table
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.find_table import usable_table
from headway.tuning.measure.measure_point import new_cell
from headway.tuning.measure.points import counted_points
from headway.tuning.table.convert import source_of, to_times
from headway.tuning.table.schema import CrossoverTable, DeviceIdentity, KernelRecord, RanksRecord

if TYPE_CHECKING:
    from headway.core.engine.ranks.torch_ranks import TorchRanks

WAYS = ("one_shot", "nccl")
"""All ways of a GPU, in the order in which they are asked."""
_CALLS = 100
"""Calls in the CUDA graph that is timed. They spread what the launches of two processes lie apart: tens of microseconds."""
_REPLAYS = 7
_TOLERANCE = 2.0**-6
"""What sums in bfloat16 may differ by, relative to the largest element, where they round after each rank."""
_CHECK_SECONDS = 30.0
"""The longest that a sum of a check takes: another rank may compile the kernel first."""
log = logging.getLogger("headway")


def choose_all_reduce(ranks: TorchRanks, budget: float) -> None:
    """Give ranks their ways of summing on a GPU, and have them choose by measured times; every rank calls.

    budget: seconds that may be measured; 0: nothing is, and where nothing is kept our kernel sums what it takes.
    """
    if ranks.device.type != "cuda":
        return
    one_shot = _one_shot(ranks)
    if one_shot is None:
        return
    ways = [one_shot, *ranks.sums]
    ranks.sum_by(ways, None)
    device = identify_device(ranks.device)
    stored = stored_sums(device, ranks.size) if ranks.rank == 0 else None
    table = torch.full((len(WAYS), len(SIZES)), math.nan, device=ranks.device)
    source = "stored by rank 0"
    if stored is not None:
        us, source = to_times(stored, SIZES), source_of(stored)
        table = torch.tensor([[math.nan if each is None else each for each in us[name]] for name in WAYS], device=ranks.device)
    table = ranks.broadcast(table)
    if budget > 0 and bool(table.isnan().all()):
        table, source = _measured(ranks), "measured now"
        if ranks.rank == 0:
            save_table(sums_table(device, ranks.size, _by_name(table)))
    if not bool(table.isnan().all()):
        ranks.sum_by(ways, AxisTimes(BYTES, _by_name(table), source))
    if ranks.rank == 0:
        unmeasured = "one_shot where it takes the tensor, else nccl (not measured)"
        log.info("all-reduce: %s", unmeasured if ranks.times is None else describe_sums(ranks.times))


def stored_sums(device: DeviceIdentity, size: int) -> CrossoverTable | None:
    """Return the times that are stored for this number of these GPUs and this software; the log says why they are not used."""
    return usable_table(RanksRecord(layer=f"{size} ranks"), device, WAYS)


def sums_table(device: DeviceIdentity, size: int, us: Times) -> CrossoverTable:
    """Return the table of a number of ranks. us: for each of SIZES."""
    timed = [
        (name, point, times[cell]) for name, times in us.items() for cell, point in enumerate(counted_points("bytes", SIZES))
    ]
    cells = [new_cell(point, name, None, "ok", median_us=time) for name, point, time in timed if time is not None]
    records = [KernelRecord(name=name, owner=BUILTIN_OWNER, available=True) for name in us]
    table = timed_table(RanksRecord(layer=f"{size} ranks"), device, records, cells)
    table.complete = True
    return table


def describe_stored_sums(device: torch.device, size: int) -> str:
    """Return how this number of ranks on GPUs of this kind sum, in words, by what is stored."""
    if device.type != "cuda":
        return "gloo"
    stored = stored_sums(identify_device(device), size)
    if stored is None:
        return "not measured yet: the first start of so many ranks measures and keeps it"
    return describe_sums(AxisTimes(BYTES, to_times(stored, SIZES), source_of(stored)))


def _one_shot(ranks: TorchRanks) -> AllReduce | None:
    """Our kernel, where every rank can run it; why not is logged."""
    made: AllReduce | None = None
    try:
        from headway.kernels.all_reduce.one_shot_kernels import NOTHING, OneShotAllReduce, shared_bytes
        from headway.kernels.all_reduce.peer_memory import PeerMemory

        unreached = [other for other in range(ranks.size) if not _reaches(ranks.device, other)]
        if unreached:
            raise RuntimeError(f"GPU {ranks.device.index} does not reach the memory of GPU {unreached[0]}")
    except (ImportError, RuntimeError) as error:
        reason = str(error)
    else:
        refused = os.environ.get("NCCL_P2P_DISABLE", "0") != "0"
        reason = "NCCL_P2P_DISABLE says that GPUs are not to reach each other's memory" if refused else ""
    if _all(ranks, not reason):
        try:
            memory = PeerMemory(ranks.store, ranks.rank, ranks.size, ranks.device, shared_bytes(ranks.size), NOTHING)
            side = torch.cuda.Stream(ranks.device)
            made = OneShotAllReduce(ranks.rank, ranks.device, memory.addresses, memory, side)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
        if _all(ranks, made is not None):
            wrong = _wrong(ranks, made) if made is not None else ""
            if _all(ranks, not wrong):
                return made
            reason = wrong
    log.warning("all-reduce: one_shot is left out, and nccl sums: %s", reason or "another rank says why")
    return None


def _reaches(device: torch.device, other: int) -> bool:
    return device.index == other or torch.cuda.can_device_access_peer(device, other)


def _all(ranks: TorchRanks, ok: bool) -> bool:
    """Whether something holds on every rank; every rank calls."""
    return bool(ranks.all_gather(torch.tensor([ok], dtype=torch.int32, device=ranks.device)).min())


def _wrong(ranks: TorchRanks, way: AllReduce) -> str:
    """What is wrong with a way's sums, beside those of what is gathered; empty: nothing."""
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    for number, count in enumerate((8, 5000, 200_000, 24, 100_000, 48, 2**18)):
        x = torch.empty(count, dtype=torch.bfloat16, device=ranks.device).normal_(generator=generator)
        expected = ranks.all_gather(x).float().sum(0)
        onto = torch.full_like(x, 3.0) if number % 2 else None
        found = way(x, onto).clone()
        if not _is_done(ranks.device):
            way.abort()
            return f"a sum of {count} elements has not ended in {_CHECK_SECONDS:g} s: GPUs do not see what others write"
        error = float((found.float() - expected - (0.0 if onto is None else 3.0)).abs().max() / expected.abs().max())
        if not error < _TOLERANCE:
            return f"a sum of {count} elements is off by {error:.1e}"
        if int((ranks.all_gather(found) != found).sum()):
            return f"ranks got other bits of a sum of {count} elements"
    return ""


def _is_done(device: torch.device) -> bool:
    """Wait, for so long as a check may take, until a device has done what it was given."""
    event: Any = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    until = time.monotonic() + _CHECK_SECONDS
    while not (done := bool(event.query())) and time.monotonic() < until:
        time.sleep(0.0005)
    return done


def _measured(ranks: TorchRanks) -> Tensor:
    """Time every way in a CUDA graph: float32 [WAYS, SIZES], microseconds of the slowest rank."""
    if ranks.rank == 0:
        log.info("all-reduce: measuring %d ways of summing over %d ranks, once", len(ranks.sums), ranks.size)
    table = torch.full((len(WAYS), len(SIZES)), math.nan, device=ranks.device)
    for way in ranks.sums:
        for cell, size in enumerate(SIZES):
            x = torch.zeros(size // 2, dtype=torch.bfloat16, device=ranks.device)
            if way.takes(x):
                table[WAYS.index(way.name), cell] = time_all_reduce(ranks, way, x)
    return ranks.all_gather(table).amax(0)


def time_all_reduce(
    ranks: TorchRanks,
    way: AllReduce,
    x: Tensor,
    onto: Tensor | None = None,
    capture: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> float:
    """Microseconds of a call in a CUDA graph, on this rank; every rank calls. capture: what a library wants around a capture."""
    stream: torch.cuda.Stream = torch.cuda.Stream(ranks.device)
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(ranks.device))
    with torch.cuda.stream(stream):
        way(x, onto)  # compiles, and connects
        torch.cuda.synchronize(ranks.device)
        with capture(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(_CALLS):
                way(x, onto)
        times: list[float] = []
        for _ in range(_REPLAYS):
            _all(ranks, True)  # which the ranks leave together
            begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(ranks.device)
            times.append(begin.elapsed_time(end) * 1e3 / _CALLS)
    torch.cuda.current_stream(ranks.device).wait_stream(stream)
    return sorted(times)[_REPLAYS // 2]


def _by_name(table: Tensor) -> Times:
    return {name: [None if math.isnan(us) else us for us in row] for name, row in zip(WAYS, table.tolist(), strict=True)}
