"""What a trace of decode steps adds up to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.bench.generate.profile import STEP
from headway.bench.studies.command import study_app
from headway.bench.studies.step_trace import read_trace, step_trace
from headway.core.contract.errors import ConfigError


def written(path: Path, *launches: tuple[str, float, float], steps: int = 2) -> Path:
    """A trace of kernels, (name, start, microseconds) each."""
    events = [{"cat": "user_annotation", "name": STEP, "ts": number, "dur": 1.0} for number in range(steps)]
    events += [{"cat": "gpu_user_annotation", "name": STEP, "ts": 0.0, "dur": 9.0}, {"ph": "M", "name": "process_name"}]
    events += [{"cat": "kernel", "name": name, "ts": start, "dur": took} for name, start, took in launches]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_overlapping_kernels_are_counted_once_and_pauses_belong_to_what_follows(tmp_path: Path) -> None:
    given = [("b", 104.0, 6.0), ("a", 100.0, 5.0), ("a", 115.0, 3.0), ("inside", 116.0, 1.0), ("b", 120.0, 2.0)]
    found = read_trace(written(tmp_path / "trace.json", *given))
    assert [(each.name, each.launches, each.busy, each.idle) for each in found.kernels] == [
        ("a", 2, 8.0, 5.0),
        ("b", 2, 7.0, 2.0),
        ("inside", 1, 0.0, 0.0),
    ]
    assert (found.busy, found.idle) == (7.5, 3.5)


def test_the_table_fits_a_terminal_and_says_what_is_left_out(tmp_path: Path) -> None:
    names = ["void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int, T1)", "few_rows", "last"]
    trace = written(tmp_path / "trace.json", *((name, 10.0 * number, 9.0 - number) for number, name in enumerate(names)))
    result = CliRunner().invoke(study_app(step_trace), [str(trace), "--most", "2"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines() if line.strip()]
    assert ["vectorized_elementwise_kernel", "0.5", "4.5", "0.0"] in lines
    assert ["1", "others", "0.5", "3.5", "1.0"] in lines
    assert lines[-1] == ["all", "1.5", "12.0", "1.5"]
    assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize("text", ["no json", "[]", '{"traceEvents": []}', '{"traceEvents": [{"cat": "kernel"}]}', None])
def test_what_is_no_trace_of_steps_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="bench throughput --profile"):
        read_trace(path)
