"""Shipped tables: named, and used by a start on a GPU after a self-test; a faulty one ends no start."""

from __future__ import annotations

import json
import logging
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
from headway.tuning.measure import run
from headway.tuning.measure.points import Point, grid
from headway.tuning.measure.run import CrossoverOptions, run_kernel_level
from headway.tuning.table.files import prior_path, read_table, table_path
from headway.tuning.table.schema import Cell, CrossoverTable, KernelRecord, SpecRecord
from tables import SPEC, a_cell, a_device, a_table
from tiny_bench import with_backend

app = make_app()

Times = Callable[[str, Point], float | None]
Ship = Callable[..., CrossoverTable]
Start = Callable[..., CostTable | None]
GRID = grid("cpu")
GPU = a_device(type="cuda", name="Some GPU", compute_capability="9.0", sm_count=100, clock_mhz=2000, threads=None, compilers={})


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
    """What measures in an engine's start, with times that a test knows: it stands for `run_kernel_level`. Self-tests are real."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.runs: list[CrossoverOptions] = []

    def __call__(self, options: CrossoverOptions, registry: Registry) -> CrossoverTable:
        if not options.grid:
            return run_kernel_level(options, registry)
        self.runs.append(options)
        names = list(options.backends or ())
        cells = cells_of(self.times, names, list(options.grid))
        old = read_table(options.output) if options.resume else None
        table = a_table(
            *(() if old is None else old.cells),
            *cells,
            complete=True,
            device=GPU,
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

    def write(times: Times = crossing, names: tuple[str, ...] = ("sdpa", "sdpa.math")) -> CrossoverTable:
        table = a_table(*cells_of(times, list(names), GRID), device=GPU)
        write_json(table, prior_path(GPU, SpecRecord.of(SPEC)))
        return table

    return write


@pytest.fixture
def start(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Start:
    """An engine's start on a machine, for its table of costs."""

    def begin(machine: Machine, tune: str = "idle", registry: Registry = registry) -> CostTable | None:
        monkeypatch.setattr(autotune, "run_kernel_level", machine)
        for module in (autotune, run):
            monkeypatch.setattr(module, "identify_device", lambda _: GPU)
        found = costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(tune=tune))
        return None if found is None else found[SPEC]

    return begin


def kept() -> CrossoverTable:
    return read_table(table_path(GPU, SpecRecord.of(SPEC)))


def us(costs: CostTable | None, name: str, batch: int, kv_len: int) -> float:
    return costs.at(Shape(Phase.DECODE, batch, 1, kv_len), name, "nhd", 16)[0]


def test_a_prior_is_taken_after_a_self_test_and_marked(ship: Ship, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    ship(names=("sdpa", "sdpa.math", "gone"))
    machine = Machine(crossing)
    costs = start(machine)
    assert machine.runs == [], "nothing is measured"
    table = kept()
    assert {cell.source for cell in table.cells} == {"prior"}
    assert {cell.kernel for cell in table.cells} == {"sdpa", "sdpa.math"}, "what can run here"
    assert {cell.point for cell in table.cells} == {(point.phase, point.case) for point in GRID}
    assert table.complete
    assert us(costs, "sdpa", 4, 512) == pytest.approx(crossing("sdpa", Point("decode", 4, 1, 512)))
    assert costs.source == "shipped table of 2026-11-21, not checked here"
    assert "they are checked while the engine is idle" in caplog.text
    caplog.clear()
    assert us(start(machine), "sdpa", 4, 512) == us(costs, "sdpa", 4, 512), "the next start reads"
    assert "cells are those of the shipped table of 2026-11-21" in caplog.text


def test_a_start_that_shall_measure_uses_no_prior(ship: Ship, start: Start) -> None:
    ship()
    machine = Machine(lambda name, point: 2 * (crossing(name, point) or 0.0))
    costs = start(machine, tune="start")
    assert len(machine.measured) == len(GRID)
    assert kept().prior is None
    assert us(costs, "sdpa", 4, 512) == pytest.approx(2 * (crossing("sdpa", Point("decode", 4, 1, 512)) or 0.0))


def test_other_versions_are_named(ship: Ship, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    there = GPU.model_copy(update={"torch": "1.0", "driver": "old", "compilers": {"ptxas": "12.8.61"}})
    write_json(ship().model_copy(update={"device": there}), prior_path(GPU, SpecRecord.of(SPEC)))
    start(Machine(crossing))
    table = kept()
    assert "driver: old there, none here" in table.prior.differs
    assert "ptxas: 12.8.61 there, none here" in table.prior.differs
    assert any(line.startswith("torch: 1.0 there") for line in table.prior.differs)
    assert "it differs in driver: old there" in caplog.text
    assert table.device.torch != "1.0"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"device": GPU.model_copy(update={"name": "another machine"})}, "device"),
        ({"spec": SpecRecord.of(SPEC).model_copy(update={"dtype": "bfloat16", "kv_dtype": "bfloat16"})}, "attention layer"),
    ],
)
def test_a_prior_of_another_device_or_layer_is_refused(
    ship: Ship, start: Start, caplog: pytest.LogCaptureFixture, changes: dict[str, object], word: str
) -> None:
    write_json(ship().model_copy(update=changes), prior_path(GPU, SpecRecord.of(SPEC)))
    machine = Machine(crossing)
    start(machine)
    assert f"shipped table not used: table {prior_path(GPU, SpecRecord.of(SPEC))}: needs {word}" in caplog.text
    assert len(machine.measured) == len(GRID), "a start without a prior measures as ever"
    assert kept().prior is None


def test_a_broken_prior_ends_no_start(ship: Ship, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    ship()
    path = prior_path(GPU, SpecRecord.of(SPEC))
    path.write_text(path.read_text()[:1000])
    machine = Machine(crossing)
    assert start(machine) is not None
    assert "shipped table not used" in caplog.text
    assert "a copy that was cut short?" in caplog.text
    assert len(machine.measured) == len(GRID)


def test_a_plugin_that_the_prior_does_not_know_is_measured_with_all_others(
    ship: Ship, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    ship()
    machine = Machine(lambda name, point: 5.0 if name == "newcomer" else crossing(name, point))
    costs = start(machine, registry=with_backend("newcomer"))
    assert "these times are not used, because they do not contain newcomer" in caplog.text
    assert len(machine.measured) == len(GRID)
    assert costs.at(Shape(Phase.EXTEND, 1, 16, 256), "newcomer", "nhd", 16)[0] == pytest.approx(5.0)


def test_without_a_budget_a_prior_serves_unchecked_unless_it_lacks_a_backend(
    ship: Ship, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ship()
    machine = Machine(crossing)
    costs = start(machine, tune="never")
    assert costs.source == "shipped table of 2026-11-21, not checked here"
    assert machine.runs == []
    assert not table_path(GPU, SpecRecord.of(SPEC)).exists(), "what was not checked is not kept"
    newcomer = with_backend("newcomer")
    assert start(machine, tune="never", registry=newcomer) is not None, (
        "ranked behind, it would not be chosen without a table either"
    )
    monkeypatch.setattr(newcomer.attention, "rank", lambda spec, phase, names: sorted(names, key=lambda name: name != "newcomer"))
    assert start(machine, tune="never", registry=newcomer) is None
    assert "does not contain newcomer and is not used unchecked" in caplog.text


def explained(*more: str) -> str:
    words = ["backends", "explain", "--device", "cpu", "--geometry", "4/2/32", "--batch", "4", "--len", "512", *more]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.usefixtures("registry")
def test_explain_names_the_prior(ship: Ship) -> None:
    there = a_device(torch="1.0")
    write_json(ship().model_copy(update={"device": there}), prior_path(a_device(), SpecRecord.of(SPEC)))
    text = explained()
    assert "decode, 4 sequences, 1 new of 512 tokens: sdpa" in text
    assert "prior, not checked here" in text
    assert "other there: torch: 1.0 there" in text
    prior = json.loads(explained("--json"))["prior"]
    assert prior["device"]["torch"] == "1.0"


def test_shipped_tables_are_listed_with_what_differs(ship: Ship, tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["table", "priors"]).exception
    assert str(missing).startswith("$HEADWAY_PRIORS: needs a folder of tables, or no value for those that ship, got ")
    (tmp_path / "priors").mkdir()
    listed = CliRunner().invoke(app, ["table", "priors"]).output
    assert "no table ships with this version: a first start measures in full" in listed
    there = a_device(torch="1.0")
    write_json(ship().model_copy(update={"device": there}), prior_path(a_device(), SpecRecord.of(SPEC)))
    prior_path(GPU, SpecRecord.of(SPEC)).unlink()
    (tmp_path / "priors" / "broken.json").write_text("{")
    listed = " ".join(CliRunner().invoke(app, ["table", "priors"]).output.split())
    assert "4/2 heads x 32 float32: shipped table of 2026-11-21" in listed
    assert "other there: torch: 1.0 there" in listed
    assert "broken.json: needs a file of schema headway.table/1" in listed
    assert "1 of 2 shipped tables are of this kind of device" in listed
    rows = json.loads(CliRunner().invoke(app, ["table", "priors", "--json"]).output)["priors"]
    assert [row["fits"] for row in rows] == [True, False] or [row["fits"] for row in rows] == [False, True]
