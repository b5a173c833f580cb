"""How long a call takes: median and spread on the device, and what it costs the host.

On a GPU Triton's `do_bench` times with events and flushes the L2 cache before every run, so that nothing is read from there; on a
CPU it is the process's clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy
import torch

from headway.core.contract.errors import ConfigError
from headway.tuning.table.noise import MOST_DRIFT

QUANTILES = (0.5, 0.2, 0.8)
Clock = Callable[[], float]
_MIN_RUNS = 5
_MAX_RUNS = 1000
_MOST_FLUSHES = 8
"""Flushes of the L2 cache before one run."""
_HOST_RUNS = 20
_HOST_SECONDS = 0.5


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches, and times, on the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True, slots=True)
class Timing:
    """One call's time over many runs, in microseconds."""

    median_us: float
    p20_us: float
    p80_us: float
    drift: float | None = None
    """How much longer the median of the slowest round that counts is than the fastest's, as a share of it; None: one round."""


@dataclass(frozen=True, slots=True)
class Timer:
    """How long to warm up and to repeat. The defaults are those the figures in the documentation were taken with."""

    warmup_ms: float = 15.0
    rep_ms: float = 60.0

    def time(self, call: Callable[[], object], device: torch.device) -> Timing:
        """Median, 20th and 80th percentile of `call` on a device. `call` must leave its inputs as they were.

        :raises ConfigError: a GPU without Triton, whose benchmark loop this is.
        """
        if device.type == "cpu":
            return _time_on_cpu(call, self.warmup_ms, self.rep_ms)
        try:
            from triton.testing import do_bench
        except ImportError as error:
            raise ConfigError("timing on a GPU", "triton", f"{type(error).__name__}: {error}", "pip install triton") from error
        answer = do_bench(call, warmup=self.warmup_ms, rep=self.rep_ms, quantiles=list(QUANTILES), return_mode="median")
        return Timing(*(1e3 * value for value in answer))


def host_us(
    call: Callable[[], object], device: torch.device, seconds: float = _HOST_SECONDS, clock: Clock = time.perf_counter
) -> float:
    """Median microseconds until `call` returns to the host, the device idle before each run and not waited for within it.

    Twenty runs after a warm-up, fewer (three at least) of a call that takes long. A call that takes longer than `seconds` is
    timed once.

    On a CPU the work itself is included, since nothing there returns early.
    """
    began = clock()
    call()
    if clock() - began > seconds:
        return 1e6 * (clock() - began)
    times: list[float] = []
    began = clock()
    while len(times) < 3 or (len(times) < _HOST_RUNS and clock() - began < seconds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = clock()
        call()
        times.append(1e6 * (clock() - start))
    return median(times)


@dataclass(frozen=True, slots=True)
class InterleavedTimer:
    """Times several calls in turns, so that a change on the machine meanwhile affects all of them equally.

    Where rounds of some call disagree, a moment of other work on the machine fell into one of them, and such work only ever adds
    time. Then all calls take more turns, at most as many again, and of each call those rounds count in which it was fastest.
    """

    rounds: int = 3
    round_ms: float = 5.0
    """Milliseconds of each call in each round, after a warm-up run."""
    min_runs: int = 3
    """Runs of each call in each round, however long it takes."""
    max_runs: int = 60
    """Runs of each call in each round, however short it is: on a GPU the flush before each takes longer than a short call."""
    host_seconds: float = 0.05
    """For each figure of what a call takes the host."""
    long_ms: float = 50.0
    """A clear loser is left untimed if timing it would take longer than this. Below it little is saved, and few runs of a short
    call mislead: the host may have been busy."""
    clock: Clock = time.perf_counter
    """Seconds. Times the calls on a CPU, and on a GPU the host's part of a launch."""

    def time(
        self,
        calls: Sequence[Callable[[], object]],
        device: torch.device,
        check: Callable[[], object] = lambda: None,
    ) -> list[Timing | Exception]:
        """Median, 20th and 80th percentile of each call. On a GPU its work alone, the L2 cache flushed before every run.

        A call that raises takes no further turn, and its exception stands in its place; the others go on.

        check: called after each call's round; what it raises is that call's exception.
        """
        run = self._run_times(device)
        rounds: list[list[list[float]]] = [[] for _ in calls]
        failed: dict[int, Exception] = {}
        for turn in range(2 * self.rounds):
            if turn >= self.rounds and all(_drift(found) <= MOST_DRIFT for found in self._counting(rounds, failed).values()):
                break
            for number, call in enumerate(calls):
                if number in failed:
                    continue
                try:
                    rounds[number].append(run(call, self._runs(run(call, 1)[0])))
                    check()
                except Exception as error:
                    failed[number] = error
                    with suppress(Exception):
                        check()  # lets it undo what the call did before it raised
        counting = self._counting(rounds, failed)
        return [failed.get(number) or _summary(counting[number]) for number in range(len(calls))]

    def _counting(self, rounds: Sequence[list[list[float]]], failed: Collection[int]) -> dict[int, list[list[float]]]:
        """The number of each call that has not failed -> its rounds that count."""
        return {number: sorted(found, key=median)[: self.rounds] for number, found in enumerate(rounds) if number not in failed}

    def _runs(self, us: float) -> int:
        """Runs in each round of a call that takes `us` microseconds."""
        return min(max(int(1e3 * self.round_ms / max(us, 1e-3)), self.min_runs), self.max_runs)

    def needed_ms(self, us: float) -> float:
        """Milliseconds it takes to time a call of `us` microseconds, without the flushes, which every call needs."""
        return 1e-3 * self.rounds * (1 + self._runs(us)) * us

    def estimate(self, call: Callable[[], object], device: torch.device) -> float:
        """The better of two runs, in microseconds: enough to know a clear loser among calls that take long."""
        return min(self._run_times(device)(call, 2))

    def _run_times(self, device: torch.device) -> Callable[[Callable[[], object], int], list[float]]:
        """The function that runs a call several times on a device and returns each run's microseconds."""
        return EventClock(device, self.clock).times if device.type == "cuda" else partial(_cpu_times, clock=self.clock)


def _summary(rounds: Sequence[list[float]]) -> Timing:
    middle, low, high = map(float, numpy.quantile([us for found in rounds for us in found], QUANTILES))
    return Timing(middle, low, high, _drift(rounds) if len(rounds) > 1 else None)


def _drift(rounds: Sequence[list[float]]) -> float:
    medians = [median(found) for found in rounds]
    return max(medians) / max(min(medians), 1e-9) - 1


class EventClock:
    """Times runs on a GPU by events, each after a flush of the L2 cache.

    A call whose launches take the host longer than the flush takes the device would be timed as the host's work: the device
    would wait between the events. Before such a call the cache is flushed several times, so that the device is still busy when
    the last launch arrives, and only its own work lies between the events. What the host takes is measured apart (`host_us`).
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(max(size, 2**20), dtype=torch.int8, device=device)
        self._flush_us = 0.0  # unknown: one flush each
        self._flush_us = min(self.times(self._flushed.zero_, 3))

    def times(self, call: Callable[[], object], runs: int) -> list[float]:
        """Microseconds of the device's work in each of `runs` runs."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        host = 0.0  # known after the first run, which alone may be timed too long
        for start, end in events:
            for _ in range(_flushes(host, self._flush_us)):
                self._flushed.zero_()
            start.record()
            began = self._clock()
            call()
            host = 1e6 * (self._clock() - began)
            end.record()
        events[-1][1].synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events]


def _flushes(host_us: float, flush_us: float) -> int:
    """Flushes that keep the device busy for half as long again as the host takes, since not every launch takes it as long."""
    return min(max(math.ceil(1.5 * host_us / flush_us), 1), _MOST_FLUSHES) if flush_us > 0 else 1


def _cpu_times(call: Callable[[], object], runs: int, clock: Clock) -> list[float]:
    times = []
    for _ in range(runs):
        before = clock()
        call()
        times.append(1e6 * (clock() - before))
    return times


def _time_on_cpu(call: Callable[[], object], warmup_ms: float, rep_ms: float) -> Timing:
    start = time.perf_counter()
    call()  # first touch: allocations, thread pools
    while time.perf_counter() - start < 1e-3 * warmup_ms:
        call()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < _MIN_RUNS or (time.perf_counter() - start < 1e-3 * rep_ms and len(times) < _MAX_RUNS):
        times += _cpu_times(call, 1, time.perf_counter)
    return Timing(*(float(each) for each in numpy.quantile(times, QUANTILES)))


MOST_COMPILING = 2.0
"""Times the budget: compiling beyond this counts, so that no start takes longer than three times what was asked for."""


class Budget:
    """Seconds for measuring. Compiling kernels is not counted: it would leave points unmeasured that a second start measures."""

    def __init__(self, seconds: float | None = None) -> None:
        """seconds: None is as many as it takes."""
        self._seconds = seconds
        self._started = time.perf_counter()
        self.compiling = 0.0
        """Seconds that first calls took longer than later ones; whoever makes such a call adds to it."""

    def begin(self) -> None:
        """Count from now on; what went before, at most `MOST_COMPILING` times the budget, was compiling."""
        self.compiling += time.perf_counter() - self._started

    @property
    def spent(self) -> float:
        """Seconds that count."""
        free = self.compiling if self._seconds is None else min(self.compiling, MOST_COMPILING * self._seconds)
        return time.perf_counter() - self._started - free

    @property
    def left(self) -> float | None:
        """Seconds that are left; None without a limit."""
        return None if self._seconds is None else self._seconds - self.spent


class SharedBudget:
    """Seconds of measuring that a start has for everything that it measures, part by part."""

    def __init__(self, seconds: float, parts: int = 0, clock: Clock = time.perf_counter) -> None:
        """parts: how many may still ask for a share."""
        self._left = seconds
        self._parts = parts
        self._clock = clock

    def expect(self, parts: int) -> None:
        """Have so many more parts ask for a share."""
        self._parts += parts

    @contextmanager
    def part(self) -> Iterator[float]:
        """The seconds of the next part: an equal share of what is left. What a part does not take is left for the others; what it
        takes beyond its share, such as for compiling, they do not lose."""
        share = self._left / max(self._parts, 1)
        began = self._clock()
        try:
            yield share
        finally:
            self._left -= min(share, self._clock() - began)
            self._parts -= 1
