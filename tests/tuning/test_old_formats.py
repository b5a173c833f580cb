"""Tables of the formats of before `headway.table/1`: read, converted, and choosing as they did."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli.app import make_app
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.ranks.torch_ranks import SIZES
from headway.core.select.costs import CostTable, Shape
from headway.tuning.measure.find_table import usable_table
from headway.tuning.table.convert import to_costs, to_times
from headway.tuning.table.files import TableError, find_prior, read_table, stored_table, table_path
from headway.tuning.table.old_formats import HIDDEN, old_path
from headway.tuning.table.schema import (
    CrossoverTable,
    ExpertsRecord,
    LayerRecord,
    LinearRecord,
    RanksRecord,
    SpecRecord,
    StateSpecRecord,
)
from tables import a_device

ROOT = Path(__file__).resolve().parents[2]
app = make_app()
CHOICES = {
    "tuning/priors/nvidia-h100-80gb-hbm3-attention-16-8-128-bfloat16-00044f95.json": "77b4a0a4df418871",
    "tuning/priors/nvidia-h100-80gb-hbm3-attention-32-8-128-bfloat16-a911acb1.json": "5e5117ab99d61120",
    "tuning/priors/nvidia-h200-attention-16-8-128-bfloat16-3c8e9863.json": "45a5921fa4520d64",
    "tuning/priors/nvidia-h200-attention-16-8-256-bfloat16-2f0ec73a.json": "1e28b4ea3d28b6b3",
    "tuning/priors/nvidia-h200-attention-32-8-128-bfloat16-04f62456.json": "ddf400d561ec384f",
    "tuning/priors/nvidia-h200-attention-32-8-64-bfloat16-86454548.json": "cc14010baf047dda",
    "bench/results/h200/crossover-16-8-128.json": "f1bcfecc220cd09e",
    "bench/results/h200/crossover-32-8-128.json": "6b0f5515b951a937",
    "bench/results/cpu/crossover.json": "56b9cf2b1c2bf033",
}
"""File -> digest of the times that `auto` looked up in it when it was read by the code of its format."""


def middle(a: Shape, b: Shape) -> Shape:
    pairs = ((a.batch, b.batch), (a.query_len, b.query_len), (a.kv_len, b.kv_len))
    return Shape(a.phase, *(max(1, round(math.sqrt(one * other))) for one, other in pairs))


def digest(table: CrossoverTable) -> str:
    """Return a digest of the times of every usable kernel at all measured points and between them, noise and exclusions."""
    costs: CostTable = to_costs(table)
    names = [record.name for record in table.kernels if record.usable]
    places = sorted({(cell.layout or "", cell.block_size or 0) for cell in table.cells if cell.layout})
    lines = []
    for phase in Phase:
        known = [*costs.shapes[phase], *costs.between[phase]]
        for shape in (each for a, b in zip(known, known[1:] + known[:1], strict=True) for each in (a, middle(a, b))):
            for place in places:
                times = [(*(f"{us:.6g}" for us in costs.at(shape, name, *place)), name) for name in names]
                lines.append(f"{shape} {place} {times}")
    lines.append(f"{costs.noise} {sorted(costs.excluded)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", CHOICES)
def test_tables_choose_as_before_their_conversion(name: str) -> None:
    assert digest(read_table(ROOT / name)) == CHOICES[name]


def test_every_shipped_table_lies_under_its_own_name_and_is_held() -> None:
    for path in (ROOT / "tuning" / "priors").glob("*.json"):
        table = read_table(path, kind=None)
        assert path.name == table_path(table.device, table.spec).name
        assert table.kind != "attention" or f"tuning/priors/{path.name}" in CHOICES


US: dict[str, list[float | None]] = {"one": [3.0, 4.0, None], "two": [5.0, 2.0, 1.0]}
STATE = StateSpecRecord(
    recurrence="gated_delta", num_heads=4, num_key_heads=2, key_dim=4, value_dim=8, conv_channels=48, conv_width=4,
    activation="silu", dtype="float32", state_dtype="float32", qk_norm=True,
)  # fmt: skip
LAYER = SpecRecord.of(AttentionSpec(4, 2, 32, 32**-0.5))


def device(**changes: object) -> dict[str, Any]:
    return a_device(**changes).model_dump(mode="json")


def counted(schema: str, **own: object) -> dict[str, Any]:
    origin = {"version": "0.4", "commit": None, "modified": False}
    return {"file_schema": schema, "device": device(), "origin": origin, "prior": "", "us": US, **own}


def attention() -> dict[str, Any]:
    place = {"phase": "decode", "batch": 1, "query_len": 1, "status": "ok", "layout": "nhd", "block_size": 16, "kernel": "k"}
    cells = [
        {**place, "backend": name, "case": f"1q1s{n}", "kv_len": n, "median_us": us, "p20_us": us, "p80_us": us}
        for name, times in (("a", (10.0, 90.0)), ("b", (20.0, 30.0)))
        for n, us in zip((64, 4096), times, strict=True)
    ]
    return {
        "schema": "headway.crossover/1", "level": "kernel", "date": "2026-11-21T10:00:00+00:00", "command": "", "complete": True,
        "device": device(), "spec": LAYER.model_dump(mode="json"), "noise": 0.02, "cells": cells,
        "backends": [{"name": name, "owner": "built-in", "available": True} for name in "ab"],
    }  # fmt: skip


def states() -> dict[str, Any]:
    place = {"layout": "key_value", "status": "ok", "convolution": "torch"}
    cells = [
        {**place, "verb": verb, "batch": 1, "query_len": n, "backend": name, "median_us": us, "p20_us": us, "p80_us": us}
        for verb, n, times in (("scan", 64, (30.0, 60.0)), ("step", 1, (8.0, 5.0)))
        for name, us in zip("ab", times, strict=True)
    ]
    return {
        "schema": "headway.states/1", "date": "2026-11-24", "command": "", "complete": True, "device": device(),
        "spec": STATE.model_dump(mode="json"), "cells": cells,
        "backends": [{"name": name, "owner": "built-in", "available": True} for name in "ab"],
    }  # fmt: skip


OLD: dict[str, tuple[dict[str, Any], LayerRecord]] = {
    "attention": (attention(), LAYER),
    "state": (states(), STATE),
    "linear": (counted("headway.products/1", product="fp8 rows 32x64", rows=[1, 2, 4]), LinearRecord(layer="fp8 rows 32x64")),
    "experts": (counted("headway.experts/1", layer="8 of 2", tokens=[1, 2, 4]), ExpertsRecord(layer="8 of 2")),
    "all_reduce": (counted("headway.all-reduce/1", ranks=2, sizes=[1, 2, 4]), RanksRecord(layer="2 ranks")),
}


def test_times_along_one_axis_are_those_of_the_old_file(tmp_path: Path) -> None:
    for kind in ("linear", "experts", "all_reduce"):
        data, record = OLD[kind]
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(data))
        table = read_table(path, kind)
        assert to_times(table, [1, 2, 4]) == US
        assert table.spec == record
        assert table.complete
    measured = read_table(ROOT / "bench" / "results" / "h200x2" / "all-reduce.json", "all_reduce")
    us = json.loads((ROOT / "bench/results/h200x2/all-reduce.json").read_text())["us"]
    assert to_times(measured, SIZES[: len(us["nccl"])]) == us


def test_tables_of_states_and_attention_look_up_as_before(tmp_path: Path) -> None:
    (tmp_path / "states.json").write_text(json.dumps(OLD["state"][0]))
    costs = to_costs(read_table(tmp_path / "states.json", "state"))
    assert costs.at(Shape(Phase.PREFILL, 1, 64, 64), "a", "key_value", 0)[0] == pytest.approx(30.0)
    assert costs.at(Shape(Phase.DECODE, 1, 1, 1), "b", "key_value", 0)[0] == pytest.approx(5.0)
    assert (costs.noise, costs.source) == (0.01, "state table of 2026-11-24")
    (tmp_path / "attention.json").write_text(json.dumps(OLD["attention"][0]))
    table = read_table(tmp_path / "attention.json")
    assert to_costs(table).at(Shape(Phase.DECODE, 1, 1, 4096), "b", "nhd", 16)[0] == pytest.approx(30.0)
    assert {cell.variant for cell in table.cells} == {"k"}


@pytest.mark.parametrize("kind", OLD)
def test_a_stored_file_of_an_old_format_is_replaced_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "headway")
    data, record = OLD[kind]
    old = tmp_path / old_path(a_device(), record)
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_text(json.dumps(data))
    table = stored_table(a_device(), record)
    assert table is not None
    assert table.kind == kind
    assert caplog.text.count(f"crossover table {table_path(a_device(), record)} replaces {old}, which is of schema headway.") == 1
    old.unlink()
    assert stored_table(a_device(), record) == table
    assert caplog.text.count("replaces") == 1


@pytest.mark.parametrize("kind", OLD)
def test_headway_table_shows_checks_and_compares_every_kind(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(OLD[kind][0]))
    shown = CliRunner().invoke(app, ["table", "show", str(path), "--json"])
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.output)["rows"]
    fastest = sorted({name for row in rows for name in row["winners"]})
    assert fastest == (["a", "b"] if kind in ("attention", "state") else ["one", "two"])
    plain = CliRunner().invoke(app, ["table", "show", str(path)], env={"COLUMNS": "160"})
    assert "CROSSOVER ANALYSIS" in plain.output
    checked = CliRunner().invoke(app, ["table", "check", str(path)])
    assert "fits this machine" in checked.output, checked.output
    same = CliRunner().invoke(app, ["table", "diff", str(path), str(path)])
    assert "0 cells differ" in same.output
    picture = CliRunner().invoke(app, ["table", "plot", str(path), str(tmp_path / "table.html")])
    assert (picture.exception is None) is (kind == "attention")


@pytest.mark.parametrize("kind", OLD)
def test_a_shipped_file_of_an_old_format_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("HEADWAY_PRIORS", str(tmp_path))
    data, record = OLD[kind]
    old = old_path(a_device(), record)
    path = tmp_path / (old.name if kind == "attention" else Path(old.parent.name) / old.name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data))
    found = find_prior(a_device(), record, {})
    assert found is not None
    assert found.path == path


def test_old_names_of_stored_files_are_those_that_earlier_versions_wrote() -> None:
    gpu = a_device(name="NVIDIA H200")
    key = hashlib.sha256(repr(("NVIDIA H200", LAYER.key)).encode()).hexdigest()[:8]
    assert str(old_path(gpu, LAYER)) == f"crossover/nvidia-h200-4-2-32-float32-{key}.json"
    assert str(old_path(gpu, RanksRecord(layer="2 ranks"))) == "all_reduce/nvidia-h200-2-ranks.json"
    key = hashlib.sha256(repr(("NVIDIA H200", "fp8 rows 32x64")).encode()).hexdigest()[:8]
    assert str(old_path(gpu, LinearRecord(layer="fp8 rows 32x64"))) == f"products/nvidia-h200-fp8-rows-32x64-{key}.json"


def test_old_times_of_experts_of_an_unknown_hidden_size_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    record = ExpertsRecord(layer=f"8 of 2{HIDDEN}64")
    old = tmp_path / old_path(a_device(), record)
    assert old == tmp_path / old_path(a_device(), ExpertsRecord(layer="8 of 2"))
    old.parent.mkdir(parents=True)
    old.write_text(json.dumps(OLD["experts"][0]))
    assert usable_table(record, a_device(), []) is None
    assert "layer of experts: measured with 8 of 2, here is 8 of 2, hidden size 64" in caplog.text
    assert not table_path(a_device(), record).exists()


def test_what_an_old_file_does_not_know_of_the_compilers_counts_as_unknown(tmp_path: Path) -> None:
    data = json.loads((ROOT / "bench/results/h200/crossover-16-8-128.json").read_text())
    data["device"]["compilers"] = {"ptxas": "12.8.93", "nvrtc": "13.0"}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    assert read_table(path).device.compilers == {"ptxas": "12.8.93 (unknown path)", "nvrtc": "13.0", "cublas": "unknown"}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda data: data["cells"][1].update(median_us=-1), r"line \d+: cells\.1\.median_us"),
        (lambda data: data["cells"][0].update(backend="c"), r"'c' is not in kernels"),
        (lambda data: data.update(cells=3), "cells"),
        (lambda data: data.update(device=3), "device"),
        (lambda data: data.pop("backends"), "kernels"),
        (lambda data: data.update(spec=[]), "spec"),
    ],
)
def test_a_faulty_old_file_is_refused_in_one_line(tmp_path: Path, edit: Any, said: str) -> None:
    data = attention()
    edit(data)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data, indent=1))
    with pytest.raises(TableError, match=said) as raised:
        read_table(path)
    assert "\n" not in str(raised.value)
    for name, wrong in product(("us", "device", "rows", "product"), (None, 3, [None], {"a": 3})):
        path.write_text(json.dumps(counted("headway.products/1", product="fp8", rows=[1, 2, 4]) | {name: wrong}))
        with pytest.raises(TableError):
            read_table(path, "linear")
