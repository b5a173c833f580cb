"""The kernel benchmark on tiny cells: who gets a time, what a mistake is told, result file and table, and other runs' times."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from headway.backends.sdpa import SDPA
from headway.bench.kernel.report import check_request, compare, print_report
from headway.bench.kernel.results import DevicePeak, KernelCell, KernelReport, peak_of
from headway.bench.kernel.run import KernelOptions, run_kernel_bench
from headway.cli.measure.bench_kernel import kernel
from headway.core.contract.errors import ConfigError, UnknownBackendError
from headway.registry import Registry
from headway.tuning.measure.workloads import Geometry
from tiny_bench import CPU, QUICK, cell_of, half_of_the_rows, run, with_backend, zeros


@pytest.mark.parametrize(("phase", "cases"), [("decode", ["3q1s40", "2q4s21"]), ("prefill", ["2q17", "1q7s20"])])
def test_right_answers_get_times_and_rates(registry: Registry, phase: str, cases: list[str]) -> None:
    report = run(registry, phase=phase, cases=cases, layouts=["nhd", "vllm_5d"], block_sizes=[8, 16])
    cells = [cell for cell in report.cells if cell.status != "unsupported"]  # native decodes alone, on one of the layouts
    found = [(c.backend, c.layout, c.block_size) for c in cells if c.case == cases[0]]
    own = [("native", "nhd", size) for size in (8, 16)] if phase == "decode" else []
    assert [each for each in found if each[0] == "native"] == own
    assert [each for each in found if each[0] != "native"] == [
        (name, layout, size) for name in ("sdpa", "sdpa.math") for layout in ("nhd", "vllm_5d") for size in (8, 16)
    ]
    for cell in cells:
        assert cell.status == "ok", cell.reason
        assert 0 < cell.p20_us <= cell.median_us <= cell.p80_us
        assert cell.relative_error < 1e-6
        assert cell.plan_us > 0
        rate, work = (cell.tflops, 1e-6) if phase == "prefill" else (cell.gbps, 1e-3)
        one = cell_of(phase, cell.case)
        amount = one.flops if phase == "prefill" else one.kv_bytes
        assert rate == pytest.approx(amount / cell.median_us * work)
        limit = report.device.matrix_tflops if phase == "prefill" else report.device.copy_gbps
        assert cell.fraction == pytest.approx(rate / limit)
    assert report.device.type == "cpu"
    assert report.device.matrix_dtype == "float32"


def test_half_precision_is_held_to_the_backends_tolerance(registry: Registry) -> None:
    (cell,) = run(registry, cases=["2q1s40"], dtype=torch.float16, backends=["sdpa"], block_sizes=[16]).cells
    assert cell.status == "ok", cell.reason
    assert 1e-5 < cell.relative_error < cell.tolerance


def raises(self, q, cache, plan, out):
    raise RuntimeError("the kernel\nfell over")


def right_once(self, q, cache, plan, out):
    SDPA.decode(self, q, cache, plan, out)
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls > 1:
        out *= 2


@pytest.mark.parametrize(("decode", "reason"), [(zeros, "relative error 1,"), (half_of_the_rows, "relative error nan")])
def test_a_wrong_answer_gets_no_time(decode: object, reason: str) -> None:
    report = run(with_backend("wrong", decode=decode), cases=["4q1s20"], backends=["wrong", "sdpa"], block_sizes=[16])
    wrong, right = report.cells
    assert (wrong.status, wrong.median_us, wrong.gbps, wrong.host_us) == ("incorrect", None, None, None)
    assert reason in wrong.reason
    assert right.status == "ok"


def test_an_answer_that_changes_under_repetition_gets_no_time() -> None:
    (cell,) = run(with_backend("racy", decode=right_once), cases=["4q1s20"], backends=["racy"], block_sizes=[16]).cells
    assert (cell.status, cell.median_us) == ("incorrect", None)
    assert "after repeated calls" in cell.reason


def test_the_tolerance_is_the_backends() -> None:
    registry = with_backend("strict", tolerance={torch.float32: 1e-12})
    (cell,) = run(registry, cases=["4q1s20"], backends=["strict"], block_sizes=[16]).cells
    assert cell.status == "incorrect"
    assert 0 < cell.relative_error < 1e-6


def test_an_exception_is_a_result() -> None:
    report = run(with_backend("broken", decode=raises), cases=["4q1s20"], backends=["broken", "sdpa"], block_sizes=[16])
    assert [(cell.status, cell.reason) for cell in report.cells] == [("error", "RuntimeError: the kernel fell over"), ("ok", "")]


def test_what_is_unsupported_says_why(registry: Registry) -> None:
    report = run(registry, cases=["2q1s20"], backends=["sdpa"], layouts=["vllm_5d"], block_sizes=[16], dtype=torch.float32)
    assert report.cells[0].status == "ok"
    narrow = KernelOptions(geometries=[Geometry(2, 1, 6)], cases=["2q1s20"], layouts=["vllm_5d"], device=CPU, timer=QUICK)
    cells = run_kernel_bench(narrow, registry).cells
    assert {cell.status for cell in cells} == {"unsupported"}
    assert "head_dim: needs a multiple of 4" in cells[0].reason


def test_writers_are_checked_and_timed(registry: Registry) -> None:
    report = run(registry, phase="write", cases=["1q20", "5q1s33"], block_sizes=[16])
    assert [(c.owner, c.layout, c.status) for c in report.cells] == [("writer", n, "ok") for n in ("nhd", "hnd", "vllm_5d")] * 2
    assert report.cells[0].gbps == pytest.approx(20 * 2 * 2 * 32 * 4 * 2 / report.cells[0].median_us * 1e-3)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"cases": ["2x"]}, "case"),
        ({"cases": ["2q9"]}, "--cases for --phase decode"),
        ({"phase": "prefill", "cases": ["2q1s9"]}, "--cases for --phase prefill"),
        ({"layouts": ["nobody"]}, "kv_layout"),
        ({"dtype": torch.float64}, "--dtype"),
        ({"phase": "write", "backends": ["sdpa"]}, "--backends"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(registry: Registry, changes: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run(registry, **changes)
    assert raised.value.reason.what == what


def test_unknown_names_are_refused(registry: Registry) -> None:
    with pytest.raises(UnknownBackendError, match="nobody"):
        run(registry, backends=["nobody"])
    assert [str(Geometry.parse(text)) for text in ("32/8/128", "16/1/576/512", "16/16/192/128/dense", "4/4/8/8")] == [
        "32/8/128",
        "16/1/576/512",
        "16/16/192/128/dense",
        "4/4/8",
    ]
    for text in ("32/8", "32/5/128", "0/0/0", "a/b/c", "16/1/576/0", "16/1/576/512/sparse"):
        with pytest.raises(ConfigError, match="num_heads/num_kv_heads/head_dim"):
            Geometry.parse(text)
    for options in ({"dtype": "int8"}, {"kv_dtype": "float64"}, {"block_sizes": "16,x"}, {"device": "tpu"}):
        with pytest.raises(ConfigError):
            kernel(**options)


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


SMALL = ("--geometry", "4/2/32", "--rep-ms", "0", "--warmup-ms", "0", "--device", "cpu", "--cases", "2q1s20")


def cell_record(backend: str, us: float | None, **changes: object) -> KernelCell:
    told = {"status": "ok", "reason": ""} if us is not None else {"reason": "RuntimeError: it fell over"}
    return a_cell(**{"backend": backend, "case": "1q1s64", "median_us": us, **told, **changes})


def run_record(*words: str) -> Result:
    app = typer.Typer()
    app.command("kernel")(kernel)
    return CliRunner().invoke(app, [*SMALL, *words])


def test_a_backend_is_slow_only_beyond_the_factor() -> None:
    cells = [cell_record("sdpa", 100.0), cell_record("mine", 109.0), cell_record("other", 120.0)]
    found = compare(cells, "sdpa", 1.1)
    assert found.compared == 2
    assert [(each.backend, each.factor) for each in found.slower] == [("other", pytest.approx(1.2))]
    assert str(found.slower[0]) == "other in decode 4/2/32 1q1s64, nhd 16: 120.0 us, 1.20 times as long as 100.0 us"
    assert found.fault == "1 of 2 cells take more than 1.1 times as long as sdpa, or failed"
    assert compare(cells, "sdpa", 1.3).fault == ""


def test_the_others_time_is_that_of_the_same_layout_else_its_fastest() -> None:
    cells = [cell_record("sdpa", 100.0), cell_record("sdpa", 50.0, block_size=256), cell_record("mine", 100.0)]
    assert compare(cells, "sdpa", 1.1).slower == []
    (slow,) = compare([*cells[:2], cell_record("mine", 100.0, layout="hnd")], "sdpa", 1.1).slower
    assert slow.than_us == 50.0
    assert compare([cells[0], cell_record("mine", 1e6, case="2q1s64")], "sdpa", 1.1).compared == 0, "another case is another work"


def test_a_failure_fails_and_a_refusal_does_not() -> None:
    declined = cell_record("picky", None, status="unsupported", reason="head_dim: needs 64, got 32")
    found = compare([cell_record("sdpa", 100.0), cell_record("mine", None), declined], "sdpa", 1.1)
    assert [each.backend for each in found.slower] == ["mine"]
    assert "no time (RuntimeError: it fell over), where the other takes 100.0 us" in str(found.slower[0])
    assert "nothing could be compared" in compare([cell_record("sdpa", 100.0), declined], "sdpa", 1.1).fault


@pytest.mark.parametrize(
    ("most", "than", "phase", "said"),
    [
        (1.1, None, "decode", "--fail-if-slower: needs --than NAME beside it, got --fail-if-slower alone"),
        (None, "sdpa", "decode", "--than: needs --fail-if-slower FACTOR beside it, got --than alone"),
        (0.0, "sdpa", "decode", "--fail-if-slower: needs a factor above 0"),
        (float("nan"), "sdpa", "decode", "--fail-if-slower: needs a factor above 0"),
        (1.1, "sdpa", "write", "--fail-if-slower: needs --phase decode or prefill"),
    ],
)
def test_half_a_request_is_refused(most: float | None, than: str | None, phase: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_request(most, than, phase)


@pytest.mark.slow
def test_the_command_fails_with_a_line_for_each_slow_cell(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    named = ("--backends", "sdpa.math", "--block-sizes", "16,32", "--than", "sdpa", "--output", str(path))
    failed = run_record("--fail-if-slower", "0.00001", *named)
    assert failed.exit_code == 1
    assert failed.stderr.count("sdpa.math in decode 4/2/32 2q1s20, nhd") == 2
    assert "headway: 2 of 2 cells take more than 1e-05 times as long as sdpa, or failed" in failed.stderr
    comparison = KernelReport.read(path).comparison
    assert [(each.backend, each.block_size) for each in comparison.slower] == [("sdpa.math", 16), ("sdpa.math", 32)]
    assert run_record("--fail-if-slower", "100000", *named).exit_code == 0
    assert isinstance(run_record("--fail-if-slower", "1.1", "--than", "nobody").exception, UnknownBackendError)


def test_the_longest_name_of_a_data_sheet_counts() -> None:
    assert peak_of("NVIDIA H200", "bfloat16") == DevicePeak(gbps=4800, tflops=989.4, source="data sheet")
    assert peak_of("NVIDIA H200 NVL", "float16").tflops == 835
    assert peak_of("NVIDIA A100-SXM4-80GB", "bfloat16").gbps == 2039
    assert peak_of("NVIDIA A100-PCIE-40GB", "bfloat16").gbps == 1555
    assert peak_of("NVIDIA L40S", "float32") == DevicePeak(gbps=864, tflops=91.6, source="data sheet")
    assert peak_of("NVIDIA L40", "bfloat16") == DevicePeak()
    assert peak_of("NVIDIA H200", "float16", bandwidth=4000.0).source == "given by the user, data sheet"


@pytest.mark.slow
def test_without_a_known_peak_the_absolute_rates_stand_alone(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    plain = run_record("--backends", "sdpa", "--output", str(path))
    assert "no data sheet of this device is known here; --peak-bandwidth GB/s and --peak-flops TFLOP/s would" in plain.output
    assert "of the peak" not in plain.output
    assert {cell.peak_fraction for cell in KernelReport.read(path).cells} == {None}
    given = run_record("--backends", "sdpa", "--peak-bandwidth", "100", "--output", str(path))
    assert "peak (given by the user): 100 GB/s; --peak-flops TFLOP/s would" in given.output
    assert "of the peak" in given.output
    for cell in KernelReport.read(path).cells:
        assert cell.peak_fraction == pytest.approx(cell.gbps / 100)
    assert isinstance(run_record("--peak-flops", "0").exception, ConfigError)
