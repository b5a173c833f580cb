"""The result file of the kernel benchmark, its table, and its clock."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from headway.bench.kernel.report import print_report
from headway.bench.kernel.results import KernelCell, KernelReport
from headway.cli.measure.bench_kernel import kernel
from headway.core.contract.errors import ConfigError
from headway.registry import Registry
from tiny_bench import half_of_the_rows, run, with_backend, zeros


def test_result_file_round_trip(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    report = run(with_backend("wrong", decode=half_of_the_rows), cases=["4q1s20"], block_sizes=[16], output=path)
    assert KernelReport.read(path) == report
    assert '"schema": "headway.kernel/1"' in path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]
    assert next(cell for cell in report.cells if cell.backend == "wrong").relative_error is None  # NaN is no JSON


@pytest.mark.parametrize(
    ("text", "fault"),
    [("", "not JSON"), ('{"schema": "headway.kernel/9"}', "schema"), ('{"schema": "headway.kernel/1"}', "command")],
)
def test_a_foreign_result_file_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=fault):
        KernelReport.read(path)
    with pytest.raises(ConfigError, match="No such file"):
        KernelReport.read(tmp_path / "missing.json")


def a_cell(**changes: object) -> KernelCell:
    base = {"backend": "x", "owner": "backend", "phase": "decode", "case": "1q1s2", "geometry": "4/2/32", "layout": "nhd"}
    base |= {"block_size": 16, "dtype": "float32", "kv_dtype": "float32", "status": "error", "reason": "none"}
    return KernelCell(**{**base, **changes})


def test_a_cell_cannot_have_a_time_and_a_reason() -> None:
    with pytest.raises(ValueError, match="median_us if and only if"):
        a_cell(median_us=1.0)
    with pytest.raises(ValueError, match="a reason if and only if"):
        a_cell(reason="")


def test_a_run_that_is_cut_short_keeps_what_it_has(tmp_path: Path) -> None:
    def interrupted(self, q, cache, plan, out):
        if len(q) == 2:
            raise KeyboardInterrupt
        zeros(self, q, cache, plan, out)

    path = tmp_path / "result.json"
    with pytest.raises(KeyboardInterrupt):
        run(with_backend("slow", decode=interrupted), backends=["slow"], cases=["4q1s20", "2q1s9"], output=path)
    assert {cell.case for cell in KernelReport.read(path).cells} == {"4q1s20"}


def test_the_table_shows_times_errors_and_reasons(registry: Registry) -> None:
    report = run(with_backend("wrong", decode=zeros), cases=["4q1s20", "2q1s9"], block_sizes=[16])
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(report, console)
    text = console.export_text()
    assert "decode, 4/2/32, float32" in text
    assert text.count(" us *") == 2  # one best a case
    assert text.count("err ") == 6  # native, sdpa and sdpa.math, two cases
    assert "wrong nhd 16 incorrect: relative error 1, tolerance 2e-06 [4q1s20, 2q1s9]" in text


def test_the_command_prints_a_table_and_writes_the_file(tmp_path: Path) -> None:
    app, path = typer.Typer(), tmp_path / "result.json"
    app.command("kernel")(kernel)
    small = ["--geometry", "4/2/32", "--geometry", "2/2/64", "--rep-ms", "0", "--warmup-ms", "0", "--device", "cpu"]
    chosen = ["--backends", "sdpa", "--cases", "2q5,1q9s20", "--layouts", "hnd,nhd", "--block-sizes", "8"]
    answer = CliRunner().invoke(app, ["--phase", "prefill", *small, *chosen, "--output", str(path)])
    assert answer.exit_code == 0, answer.output
    assert "prefill, 4/2/32, float32" in answer.output
    cells = KernelReport.read(path).cells
    assert [(c.geometry, c.case, c.layout) for c in cells] == [
        (geometry, case, layout) for geometry in ("4/2/32", "2/2/64") for case in ("2q5", "1q9s20") for layout in ("hnd", "nhd")
    ]
    assert {cell.status for cell in cells} == {"ok"}
