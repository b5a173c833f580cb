"""Where the times behind auto come from: a file that fits, or a measurement, or neither; and no fault ends a start."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread, current_thread

import pytest

from headway.backends.sdpa import SDPA
from headway.bench.crossover.regret import RegretReport, RegretTrial, judge_again, leave_one_out, measure_regret
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import HND
from headway.core.contract.metadata import Phase
from headway.core.select.costs import Shape
from headway.core.select.request import ALL_AUTO, BackendRequest, LayerSpecs, Workload
from headway.core.select.selector import Selector
from headway.core.system.json_files import write_json
from headway.registry import Registry, create_registry
from headway.tuning import autotune
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.isolated.measure_in_child import CRASHED, HUNG
from headway.tuning.measure import kinds
from headway.tuning.measure.points import Point
from headway.tuning.measure.run import CrossoverOptions, run_kernel_level
from headway.tuning.table.files import read_table, stored_tables, table_path
from headway.tuning.table.schema import CrossoverTable, SpecRecord
from sandbox import TOY, install
from tables import POINTS, QUICK, SPEC, a_cell, a_device, a_table, quick
from tiny_bench import CPU, half_of_the_rows, with_backend

DECODE = Shape(Phase.DECODE, 1, 1, 8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, and a quick grid."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.delenv("HEADWAY_AUTOTUNE_BUDGET", raising=False)
    monkeypatch.setattr(autotune, "TIMER", QUICK)
    return tmp_path


@pytest.fixture
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    real = autotune.CrossoverOptions
    monkeypatch.setattr(autotune, "CrossoverOptions", lambda **options: real(**{**options, "grid": POINTS}))


@pytest.mark.usefixtures("small_grid")
def test_the_first_start_measures_and_the_next_one_reads(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    first = costs_for(LayerSpecs([SPEC, SPEC]), registry, ALL_AUTO, TableRequest(budget=60))
    assert "measuring attention backends" in caplog.text
    path = table_path(a_device(), SpecRecord.of(SPEC))
    assert stored_tables() == [path]
    assert read_table(path).complete
    caplog.clear()
    second = costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60))
    assert caplog.text == ""
    assert first[SPEC].at(DECODE, "sdpa", "nhd", 16) == second[SPEC].at(DECODE, "sdpa", "nhd", 16)
    selector = Selector(registry, LayerSpecs([SPEC]), costs=second)
    assert "crossover table" in str(selector.selection)


@pytest.mark.usefixtures("small_grid")
@pytest.mark.parametrize("dies", [False, True])
def test_of_two_first_starts_one_measures_and_the_other_waits(
    registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    real, measured, begun, released = autotune.run_kernel_level, list[str](), Event(), Event()

    def slow(options: CrossoverOptions, registry: Registry) -> CrossoverTable:
        measured.append(current_thread().name)
        if len(measured) == 1:
            begun.set()
            assert released.wait(60)
            if dies:
                raise ConfigError("first", "to live", "an end")
        return real(options, registry)

    found = dict[str, object]()

    def start() -> None:
        found[current_thread().name] = costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60))

    monkeypatch.setattr(autotune, "run_kernel_level", slow)
    threads = [Thread(target=start, name=name) for name in ("first", "second")]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    while "for another process: measuring attention backends for" not in caplog.text:
        time.sleep(0.01)
    assert measured == ["first"]
    released.set()
    for thread in threads:
        thread.join(120)
    assert measured == (["first", "second"] if dies else ["first"])
    assert found["second"] is not None
    assert not list(stored_tables()[0].parent.glob(".*"))
    if not dies:
        assert found["first"][SPEC].at(DECODE, "sdpa", "nhd", 16) == found["second"][SPEC].at(DECODE, "sdpa", "nhd", 16)


@pytest.mark.usefixtures("small_grid")
def test_layers_that_differ_in_sinks_are_measured_once(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    layers = LayerSpecs([replace(SPEC, sinks=(float(number),) * SPEC.num_heads) for number in range(4)])
    costs = costs_for(layers, registry, ALL_AUTO, TableRequest(budget=60))
    assert caplog.text.count("measuring attention backends") == 1
    assert list(costs) == [layers.cached[0].kind]
    assert layers.counts == {layers.cached[0].kind: 4}
    assert "crossover table" in str(Selector(registry, layers, costs=costs).selection)


def test_without_a_budget_nothing_is_measured(registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=0)) is None
    monkeypatch.setenv("HEADWAY_AUTOTUNE_BUDGET", "0")
    assert costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest()) is None
    assert not (cache / "crossover").exists()
    for text in ("soon", "-1", "nan"):
        monkeypatch.setenv("HEADWAY_AUTOTUNE_BUDGET", text)
        with pytest.raises(ConfigError, match="HEADWAY_AUTOTUNE_BUDGET: needs seconds"):
            costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest())


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"schema": "headway.table/1", "cells": [', "line 1"),
        ('{"schema": "headway.table/2"}', "newer release"),
        ("nonsense", "line 1"),
    ],
)
def test_a_faulty_kept_table_is_logged_and_left_alone(
    registry: Registry, caplog: pytest.LogCaptureFixture, content: str, word: str
) -> None:
    path = table_path(a_device(), SpecRecord.of(SPEC))
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=0)) is None
    assert word in caplog.text
    assert path.read_text() == content


def test_a_table_asked_for_is_used_or_refused_and_never_measured_again(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    cells = [a_cell(us, kernel=name) for name, us in (("sdpa", 10.0), ("sdpa.math", 20.0))]
    write_json(a_table(*cells), path)
    costs = costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest([path]))
    assert costs[SPEC].at(Shape(Phase.DECODE, 1, 1, 64), "sdpa", "nhd", 16)[0] == pytest.approx(10)
    write_json(a_table(*cells, device=a_device(driver="old", torch="1.0")), path)
    (empty := tmp_path / "empty.json").write_text(path.read_text().replace('"cells":', '"cells": [], "more":'))
    for paths, said in (([path], "torch: measured with 1.0"), ([path, empty], "driver: measured with old"), ([empty], "empty")):
        with pytest.raises(ConfigError, match=f"crossover_table: needs a table that applies to this machine, got .*{said}"):
            costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(paths, budget=60))


def test_of_several_tables_asked_for_each_serves_the_layer_that_it_was_measured_on(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = replace(SPEC, head_dim=64)
    tables = {
        "elsewhere": a_table(a_cell(1.0, kernel="sdpa"), device=a_device(name="another machine")),
        "narrow": a_table(a_cell(10.0, kernel="sdpa")),
        "wide": a_table(a_cell(20.0, kernel="sdpa"), spec=SpecRecord.of(wide)),
    }
    paths = {name: tmp_path / f"{name}.json" for name in tables}
    for name, table in tables.items():
        write_json(table, paths[name])
    layers = LayerSpecs([SPEC, wide])
    costs = costs_for(layers, registry, ALL_AUTO, TableRequest(list(paths.values())))
    step = Shape(Phase.DECODE, 1, 1, 64)
    assert costs[SPEC].at(step, "sdpa", "nhd", 16)[0] == pytest.approx(10)
    assert costs[wide].at(step, "sdpa", "nhd", 16)[0] == pytest.approx(20)
    assert "not used" not in caplog.text
    assert costs_for(layers, registry, ALL_AUTO, TableRequest([paths["narrow"]])) is None
    assert f"crossover_table needs a table for {wide}, got one for {SpecRecord.of(SPEC)}" in caplog.text


@pytest.mark.usefixtures("small_grid")
def test_a_backend_installed_since_makes_the_kept_table_stale(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60))
    more = with_backend("newcomer")
    costs = costs_for(LayerSpecs([SPEC]), more, ALL_AUTO, TableRequest(budget=60))
    assert "attention backends: newcomer not in it" in caplog.text
    assert costs[SPEC].at(DECODE, "newcomer", "nhd", 16)[0] < float("inf")


def with_failure(path: Path, name: str, reason: str) -> None:
    """Edit a table file as if a backend had failed in it, at all points."""
    table = read_table(path)
    table.kernels = [record.model_copy(update={"reason": reason}) if record.name == name else record for record in table.kernels]
    table.cells = [cell for cell in table.cells if cell.kernel != name]
    write_json(table, path)


@pytest.mark.slow
@pytest.mark.usefixtures("small_grid")
def test_a_backend_that_crashed_is_measured_again_under_a_new_version(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = with_backend("guest")
    costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60))
    path = table_path(a_device(), SpecRecord.of(SPEC))
    with_failure(path, "guest", f"{CRASHED} in decode")
    costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60))
    assert not any(cell.kernel == "guest" for cell in read_table(path).cells), "the same version is not called again"
    own = registry.backends["guest"].owner
    monkeypatch.setattr("headway.tuning.measure.self_test.version_of", lambda owner: "2.0" if owner == own else "")
    costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60))
    assert f"backend guest of {own}: measured with none, here is 2.0" in caplog.text
    assert {record.name: record.version for record in read_table(path).kernels}["guest"] == "2.0"
    assert any(cell.kernel == "guest" for cell in read_table(path).cells)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module of an installed plugin, measured in this process to save time; its folder is `toy.parent`."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.setattr(autotune, "can_measure_in_child", lambda registry, names, kind: False)
    monkeypatch.syspath_prepend(str(folder))
    install(folder, "toy", TOY)
    yield folder / "toy.py"
    sys.modules.pop("toy", None)


@pytest.mark.slow
@pytest.mark.usefixtures("small_grid")
@pytest.mark.parametrize("reason", [f"{HUNG} in decode", "self-test: decode is wrong"])
def test_a_repaired_plugin_of_the_same_version_is_measured_at_its_next_start(
    toy: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    costs_for(LayerSpecs([SPEC]), create_registry(), ALL_AUTO, TableRequest(budget=60))
    path = table_path(a_device(), SpecRecord.of(SPEC))
    with_failure(path, "toy", reason)
    caplog.clear()
    costs_for(LayerSpecs([SPEC]), create_registry(), ALL_AUTO, TableRequest(budget=60))
    assert not any(cell.kernel == "toy" for cell in read_table(path).cells), "the same files are not tried again"
    assert "measured again" not in caplog.text
    toy.write_text(f"{TOY}\n# repaired\n")
    costs_for(LayerSpecs([SPEC]), create_registry(), ALL_AUTO, TableRequest(budget=0))
    assert "measured again" not in caplog.text, "a start that may not measure takes the table as it is"
    costs_for(LayerSpecs([SPEC]), create_registry(), ALL_AUTO, TableRequest(budget=60))
    assert "toy failed in it, and its plugin's files have changed; measuring again" in caplog.text
    assert reason not in path.read_text()
    assert any(cell.kernel == "toy" for cell in read_table(path).cells)
    caplog.clear()
    costs_for(LayerSpecs([SPEC]), create_registry(), ALL_AUTO, TableRequest(budget=60))
    assert caplog.text == ""


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("reason", ["", f"{CRASHED} in decode"])
def test_a_table_is_completed_without_a_plugin_that_is_gone(
    registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(kinds, "grid", lambda device_type: POINTS)
    path = table_path(a_device(), SpecRecord.of(SPEC))
    costs_for(LayerSpecs([SPEC]), create_registry(), ALL_AUTO, TableRequest(budget=1e-9))  # one point at each start
    assert {record.name for record in read_table(path).kernels} >= {"sdpa", "toy"}
    if reason:
        with_failure(path, "toy", reason)
    sizes, told = [], []
    for _ in range(2):
        caplog.clear()
        assert costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=1e-9)) is not None
        sizes.append(len({cell.point for cell in read_table(path).cells}))
        told.append(".json: toy of toy 1.0" in caplog.text)
        assert "measuring a crossover table failed" not in caplog.text
    assert sizes == [2, 3]
    assert told == [not reason, False], "a missing plugin is told of once"
    assert "toy" not in path.read_text()


def test_a_plugins_own_layout_is_measured_beside_a_built_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def run(options: CrossoverOptions, registry: Registry) -> CrossoverTable:
        asked["layouts"] = options.layouts
        return a_table()

    monkeypatch.setattr(autotune, "run_kernel_level", run)
    claims = replace(SDPA.capabilities, layouts=(HND,))
    costs_for(LayerSpecs([SPEC]), with_backend("picky", capabilities=claims), ALL_AUTO, TableRequest(budget=60))
    assert asked["layouts"][0] == "nhd"
    assert "hnd" in asked["layouts"]


@pytest.mark.usefixtures("small_grid")
def test_a_backend_that_computes_wrongly_here_is_left_out_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    registry = with_backend("wrong", decode=half_of_the_rows)
    costs = costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60))
    assert "auto: excluding wrong: self-test: decode" in caplog.text
    caplog.clear()
    costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60))
    assert "auto: excluding wrong: self-test: decode" in caplog.text, "a start that measures nothing says so, too"
    assert "measuring" not in caplog.text
    assert "wrong" in costs[SPEC].excluded
    selector = Selector(registry, LayerSpecs([SPEC]), costs=costs)
    assert "wrong" not in selector.selection.names.values()


def test_a_folder_that_cannot_be_written_leaves_the_rank_order(
    registry: Registry, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "crossover").write_text("a file where the folder should be")
    assert costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60)) is None
    assert "using the rank order" in caplog.text
    assert "HEADWAY_CACHE names another folder" in caplog.text
    assert "--output" not in caplog.text, "nobody has named a file"


def test_where_there_is_no_choice_nothing_is_measured(registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert costs_for(LayerSpecs([SPEC]), registry, BackendRequest("sdpa", "sdpa.math"), TableRequest()) is None
    monkeypatch.setattr(registry.attention, "entries", {"sdpa": registry.backends["sdpa"]})
    assert costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60)) is None
    assert not (cache / "crossover").exists()


def test_the_file_is_named_by_device_and_kind_of_layer() -> None:
    paths = {
        table_path(a_device(), SpecRecord.of(SPEC)),
        table_path(a_device(), SpecRecord.of(replace(SPEC, scale=0.9))),
        table_path(a_device(), SpecRecord.of(replace(SPEC, sliding_window=4))),
        table_path(a_device(name="NVIDIA H200"), SpecRecord.of(SPEC)),
    }
    assert len(paths) == 3
    assert any(path.name.startswith("nvidia-h200-attention-4-2-32-float32-") for path in paths)


def slow(self, q, cache, plan, out):
    from headway.backends.sdpa import SDPA

    for _ in range(30):
        SDPA.decode(self, q, cache, plan, out)


def test_regret_is_what_the_choice_loses_at_points_nobody_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = with_backend("slow", decode=slow)
    table = run_kernel_level(quick(backends=["sdpa", "slow"], block_sizes=[16]), registry)
    points = [Point("decode", 3, 1, 30), Point("prefill", 2, 11, 11)]
    monkeypatch.setattr("headway.bench.crossover.regret.held_out", lambda *_: points)
    report = measure_regret(table, registry, CPU, 2, [0], Workload(1, 16, 16), layers=4)
    assert [(trial.phase, trial.case) for trial in report.trials] == [("decode", "3q1s30"), ("prefill", "2q11")]
    decode = report.trials[0]
    assert (decode.chosen, decode.best) == ("sdpa", "sdpa")
    assert decode.regret == 1.0
    assert {key.split()[0] for key in decode.times_us} == {"sdpa", "slow"}
    assert report.worst >= report.geometric_mean >= 1.0
    bad = decode.model_copy(update={"chosen_us": 3 * decode.best_us})
    assert bad.regret == pytest.approx(3)
    assert report.worst_anywhere == report.worst


def test_regret_is_also_judged_against_layouts_that_were_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = with_backend("slow", decode=slow)
    table = run_kernel_level(quick(backends=["sdpa"], layouts=["nhd", "hnd"], block_sizes=[16]), registry)
    monkeypatch.setattr("headway.bench.crossover.regret.held_out", lambda *_: [Point("decode", 3, 1, 30)])
    report = measure_regret(table, registry, CPU, 1, [0], Workload(1, 16, 16), layers=4, anywhere=True)
    (trial,) = report.trials
    assert set(trial.times_us) == {"sdpa nhd 16", "sdpa hnd 16"}
    (other,) = (key for key, us in trial.times_us.items() if us != trial.chosen_us)
    half = trial.model_copy(update={"times_us": {**trial.times_us, other: trial.chosen_us / 2}})
    assert half.regret_anywhere == pytest.approx(2)
    assert half.regret == 1.0
    assert report.worst_anywhere == trial.regret_anywhere


def test_a_layer_without_a_cache_is_judged_in_the_phase_that_it_has() -> None:
    prompts = [
        a_cell(us, phase="prefill", kernel=name, case=f"1q{n}", query_len=n, kv_len=n, layout=None, block_size=None)
        for name, us in (("sdpa", 10.0), ("sdpa.math", 20.0))
        for n in (16, 1024)
    ]
    table = a_table(*prompts, spec=SpecRecord.of(replace(SPEC, dense=True, causal=False)))
    report = measure_regret(table, create_registry(load_entry_points=False), CPU, 2, [1], Workload(1, 16, 16), layers=1)
    assert {trial.phase for trial in report.trials} == {"prefill"}


def test_another_table_is_judged_by_the_times_of_an_earlier_report(tmp_path: Path) -> None:
    cells = [
        a_cell(us, kernel=name, case=f"1q1s{kv_len}", kv_len=kv_len, plan_us=0.0)
        for name, us in (("sdpa", 10.0), ("sdpa.math", 20.0))
        for kv_len in (64, 1024)
    ]
    dense = [
        a_cell(us, phase="prefill", kernel=name, case="1q64", query_len=64, kv_len=64, layout=None, block_size=None)
        for name, us in (("sdpa", 10.0), ("sdpa.math", 20.0))
    ]
    extend = [a_cell(10.0, phase="extend", kernel="sdpa", case="1q16s64", query_len=16, kv_len=64)]
    table = a_table(*cells, *dense, *extend)
    place = f"{cells[0].layout} {cells[0].block_size}"
    trials = [
        {
            "phase": "decode",
            "case": "1q1s200",
            "times_us": {f"sdpa {place}": 30.0, f"sdpa.math {place}": 20.0, "sdpa hnd 64": 10.0},
        },
        {"phase": "prefill", "case": "1q70", "times_us": {"sdpa": 5.0, "sdpa.math": 8.0}},
        {"phase": "decode", "case": "1q1s300", "times_us": {"sdpa hnd 64": 10.0}},
    ]
    blank = {"chosen": "", "best": "", "chosen_us": 1.0, "best_us": 1.0}
    old = leave_one_out(table).model_copy(update={"trials": [RegretTrial(**blank, **trial) for trial in trials]})
    write_json(old, tmp_path / "old.json")
    report = judge_again(RegretReport.read(tmp_path / "old.json"), table, Workload(1, 64, 64))
    decode, prefill = report.trials
    assert (decode.chosen, decode.best, decode.regret, decode.regret_anywhere) == ("sdpa", "sdpa.math", 1.5, 3.0)
    assert (prefill.chosen, prefill.regret) == ("sdpa", 1.0)
    assert len(report.untimed) == 1
    assert report.worst == 1.5
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(ConfigError, match="headway table regret --output wrote, got"):
        RegretReport.read(tmp_path / "old.json")


def test_leaving_a_point_out_shows_what_the_lookup_would_have_lost() -> None:
    lens, times = (64, 256, 1024), {"sdpa": (10.0, 40.0, 30.0), "sdpa.math": (20.0, 20.0, 20.0)}
    cells = [
        a_cell(us, kernel=name, case=f"1q1s{kv_len}", kv_len=kv_len, plan_us=0.0)
        for name, row in times.items()
        for kv_len, us in zip(lens, row, strict=True)
    ]
    report = leave_one_out(a_table(*cells), layers=1)
    (trial,) = report.trials  # the ends cannot be left out: nothing spans them
    # between 10 and 30 the lookup expects sdpa to take 17.3, and it takes 40
    assert (trial.case, trial.chosen, trial.best) == ("1q1s256", "sdpa", "sdpa.math")
    assert trial.regret == pytest.approx(2, rel=1e-3)
    assert report.worst == report.geometric_mean == pytest.approx(2, rel=1e-3)
