"""Where seconds go: parts inside parts count once."""

from __future__ import annotations

from contextlib import nullcontext

from headway.core.system.part_clock import PartClock


class FakeTime:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_runs_inside_a_part_counts_once() -> None:
    time = FakeTime()
    clock = PartClock(time)
    compiling = clock.within("compiling", nullcontext)
    assert compiling is not None
    assert clock.within("compiling", None) is None
    with clock.part("measuring"):
        time.now += 2.0
        with compiling():
            time.now += 5.0
    with clock.part("weights"):
        time.now += 1.0
        with compiling():
            time.now += 0.5
    with clock.part("nothing"):
        time.now += 0.01
    time.now += 0.49
    clock.end()
    time.now += 60.0
    assert clock.seconds == {"compiling": 5.5, "measuring": 2.0, "weights": 1.0, "nothing": clock.seconds["nothing"]}
    assert str(clock) == "9.0 s: compiling 5.5, measuring 2.0, weights 1.0, the rest 0.5"
