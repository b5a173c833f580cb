"""The kit around its cells: hostile backends, children that die, reports, the command line, the pytest plugin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headway.cli.app import make_app
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.oracle.cells import PHASES, CheckCell
from headway.core.system.provenance import Origin
from headway.registry.isolation import TIMEOUT
from headway.testing.diagnosis.scorecard import badge, command, patterns, scorecard
from headway.testing.kit.checking import Wanted, check
from headway.testing.kit.kit import CHECKS, Kit, parse_cell
from headway.testing.kit.report import CellResult, CheckReport, ReportComparison, machine_of, read_check
from headway.testing.kit.runner import CellProcess, CellRun, cell_timeout
from headway.testing.kit.subject import load_subject

HERE = Path(__file__).parent
HOSTILE = HERE / "hostile.py"
EXAMPLE = HERE.parent.parent / "examples" / "headway-example" / "headway_example.py"
PLAIN = CheckCell("answer", "decode", layout="nhd", block_size=8, head_dim=32, group=2)

BOTH_WAYS = PLAIN.plain("answer", phase="prefill", feature="bidirectional-37")


@cache
def kit(name: str) -> Kit:
    return Kit(load_subject(f"{HOSTILE}:{name}", torch.device("cpu")))


@cache
def baseline() -> Kit:
    return Kit(load_subject("sdpa.math", torch.device("cpu")))


@pytest.mark.parametrize(
    ("name", "cell", "words"),
    [
        ("Raises", PLAIN, "ValueError: no kernel for this (hostile.py:"),
        pytest.param("Leaks", PLAIN.plain("memory"), "keeps memory of every step", marks=pytest.mark.slow),
        ("AnyOption", PLAIN.plain("options"), "unknown options are silently ignored"),
        ("LooseTolerance", PLAIN.plain("tolerance"), "a tolerance that would let wrong answers pass"),
        pytest.param("WrongBeyond", PLAIN.plain("long", phase="long"), "those of more than 1,024 tokens", marks=pytest.mark.slow),
        ("MutatesMetadata", PLAIN, "slot_mapping"),
        ("CachesByAddress", PLAIN, "wrong"),
        ("DenseAsOne", PLAIN.plain("answer", phase="prefill"), "sequences are wrong"),
        (
            "MasksCausally",
            BOTH_WAYS.plain("answer", feature="bidirectional"),
            "a causal mask, in a layer whose queries see later keys",
        ),
        ("WiderWindow", BOTH_WAYS, "a window off by one (one key too many)"),
        ("LeaksBetweenLayers", PLAIN, "over the cache of another layer"),
        ("NoGpu", PLAIN, "TRITON_INTERPRET=1 in the environment"),
    ],
)
def test_a_hostile_backend_is_caught(name: str, cell: CheckCell, words: str) -> None:
    result = kit(name).run(cell)
    assert result.status == "failed"
    assert words in f"{result.reason} {result.guess}", result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DecodeOnly", pytest.param("NoPrompts", marks=pytest.mark.soak), "OwnLayout"])
def test_a_part_of_the_contract_is_enough(name: str) -> None:
    own = kit(name)
    layout = "slots_first" if name == "OwnLayout" else "nhd"
    cell = CheckCell("engine", layout=layout, block_size=8, head_dim=32, group=2)
    checks = ["claims", "engine", "steps", "turns"]
    results = [own.run(cell.plain(check)) for check in checks]
    results.append(own.run(cell.plain("answer", phase="decode")))
    assert [result.status for result in results] == ["passed"] * 5, results
    cells = own.cells(quick=True)
    if name == "DecodeOnly":
        assert {each.phase for each in cells if each.check == "answer"} == {"decode", "verify", "ragged"}
        assert {each.phase for each in cells if each.check == "refuse" and each.about == "phase"} == {
            "prefill",
            "extend",
            "mixed",
        }
    if name == "OwnLayout":
        assert {each.layout for each in cells if each.check == "answer"} == {"slots_first"}


@pytest.mark.slow
def test_a_process_that_dies_is_a_finding_and_the_next_cell_runs() -> None:
    cells = [str(PLAIN.plain("answer", phase=phase)) for phase in ("decode", "prefill")]
    for name, words in (("Crashes", "SIGSEGV"), ("Exits", "exited with code 3")):
        run = CellRun([CellProcess(f"{HOSTILE}:{name}", "cpu", 1, 60.0)])
        results = run.all([*cells, str(PLAIN.plain("options"))])
        assert words in results[0].reason
        assert "takes the process with it" in results[0].guess
        assert results[-1].status == "skipped"  # no options; and it ran
        assert "no options" in results[-1].reason


def test_a_cell_that_loses_the_gpu_costs_the_next_cell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Process:
        """Stands in for a process whose first cell leaves a fault behind, which every later call would report."""

        def __init__(self, command: Sequence[str], limits: Mapping[str, str]) -> None:
            started.append(self)
            self.lost = False

        def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
            if "load" in request:
                return {"loaded": "subject"}
            status = "failed" if self.lost or len(started) == 1 else "passed"
            self.lost |= status == "failed"
            cell = parse_cell(request["cell"])
            return {
                "result": {"cell": request["cell"], "check": cell.check, "status": status, **cell.axes},
                "lost_gpu": self.lost,
            }

        def stop(self) -> None:
            pass

    monkeypatch.setattr("headway.testing.kit.runner.Child", Process)
    child = CellProcess("subject", "cuda", 1, 60.0)
    cells = [str(PLAIN.plain("answer", phase=phase)) for phase in ("decode", "prefill", "extend")]
    assert [each.status for each in CellRun([child]).all(cells)] == ["failed", "passed", "passed"]
    assert (len(started), child.deaths) == (2, 1)


@pytest.mark.gpu
def test_a_read_out_of_bounds_on_a_gpu_is_the_finding_of_its_cell_alone() -> None:
    cells = [str(PLAIN.plain("answer", phase=phase)) for phase in ("decode", "prefill")]
    first, second = CellRun([CellProcess(f"{HOSTILE}:ReadsFarAway", "cuda", 1, 240.0)]).all(cells)
    assert first.status == "failed"
    assert "memory that is not its own" in first.guess
    assert second.status == "passed", second


def test_a_hang_is_a_finding() -> None:
    (result,) = CellRun([CellProcess(f"{HOSTILE}:Hangs", "cpu", 1, 1.0)]).all([str(PLAIN)])
    assert "no answer within 1 s" in result.reason
    assert result.guess.startswith("hangs, or takes longer: --timeout")


def test_under_the_interpreter_a_cell_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = cell_timeout("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cell_timeout("cpu") == 10 * usual
    assert machine_of(torch.device("cpu")).interpreted


@pytest.mark.slow
def test_every_cell_has_a_name_that_finds_it_again() -> None:
    cells = kit("OwnLayout").cells()
    assert len({str(cell) for cell in cells}) == len(cells)
    assert [CheckCell.parse(str(cell)) for cell in cells] == cells
    assert {cell.check for cell in cells} <= set(CHECKS)
    with pytest.raises(ConfigError, match="a cell's name"):
        CheckCell.parse("answer:decode")
    with pytest.raises(ConfigError, match="--cell"):
        CheckCell.parse("long:long:nhd:own:b0:d0:g0:float32:none:-")


@pytest.mark.slow
def test_every_pair_of_claimed_values_is_in_a_cell() -> None:
    claimed = kit("OwnLayout").stage.claimed
    covered = claimed.cover(2)
    for phase in PHASES:
        mine = [cell for cell, phases in covered if phase in phases]
        for block in claimed.values["block_size"]:
            for dim in claimed.values["head_dim"]:
                assert any((cell.block_size, cell.head_dim) == (block, dim) for cell in mine)


@pytest.mark.slow
def test_latents_and_one_kv_head_are_tried_with_more_heads_than_a_tile_holds() -> None:
    own = baseline()
    many = [cell for cell in own.cells() if cell.group > 32]
    tried = {(cell.check, cell.feature, cell.group, cell.phase) for cell in many}
    phases = ("decode", "extend", "mixed", "verify")
    for feature, group, other in (("latent", 128, 96), ("none", 71, 64)):
        assert {("answer", feature, group, phase) for phase in phases} < tried
        assert {("lse", feature, group, "decode"), ("graph", feature, group, "decode")} < tried
        assert {("answer", feature, other, phase) for phase in ("decode", "extend")} < tried
    assert len(tried) == len(many) == 16
    assert {cell.dtype for cell in many} == {"bfloat16"}
    assert {cell.head_dim for cell in many if cell.feature == "latent"} == {576}
    assert {(cell.check, cell.phase) for cell in own.cells(quick=True) if cell.group > 32} == {("answer", "decode")}


@pytest.mark.slow
def test_many_heads_that_are_not_taken_must_be_refused_in_words() -> None:
    own = kit("FewHeads")
    refused = [cell for cell in own.cells() if cell.group > 32]
    assert [(cell.check, cell.about, cell.group) for cell in refused] == [("refuse", "group", 71), ("refuse", "group", 64)]
    results = [own.run(cell) for cell in refused]
    assert [result.status for result in results] == ["passed", "passed"]
    assert "query heads a kv head: needs at most 16, got 71" in results[0].reason, results[0]


@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm_5d", "latent"])
def test_the_built_in_layouts_keep_their_rows(layout: str) -> None:
    own = baseline()
    results = [own.run(cell) for cell in own.layout_cells(layout)]
    assert not [result for result in results if result.status == "failed"]
    assert sum(result.status == "passed" for result in results) > 10


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nobody", "nobody registered"),
        ("broken:nobody", "one of wrong-scale"),
        ("no_file.py:X", "there is no such file"),
        (f"{HOSTILE}:Nobody", "one of Crashes"),
        (str(HOSTILE), "with a class out of Crashes"),
    ],
)
def test_a_mistaken_target_is_one_line(target: str, words: str) -> None:
    with pytest.raises(HeadwayError, match=words):
        load_subject(target, torch.device("cpu"))


def test_a_layout_that_nobody_registered_is_one_line() -> None:
    with pytest.raises(ConfigError, match="one of nhd, hnd, vllm_5d, latent, nhd_int8, got 'zz'"):
        Kit(load_subject("sdpa.math", torch.device("cpu"))).listed(layout="zz")


def test_a_report_comes_back_and_shows_one_line_a_check(tmp_path: Path) -> None:
    cells = [PLAIN, PLAIN.plain("repeat"), PLAIN.plain("sync")]
    results = [kit("LeaksBetweenLayers").run(cell) for cell in cells]
    report = CheckReport(
        target=f"{HOSTILE}:LeaksBetweenLayers",
        subject="leaks-between-layers",
        origin=Origin(version="1", commit="abc"),
        date="2026-11-22T00:00:00+00:00",
        quick=True,
        machine=machine_of(torch.device("cpu")),
        cells=results,
    )
    path = tmp_path / "deep" / "report.json"
    report.write(path)
    assert read_check(path) == report
    assert json.loads(path.read_text())["schema"] == "headway.check/1"
    lines = [line.plain for line in scorecard(report, {name: about for name, (_, about) in CHECKS.items()}, 80)]
    assert all(len(line) <= 80 for line in lines if "--cell" not in line)
    assert sum(line.startswith((" ✓", " ✗", " –")) for line in lines) == 3
    assert f"  {command(report, results[0])}" in lines
    assert str(PLAIN) in command(report, results[0])
    assert "1 of 3 failed" in badge(report)


def test_failures_of_one_kind_are_shown_once() -> None:
    results = [kit("LeaksBetweenLayers").run(PLAIN)]
    results += [results[0].model_copy(update={"cell": f"other {number}", "block_size": 16}) for number in range(9)]
    results += [
        results[0].model_copy(update={"cell": f"well {size}", "status": "passed", "block_size": size}) for size in (32, 64, 128)
    ]
    lines = [line.plain for line in scorecard(report_of(results), {"answer": "answers"}, 80)]
    assert sum(line.startswith("✗ ") for line in lines) == 1
    assert "  and 9 more like it" in lines
    assert "10 failed in all; --json FILE keeps them" in lines
    assert [line for line in lines if "exactly" in line] == [
        "answers are wrong exactly where block_size is 16 or 8 (10 cells are wrong)"
    ]
    some = [
        results[0],
        *(cell.model_copy(update={"block_size": size}) for cell, size in zip(results[1:4], (16, 24, 48), strict=True)),
    ]
    assert patterns([*some, results[-1]]) == ["answers are right exactly where block_size is 128 (4 cells are wrong)"]


def report_of(results: Sequence[CellResult]) -> CheckReport:
    origin, machine = Origin(version="1", commit="a"), machine_of(torch.device("cpu"))
    return CheckReport(target="x", subject="x", origin=origin, date="now", quick=True, machine=machine, cells=list(results))


def test_a_passed_cell_keeps_its_error() -> None:
    for check_, most in (("answer", 2e-6), ("lse", 1e-4)):
        result = baseline().run(PLAIN.plain(check_))
        assert result.status == "passed"
        assert result.tolerance == pytest.approx(most)
        assert result.relative_error is not None
        assert 0 < result.relative_error < most
    assert baseline().run(PLAIN.plain("repeat")).relative_error is None


@pytest.mark.parametrize(
    ("changes", "worse", "words"),
    [
        ({}, False, "B is not worse than A"),
        ({"status": "failed", "reason": "wrong"}, True, "fail in B (1):"),
        ({"status": "skipped"}, True, "lost in B"),
        ({"relative_error": 5e-7}, True, "error 1e-07 to 5e-07 (5.0 x), tolerance 2e-06"),
        ({"relative_error": 1.5e-7}, False, "not worse"),
        ({"relative_error": 1e-8}, False, "error shrank by more than 2 x (1):"),
        ({"cell": "answer:another"}, True, "missing"),
    ],
)
def test_two_reports_are_compared_cell_by_cell(changes: dict[str, Any], worse: bool, words: str) -> None:
    old = CellResult(cell=str(PLAIN), check="answer", status="passed", relative_error=1e-7, tolerance=2e-6)
    found = ReportComparison(report_of([old]), report_of([old.model_copy(update=changes)]))
    lines = list(found.lines())
    assert found.worse is worse
    assert words in " ".join(line.strip() for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_a_new_failure_is_worse_and_a_fixed_one_is_not() -> None:
    right = CellResult(cell=str(PLAIN), check="answer", status="passed")
    wrong = right.model_copy(update={"cell": "answer:other", "status": "failed"})
    assert ReportComparison(report_of([right]), report_of([right, wrong])).worse
    fixed = ReportComparison(report_of([wrong]), report_of([wrong.model_copy(update={"status": "passed"})]))
    assert not fixed.worse
    assert "fixed in B (1):" in list(fixed.lines())


@pytest.mark.slow
def test_a_run_stops_at_the_first_failure_without_a_guess() -> None:
    wanted = Wanted("broken:drops-sinks", quick=True, only="answer", stop_at_failure=True, guesses=False)
    report = check(wanted)
    assert [cell.status for cell in report.cells].count("failed") == 1
    assert report.not_run > 0
    assert "relative error" not in report.failed[0].reason
    assert "expected" in report.failed[0].reason
    assert report.failed[0].guess == ""
    assert len(report.digest) == 64


@pytest.mark.slow
def test_the_command_line_and_its_exit_codes(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "headway", "check", *arguments], capture_output=True, text=True)

    path = tmp_path / "out.json"
    wrong = run("broken:changes-q", "--cell", str(PLAIN), "--json", str(path), "--badge", str(tmp_path / "b.svg"))
    assert wrong.returncode == 1, wrong.stderr
    assert "looks like: changes q" in wrong.stdout
    assert read_check(path).failed[0].cell == str(PLAIN)
    assert "<svg" in (tmp_path / "b.svg").read_text()
    mistaken = run("nobody")
    assert mistaken.returncode == 2
    assert "nobody registered" in mistaken.stderr
    assert "Traceback" not in mistaken.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("hung", "verdict"), [(1, "interrupted: "), (2, "FAILED: 1 passed, 1 failed, ")], ids=["trial", "cell"])
def test_ctrl_c_shows_what_was_found(tmp_path: Path, hung: int, verdict: str) -> None:
    """hung: processes that hang, the first of which tries the plugin as a start does."""
    options = ["--quick", "--jobs", "1", "--json", str(tmp_path / "found.json"), "--badge", str(tmp_path / "badge.svg")]
    command_ = [sys.executable, "-m", "headway", "check", f"{HOSTILE}:HangsAndTells", *options]
    taken_back = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    environment = {**os.environ, TIMEOUT: "20" if hung == 1 else "1"}
    run = subprocess.Popen(
        command_, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=taken_back, cwd=tmp_path, env=environment
    )
    until = time.monotonic() + 100
    while len(list(tmp_path.glob("hangs-*"))) < hung:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in err
    report = read_check(tmp_path / "found.json")
    assert report.not_run > len(report.cells)
    assert verdict in out
    assert f"{report.not_run} not run" in out
    assert ("not tested" if hung == 1 else "1 of 2 failed") in (tmp_path / "badge.svg").read_text()


def test_what_is_raised_at_one_place_is_shown_once_whatever_the_check() -> None:
    reasons = [
        "backend x failed in prefill (layer 0, q [382, 8, 64]): IndexError: index 9 is out of bounds (x.py:69)",
        "raised IndexError: index 12 is out of bounds (x.py:69)",
        "raised IndexError: index 9 is out of bounds (x.py:70)",
    ]
    made = kit("LeaksBetweenLayers").run(PLAIN)
    cells = [made.model_copy(update={"cell": f"{number}", "reason": reasons[number % 2], "guess": ""}) for number in range(6)]
    cells[1] = cells[1].model_copy(update={"check": "lse"})
    cells += [cells[0].model_copy(update={"cell": "other place", "reason": reasons[2]})]
    lines = [line.plain for line in scorecard(report_of(cells), {}, 80)]
    assert [line for line in lines if line.startswith("✗ ")] == ["✗ 0", "✗ other place"]
    assert "  and 5 more like it" in lines


_UNREGISTERED = """
from headway import hookimpl
from headway.contract import ALL_PHASES, BackendInfo, CacheLayout, Capabilities
from headway.testing.broken.attention import PlainBackend

ROWS = ("slot", "block", "head", "dim")
OWN = CacheLayout("slots_first", {"key": ROWS, "value": ROWS})

class Mine(PlainBackend):
    name = "mine"
    capabilities = Capabilities(phases=ALL_PHASES, layouts=(OWN,), devices=("cpu",))

@hookimpl
def headway_register_backends():
    return [BackendInfo("mine", "reads a layout of its own", lambda: Mine, api_version=3)]
"""


@pytest.mark.slow
def test_a_layout_that_a_plugin_claims_and_does_not_register_is_named(tmp_path: Path) -> None:
    (tmp_path / "unregistered.py").write_text(_UNREGISTERED)
    result = Kit(load_subject(f"{tmp_path / 'unregistered.py'}:Mine", torch.device("cpu"))).run(PLAIN.plain("claims"))
    assert "layouts has slots_first, which nobody registers" in result.reason
    assert "headway_register_layouts()" in result.reason


@pytest.mark.slow
def test_several_checks_are_asked_for_at_once() -> None:
    report = check(Wanted(target=f"{EXAMPLE}:Example", quick=True, only="claims,options"))
    assert [cell.check for cell in report.cells] == ["claims", "options"]
    with pytest.raises(ConfigError, match="--only: needs checks of this subject: claims, .*, got 'ansewr'"):
        check(Wanted(target=f"{EXAMPLE}:Example", quick=True, only="claims,ansewr"))


@pytest.mark.parametrize("options", [["--only", "answer"], ["--only", "answer,long"], ["--only", "serves"]])
def test_a_check_in_which_nothing_ran_gives_the_reason_and_exits_with_2(options: list[str]) -> None:
    command = ["check", f"{EXAMPLE}:Example", "--rule", "tests/support/rules.py:TanhCap", "--jobs", "1", *options]
    result = CliRunner().invoke(make_app(), command, catch_exceptions=False)
    assert result.exit_code == 2
    assert "rule: needs a backend that computes it, got rule=TanhCap" in " ".join(result.output.split())
    assert "nothing was checked: 3 skipped" in result.output
    assert "passed" not in result.output


def test_a_cell_in_this_process_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    report = check(Wanted(target=f"{HOSTILE}:Prints", cell=str(PLAIN), in_process=True))
    assert [cell.status for cell in report.cells] == ["passed"]
    assert "hello from the kernel" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--in-process: needs one cell: --cell CELL, got none"):
        check(Wanted(target="sdpa", in_process=True))


@pytest.mark.slow
def test_the_pytest_plugin_makes_a_test_of_each_cell(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "no:headway", "-p", "headway.testing.pytest_plugin"]  # whether its entry point is installed or not
    command += ["--attn-plugin", f"{HOSTILE}:AnyOption", "-k", "options or tolerance", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "1 failed, 3 passed" in run.stdout, run.stdout + run.stderr
    assert "unknown options are silently ignored" in run.stdout


def mistyped(axis: str) -> str:
    name = str(PLAIN)
    assert f":{axis}:" in f":{name}:"
    return ":".join("nosuch" if part == axis else part for part in name.split(":"))


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ("answer", "a check out of claims, process, serves"),
        ("decode", "a cell's name as `headway check` prints it"),
        ("nhd", "a layout out of nhd, hnd"),
        ("own", "a cell's name"),
        ("float32", "a cell's name"),
        ("none", "a cell's name"),
    ],
)
def test_a_cell_that_cannot_be_is_no_finding(axis: str, words: str) -> None:
    with pytest.raises(HeadwayError, match=f"--cell: needs {words}.*nosuch"):
        check(Wanted(target="sdpa.math", cell=mistyped(axis), in_process=True))


def test_of_one_cell_no_others_are_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which layers a backend accepts takes a second to find out."""
    monkeypatch.setattr(Kit, "cells", lambda *_: pytest.fail("all cells are listed"))
    report = check(Wanted(target="sdpa.math", cell=str(PLAIN), in_process=True))
    assert [(cell.cell, cell.status) for cell in report.cells] == [(str(PLAIN), "passed")]
