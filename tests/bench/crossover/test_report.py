"""A table as text, Markdown, CSV, HTML and PNG; and tables of whole generations, one process a backend."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from headway.bench.crossover import engine_level, worker_protocol
from headway.bench.crossover.engine_level import EngineOptions, cases, run_engine_level
from headway.bench.crossover.export import export
from headway.bench.crossover.report import print_view, speedup, to_csv, to_markdown, to_plain, view
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.system.child import Child, ChildDied
from headway.registry import Registry
from headway.tuning.table.files import read_table
from headway.tuning.table.schema import CrossoverTable, KernelRecord
from sandbox import install, save_tiny_model
from tables import a_cell, a_table
from tiny_bench import CPU


def crossing() -> CrossoverTable:
    """a wins the short length, b the long one; c is out of memory there, d ties with a, <e> is a backend with a rude name."""
    rows = {64: {"a": 10.0, "b": 30.0, "c": 50.0, "d": 10.05}, 4096: {"a": 200.0, "b": 100.0, "d": 300.0}}
    cells = [
        a_cell(us, kernel=name, case=f"2q1s{kv_len}", kv_len=kv_len, batch=2)
        for kv_len, times in rows.items()
        for name, us in times.items()
    ]
    cells.append(a_cell(None, kernel="c", case="2q1s4096", kv_len=4096, batch=2, status="oom", reason="too <large>"))
    cells.append(a_cell(60.0, kernel="<e>", case="2q1s64", batch=2, status="dropped", reason="6 times"))
    cells.append(a_cell(7.0, kernel="a", case="1q32", phase="prefill", query_len=32, kv_len=32, layout=None, block_size=None))
    return a_table(*cells)


def text_of(table: CrossoverTable, width: int = 160, **asked: object) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_view(view(table, **asked), console)
    return console.file.getvalue()


def test_the_winner_and_its_speed_up_are_shown_per_batch_size() -> None:
    shown = view(crossing())
    decode = next(block for block in shown.blocks if block.phase == "decode")
    assert (decode.batch, [row.label for row in decode.rows]) == (2, ["64", "4096"])
    assert [row.winners for row in decode.rows] == [["a", "d"], ["b"]]
    assert [row.speedup for row in decode.rows] == pytest.approx([1.005, 2.0])
    assert [speedup(row) for row in decode.rows] == ["tie", "2.00x"]


def test_the_terminal_shows_blocks_columns_and_why_a_cell_has_no_time() -> None:
    text = text_of(crossing())
    assert text.startswith("CROSSOVER ANALYSIS")
    assert "decode, batch size 2 (us per layer)" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("4096"))
    assert row.split() == ["4096", "200.0", "100.0", "OOM", "300.0", "b", "2.00x"]
    assert "~60.0" in text
    assert "c oom: too <large> [decode 2q1s4096]" in text


def test_the_rule_of_a_tie_is_the_one_that_is_printed() -> None:
    wide = {"p20_us": 4000.0, "p80_us": 9000.0}
    text = text_of(a_table(a_cell(4600.0, **wide), a_cell(7685.0, kernel="b", **wide), noise=0.058))
    assert " = " not in text
    assert "1.67x" in text
    assert "differ by less than 1%, or by less than 10% with ranges (p20 to p80) that overlap" in text


def test_a_run_on_a_busy_machine_says_so() -> None:
    steady = text_of(a_table(a_cell(drift=0.05)))
    assert "busy machine" not in steady
    assert "not steady" not in steady
    text = text_of(
        a_table(a_cell(drift=0.9), a_cell(20.0, kernel="b", drift=0.1), busy="other processes kept 2.0 of 2 cores busy")
    )
    assert "measured on a busy machine, other processes kept 2.0 of 2 cores busy" in text
    assert "disagree by more than 25% in 1 of 2 cells (most by 90%: a, decode 1q1s64)" in text


def test_a_narrow_terminal_gets_the_two_fastest_of_each_row_uncut() -> None:
    names = [f"a_longer_name_{number}" for number in range(4)]
    table = a_table(*(a_cell(10.0 * (number + 1), kernel=name) for number, name in enumerate(names)))
    text = text_of(table, width=80)
    row = next(line for line in text.splitlines() if line.strip().startswith("64 "))
    assert row.split() == ["64", names[0], "10.0", names[1], "20.0", "2.00x"]
    assert "…" not in text
    assert "--json" in text


def test_the_view_as_plain_data_holds_every_row() -> None:
    plain = to_plain(view(crossing()))
    decode = [row for row in plain["rows"] if row["phase"] == "decode"]
    assert [row["winners"] for row in decode] == [["a", "d"], ["b"]]
    assert decode[1]["us"] == {"a": 200.0, "b": 100.0, "c": None, "d": 300.0}
    assert decode[1]["status"]["c"] == "oom"
    assert json.loads(json.dumps(plain)) == plain


def test_generations_are_shown_as_tokens_a_second() -> None:
    cells = [
        a_cell(us, phase="generate", case="4q8s16", batch=4, query_len=8, kv_len=16, layout=None, block_size=None, kernel=name)
        for name, us in (("a", 1e6), ("b", 0.5e6))
    ]
    text = text_of(a_table(*cells, level="engine", model="m"))
    assert "generate, batch size 4 (output tok/s)" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("8 + 8"))
    assert row.split() == ["8", "+", "8", "32", "64", "b", "2.00x"]


def test_the_fastest_layout_is_shown_unless_another_is_asked_for() -> None:
    table = a_table(a_cell(10.0), a_cell(9.0, block_size=64), a_cell(20.0, layout="hnd"))
    assert view(table).pair == ("nhd", 64)
    assert view(table, layout="hnd").pair == ("hnd", 16)
    assert view(table, block_size=16).pair == ("nhd", 16)
    with pytest.raises(ConfigError, match="one that was measured: nhd 16, nhd 64, hnd 16"):
        view(table, layout="vllm_5d")


def test_markdown_has_a_table_a_block_and_marks_the_winner() -> None:
    text = to_markdown(view(crossing()))
    assert "| kv_len | a | b | c | d | &lt;e&gt; | winner | speed-up |" in text
    assert "| 4096 | 200.0 | **100.0** | OOM | 300.0 |  | b | 2.00x |" in text


def test_csv_holds_every_cell() -> None:
    table = crossing()
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert len(rows) == len(table.cells)
    assert rows[0]["kernel"] == "a"
    assert float(rows[0]["median_us"]) == 10.0
    assert rows[-1]["layout"] == ""


def test_the_page_is_whole_loads_nothing_and_escapes_names(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    export(view(crossing()), path)
    source = path.read_text()
    text = html.unescape(re.sub(r"<[^>]*>", "", source))
    assert not re.search(r"https?://|@import|url\(|\ssrc=|\shref=", source)
    assert "$" not in source
    assert "<e>" not in source
    for word in ("a = d", "2.00x", "too <large>", "prefers-color-scheme: dark"):
        assert word in text


def test_an_unknown_form_or_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(".json or .csv or .md or .html or .png")):
        export(view(crossing()), tmp_path / "t.xlsx")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a folder that can be written to"):
        export(view(crossing()), tmp_path / "file" / "t.csv")


def test_who_takes_no_part_is_named() -> None:
    records = [
        KernelRecord(name="a", owner="x", available=True),
        KernelRecord(name="z", owner="x", available=False, reason="no GPU"),
    ]
    table = a_table(a_cell(), kernels=records)
    short = text_of(table)
    assert "z is not used" not in short
    assert "not listed: 1 backends that could not run where this was measured (--all)" in short
    console = Console(file=io.StringIO(), width=160)
    print_view(view(table), console, all_backends=True)
    assert "z is not used: no GPU" in console.file.getvalue()
    assert "z is not used: no GPU" in to_plain(view(table))["notes"]
    records[1] = KernelRecord(name="z", owner="x", available=True, reason="self-test: decode is wrong")
    assert "z is not used: self-test: decode is wrong" in text_of(a_table(a_cell(), kernels=records))


def test_a_summary_comes_first_and_every_mark_is_explained() -> None:
    summary, marks = text_of(crossing()).splitlines(), text_of(crossing(), width=80)
    assert summary[:3] == [
        f"CROSSOVER ANALYSIS {crossing().title}",
        "kv_layout nhd, block_size 16; fastest of 3 points: tie 1, b 1, a 1",
        "decode, batch size 2 (us per layer)".ljust(len(summary[2])),
    ]
    for mark in ("speed-up: ", "tie (=): ", "~: ", "OOM: the point needs more memory"):
        assert f"\n{mark}" in marks
    assert "\nunsupported: " not in marks, "no cell says so"
    assert max(map(len, marks.splitlines())) <= 80


FAULTY = '''
"""A plugin whose backends decode like sdpa, until a batch of two comes."""

import os
import time

import torch

from headway.backends.sdpa import SDPA
from headway.core.contract.backend import BackendInfo
from headway.registry import hookimpl


class Dies(SDPA):
    name = "dies"

    def decode(self, q, cache, plan, out):
        if len(q) == 2:
            os._exit(7)
        super().decode(q, cache, plan, out)


class Hangs(SDPA):
    name = "hangs"

    def decode(self, q, cache, plan, out):
        if len(q) == 2:
            time.sleep(600)
        super().decode(q, cache, plan, out)


@hookimpl
def headway_register_backends():
    return [BackendInfo(b.name, "for a test", lambda b=b: b, api_version=2) for b in (Dies, Hangs)]
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def options(model: Path, **changes: object) -> EngineOptions:
    llm = {"model": str(model), "device": "cpu", "num_threads": 1, "kv_cache_memory": "16MiB"}
    return replace(EngineOptions(CPU, llm, cases([1, 2], [4]), ["sdpa"]), **changes)


@pytest.mark.slow
def test_generations_are_timed_through_each_backend(model: Path, registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    table = run_engine_level(options(model, backends=["sdpa", "sdpa.math", "auto"], output=path), registry)
    assert table.complete
    assert (table.level, table.model) == ("engine", str(model))
    assert (table.spec.num_heads, table.spec.head_dim) == (4, 8)
    assert {(cell.kernel, cell.case) for cell in table.cells} == {
        (name, case) for name in ("sdpa", "sdpa.math", "auto") for case in ("1q4s8", "2q4s8")
    }
    for cell in table.cells:
        assert cell.status in ("ok", "tie"), cell.reason
        assert cell.tokens_per_second == pytest.approx(cell.batch * 4 / cell.median_us * 1e6)
        assert "sdpa" in cell.variant
    assert read_table(path) == table


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    from headway.registry import create_registry

    install(tmp_path, "faulty", FAULTY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return create_registry()


@pytest.mark.slow
def test_a_process_that_dies_costs_its_cell_and_the_next_one_goes_on(model: Path, faulty: Registry) -> None:
    table = run_engine_level(options(model, cases=["2q4s8", "1q4s8"], backends=["dies", "sdpa"]), faulty)
    found = {(cell.kernel, cell.batch): cell for cell in table.cells}
    assert found["dies", 2].status == "error"
    assert "exited with code 7" in found["dies", 2].reason
    assert found["dies", 1].status in ("ok", "tie")  # with sdpa, which does the same work
    assert found["sdpa", 2].status == "ok"
    assert table.complete


@pytest.mark.slow
def test_a_generation_that_takes_too_long_is_given_up_with_all_larger_ones(
    model: Path, faulty: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_protocol, "COMPILING_SECONDS", 0.0)
    chosen = options(model, cases=cases([1, 2], [4, 5]), backends=["hangs"], cell_limit=8.0)
    found = {cell.case: cell for cell in run_engine_level(chosen, faulty).cells}
    assert [found[case].status for case in ("1q4s8", "1q5s10")] == ["ok", "ok"]
    assert [found[case].status for case in ("2q4s8", "2q5s10")] == ["dropped", "dropped"]
    assert "2q4s8 took longer than 8 s" in found["2q5s10"].reason


def test_the_limit_is_that_of_one_generation_and_the_first_pass_has_more() -> None:
    waits: list[float | None] = []

    class Talking:
        said: ClassVar = ["begin", "pass", "pass", "done"]

        def send(self, request: object) -> None:
            pass

        def answer(self, timeout: float | None) -> dict[str, str]:
            waits.append(timeout)
            if len(waits) > len(self.said):
                raise ChildDied("the process exited with code 0")
            return {"event": self.said[len(waits) - 1]}

    assert [event["event"] for event in worker_protocol.events(Talking(), {}, 5.0)] == ["begin", "pass", "pass", "done", "ended"]
    assert waits == [None, 5.0 + worker_protocol.COMPILING_SECONDS, 5.0, 5.0, None]


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_done_and_a_later_run_goes_on(
    model: Path, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "engine.json", engine_level.save
    wanted = options(model, backends=["sdpa", "sdpa.math"], output=path)
    with pytest.raises(ConfigError, match="--resume: needs the file to go on with"):
        run_engine_level(replace(wanted, output=None, resume=True), registry)

    def interrupting(table: object, path: object) -> None:
        real(table, path)
        monkeypatch.setattr(engine_level, "save", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_level, "save", interrupting)
    first = run_engine_level(wanted, registry)
    assert [(cell.kernel, cell.case) for cell in first.cells] == [("sdpa", "1q4s8")]
    assert not first.complete
    asked: list[list[str]] = []

    def noted(child: Child, request: dict, cell_limit: float) -> Iterator[dict]:
        asked.append(request["cases"])
        return worker_protocol.events(child, request, cell_limit)

    monkeypatch.setattr(engine_level, "events", noted)
    later = replace(wanted, resume=True)
    whole = run_engine_level(later, registry)
    assert asked == [["2q4s8"], ["1q4s8", "2q4s8"]]
    assert (whole.complete, len(whole.cells)) == (True, 4)
    assert first.cells[0].median_us in {cell.median_us for cell in whole.cells}
    run_engine_level(later, registry)
    assert len(asked) == 2, "nothing was left to do"
    with pytest.raises(UnsupportedError, match="model: needs .*, got another"):
        run_engine_level(replace(later, llm={**later.llm, "model": "another"}), registry)
