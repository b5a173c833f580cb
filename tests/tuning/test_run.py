"""The kernel level on tiny grids: right answers are timed, all others say why, and an interrupted run goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.backends.sdpa import SDPA
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.kernel import AHEAD, compile_ahead
from headway.core.contract.layout import HND, NHD, LayoutInfo
from headway.core.contract.metadata import Phase
from headway.registry import Registry, create_registry
from headway.tuning.measure import run as module
from headway.tuning.measure import self_test as selftest
from headway.tuning.measure.points import GRIDS, PHASES, Point, grid, held_out
from headway.tuning.measure.run import run_kernel_level, slower_candidates, surviving_pairs
from headway.tuning.table.files import read_table
from headway.tuning.table.schema import Cell, CrossoverTable
from tables import POINTS, QUICK, SPEC, a_cell, quick
from tiny_bench import with_backend


def by_backend(table: CrossoverTable, phase: str, case: str) -> dict[str, Cell]:
    return {cell.kernel: cell for cell in table.cells if (cell.phase, cell.case) == (phase, case)}


def test_every_backend_is_checked_and_timed_at_every_point(registry: Registry) -> None:
    table = run_kernel_level(quick(layouts=["nhd", "vllm_5d"], block_sizes=[8, 16]), registry)
    assert table.complete
    assert [record.name for record in table.kernels if record.usable] == ["native", "sdpa", "sdpa.math"]
    assert "needs a CUDA GPU" in next(record.reason for record in table.kernels if record.name == "triton")
    dense = sum(point.phase == "prefill" for point in POINTS)
    others = [cell for cell in table.cells if cell.kernel != "native"]  # which decodes alone, and on one of the layouts
    assert len(others) == 2 * (dense + (len(POINTS) - dense) * 4)  # backends, layouts x block sizes
    for cell in (cell for cell in table.cells if (cell.kernel, cell.status) != ("native", "unsupported")):
        assert cell.status in ("ok", "tie", "dropped"), cell.reason
        if cell.status == "dropped" and cell.median_us is None:
            continue  # on a busy machine a thread that waits for its turn makes a clear loser
        assert cell.median_us > 0
        assert cell.relative_error <= cell.tolerance
    assert 0.01 <= table.noise <= 0.10


def test_a_dense_prefill_is_timed_once_for_all_layouts() -> None:
    claims = replace(SDPA.capabilities, dense_prefill=True)
    registry = with_backend("dense", capabilities=claims)
    table = run_kernel_level(quick(backends=["dense", "sdpa"], layouts=["nhd", "hnd"]), registry)
    prefills = [
        (cell.kernel, cell.layout, cell.block_size) for cell in table.cells if (cell.phase, cell.case) == ("prefill", "1q9")
    ]
    assert ("dense", None, None) in prefills
    assert len([row for row in prefills if row[0] == "dense"]) == 1


def test_all_but_a_prefill_pay_for_the_write_into_the_cache(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    layout = Registry.layout

    def counting(self: Registry, name: str) -> object:
        info = layout(self, name)
        write = info.load_writer(torch.device("cpu"))

        def counted(k: torch.Tensor, *rest: object) -> None:
            written.append(len(k))
            write(k, *rest)

        return LayoutInfo(info.layout, lambda device: counted)

    monkeypatch.setattr(Registry, "layout", counting)
    prefills = [point for point in POINTS if point.phase == "prefill"]
    run_kernel_level(quick(backends=["sdpa"], grid=prefills), registry)
    untimed = Counter(written)  # of the self-test, once each
    table = run_kernel_level(quick(backends=["sdpa"]), registry)
    assert {cell.status for cell in table.cells} <= {"ok", "tie"}  # what is written is what was there: the answers stay right
    timed = Counter(written) - untimed - untimed
    assert set(timed) == {point.batch * point.query_len for point in POINTS if point not in prefills}
    assert min(timed.values()) > 5


def raises(error: Exception) -> Callable[..., None]:
    def act(*_: object) -> None:
        raise error

    return act


def at_five(act: Callable[[torch.Tensor], object]) -> object:
    def decode(self, q, cache, plan, out):
        SDPA.decode(self, q, cache, plan, out)
        if len(q) == 5:
            act(out)

    return decode


@pytest.mark.parametrize(
    ("act", "status", "reason"),
    [
        (lambda out: out.mul_(2), "incorrect", "relative error 1, tolerance"),
        (raises(RuntimeError("too many\nsequences")), "error", "RuntimeError: too many sequences"),
        (raises(torch.OutOfMemoryError("CUDA out of memory")), "oom", "OutOfMemoryError"),
    ],
)
def test_what_goes_wrong_costs_that_cell_alone(act: Callable[..., object], status: str, reason: str) -> None:
    fives = [Point("decode", 5, 1, 40), Point("decode", 1, 1, 8)]
    registry = with_backend("odd", decode=at_five(act))
    table = run_kernel_level(quick(backends=["odd", "sdpa"], grid=fives), registry)
    cells = by_backend(table, "decode", "5q1s40")
    assert (cells["odd"].status, cells["odd"].median_us) == (status, None)
    assert reason in cells["odd"].reason
    assert cells["sdpa"].status in ("ok", "tie")
    assert by_backend(table, "decode", "1q1s8")["odd"].median_us is not None


def at_call(number: int, act: object) -> object:
    """A decode that does something wrong in one of its calls for five sequences of the measured layer, and in all later ones."""
    calls = [0]

    def decode(self, q, cache, plan, out):
        SDPA.decode(self, q, cache, plan, out)
        calls[0] += self.spec == SPEC and len(q) == 5
        if calls[0] >= number:
            act(q, cache)

    return decode


def change_q_and_raise(q, cache):
    q.zero_()
    raise RuntimeError("after the harm was done")


@pytest.mark.parametrize(
    ("number", "act", "status", "reason"),
    [
        (6, lambda q, cache: q.mul_(2), "incorrect", "it changed its inputs, of which a backend may write `out` alone: q"),
        (1, lambda q, cache: cache.value[:, 0].add_(1), "incorrect", "cache.value"),
        (6, change_q_and_raise, "error", "after the harm"),
        (6, raises(RuntimeError("later")), "error", "later"),
    ],
)
def test_a_backend_that_spoils_what_all_share_is_blamed_alone(number: int, act: object, status: str, reason: str) -> None:
    registry = with_backend("odd", decode=at_call(number, act))
    table = run_kernel_level(
        quick(backends=["odd", "sdpa"], grid=[Point("decode", 5, 1, 40)], timer=replace(QUICK, long_ms=1e9)), registry
    )  # a busy machine gives nobody up
    cells = by_backend(table, "decode", "5q1s40")
    assert (cells["odd"].status, cells["odd"].median_us) == (status, None)
    assert reason in cells["odd"].reason
    assert cells["sdpa"].median_us is not None, cells["sdpa"].reason


def test_a_phase_that_a_backend_does_not_serve_is_unsupported_with_the_reason() -> None:
    claims = Capabilities(phases=frozenset({Phase.DECODE}), devices=("cpu",))
    table = run_kernel_level(quick(backends=["sdpa", "part"]), with_backend("part", capabilities=claims))
    cell = by_backend(table, "prefill", "1q9")["part"]
    assert (cell.status, cell.layout) == ("unsupported", None)
    assert "phase: needs decode, got prefill" in cell.reason
    assert by_backend(table, "decode", "1q1s8")["part"].median_us


def slow(self, q, cache, plan, out):
    SDPA.decode(self, q, cache, plan, out)
    time.sleep(0.1)


def test_a_clear_loser_is_timed_roughly_and_marked() -> None:
    table = run_kernel_level(quick(backends=["sdpa", "slow"], grid=POINTS[:1]), with_backend("slow", decode=slow))
    cell = by_backend(table, "decode", "1q1s8")["slow"]
    assert (cell.status, cell.median_us is None) == ("dropped", False)
    assert "times the fastest" in cell.reason


def test_an_interrupted_run_keeps_what_is_done_and_goes_on(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "t.json", module.measure_point
    counted: list[Point] = []

    def interrupted(point: Point, *rest: object) -> list[Cell]:
        counted.append(point)
        if len(counted) == 3:
            raise KeyboardInterrupt
        return real(point, *rest)

    monkeypatch.setattr(module, "measure_point", interrupted)
    partial = run_kernel_level(quick(output=path), registry)
    assert not partial.complete
    assert read_table(path) == partial
    assert len({cell.point for cell in partial.cells}) == 2
    whole = run_kernel_level(quick(output=path, resume=True), registry)
    assert whole.complete
    assert whole.cells[: len(partial.cells)] == partial.cells
    assert len({cell.point for cell in whole.cells}) == len(POINTS)
    assert len(counted) == 3 + len(POINTS) - 2
    assert read_table(path) == whole


def test_another_layers_table_cannot_be_gone_on_with(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    run_kernel_level(quick(output=path, grid=POINTS[:1]), registry)
    with pytest.raises(UnsupportedError, match="attention layer"):
        run_kernel_level(quick(output=path, resume=True, spec=replace(SPEC, num_kv_heads=4)), registry)
    with pytest.raises(UnsupportedError, match="backends: needs native, sdpa, sdpa.math, got sdpa"):
        run_kernel_level(quick(output=path, resume=True, backends=["sdpa"]), registry)


def test_a_backend_that_is_given_up_is_not_called(registry: Registry) -> None:
    options = quick(backends=["sdpa", "sdpa.math"], given_up={"decode": {"sdpa.math": "far behind elsewhere"}})
    table = run_kernel_level(options, registry)
    assert table.complete
    slow = [cell for cell in table.cells if cell.kernel == "sdpa.math"]
    assert {(cell.status, cell.reason) for cell in slow if cell.phase == "decode"} == {("dropped", "far behind elsewhere")}
    assert {cell.status for cell in slow if cell.phase == "prefill"} <= {"ok", "tie"}
    assert {cell.status for cell in table.cells if cell.kernel == "sdpa"} <= {"ok", "tie"}


@pytest.mark.parametrize("device", GRIDS)
def test_a_grid_spans_every_phase_and_starts_with_its_corners(device: str) -> None:
    points = grid(device)
    assert {point.phase for point in points} == set(PHASES)
    assert len({(point.phase, point.case) for point in points}) == len(points)
    levels = [point.level for point in points]
    assert levels == sorted(levels)
    assert {point.phase for point in points[:8]} == set(PHASES)
    for point in points:
        work = point.work(SPEC)
        assert {(q, kv) for q, kv in work.lens} == {(point.query_len, point.kv_len)}
        assert len(work.lens) == point.batch
        assert work.attention_phase is point.shape.phase


def test_what_is_named_twice_is_measured_once() -> None:
    assert grid("cpu", ["decode", "prefill"], [3, 3], [70, 90, 70]) == grid("cpu", ["decode", "prefill"], [3], [70, 90])
    registry = create_registry(load_entry_points=False)
    twice = quick(backends=["sdpa"], layouts=["nhd", "nhd"], block_sizes=[16, 16], grid=POINTS[:1])
    assert len(run_kernel_level(twice, registry).cells) == 1


def test_held_out_points_are_new_and_repeatable() -> None:
    known = {point.case for point in grid("cuda")}
    points = held_out("cuda", 60, 1, known)
    assert points == held_out("cuda", 60, 1, known)
    assert not {point.case for point in points} & known
    assert {point.phase for point in points} == set(PHASES)
    assert len(set(points)) == 60


def cells(**times: tuple[float, ...]) -> list[Cell]:
    """Decode cells: backend -> its time at each length."""
    return [
        a_cell(us, kernel=name, case=f"1q1s{2**number}", kv_len=2**number)
        for name, row in times.items()
        for number, us in enumerate(row, start=4)
    ]


def test_halving_gives_up_who_never_comes_near() -> None:
    found = cells(best=(10, 20, 30), near=(40, 22, 90), far=(30, 60, 90), farther=(90, 90, 90))
    dropped = slower_candidates(found, "decode", ["best", "near", "far", "farther"])
    assert set(dropped) == {"far", "farther"} or set(dropped) == {"farther"}
    assert "near" not in dropped
    assert "3.00 times" in dropped["farther"]
    assert slower_candidates(found, "prefill", ["best", "far"]) == {}
    assert slower_candidates(cells(only=(10, 10)), "decode", ["only"]) == {}


def test_halving_keeps_the_better_layouts() -> None:
    pairs = [(NHD, 16), (HND, 16), (NHD, 64), (HND, 64)]
    times = dict(zip(pairs, (12.0, 10.0, 30.0, 11.0), strict=True))
    found = [a_cell(us, layout=layout.name, block_size=size) for (layout, size), us in times.items()]
    assert surviving_pairs(found, pairs) == [(HND, 16), (HND, 64)]
    close = zip(pairs, (10.15, 10.0, 10.1, 9.9), strict=True)
    even = [a_cell(us, layout=layout.name, block_size=size) for (layout, size), us in close]
    assert surviving_pairs(even, pairs) == pairs, "noise drops none of them"
    assert surviving_pairs(found, pairs[:1]) == pairs[:1]


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
