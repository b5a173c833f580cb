"""Backends held to another's times and to the device's peak: in the table, in the file, and by the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from headway.bench.kernel.report import check_request, compare
from headway.bench.kernel.results import DevicePeak, KernelCell, KernelReport, peak_of
from headway.cli.measure.bench_kernel import kernel
from headway.core.contract.errors import ConfigError, UnknownBackendError

SMALL = ("--geometry", "4/2/32", "--rep-ms", "0", "--warmup-ms", "0", "--device", "cpu", "--cases", "2q1s20")


def a_cell(backend: str, us: float | None, **changes: object) -> KernelCell:
    base = {"backend": backend, "owner": "backend", "phase": "decode", "case": "1q1s64", "geometry": "4/2/32", "layout": "nhd"}
    base |= {"block_size": 16, "dtype": "float32", "kv_dtype": "float32", "status": "ok", "median_us": us}
    base |= {} if us is not None else {"status": "error", "reason": "RuntimeError: it fell over"}
    return KernelCell(**{**base, **changes})


def run(*words: str) -> Result:
    app = typer.Typer()
    app.command("kernel")(kernel)
    return CliRunner().invoke(app, [*SMALL, *words])


def test_a_backend_is_slow_only_beyond_the_factor() -> None:
    cells = [a_cell("sdpa", 100.0), a_cell("mine", 109.0), a_cell("other", 120.0)]
    found = compare(cells, "sdpa", 1.1)
    assert found.compared == 2
    assert [(each.backend, each.factor) for each in found.slower] == [("other", pytest.approx(1.2))]
    assert str(found.slower[0]) == "other in decode 4/2/32 1q1s64, nhd 16: 120.0 us, 1.20 times as long as 100.0 us"
    assert found.fault == "1 of 2 cells take more than 1.1 times as long as sdpa, or failed"
    assert compare(cells, "sdpa", 1.3).fault == ""


def test_the_others_time_is_that_of_the_same_layout_else_its_fastest() -> None:
    cells = [a_cell("sdpa", 100.0), a_cell("sdpa", 50.0, block_size=256), a_cell("mine", 100.0)]
    assert compare(cells, "sdpa", 1.1).slower == []
    (slow,) = compare([*cells[:2], a_cell("mine", 100.0, layout="hnd")], "sdpa", 1.1).slower
    assert slow.than_us == 50.0
    assert compare([cells[0], a_cell("mine", 1e6, case="2q1s64")], "sdpa", 1.1).compared == 0, "another case is another work"


def test_a_failure_fails_and_a_refusal_does_not() -> None:
    declined = a_cell("picky", None, status="unsupported", reason="head_dim: needs 64, got 32")
    found = compare([a_cell("sdpa", 100.0), a_cell("mine", None), declined], "sdpa", 1.1)
    assert [each.backend for each in found.slower] == ["mine"]
    assert "no time (RuntimeError: it fell over), where the other takes 100.0 us" in str(found.slower[0])
    assert "nothing could be compared" in compare([a_cell("sdpa", 100.0), declined], "sdpa", 1.1).fault


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
    failed = run("--fail-if-slower", "0.00001", *named)
    assert failed.exit_code == 1
    assert failed.stderr.count("sdpa.math in decode 4/2/32 2q1s20, nhd") == 2
    assert "headway: 2 of 2 cells take more than 1e-05 times as long as sdpa, or failed" in failed.stderr
    comparison = KernelReport.read(path).comparison
    assert [(each.backend, each.block_size) for each in comparison.slower] == [("sdpa.math", 16), ("sdpa.math", 32)]
    assert run("--fail-if-slower", "100000", *named).exit_code == 0
    assert isinstance(run("--fail-if-slower", "1.1", "--than", "nobody").exception, UnknownBackendError)


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
    plain = run("--backends", "sdpa", "--output", str(path))
    assert "no data sheet of this device is known here; --peak-bandwidth GB/s and --peak-flops TFLOP/s would" in plain.output
    assert "of the peak" not in plain.output
    assert {cell.peak_fraction for cell in KernelReport.read(path).cells} == {None}
    given = run("--backends", "sdpa", "--peak-bandwidth", "100", "--output", str(path))
    assert "peak (given by the user): 100 GB/s; --peak-flops TFLOP/s would" in given.output
    assert "of the peak" in given.output
    for cell in KernelReport.read(path).cells:
        assert cell.peak_fraction == pytest.approx(cell.gbps / 100)
    assert isinstance(run("--peak-flops", "0").exception, ConfigError)
