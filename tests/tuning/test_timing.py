"""Timing in turns: every call is run, in every round, and a slow one is seen to be slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest
import torch

from headway.tuning.measure.timing import EventClock, InterleavedTimer, SharedBudget, host_us

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass only where a call says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _taking(clock: Clock, order: list[str], name: str, seconds: Iterator[float]) -> Callable[[], None]:
    """A call that notes its name and takes the next number of seconds."""

    def call() -> None:
        order.append(name)
        clock.sleep(next(seconds))

    return call


def test_calls_run_in_turns_within_each_round(clock: Clock) -> None:
    order: list[str] = []
    calls = [_taking(clock, order, name, repeat(0.001)) for name in "ab"]
    timings = InterleavedTimer(rounds=3, round_ms=0.0, min_runs=2, clock=clock).time(calls, CPU)
    assert "".join(order) == ("aaa" + "bbb") * 3  # one to estimate and two to time, in each of three rounds
    for timing in timings:
        assert 0 < timing.p20_us <= timing.median_us <= timing.p80_us


def test_a_call_that_raises_takes_no_further_turn_and_the_others_go_on() -> None:
    def fall_over() -> None:
        raise RuntimeError("no")

    first, second = InterleavedTimer(rounds=2, round_ms=0.0).time([fall_over, lambda: None], CPU)
    assert isinstance(first, RuntimeError)
    assert second.median_us > 0


def test_drift_is_the_difference_between_rounds(clock: Clock) -> None:
    ever_slower = _taking(clock, [], "", chain.from_iterable([0.002 * 3**turn] * 4 for turn in range(4)))
    (timing,) = InterleavedTimer(rounds=2, round_ms=0.0, min_runs=3, clock=clock).time([ever_slower], CPU)
    assert timing.drift == pytest.approx(2.0)
    (once,) = InterleavedTimer(rounds=1, round_ms=0.0, clock=clock).time([lambda: clock.sleep(0.001)], CPU)
    assert once.drift is None


def test_a_moment_of_other_work_makes_all_calls_take_more_turns_and_does_not_count(clock: Clock) -> None:
    order: list[str] = []
    disturbed = chain([0.004] * 4, [0.001] * 4, [0.004] * 2, repeat(0.001))  # in all of the first round and half of the third
    calls = [_taking(clock, order, "a", disturbed), _taking(clock, order, "b", repeat(0.002))]
    first, second = InterleavedTimer(rounds=3, round_ms=0.0, min_runs=3, clock=clock).time(calls, CPU)
    assert "".join(order) == ("aaaa" + "bbbb") * 4
    assert [timing.median_us for timing in (first, second)] == [pytest.approx(1000), pytest.approx(2000)]
    assert (first.drift, second.drift) == (pytest.approx(0.0), pytest.approx(0.0))


def test_a_machine_that_is_never_steady_takes_twice_the_turns_and_says_so(clock: Clock) -> None:
    order: list[str] = []
    call = _taking(clock, order, "a", chain.from_iterable([0.001 * 2**turn] * 4 for turn in range(9)))
    (timing,) = InterleavedTimer(rounds=3, round_ms=0.0, min_runs=3, clock=clock).time([call], CPU)
    assert len(order) == 2 * 3 * 4
    assert timing.drift == pytest.approx(3.0)


class _Event:
    """Stands in for a GPU's."""

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return 0.030


def test_the_cache_is_flushed_until_a_slow_host_has_launched(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    flushes: list[int] = [0]

    class L2Sized:
        def zero_(self) -> None:
            flushes[-1] += 1

    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"L2_cache_size": 64}))
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: L2Sized())
    events = EventClock(torch.device("cuda"), clock)

    def counts(seconds: float) -> list[int]:
        def launch() -> None:
            clock.sleep(seconds)
            flushes.append(0)

        flushes[:] = [0]
        events.times(launch, 4)
        return flushes[:4]

    assert counts(0.001) == [1, 8, 8, 8]  # a flush takes 30 us
    assert counts(50e-6) == [1, 3, 3, 3]


@pytest.mark.gpu
def test_host_time_is_not_counted_as_the_device_s() -> None:
    device = torch.device("cuda")
    x = torch.ones(1024, device=device)

    def call() -> None:
        x.add_(1)
        until = time.perf_counter() + 60e-6
        while time.perf_counter() < until:
            pass
        x.add_(1)

    (timing,) = InterleavedTimer().time([call], device)
    assert timing.median_us < 30
    assert host_us(call, device) > 60


def test_parts_share_a_budget_and_leave_what_they_do_not_take(clock: Clock) -> None:
    budget = SharedBudget(20.0, clock=clock)
    budget.expect(4)
    shares = []
    for took in (1.0, 0.0, 30.0, 5.0):
        with budget.part() as seconds:
            shares.append(seconds)
            clock.sleep(took)
    assert shares == pytest.approx([5.0, 19.0 / 3, 9.5, 9.5])
    with SharedBudget(3.0, clock=clock).part() as seconds:
        assert seconds == 3.0
    with budget.part() as seconds:
        assert seconds == pytest.approx(4.5)
