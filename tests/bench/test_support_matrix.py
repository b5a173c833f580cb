"""The grid's result file and the matrix that is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from gridlog import GridLog
from headway.bench.conformance import support_matrix
from headway.bench.conformance.report import GridCell, GridReport, merge, read_grid
from headway.bench.conformance.support_matrix import BEGIN, END, render, replace_in
from headway.core.contract.errors import ConfigError
from headway.core.contract.support import Support
from headway.tuning.device import DeviceIdentity
from headway.tuning.json_files import write_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "bench" / "results").rglob("grid*.json"))
DEVICE = DeviceIdentity(
    type="cuda",
    name="NVIDIA H200",
    compute_capability="9.0",
    driver="580.65.06",
    python="3.12.3",
    torch="2.11.0+cu130",
    libraries={"triton": "3.6.0", "headway": "0.1.0"},
    date="2026-11-21T09:00:00+00:00",
)
AXES = {
    "phase": "decode",
    "layout": "nhd",
    "block_size": 256,
    "head_dim": 128,
    "group": 4,
    "dtype": "bfloat16",
    "feature": "none",
}


def cell(status: str = "pass", check: str = "answer", backend: str = "kernel", **changes: object) -> GridCell:
    reason = "" if status == "pass" else "because | of it"
    return GridCell(check=check, backend=backend, status=status, reason=reason, **{**AXES, **changes})


def report(*cells: GridCell) -> GridReport:
    return GridReport(device=DEVICE, cells=list(cells))


def row_of(matrix: str, title: str) -> dict[str, str]:
    """Column -> mark of the backend "kernel" in the table with this title."""
    lines = matrix.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {title} |"))
    head, _, row = ([part.strip() for part in line.strip("|").split("|")] for line in lines[start : start + 3])
    assert row[0] == "`kernel`"
    return dict(zip(head[1:], row[1:], strict=True))


def test_ticks_count_cells_and_crosses_stand_where_a_value_is_refused() -> None:
    cells = [cell(), cell(phase="prefill"), cell(block_size=512), cell("refused", "claim", about="block_size", block_size=16)]
    matrix = render([report(*cells)])
    blocks = row_of(matrix, "Block sizes")
    assert list(blocks) == ["8", "16", "64", "128", "256", "512"]
    assert (blocks["256"], blocks["16"], blocks["64"], blocks["512"]) == ("✓ 2", "✗", "–", "✓ 1")
    phases = row_of(matrix, "Phases")
    assert (phases["decode"], phases["prefill"], phases["verify"]) == (
        "✓ 2",
        "✓ 1",
        "–",
    )  # a refused block size says nothing of them
    assert "⚠ **" not in matrix


def test_a_value_that_only_some_phases_serve_names_them() -> None:
    cells = [cell(phase="prefill", layout="hnd"), cell(), cell("refused", "claim", layout="hnd", about="layout")]
    layouts = row_of(render([report(*cells)]), "Cache layouts")
    assert (layouts["hnd"], layouts["nhd"]) == ("✓ 1 (prefill)", "✓ 1")


def test_failures_are_marked_and_listed() -> None:
    matrix = render([report(cell(), cell("fail", feature="window"))])
    assert row_of(matrix, "Features")["window"] == "⚠ 1/1"
    assert row_of(matrix, "Phases")["decode"] == "⚠ 1/2"
    assert "**1 cells failed:**" in matrix
    assert "because \\| of it" in matrix


def test_graphs_options_turns_and_writers() -> None:
    cells = [
        cell(),
        cell(check="graph"),
        cell("refused", "graph", phase="verify"),
        cell(check="option"),
        cell(check="alternate", backend="kernel > other"),
        cell(check="writer", backend="writer"),
        cell("refused", "available", backend="absent"),
    ]
    matrix = render([report(*cells)])
    assert row_of(matrix, "CUDA graphs, captured at the longest lengths") == {"1 query token": "✓ 1", "4 query tokens": "✗"}
    assert set(row_of(matrix, "Checks").values()) == {"✓ 1"}
    assert "read back exactly: ✓ 1" in matrix
    assert "- `absent`: because" in matrix
    assert "| `absent` |" not in matrix


def test_rendering_is_stable_and_parts_count_as_one_run() -> None:
    one, two = report(cell()), report(cell(backend="other"))
    assert render([one, two]) == render([one, two])
    assert len(merge([one, two])) == 1
    assert render([one, two]).count("### NVIDIA H200") == 1


def test_a_pass_has_no_reason_and_the_rest_have_one() -> None:
    with pytest.raises(ValidationError):
        GridCell(check="answer", backend="kernel", status="pass", reason="x")
    with pytest.raises(ValidationError):
        GridCell(check="answer", backend="kernel", status="refused")


def test_a_file_comes_back_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    write_json(report(cell()), path)
    assert read_grid(path) == report(cell())
    with pytest.raises(ConfigError, match="No such file"):
        read_grid(tmp_path / "none.json")
    path.write_text('{"schema": "headway.kernel/1", "device": {}, "cells": []}')
    with pytest.raises(ConfigError, match="schema"):
        read_grid(path)


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    text = f"before\n\n{BEGIN}\nold\n{END}\nafter"
    once = replace_in(text, "new")
    assert once == f"before\n\n{BEGIN}\n\nnew\n\n{END}\nafter"
    assert replace_in(once, "new") == once
    for wrong in ("nothing", f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"):
        with pytest.raises(ConfigError, match="--docs"):
            replace_in(wrong, "new")


def test_the_command_prints_writes_and_refuses(tmp_path: Path) -> None:
    app = support_matrix.typer.Typer()
    app.command()(support_matrix.main)
    result, docs = tmp_path / "grid.json", tmp_path / "docs.md"
    write_json(report(cell()), result)
    docs.write_text(f"{BEGIN}{END}")
    run = CliRunner().invoke
    assert "✓ 1" in run(app, [str(result)]).output
    assert run(app, [str(result), "--docs", str(docs)]).exit_code == 0
    assert "✓ 1" in docs.read_text()
    assert run(app, [str(tmp_path / "none.json")]).exit_code == 2
    merged = tmp_path / "merged.json"
    assert run(app, [str(result), str(result), "--output", str(merged)]).exit_code == 0
    assert read_grid(merged) == report(cell())  # what two parts have alike counts once
    other = GridReport(device=DEVICE.model_copy(update={"name": "another"}), cells=[])
    write_json(other, tmp_path / "other.json")
    assert run(app, [str(result), str(tmp_path / "other.json"), "--output", str(merged)]).exit_code == 2


def test_the_log_keeps_passes_failures_and_refusals(tmp_path: Path) -> None:
    log = GridLog(tmp_path / "grid.json")
    with log.cell("cpu", check="answer", backend="kernel", **AXES) as outcome:
        outcome.compare(1e-7, 1e-6)
    for error in (1.0, float("nan")):
        with pytest.raises(AssertionError), log.cell("cpu", check="answer", backend="kernel", **AXES) as outcome:
            outcome.compare(error, 1e-6)
    with log.cell("cpu", check="claim", backend="kernel", about="phase", **AXES) as outcome:
        outcome.refuse(Support.no("phase", "decode", "prefill"))
    log.write()
    cells = read_grid(tmp_path / "grid.json").cells
    assert [cell.status for cell in cells] == ["pass", "fail", "fail", "refused"]
    assert [cell.relative_error for cell in cells] == [1e-7, 1.0, None, None]
    assert cells[3].reason == "phase: needs decode, got prefill"


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_GRID_OUT", raising=False)
    monkeypatch.chdir(tmp_path)
    log = GridLog.from_environment()
    with log.cell("cpu", check="answer", backend="kernel", **AXES):
        pass
    log.write()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not RESULTS, reason="bench/results has no grid file")
def test_the_matrix_in_the_docs_is_that_of_the_result_files() -> None:
    reports = [read_grid(path) for path in RESULTS]
    docs = (ROOT / "docs" / "backends.md").read_text()
    assert replace_in(docs, render(reports)) == docs, (
        f"run: python -m headway.bench.conformance.support_matrix {' '.join(map(str, RESULTS))}"
    )
    assert not [cell for each in reports for cell in each.cells if cell.status == "fail"]


def test_a_backend_that_one_part_had_installed_is_there_in_the_merged_report() -> None:
    identity = {"type": "cuda", "name": "GPU", "python": "3.12", "torch": "2.11", "date": "2026-11-21"}
    absent = GridCell(check="available", backend="fast", status="refused", reason="not installed")
    there = GridCell(check="available", backend="fast", status="pass")
    other = GridCell(check="available", backend="slow", status="refused", reason="no such chip")
    parts = [
        GridReport(device=DeviceIdentity(**identity, libraries={"a": "1"}), cells=[absent, other]),
        GridReport(device=DeviceIdentity(**identity, libraries={"fast": "4"}), cells=[there, other]),
    ]
    (merged,) = merge(parts)
    assert merged.device.libraries == {"a": "1", "fast": "4"}
    assert merged.cells == [other, there]
