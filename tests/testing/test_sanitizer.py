"""`headway check --sanitize`, with a stand-in for compute-sanitizer that logs an error and runs what it was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.contract.errors import ConfigError
from headway.testing.kit.runner import CellProcess, CellRun, Sanitizer, cell_timeout, find_sanitizer, first_error

LOG = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at paged_attention(float *, int)+0x70
=========     by thread (3,0,0) in block (1,0,0)
=========     Access at 0x7f0000000400 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= Program hit a second error
========= ERROR SUMMARY: 2 errors
"""
FOUND = (
    "Invalid __global__ read of size 4 bytes, at paged_attention(float *, int)+0x70, by thread (3,0,0) in block (1,0,0), "
    "Access at 0x7f0000000400 is out of bounds"
)
CELLS = ("options:-:nhd:own:b16:d64:g1:float32:none:-", "claims:-:nhd:own:b16:d64:g1:float32:none:-")


def stand_in(folder: Path, log: str) -> Path:
    """An executable compute-sanitizer that writes a log at once."""
    (folder / "log").write_text(log)
    tool = folder / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\n"
        'while [ "${1#--}" != "$1" ]; do [ "$1" = --log-file ] && log=$2; shift 2; done\n'
        f'cp {folder / "log"} "$log"\n'
        'exec "$@"\n'
    )
    tool.chmod(0o755)
    return tool


def test_the_first_error_of_a_log_is_one_line() -> None:
    assert first_error(LOG) == FOUND
    assert first_error("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == ""
    assert first_error("") == ""


@pytest.mark.slow
def test_the_sanitizers_error_is_the_finding_of_its_cell_alone(tmp_path: Path) -> None:
    child = CellProcess("sdpa", "cpu", 1, 60.0, sanitizer=Sanitizer(str(stand_in(tmp_path, LOG))))
    first, second = CellRun([child]).all(CELLS)
    assert (first.status, first.reason) == ("failed", f"compute-sanitizer: {FOUND}")
    assert first.guess == "a kernel reads or writes memory that is not its own"
    assert second.status != "failed", second


@pytest.mark.slow
def test_a_machine_that_it_cannot_watch_is_refused_in_its_words(tmp_path: Path) -> None:
    tool = stand_in(tmp_path, "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to the list\n")
    child = CellProcess("sdpa", "cpu", 1, 60.0, sanitizer=Sanitizer(str(tool)))
    with pytest.raises(ConfigError, match="--sanitize: needs a machine whose GPU .* got Error: Device not supported"):
        child.list(quick=True)
    child.stop()


def test_without_the_tool_or_a_gpu_it_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("headway.testing.kit.runner.PLACE", str(tmp_path))
    with pytest.raises(ConfigError, match="--sanitize: needs --device cuda, whose kernels it watches, got --device cpu"):
        find_sanitizer("cpu")
    with pytest.raises(ConfigError, match="--sanitize: needs compute-sanitizer, got none on the PATH"):
        find_sanitizer("cuda")
    tool = stand_in(tmp_path, LOG)
    assert find_sanitizer("cuda") == str(tool)


def test_a_watched_cell_may_take_longer() -> None:
    assert cell_timeout("cuda", sanitized=True) == 20 * cell_timeout("cuda")
