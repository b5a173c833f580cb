"""Timing of calls: median and spread of the device time, and host time.

On a GPU, `Timer` uses Triton's `do_bench`: CUDA events, with the L2 cache flushed before every run. On a CPU, it uses a host
clock.
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
"""Maximum number of L2 flushes before one run."""
_HOST_RUNS = 20
_HOST_SECONDS = 0.5


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that makes a GPU current: Triton launches and times on the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call over many runs, in microseconds."""

    median_us: float
    p20_us: float
    p80_us: float
    drift: float | None = None
    """Relative difference between the medians of the slowest and fastest counted rounds. None if there was only one round."""


@dataclass(frozen=True, slots=True)
class Timer:
    """Timer with a warm-up and a repetition time. The documentation's results were measured with the defaults."""

    warmup_ms: float = 15.0
    rep_ms: float = 60.0

    def time(self, call: Callable[[], object], device: torch.device) -> Timing:
        """Return median, 20th and 80th percentile of `call` on a device. `call` must not change its inputs.

        :raises ConfigError: if the device is a GPU and Triton, which provides the benchmark loop, is not installed.
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
    """Return the median time until `call` returns to the host, in microseconds, with the device idle before each run.

    There are twenty runs after a warm-up; a long call has fewer runs, but at least three. A call longer than `seconds` is timed
    once. On a CPU the time includes the work itself, because calls are synchronous.
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
    """Timer for several calls in alternating rounds, so that a change on the machine affects all calls equally.

    If the rounds of a call disagree, other work on the machine, which can only add time, has disturbed a round. All calls then
    run more rounds, at most twice as many, and the fastest rounds of each call count.
    """

    rounds: int = 3
    round_ms: float = 5.0
    """Milliseconds for each round of a call, after a warm-up run."""
    min_runs: int = 3
    """Minimum number of runs in each round of a call."""
    max_runs: int = 60
    """Maximum number of runs in each round of a call. On a GPU, the flush before each run takes longer than a short call."""
    host_seconds: float = 0.05
    """Seconds for each measurement of host time."""
    long_ms: float = 50.0
    """Maximum milliseconds for timing a clearly slower call; a call that would take longer to time is skipped. Skipping a shorter
    call would save little time, and judging it by a few runs is misleading on a busy host."""
    clock: Clock = time.perf_counter
    """Clock in seconds, for calls on a CPU and for the host time of launches on a GPU."""

    def time(
        self,
        calls: Sequence[Callable[[], object]],
        device: torch.device,
        check: Callable[[], object] = lambda: None,
    ) -> list[Timing | Exception]:
        """Return median, 20th and 80th percentile of the time of each call. On a GPU, only device time is measured, with the L2
        cache flushed before every run.

        A call that raises an exception is not run again, and the exception is its result; the other calls continue.

        check: function called after each round of a call; an exception in `check` counts as an exception of the call.
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
                        check()  # undoes what the call wrote before it raised
        counting = self._counting(rounds, failed)
        return [failed.get(number) or _summary(counting[number]) for number in range(len(calls))]

    def _counting(self, rounds: Sequence[list[list[float]]], failed: Collection[int]) -> dict[int, list[list[float]]]:
        """Return index -> the rounds that count, for each call that has not failed."""
        return {number: sorted(found, key=median)[: self.rounds] for number, found in enumerate(rounds) if number not in failed}

    def _runs(self, us: float) -> int:
        """Return the number of runs per round of a call that takes `us` microseconds."""
        return min(max(int(1e3 * self.round_ms / max(us, 1e-3)), self.min_runs), self.max_runs)

    def needed_ms(self, us: float) -> float:
        """Return the milliseconds needed to time a call of `us` microseconds, without the flushes that every call needs."""
        return 1e-3 * self.rounds * (1 + self._runs(us)) * us

    def estimate(self, call: Callable[[], object], device: torch.device) -> float:
        """Return the faster of two runs in microseconds: enough to detect a clearly slower call among long calls."""
        return min(self._run_times(device)(call, 2))

    def _run_times(self, device: torch.device) -> Callable[[Callable[[], object], int], list[float]]:
        """Return a function that runs a call several times on a device and returns the microseconds of each run."""
        return EventClock(device, self.clock).times if device.type == "cuda" else partial(_cpu_times, clock=self.clock)


def _summary(rounds: Sequence[list[float]]) -> Timing:
    middle, low, high = map(float, numpy.quantile([us for found in rounds for us in found], QUANTILES))
    return Timing(middle, low, high, _drift(rounds) if len(rounds) > 1 else None)


def _drift(rounds: Sequence[list[float]]) -> float:
    medians = [median(found) for found in rounds]
    return max(medians) / max(min(medians), 1e-9) - 1


class EventClock:
    """Timer for runs on a GPU by CUDA events, each after a flush of the L2 cache.

    If launching a call takes the host longer than the flush takes the device, the device would idle between the events and host
    time would be measured. Before such a call the cache is flushed several times, so that the device is busy until the last
    launch arrives. Host time is measured separately (`host_us`).
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(max(size, 2**20), dtype=torch.int8, device=device)
        self._flush_us = 0.0  # unknown: one flush per run
        self._flush_us = min(self.times(self._flushed.zero_, 3))

    def times(self, call: Callable[[], object], runs: int) -> list[float]:
        """Return the device time of each of `runs` runs in microseconds."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        host = 0.0  # known after the first run; only the first may be timed too long
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
    """Return the number of flushes that keep the device busy for 1.5 times the host time, because launch times vary."""
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
    call()  # the first call allocates memory and starts thread pools
    while time.perf_counter() - start < 1e-3 * warmup_ms:
        call()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < _MIN_RUNS or (time.perf_counter() - start < 1e-3 * rep_ms and len(times) < _MAX_RUNS):
        times += _cpu_times(call, 1, time.perf_counter)
    return Timing(*(float(each) for each in numpy.quantile(times, QUANTILES)))


MOST_COMPILING = 2.0
"""Maximum compile time that does not count against the budget, as a multiple of the budget. A start thus takes at most three
times its budget."""


class Budget:
    """Time budget for measuring. Compile time does not count; otherwise the first start would leave points to the second
    start."""

    def __init__(self, seconds: float | None = None) -> None:
        """seconds: the limit; None means no limit."""
        self._seconds = seconds
        self._started = time.perf_counter()
        self.compiling = 0.0
        """Extra seconds that first calls took, compared with later calls. The code that makes a first call adds its extra time
        here."""

    def begin(self) -> None:
        """Start counting. The time since the budget was created counts as compiling, up to `MOST_COMPILING` times the budget."""
        self.compiling += time.perf_counter() - self._started

    @property
    def spent(self) -> float:
        """Seconds that count against the budget."""
        free = self.compiling if self._seconds is None else min(self.compiling, MOST_COMPILING * self._seconds)
        return time.perf_counter() - self._started - free

    @property
    def left(self) -> float | None:
        """Remaining seconds. None means no limit."""
        return None if self._seconds is None else self._seconds - self.spent


class SharedBudget:
    """Measuring time of a start, divided among all measurements of the start."""

    def __init__(self, seconds: float, parts: int = 0, clock: Clock = time.perf_counter) -> None:
        """parts: number of measurements that will each take a part of the time."""
        self._left = seconds
        self._parts = parts
        self._clock = clock

    def expect(self, parts: int) -> None:
        """Increase the number of measurements that will each take a part of the time."""
        self._parts += parts

    @contextmanager
    def part(self) -> Iterator[float]:
        """Yield the seconds of the next part: an equal fraction of the remaining time. Unused time goes to the other parts. Time
        beyond the part, for example for compiling, is not taken from the other parts."""
        share = self._left / max(self._parts, 1)
        began = self._clock()
        try:
            yield share
        finally:
            self._left -= min(share, self._clock() - began)
            self._parts -= 1
