"""Timing in turns: every call is run, in every round, and a slow one is seen to be slow."""

from __future__ import annotations

import time

import torch

from headway.bench.timing import Turns, host_us

CPU = torch.device("cpu")


def test_calls_take_turns() -> None:
    order: list[str] = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    timings = Turns(rounds=3, round_ms=0.0, min_runs=2).time(calls, CPU)
    assert "".join(order) == ("aaa" + "bbb") * 3  # one to estimate and two to time, in each of three rounds
    for timing in timings:
        assert 0 < timing.p20_us <= timing.median_us <= timing.p80_us


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


def test_what_takes_longer_than_the_limit_runs_once() -> None:
    count = [0]

    def call() -> None:
        count[0] += 1
        time.sleep(0.005)

    assert host_us(call, CPU, seconds=0.001) > 4000
    assert count[0] == 1
