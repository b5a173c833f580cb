"""The check `process`: what the trial of plugins refuses at a start is a finding of the kit, with the trial's own words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from headway.core.contract.errors import ConfigError
from headway.registry.isolation import Verdict
from headway.registry.plugin_sources import PluginFile, PluginSource, find_source
from headway.testing.diagnosis.scorecard import scorecard
from headway.testing.kit.checking import Wanted, check
from headway.testing.kit.checks.claims import CELL, try_plugin
from headway.testing.kit.kit import CHECKS, Kit
from headway.testing.kit.runner import CellProcess, CellRun, Sanitizer, cell_timeout, find_sanitizer, first_error
from headway.testing.kit.subject import load_subject
from headway.tuning.isolated.trial import try_plugins

HOSTILE = Path(__file__).parent / "hostile.py"
IMPORT = """
import torch
from headway.testing.broken.attention import PlainBackend
torch.set_default_dtype(torch.float64)
class Mine(PlainBackend):
    name = "mine"
"""
SIGNALS = """
import signal
from headway.testing.broken.attention import PlainBackend
class Mine(PlainBackend):
    name = "mine"
    def plan(self, metadata):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return super().plan(metadata)
"""
RIGHT = """
from headway.testing.broken.attention import PlainBackend
class Mine(PlainBackend):
    name = "mine"
"""


def plugin(target: str) -> PluginSource:
    found = load_subject(target, torch.device("cpu")).plugin
    assert found is not None
    return find_source(*found)


@pytest.mark.slow
def test_what_a_start_would_refuse_is_found_and_named(tmp_path: Path) -> None:
    (tmp_path / "imports.py").write_text(IMPORT)
    (tmp_path / "signals.py").write_text(SIGNALS)
    (tmp_path / "right.py").write_text(RIGHT)
    before = torch.get_default_dtype()
    try:
        sources = [
            plugin(f"{HOSTILE}:Prints"),
            plugin(f"{HOSTILE}:ChangesTheUmask"),
            plugin(f"{tmp_path}/imports.py"),  # its only class
            plugin(f"{tmp_path}/signals.py:Mine"),
            plugin(f"{tmp_path}/right.py:Mine"),
        ]
    finally:
        torch.set_default_dtype(before)
    verdicts = dict(zip(sources, try_plugins(sources), strict=True))  # together: each result below is this trial's
    prints, umask, imports, signals, right = (try_plugin(each, lambda one: [verdicts[one[0]]]) for each in sources)
    assert {result.status for result in (prints, umask, imports, signals)} == {"failed"}
    assert "prints to standard output in the self-test of backend prints on cpu: 'hello from the kernel" in prints.reason
    assert "changes the mask of new files' modes" in umask.reason
    assert "in the self-test of backend changes-the-umask on cpu" in umask.reason
    assert "torch's default dtype from torch.float32 to torch.float64, in its import" in imports.reason
    assert "changes what Ctrl-C does" in signals.reason
    assert right.status == "passed", right


@pytest.mark.parametrize("target", ["sdpa", "broken:drops-sinks"])
def test_what_is_no_plugins_has_no_trial(target: str) -> None:
    kit = Kit(load_subject(target, torch.device("cpu")))
    assert kit.stage.subject.plugin is None
    result = kit.run(CELL)
    assert (result.status, "is used untried" in result.reason) == ("skipped", True)


@pytest.mark.slow
def test_one_cell_asks_the_trial_that_is_handed_in() -> None:
    asked: list[PluginSource] = []

    def trial(plugins: Sequence[PluginSource]) -> list[Verdict]:
        asked.extend(plugins)
        return [Verdict("hangs in its import: no answer within 5 s")]

    wanted = Wanted(target=f"{HOSTILE}:Prints", cell=str(CELL), in_process=True)
    report = check(wanted, trial=trial)
    assert [each.target for each in asked] == [f"{HOSTILE}:Prints"]
    (result,) = report.failed
    assert "HEADWAY_PLUGIN_TIMEOUT=60 in the environment gives it more time" in result.reason
    shown = "\n".join(line.plain for line in scorecard(report, {"process": CHECKS["process"][1]}, 200))
    assert f"headway check {HOSTILE}:Prints --cell {CELL}" in shown


def test_nobody_is_tried_where_nobody_says_how() -> None:
    result = Kit(load_subject(f"{HOSTILE}:Prints", torch.device("cpu"))).run(CELL)
    assert (result.status, "check(wanted, trial=...)" in result.reason) == ("skipped", True)


@pytest.mark.slow
def test_the_check_comes_first_of_a_plugins_cells() -> None:
    told: list[str] = []
    counts: list[int] = []
    report = check(
        Wanted(target=f"{HOSTILE}:Prints", only="process", quick=True), counts.append, lambda r: told.append(r.check), try_plugins
    )
    assert (counts, told, [cell.status for cell in report.cells]) == ([1], ["process"], ["failed"])
    with pytest.raises(ConfigError, match="--only: needs checks of this subject: claims"):
        check(Wanted(target="broken:changes-q", only="process", quick=True), trial=try_plugins)


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


KERNELS = """
import os, time, torch
from headway.contract import ExpertsCapabilities, ExpertsKernel, LinearCapabilities, LinearKernel
class Exits(LinearKernel):
    name = "exits"
    capabilities = LinearCapabilities(frozenset({"int4"}), (torch.float32,), ("cpu",))
    def apply(self, x, weight, out):
        os._exit(3) if len(x) > 16 else out.zero_()
class Hangs(ExpertsKernel):
    name = "hangs"
    capabilities = ExpertsCapabilities(frozenset({"plain"}), (torch.float32,), ("cpu",))
    def apply(self, x, experts, scores, weights, out):
        time.sleep(600)
class Wrong(LinearKernel):
    name = "wrong"
    capabilities = LinearCapabilities(frozenset({"plain"}), (torch.float32,), ("cpu",))
    def apply(self, x, weight, out):
        torch.mm(x, weight.t(), out=out)[20:] = 0
"""


def test_kernels_of_weights_are_tried_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends or blocks the process does so there, and not in a start."""
    monkeypatch.setenv("HEADWAY_PLUGIN_TIMEOUT", "4")
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    exits, hangs, wrong = try_plugins([PluginFile.of(f"{file}:{name}") for name in ("Exits", "Hangs", "Wrong")])
    assert "ends the process in the self-test of linear kernel exits on cpu: it exited with code 3" in exits.fault
    assert "hangs in the self-test of experts kernel hangs on cpu" in hangs.fault
    assert not wrong.fault
    assert any("plain weights" in line and "with 33 rows" in line for line in wrong.remarks)
