"""Before points are measured, every kernel that they need is compiled, by launches that compute nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headway.backends.sdpa import SDPA
from headway.core.contract.compiled import AHEAD, compile_ahead
from headway.tuning.measure import self_test as selftest
from headway.tuning.measure.run import run_kernel_level
from tables import POINTS, quick
from tiny_bench import with_backend


class Recorder:
    """A backend whose launches start nothing inside `compile_ahead`, as those of compiled kernels do."""

    def __init__(self, obeys: bool) -> None:
        self.obeys = obeys
        self.ahead: list[tuple[str, int]] = []
        self.running = 0

    def call(self, name: str):
        real, recorder = getattr(SDPA, name), self

        def launch(backend, q, *rest):
            if AHEAD.get() is None:
                recorder.running += 1
                return real(backend, q, *rest)
            recorder.ahead.append((name, len(q)))
            return None if recorder.obeys else real(backend, q, *rest)

        return launch

    @property
    def methods(self) -> dict[str, object]:
        return {name: self.call(name) for name in ("prefill", "decode")}


@pytest.mark.parametrize("obeys", [True, False])
def test_every_point_is_launched_before_the_first_is_timed(obeys: bool) -> None:
    recorder = Recorder(obeys)
    registry = with_backend("recorder", **recorder.methods)
    table = run_kernel_level(quick(backends=["recorder"], compile_ahead=compile_ahead), registry)
    assert table.complete
    assert {cell.status for cell in table.cells} <= {"ok", "tie"}
    wanted = [("decode" if p.phase in ("decode", "verify") else "prefill", p.batch * p.query_len) for p in POINTS]
    # One that computes all the same has nothing to be compiled: it is asked for a step of each self-test, and for one point.
    tested = sum(map(len, selftest.CASES.values()))
    assert recorder.ahead[tested:] == (wanted if obeys else wanted[:1])


def test_what_is_measured_or_given_up_is_not_compiled(tmp_path: Path) -> None:
    recorder = Recorder(True)
    registry = with_backend("recorder", **recorder.methods)
    options = quick(backends=["recorder"], compile_ahead=compile_ahead, output=tmp_path / "table.json")
    some = [point for point in POINTS if point.phase == "prefill"]
    run_kernel_level(replace(options, grid=some), registry)
    recorder.ahead.clear()
    table = run_kernel_level(replace(options, resume=True, given_up={"extend": {"recorder": "slow"}}), registry)
    assert table.complete
    tested = sum(map(len, selftest.CASES.values()))
    missing = [point for point in POINTS if point.phase not in ("prefill", "extend")]
    assert [size for _, size in recorder.ahead[tested:]] == [point.batch * point.query_len for point in missing]


def test_a_backend_that_raises_there_is_left_to_the_measurement() -> None:
    def broken(self, q, cache, plan, out):
        raise RuntimeError("no such kernel")

    table = run_kernel_level(
        quick(backends=["broken", "sdpa"], compile_ahead=compile_ahead), with_backend("broken", decode=broken)
    )
    blamed = [cell for cell in table.cells if cell.backend == "broken" and cell.phase == "decode"]
    assert all(cell.status in ("error", "dropped") for cell in blamed)
    assert table.complete
