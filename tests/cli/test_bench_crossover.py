"""`headway bench crossover`, `headway table` and `headway backends explain`, as typed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.core.contract.spec import AttentionSpec
from headway.core.system.json_files import write_json
from headway.tuning.table.files import read_table, stored_tables, table_path
from headway.tuning.table.schema import CrossoverTable, KernelRecord, SpecRecord
from sandbox import Result, assert_refused
from tables import SPEC, a_cell, a_device, a_table

Headway = Callable[..., Result]
TINY = ("--device", "cpu", "--geometry", "4/2/32")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def crossing() -> CrossoverTable:
    """sdpa wins short decodes, sdpa.math long ones and native none, which nobody would believe of a real one."""
    cells = [
        a_cell(us, kernel=name, case=f"{batch}q1s{kv_len}", kv_len=kv_len, batch=batch)
        for batch in (1, 64)
        for kv_len, times in ((64, (10.0, 30.0, 50.0)), (4096, (200.0, 100.0, 500.0)))
        for name, us in zip(("sdpa", "sdpa.math", "native"), times, strict=True)
    ]
    for phase, case, query_len, kv_len in (("prefill", "1q64", 64, 64), ("extend", "1q64s128", 64, 128)):
        shape = {"phase": phase, "case": case, "query_len": query_len, "kv_len": kv_len}
        cells += [a_cell(us, kernel=name, **shape) for name, us in (("sdpa", 5.0), ("sdpa.math", 9.0))]
    return a_table(*cells)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_json(crossing(), tmp_path / "t.json")
    return tmp_path / "t.json"


@pytest.fixture
def kept() -> Path:
    """The table that auto would use for the tiny layer on this machine."""
    place = table_path(a_device(), SpecRecord.of(SPEC))
    write_json(crossing(), place)
    return place


def test_a_small_table_is_measured_printed_exported_and_not_kept_for_auto(headway: Headway, tmp_path: Path) -> None:
    files = [tmp_path / f"x.{form}" for form in ("csv", "md", "html", "json")]
    exports = [word for file in files for word in ("--export", str(file))]
    grid = ("--phases", "decode,prefill", "--batch-sizes", "1,2", "--input-lens", "8", "--layouts", "nhd", "--block-sizes", "16")
    result = headway("bench", "crossover", *TINY, *grid, *exports, columns=200)
    assert result.code == 0, result
    assert "CROSSOVER ANALYSIS" in result.out
    assert "decode, batch size 2" in result.out
    assert "not saved" in result.out
    assert stored_tables() == []
    assert all(file.stat().st_size > 100 for file in files)
    path = tmp_path / "t.json"
    assert headway("bench", "crossover", *TINY, *grid, "--output", str(path)).code == 0
    table = read_table(path)
    assert table.complete
    assert {cell.case for cell in table.cells} == {"1q1s8", "2q1s8", "1q8", "2q8"}
    assert headway("bench", "crossover", *TINY, *grid, "--output", str(path), "--resume").code == 0
    assert read_table(path).cells == table.cells
    assert "decode" in headway("table", "show", str(path)).out
    assert len(json.loads(headway("table", "show", str(path), "--json").out)["rows"]) == 4


def test_a_whole_grid_is_kept_for_auto(headway: Headway) -> None:
    result = headway("bench", "crossover", *TINY, "--layouts", "nhd", "--block-sizes", "16", "--budget", "0s")
    assert result.code == 0, result
    (kept,) = stored_tables()
    assert kept == table_path(a_device(), SpecRecord.of(SPEC))
    assert not read_table(kept).complete
    assert str(kept) in result.out.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--phases", "decode,nonsense"), "--phases: needs decode, prefill, extend, verify, got 'nonsense'"),
        (("--budget", "soon"), "--budget: needs a time such as 120s or 5m"),
        (("--geometry", "4/3/32"), "--geometry"),
        (("--batch-sizes", "0"), "--batch-sizes"),
        (("--export", "x.xlsx"), ".json or .csv or .md or .html or .png"),
        (("--backends", "nope"), "'nope'"),
        (("--layouts", "nope"), "kv_layout"),
        (("--backends", "triton"), "triton: needs a backend that runs"),
        (("--model", "x"), "--model: needs --level engine, got --level kernel"),
        (("--cell-limit", "5s"), "--cell-limit: needs --level engine"),
        (("--level", "engine", "--graph-len", "64"), "--graph-len: needs --level kernel, got --level engine"),
        (("--level", "engine", "--mixed", "2q8"), "512 tokens in, 512 out"),
        (("--level", "engine", "--backends", "nope"), "'nope'"),
    ],
)
def test_a_mistake_is_one_message(headway: Headway, words: tuple[str, ...], said: str) -> None:
    assert_refused(headway("bench", "crossover", "--device", "cpu", *words, columns=400), said)


def test_a_table_that_does_not_fit_says_why_and_fails(headway: Headway, path: Path, kept: Path) -> None:
    write_json(crossing().model_copy(update={"device": a_device(driver="1.0", name="GPU of old")}), path)
    fitting, result = headway("table", "check", str(kept), columns=200), headway("table", "check", str(path))
    assert (fitting.code, "fits this machine" in fitting.out) == (0, True)
    assert result.code == 1
    assert "driver: the table has 1.0, this machine none" in result.out
    assert "device: the table has GPU of old" in result.out


def test_two_tables_are_compared_and_put_together(headway: Headway, path: Path, tmp_path: Path) -> None:
    other = crossing()
    other.cells[0] = other.cells[0].model_copy(update={"median_us": 20.0, "p20_us": 20.0, "p80_us": 20.0})
    write_json(other, tmp_path / "u.json")
    shown = headway("table", "diff", str(path), str(tmp_path / "u.json"), columns=200).out
    assert "2.00" in shown
    assert "slower" in shown
    assert "1 cells differ" in shown
    merged = headway("table", "merge", str(path), str(tmp_path / "u.json"), "-o", str(tmp_path / "m.json"))
    assert merged.code == 0
    assert len(read_table(tmp_path / "m.json").cells) == len(other.cells)
    assert_refused(headway("table", "merge", str(path), "-o", str(tmp_path / "m.json")), "two files or more")
    write_json(other.model_copy(update={"device": a_device(driver="1.0")}), tmp_path / "u.json")
    odd = headway("table", "merge", str(path), str(tmp_path / "u.json"), "-o", str(tmp_path / "m.json"))
    assert_refused(odd, f"driver of {path}: needs 1.0 as {tmp_path / 'u.json'} has, got none")


@pytest.mark.parametrize("command", [("table", "show"), ("table", "check"), ("table", "diff"), ("table", "plot")])
def test_a_faulty_file_is_refused_with_the_line(headway: Headway, path: Path, command: tuple[str, ...]) -> None:
    path.write_text(path.read_text().replace('"batch": 64', '"batch": "many"', 1))
    words = [str(path)] if command[1] in ("show", "check") else [str(path), str(path.with_suffix(".html"))]
    words = [str(path), str(path)] if command[1] == "diff" else words
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if '"many"' in text)
    assert_refused(headway(*command, *words, columns=400), f"line {line}: cells.6.batch")


def test_without_any_table_the_way_to_one_is_said(headway: Headway) -> None:
    assert_refused(headway("table", "show", columns=300), "headway bench crossover measures one")


def test_choices_are_judged_and_judged_again_by_the_same_times(headway: Headway, path: Path, tmp_path: Path) -> None:
    output = tmp_path / "regret.json"
    result = headway("table", "regret", str(path), "--leave-one-out", "--output", str(output))
    assert result.code == 0, result.err
    assert "geometric mean" in result.out
    report = json.loads(output.read_text())
    assert len(report["trials"]) > 1
    for number, trial in enumerate(report["trials"]):
        trial["seed"] = 11 + number % 2
    output.write_text(json.dumps(report))
    alone = headway("table", "regret", str(path), "--trials", str(output))
    assert (alone.code, "every layout" in alone.out) == (0, False)  # the times are of one layout and block size
    assert "microseconds of a step of 32 layers" in alone.out
    report["trials"][0]["times_us"]["sdpa hnd 64"] = 1.0
    output.write_text(json.dumps(report))
    again = headway("table", "regret", str(path), "--trials", str(output))
    assert again.code == 0, again.err
    assert [line.split(":")[0] for line in again.out.splitlines() if line.startswith("seed")] == ["seed 11", "seed 12"]
    assert "against the best of every layout and block size" in again.out
    wrong = headway("table", "regret", str(path), "--trials", str(path), columns=400)
    assert_refused(wrong, "needs a file that headway table regret --output wrote")
    both = headway("table", "regret", str(path), "--leave-one-out", "--trials", str(output), columns=400)
    assert_refused(both, "needs one of --leave-one-out, --trials, --derived-from, got --leave-one-out and --trials")


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("--leave-one-out", ("--anywhere",)),
        ("--trials", ("--seed", "2")),
        ("--derived-from", ("--workload", "long")),
    ],
)
def test_an_option_for_points_that_nobody_measures_is_refused(
    headway: Headway, path: Path, way: str, words: tuple[str, ...]
) -> None:
    given = (way,) if way == "--leave-one-out" else (way, "r.json")
    result = headway("table", "regret", str(path), *given, *words, columns=400)
    assert_refused(
        result, f"{words[0]}: needs points that are measured, got {way}, which measures none and does not read {words[0]}"
    )


def test_a_table_that_leads_to_no_choice_says_what_it_lacks(headway: Headway, path: Path) -> None:
    table = crossing()
    write_json(table.model_copy(update={"cells": [cell for cell in table.cells if cell.phase != "extend"]}), path)
    refused = headway("table", "regret", str(path), "--points", "1", columns=400)
    assert_refused(refused, "needs a table of level kernel with times for every phase, got one without times for extend")
    foreign = [KernelRecord(name="triton", owner="headway", version="1", available=True)]
    cells = [cell.model_copy(update={"kernel": "triton"}) for cell in table.cells if cell.kernel == "sdpa"]
    write_json(table.model_copy(update={"cells": cells, "kernels": foreign}), path)
    refused = headway("table", "regret", str(path), "--points", "1", columns=400)
    assert_refused(refused, "of backends that can run here, got times of triton on ")


def test_choices_by_the_times_of_another_layer_are_judged(headway: Headway, path: Path, tmp_path: Path) -> None:
    table, other = crossing(), tmp_path / "crossover-other.json"
    write_json(table.model_copy(update={"spec": table.spec.model_copy(update={"num_heads": 2 * table.spec.num_heads})}), other)
    result = headway("table", "regret", str(path), "--derived-from", str(other))
    assert result.code == 0, result.err
    assert "derived from the table for 8/2 heads x 32 float32" in result.out
    assert "geometric mean" in result.out
    narrow = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
    write_json(table.model_copy(update={"spec": table.spec.model_copy(update=narrow)}), other)
    refused = headway("table", "regret", str(path), "--derived-from", str(other), columns=400)
    assert_refused(refused, "--derived-from: needs a table of level kernel for a layer similar to 4/2 heads x 32 float32, got")


def test_a_table_of_whole_generations_is_not_judged(headway: Headway, path: Path) -> None:
    cell = a_cell(10.0, phase="generate", kernel="sdpa", case="1q4s8", query_len=4, kv_len=8)
    write_json(a_table(cell, level="engine"), path)
    refused = headway("table", "regret", str(path), "--leave-one-out", columns=400)
    assert_refused(refused, "needs a table of level kernel with times for every phase, got one of level engine")


def test_several_tables_are_judged_in_one_command(headway: Headway, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "crossover-other.json"
    other.write_text(path.read_text())
    result = headway("table", "regret", str(path), str(other), "--leave-one-out", "--output", str(tmp_path / "reports"))
    assert result.code == 0, result.err
    assert "2 tables, " in result.out
    assert {file.name for file in (tmp_path / "reports").iterdir()} == {f"regret-{path.stem}.json", "regret-other.json"}
    two = headway("table", "regret", str(path), str(other), "--trials", str(path), columns=400)
    assert_refused(two, "needs one table, which the times are of, got 2 tables")
    assert_refused(headway("table", "regret", str(path), "--seed", "1,x", columns=400), "--seed: needs numbers")


def test_a_picture_can_be_asked_for_alone(headway: Headway, path: Path, tmp_path: Path) -> None:
    assert headway("table", "plot", str(path), str(tmp_path / "p.html")).code == 0
    assert "sdpa.math" in (tmp_path / "p.html").read_text()
    assert_refused(headway("table", "plot", str(path), str(tmp_path / "p.bmp"), columns=300), ".html or .png")


def test_explain_names_choice_runner_up_gap_row_and_age(headway: Headway, kept: Path) -> None:
    result = headway("backends", "explain", *TINY, "--batch", "2", "--len", "4000", "--layers", "4", columns=200)
    assert result.code == 0, result
    lines = result.out.splitlines()
    assert lines[0] == "decode, 2 sequences, 1 new of 4000 tokens: sdpa.math"
    assert lines[1].startswith("runner-up sdpa: 1.9")
    assert "kv_layout=nhd, block_size=16 (auto: crossover table of 2026-11-21" in result.out
    assert "triton" not in result.out, "it cannot run on this device"
    assert re.match(r"not listed: \d+ backends that cannot run on this device \(--all\)", lines[2])
    assert [line.split()[0] for line in lines if "needs" in line] == ["flex"], "each other backend that is listed has a time"
    assert (
        "nearest row of the table: decode, 1 sequence, 1 new of 4096 tokens, sdpa.math, nhd 16: 100.0 us per layer" in result.out
    )
    assert "measured 2026-11-21T10:00:00+00:00, " in result.out
    everything = headway("backends", "explain", *TINY, "--all", columns=200).out
    assert "not listed" not in everything
    assert re.search(r"triton +device: needs a CUDA GPU", everything)
    short = headway("backends", "explain", *TINY, "--len", "64").out
    assert short.splitlines()[0].endswith("tokens: sdpa")
    assert max(map(len, short.splitlines())) <= 80


def test_explain_counts_the_layers_of_the_model_with_the_geometry(headway: Headway) -> None:
    for options, layers in (((), 30), (("--geometry", "9/3/64"), 30), (("--geometry", "4/2/32"), 32), (("--layers", "3"), 3)):
        assert f"us per step of {layers} layers" in headway("backends", "explain", "--device", "cpu", *options).out


def test_explain_says_where_a_step_lies_beyond_what_was_measured(headway: Headway, kept: Path) -> None:
    said = "the step is outside the measured range; the times are those of the nearest measured edge"
    for length, beyond in (("4096", False), ("100000", True)):
        asked = ("backends", "explain", *TINY, "--batch", "2", "--len", length)
        assert (said in headway(*asked, columns=200).out) is beyond
        assert json.loads(headway(*asked, "--json").out)["covered"] is not beyond
    verify = headway("backends", "explain", *TINY, "--phase", "verify", "--len", "64", columns=200).out
    assert said in verify  # the table has decodes of one token alone


def test_explain_of_backends_that_are_named_shows_the_measured_times(headway: Headway, kept: Path) -> None:
    named = ("backends", "explain", *TINY, "--layers", "4", "--len", "4000", "--batch", "2")
    auto = json.loads(headway(*named, "--json").out)
    for request in ("sdpa", "prefill=sdpa,decode=sdpa"):
        found = json.loads(headway(*named, "--json", "--attn-backend", request).out)
        assert found["choice"] == "sdpa"
        times = {each["name"]: each["step_us"] for each in found["candidates"]}
        assert times == {each["name"]: each["step_us"] for each in auto["candidates"]}
    shown = headway(*named, "--attn-backend", "sdpa", columns=200).out
    assert "not measured" not in shown
    assert shown.splitlines()[1].startswith("faster here, sdpa.math: 0.5")


def test_explain_is_data_too(headway: Headway, kept: Path) -> None:
    found = json.loads(headway("backends", "explain", *TINY, "--phase", "prefill", "--len", "64", "--layers", "2", "--json").out)
    assert found["choice"] == "sdpa"
    assert found["runner_up"]["name"] == "sdpa.math"
    assert found["runner_up"]["factor"] == pytest.approx((2 * 9 + 1) / (2 * 5 + 1))
    assert found["candidates"][0] == {"name": "sdpa", "step_us": pytest.approx(11.0), "reasons": []}
    assert found["nearest_row"]["case"] == "1q64"


def test_explain_takes_a_table_for_each_form_of_latent_attention(headway: Headway, tmp_path: Path) -> None:
    latent = ("backends", "explain", "--device", "cpu", "--geometry", "4/1/48/32+4/4/24/16/dense", "--json")
    absorbed = AttentionSpec(4, 1, 48, 48**-0.5, v_head_dim=32, value_in_key=True)
    expanded = AttentionSpec(4, 4, 24, 24**-0.5, v_head_dim=16, dense=True)
    names, options = ("sdpa", "sdpa.math"), []
    for spec, phases in ((absorbed, ("decode", "extend")), (expanded, ("prefill",))):
        cells = []
        for phase in phases:
            new = {"decode": 1, "extend": 32, "prefill": 64}[phase]
            at = {"phase": phase, "case": f"1q{new}s64", "query_len": new, "layout": "latent" if spec is absorbed else None}
            at |= {"block_size": 16 if spec is absorbed else None}
            cells += [a_cell(us, kernel=name, **at) for us, name in zip((10.0, 20.0), names, strict=True)]
        path = tmp_path / f"{spec.head_dim}.json"
        write_json(a_table(*cells, spec=SpecRecord.of(spec)), path)
        options += ["--crossover-table", str(path)]
    for phase in ("prefill", "extend", "decode"):
        found = json.loads(headway(*latent, "--phase", phase, "--len", "64", *options).out)
        assert [(each["name"], each["step_us"] is None) for each in found["candidates"][:2]] == [
            ("sdpa", False),
            ("sdpa.math", False),
        ]
    assert_refused(headway(*latent, *options[:2], columns=400), "--crossover-table: needs a table for 4/4 heads x 24")


def test_explain_says_who_failed_its_self_test_and_who_was_not_measured(headway: Headway, path: Path) -> None:
    table = crossing()
    records = [record for record in table.kernels if record.name != "sdpa.math"]
    records.append(KernelRecord(name="sdpa.math", owner="built-in", available=True, reason="self-test: decode is wrong"))
    write_json(table.model_copy(update={"kernels": records}), path)
    options = (*TINY, "--crossover-table", str(path))
    assert "self-test: decode is wrong" in headway("backends", "explain", *options, "--len", "4000", columns=200).out
    write_json(a_table(*(cell for cell in table.cells if cell.kernel == "sdpa")), path)
    assert "not measured around here" in headway("backends", "explain", *options, columns=200).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--phase", "prefill", "--len", "64", "--query-len", "8"), "--query-len: needs 64 as --len in prefill"),
        (("--phase", "decode", "--len", "1"), "--len: needs more than the 1 new tokens"),
        (("--workload", "party"), "workload: needs chat, long, batch, or BATCHxINPUT+OUTPUT"),
        (("--crossover-table", "none.json"), "No such file"),
    ],
)
def test_explain_refuses_what_cannot_be(headway: Headway, path: Path, words: tuple[str, ...], said: str) -> None:
    assert_refused(headway("backends", "explain", *TINY, *words, columns=400), said)
    if "--workload" in words:
        other = ("backends", "explain", "--device", "cpu", "--geometry", "8/2/32", "--crossover-table", str(path))
        assert_refused(headway(*other, columns=400), "say --geometry and --dtype")


def test_generate_uses_a_table_and_refuses_a_faulty_one(headway: Headway, tiny_model_folder: Path, tmp_path: Path) -> None:
    model = ("--model", str(tiny_model_folder), "--device", "cpu", "--max-tokens", "2", "--stats")
    record = SpecRecord.of(SPEC).model_copy(update={"head_dim": 8, "scale": 8**-0.5})
    path = tmp_path / "t.json"
    write_json(crossing().model_copy(update={"spec": record}), path)
    result = headway("generate", *model, "--crossover-table", str(path), "hello")
    assert result.code == 0, result
    assert "decode=sdpa" in result.err
    assert "crossover table of 2026-11-21" in result.err
    path.write_text(path.read_text()[:500])
    result = headway("generate", *model, "--crossover-table", str(path), "hello", columns=400)
    assert_refused(result, "crossover_table: needs a table that applies to this machine, got ")
    assert_refused(headway("generate", *model, "--workload", "party", "hello", columns=300), "workload: needs chat")
