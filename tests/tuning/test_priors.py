"""Shipped tables: named, checked at a few points, taken where they agree, measured where not; a faulty one ends no start."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.app import make_app
from headway.core.contract.metadata import Phase
from headway.core.contract.support import Support
from headway.core.select.costs import CostTable, Shape
from headway.core.select.request import ALL_AUTO, LayerSpecs
from headway.core.system.json_files import write_json
from headway.registry import Registry, create_registry
from headway.tuning import autotune
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.measure import kinds
from headway.tuning.measure.points import Point, grid
from headway.tuning.measure.prior_check import Extent
from headway.tuning.measure.run import CrossoverOptions
from headway.tuning.table.files import prior_path, read_table, table_path
from headway.tuning.table.schema import Cell, CrossoverTable, KernelRecord, SpecRecord
from headway.tuning.table.schema import points as by_point
from tables import POINTS, QUICK, SPEC, a_cell, a_device, a_table
from tiny_bench import with_backend

app = make_app()

Times = Callable[[str, Point], float | None]
Ship = Callable[..., CrossoverTable]
Start = Callable[..., CostTable | None]
GRID = grid("cpu")


def crossing(name: str, point: Point) -> float | None:
    """Microseconds of two backends: sdpa.math is faster up to 200 tokens, sdpa beyond; others are far behind."""
    us = 1.0 * point.batch * point.kv_len
    return {"sdpa": us + 200.0, "sdpa.math": 2.0 * us}.get(name, 50.0 * us)


def cells_of(times: Times, names: list[str], points: list[Point]) -> list[Cell]:
    found = []
    for point in points:
        place = {"phase": point.phase, "case": point.case, "batch": point.batch}
        place |= {"query_len": point.query_len, "kv_len": point.kv_len}
        found += [a_cell(times(name, point), kernel=name, **place) for name in names]
    return found


class Machine:
    """What measures in an engine's start, with times that a test knows: it stands for `run_kernel_level`."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.runs: list[CrossoverOptions] = []

    def __call__(self, options: CrossoverOptions, registry: Registry) -> CrossoverTable:
        self.runs.append(options)
        names = list(options.backends or ())
        cells = cells_of(self.times, names, list(options.grid))
        old = read_table(options.output) if options.resume else None
        table = a_table(
            *(() if old is None else old.cells),
            *cells,
            complete=True,
            prior=None if old is None else old.prior,
            kernels=[KernelRecord(name=name, owner="built-in", available=True) for name in names],
        )
        write_json(table, options.output)
        return table

    @property
    def measured(self) -> list[str]:
        return [f"{point.phase} {point.case}" for run in self.runs for point in run.grid or ()]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """One of the test's own, in which two backends are there: enough to choose between."""
    absent = Support.no("C compiler", "gcc or clang", "none")
    monkeypatch.setattr("headway.backends.native.native_support", lambda: absent)
    return create_registry(load_entry_points=False)


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Ship:
    """Ship a table of the whole grid; the folders of tables are the test's own."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HEADWAY_AUTOTUNE_BUDGET", raising=False)
    monkeypatch.setenv("HEADWAY_PRIORS", str(tmp_path / "priors"))
    caplog.set_level(logging.INFO, "headway")

    def write(times: Times = crossing, names: tuple[str, ...] = ("sdpa", "sdpa.math"), **changes: object) -> CrossoverTable:
        table = a_table(*cells_of(times, list(names), GRID), **changes)
        write_json(table, prior_path(a_device(), SpecRecord.of(SPEC)))
        return table

    return write


@pytest.fixture
def start(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Start:
    """An engine's start on a machine, for its table of costs."""

    def begin(machine: Machine, budget: float = 10.0, registry: Registry = registry) -> CostTable | None:
        monkeypatch.setattr(autotune, "run_kernel_level", machine)
        found = costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=budget))
        return None if found is None else found[SPEC]

    return begin


def kept() -> CrossoverTable:
    return read_table(table_path(a_device(), SpecRecord.of(SPEC)))


def us(costs: CostTable | None, name: str, batch: int, kv_len: int) -> float:
    return costs.at(Shape(Phase.DECODE, batch, 1, kv_len), name, "nhd", 16)[0]


def test_a_prior_that_agrees_is_taken_scaled_and_marked(ship: Ship, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    ship()
    machine = Machine(lambda name, point: 1.25 * (crossing(name, point) or 0.0))
    costs = start(machine)
    assert len(machine.runs) == 1, "nothing but the check"
    assert len(machine.measured) == 15, "at most four points of each phase"
    table = kept()
    assert (len(table.prior.checked), table.prior.disagreed) == (15, [])
    assert table.prior.device_scale == dict.fromkeys(("decode", "prefill", "extend", "verify"), 1.25)
    assert {f"{cell.phase} {cell.case}" for cell in table.cells if cell.source == "measured"} == set(machine.measured)
    assert {cell.point for cell in table.cells} == {(point.phase, point.case) for point in GRID}
    assert table.complete
    for name in ("sdpa", "sdpa.math"):
        assert us(costs, name, 4, 512) == pytest.approx(1.25 * (crossing(name, Point("decode", 4, 1, 512)) or 0.0))
    assert costs.source == "shipped table of 2026-11-21, checked here 2026-11-21"
    assert "checking the shipped table" in caplog.text
    caplog.clear()
    start(machine)
    assert len(machine.runs) == 1, "the next start reads"
    assert "cells are those of the shipped table of 2026-11-21" in caplog.text


def test_where_a_prior_is_wrong_its_neighbourhood_is_measured(ship: Ship, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    ship()

    def here(name: str, point: Point) -> float | None:
        """Decodes of long sequences by sdpa take ten times as long as it was where the prior was measured."""
        slow = 10.0 if name == "sdpa" and point.phase == "decode" and point.kv_len > 300 else 1.0
        return slow * (crossing(name, point) or 0.0)

    machine = Machine(here)
    costs = start(machine)
    table = kept()
    assert table.prior.disagreed
    assert all(line.startswith("decode ") for line in table.prior.disagreed)
    assert "sdpa takes" in caplog.text
    again = machine.runs[1].grid or ()
    assert {point.phase for point in again} == {"decode"}
    assert len(again) < sum(point.phase == "decode" for point in GRID), "around points that agree nothing is measured"
    assert machine.runs[1].resume
    assert 0 < (machine.runs[1].budget or 0) < 10.0
    assert {cell.point for cell in table.cells} == {(point.phase, point.case) for point in GRID}
    assert us(costs, "sdpa", 4, 512) == pytest.approx(here("sdpa", Point("decode", 4, 1, 512)))
    assert all(cell.source == "prior" for cell in table.cells if cell.point == ("prefill", "16q64"))


def test_other_versions_are_named_and_checked(ship: Ship, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    ship(device=a_device(torch="1.0", driver="old", compilers={"ptxas": "12.8.61"}))
    machine = Machine(crossing)
    start(machine)
    assert len(machine.runs) == 1
    table = kept()
    assert "driver: old there, none here" in table.prior.differs
    assert "ptxas: 12.8.61 there, none here" in table.prior.differs
    assert any(line.startswith("torch: 1.0 there") for line in table.prior.differs)
    assert "it differs in driver: old there" in caplog.text
    assert table.device.torch != "1.0"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"device": a_device(name="another machine")}, "device"),
        ({"spec": SpecRecord.of(SPEC).model_copy(update={"head_dim": 64})}, "attention layer"),
    ],
)
def test_a_prior_of_another_device_or_layer_is_refused(
    ship: Ship, start: Start, caplog: pytest.LogCaptureFixture, changes: dict[str, object], word: str
) -> None:
    ship(**changes)
    machine = Machine(crossing)
    start(machine)
    assert f"shipped table not used: table {prior_path(a_device(), SpecRecord.of(SPEC))}: needs {word}" in caplog.text
    assert len(machine.measured) == len(GRID), "a start without a prior measures as ever"
    assert kept().prior is None


def test_a_broken_prior_ends_no_start(ship: Ship, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    ship()
    path = prior_path(a_device(), SpecRecord.of(SPEC))
    path.write_text(path.read_text()[:1000])
    machine = Machine(crossing)
    assert start(machine) is not None
    assert "shipped table not used" in caplog.text
    assert "a copy that was cut short?" in caplog.text
    assert len(machine.measured) == len(GRID)


@pytest.mark.parametrize("fast", [False, True])
def test_a_backend_that_the_prior_does_not_know_is_weighed_by_the_check(ship: Ship, start: Start, fast: bool) -> None:
    ship()

    def times(name: str, point: Point) -> float | None:
        return 5.0 if fast and name == "newcomer" and point.phase == "extend" else crossing(name, point)

    machine = Machine(times)
    costs = start(machine, registry=with_backend("newcomer"))
    table = kept()
    at = {cell.kernel: cell for cell in by_point(table.cells)["decode", "4q1s512"]}
    if at["sdpa"].source == "prior":
        assert at["newcomer"].status == "dropped"
        assert "not in the shipped table" in at["newcomer"].reason
    assert len(machine.runs) == (2 if fast else 1)
    if fast:
        assert {line.split()[0] for line in table.prior.disagreed} == {"extend"}
        assert "newcomer, which it does not know, is among the fastest" in table.prior.disagreed[0]
        assert costs.at(Shape(Phase.EXTEND, 1, 16, 256), "newcomer", "nhd", 16)[0] == pytest.approx(5.0)


def test_without_a_budget_a_prior_serves_unchecked_unless_it_lacks_a_backend(
    ship: Ship, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ship()
    machine = Machine(crossing)
    costs = start(machine, budget=0.0)
    assert costs.source == "shipped table of 2026-11-21, not checked here"
    assert machine.runs == []
    assert not table_path(a_device(), SpecRecord.of(SPEC)).exists(), "what was not checked is not kept"
    newcomer = with_backend("newcomer")
    assert start(machine, budget=0.0, registry=newcomer) is not None, (
        "ranked behind, it would not be chosen without a table either"
    )
    monkeypatch.setattr(newcomer.attention, "rank", lambda spec, phase, names: sorted(names, key=lambda name: name != "newcomer"))
    assert start(machine, budget=0.0, registry=newcomer) is None
    assert "does not contain newcomer and is not used unchecked" in caplog.text


def _times_of(cell: Cell, factor: float) -> dict[str, float]:
    return {name: factor * getattr(cell, name) for name in ("median_us", "p20_us", "p80_us")}


def test_layouts_count_where_they_were_measured_here(ship: Ship, start: Start, registry: Registry) -> None:
    """One that only the shipped table has is no fault of it; one that only this machine has is, where it is among the fastest."""
    table = ship()
    more = [cell.model_copy(update={"layout": "hnd"}) for cell in table.cells]
    both = table.model_copy(update={"cells": [*table.cells, *more]})
    write_json(both, prior_path(a_device(), SpecRecord.of(SPEC)))
    start(Machine(crossing))
    found = kept()
    assert found.prior.disagreed == []
    assert {cell.layout for cell in found.cells} == {"nhd", "hnd"}

    class Elsewhere(Machine):
        def __call__(self, options: CrossoverOptions, registry: Registry) -> CrossoverTable:
            table = super().__call__(options, registry)
            cells = [cell.model_copy(update={"layout": "vllm_5d"}) for cell in table.cells if cell.source == "measured"]
            table = table.model_copy(update={"cells": [*table.cells, *cells]} if not options.resume else {})
            write_json(table, options.output)
            return table

    slow = [cell.model_copy(update={"layout": "hnd", **_times_of(cell, 3.0)}) for cell in table.cells]
    worse = table.model_copy(update={"cells": [*table.cells, *slow]})
    pairs = [(registry.layout(name).layout, 16) for name in ("nhd", "hnd", "vllm_5d")]
    assert Extent.of(worse, pairs, []).layouts == ["nhd", "vllm_5d"]
    assert Extent.of(both, pairs, []).layouts == ["nhd", "hnd", "vllm_5d"]

    table_path(a_device(), SpecRecord.of(SPEC)).unlink()
    machine = Elsewhere(crossing)
    start(machine)
    assert len(machine.runs) == 2
    prior = kept().prior
    assert len(prior.disagreed) == len(prior.checked)
    assert all("vllm_5d 16, which it does not know, is among the fastest" in line for line in prior.disagreed)


def test_points_that_the_time_did_not_reach_are_not_taken(ship: Ship, start: Start) -> None:
    ship()

    class Slow(Machine):
        def __call__(self, options: CrossoverOptions, registry: Registry) -> CrossoverTable:
            few = [point for point in options.grid or () if point.phase in ("decode", "prefill")]
            return super().__call__(CrossoverOptions(**{**vars(options), "grid": few}), registry)

    machine = Slow(crossing)
    start(machine)
    table = kept()
    assert {line.split()[0] for line in table.prior.disagreed} == {"extend", "verify"}
    assert {cell.phase for cell in table.cells if cell.source == "prior"} == {"decode", "prefill"}


def test_this_machine_checks_a_prior_by_real_measurements(ship: Ship, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine's own run: whatever these made-up times are worth here, the table is whole and says where it is from."""
    ship()
    write_json(a_table(*cells_of(crossing, ["sdpa", "sdpa.math"], POINTS)), prior_path(a_device(), SpecRecord.of(SPEC)))
    monkeypatch.setattr(autotune, "TIMER", QUICK)
    monkeypatch.setattr(kinds, "grid", lambda device_type: POINTS)
    registry = create_registry(load_entry_points=False)
    assert costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60.0)) is not None
    table = kept()
    assert {cell.point for cell in table.cells} >= {(point.phase, point.case) for point in POINTS}
    for checked in table.prior.checked:
        rivals = by_point(table.cells)[tuple(checked.split(" "))]  # type: ignore[index]
        assert not all(cell.source == "prior" for cell in rivals), (
            "only backends that could not win there were left to the shipped table"
        )


def explained(*more: str) -> str:
    words = ["backends", "explain", "--device", "cpu", "--geometry", "4/2/32", "--batch", "4", "--len", "512", *more]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_explain_names_the_prior_and_which_row_was_measured_here(ship: Ship, start: Start) -> None:
    ship(device=a_device(torch="1.0"))
    text = explained()
    assert "decode, 4 sequences, 1 new of 512 tokens: sdpa" in text
    assert "prior, not checked here" in text
    assert "other there: torch: 1.0 there" in text
    start(Machine(crossing))
    text = " ".join(explained().split())
    assert re.search(r"nearest row of the table: decode, 4 sequences, 1 new of \d+ tokens, sdpa, nhd 16:", text)
    assert "prior, checked here" in text
    assert "checked here at 15 points" in text
    prior = json.loads(explained("--json"))["prior"]
    assert prior["device"]["torch"] == "1.0"
    assert len(prior["checked"]) == 15
    table = kept()
    measured = next(
        cell for cell in table.cells if cell.phase == "decode" and cell.source == "measured" and cell.kernel == "sdpa"
    )
    assert "measured here" in explained("--batch", str(measured.batch), "--len", str(measured.kv_len))


def test_shipped_tables_are_listed_with_what_differs(ship: Ship, tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["table", "priors"]).exception
    assert str(missing).startswith("$HEADWAY_PRIORS: needs a folder of tables, or no value for those that ship, got ")
    (tmp_path / "priors").mkdir()
    listed = CliRunner().invoke(app, ["table", "priors"]).output
    assert "no table ships with this version: a first start measures in full" in listed
    ship(device=a_device(torch="1.0"))
    (tmp_path / "priors" / "broken.json").write_text("{")
    listed = " ".join(CliRunner().invoke(app, ["table", "priors"]).output.split())
    assert "4/2 heads x 32 float32: shipped table of 2026-11-21" in listed
    assert "other there: torch: 1.0 there" in listed
    assert "broken.json: needs a file of schema headway.table/1" in listed
    assert "1 of 2 shipped tables are of this kind of device" in listed
    rows = json.loads(CliRunner().invoke(app, ["table", "priors", "--json"]).output)["priors"]
    assert [row["fits"] for row in rows] == [True, False] or [row["fits"] for row in rows] == [False, True]
