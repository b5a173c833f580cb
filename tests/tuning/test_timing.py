"""Timing in turns: every call is run, in every round, and a slow one is seen to be slow."""

from __future__ import annotations

import time

import pytest
import torch

import headway.tuning.timing as module
from headway.tuning.timing import Turns, host_us

CPU = torch.device("cpu")


def test_calls_take_turns() -> None:
    order: list[str] = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    timings = Turns(rounds=3, round_ms=0.0, min_runs=2).time(calls, CPU)
    assert "".join(order) == ("aaa" + "bbb") * 3  # one to estimate and two to time, in each of three rounds
    for timing in timings:
        assert 0 < timing.p20_us <= timing.median_us <= timing.p80_us


def test_a_call_that_raises_loses_its_turns_alone() -> None:
    def fall_over() -> None:
        raise RuntimeError("no")

    first, second = Turns(rounds=2, round_ms=0.0).time([fall_over, lambda: None], CPU)
    assert isinstance(first, RuntimeError)
    assert second.median_us > 0


def test_rounds_that_disagree_are_told() -> None:
    calls = [0]

    def slower_later() -> None:
        calls[0] += 1
        time.sleep(0.002 if calls[0] <= 4 else 0.006)

    (timing,) = Turns(rounds=2, round_ms=0.0, min_runs=3).time([slower_later], CPU)
    assert timing.drift > 1
    (once,) = Turns(rounds=1, round_ms=0.0).time([lambda: None], CPU)
    assert once.drift is None


def test_short_calls_run_often_but_not_forever() -> None:
    count = [0]

    def call() -> None:
        count[0] += 1

    Turns(rounds=2, round_ms=50.0, max_runs=7).time([call], CPU)
    assert count[0] == 2 * 8


def test_a_slow_call_is_seen_to_be_slow() -> None:
    fast, slow = Turns(rounds=1, round_ms=0.0).time([lambda: None, lambda: time.sleep(0.002)], CPU)
    assert slow.p20_us > 1500
    assert fast.p20_us < slow.p20_us
    assert Turns().estimate(lambda: time.sleep(0.002), CPU) > 1500


def test_what_timing_would_take_is_known_beforehand() -> None:
    turns = Turns(rounds=3, round_ms=5.0, min_runs=3, max_runs=60)
    assert turns.needed_ms(10) == pytest.approx(3 * 61 * 0.01)
    assert turns.needed_ms(1000) == pytest.approx(3 * 6 * 1.0)
    assert turns.needed_ms(20_000) == pytest.approx(3 * 4 * 20.0)


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


def test_a_device_has_work_until_a_slow_host_has_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"L2_cache_size": 64}))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: empty(*size, dtype=dtype))
    clock = module._EventClock(torch.device("cuda"))
    flushes: list[int] = []

    class Flushed:
        def zero_(self) -> None:
            flushes[-1] += 1

    monkeypatch.setattr(clock, "_flushed", Flushed())

    def launch(seconds: float) -> None:
        time.sleep(seconds)
        flushes.append(0)

    def counts(seconds: float) -> list[int]:
        flushes[:] = [0]
        clock.times(lambda: launch(seconds), 4)
        return flushes[:4]

    assert counts(0.001) == [1, 8, 8, 8]  # a flush takes 30 us
    monkeypatch.setattr(time, "perf_counter", iter([0.0, 50e-6] * 4).__next__)
    assert counts(0.0) == [1, 3, 3, 3]


@pytest.mark.gpu
def test_a_slow_host_does_not_count_as_the_devices_time() -> None:
    device = torch.device("cuda")
    x = torch.ones(1024, device=device)

    def call() -> None:
        x.add_(1)
        until = time.perf_counter() + 60e-6
        while time.perf_counter() < until:
            pass
        x.add_(1)

    (timing,) = Turns().time([call], device)
    assert timing.median_us < 30
    assert host_us(call, device) > 60


def test_what_takes_longer_than_the_limit_runs_once() -> None:
    count = [0]

    def call() -> None:
        count[0] += 1
        time.sleep(0.005)

    assert host_us(call, CPU, seconds=0.001) > 4000
    assert count[0] == 1
