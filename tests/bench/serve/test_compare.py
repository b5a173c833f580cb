"""Servers side by side: each is started, gets the same requests, and is stopped; one that does not start is told of."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from headway.bench.studies.servers.compare import Comparison, goodput, print_comparison, rates_of
from headway.bench.studies.servers.contenders import ServerContender
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import read_json
from sandbox import save_tiny_model

ROOT = Path(__file__).resolve().parents[3]
WORK = ("--mix", "12/6", "--vocab-size", "300", "--warmup", "2", "--seconds", "0.5", "--goodput", "ttft:5000,tpot:5000")


def compare(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headway.bench.studies.servers.compare", *options]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_a_server_and_the_engine_without_http_get_the_same_work(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny")
    served = f"{shlex.quote(sys.executable)} -m headway serve tiny --device cpu --port {{port}}"
    direct = json.dumps({"model": "tiny", "device": "cpu"})
    options = ("--at-once", "4", "--passes", "1", "--rate", "0.5x,8", "--output", "found.json")
    servers = ("--server", f"http={served}", "--server", f"no-http=in-process {direct}")
    done = compare(*WORK, *options, *servers, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = read_json(tmp_path / "found.json", Comparison, "headway.serve_compare/1")
    http, direct_found = found.contenders
    assert (http.name, direct_found.name) == ("http", "no-http")
    assert http.version
    assert [cell.mode for cell in http.cells] == ["offline", "online", "online"]
    assert http.cells[1].rate == pytest.approx(0.5 * http.cells[0].requests_per_second)
    for one, other in zip(http.cells, direct_found.cells, strict=True):
        assert one.failed == other.failed == 0
        assert (one.rate, one.completed, one.prompt_tokens) == (other.rate, other.completed, other.prompt_tokens)
        assert one.output_tokens == other.output_tokens == 6 * one.completed
    assert goodput(http) == max(cell.goodput or 0.0 for cell in http.cells[1:])
    assert max(map(len, done.stdout.splitlines())) <= 80
    ours = [each for each in psutil.process_iter(["cmdline"]) if "tiny" in (each.info["cmdline"] or ())]
    assert not [each for each in ours if Path(each.cwd()) == tmp_path], "a server goes on"


def rare(server: str, match: str) -> object:
    """One of the slow tests: each starts a command."""
    return pytest.param(server, match, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "match"),
    [
        ("a=sleep 5", r"--server: needs NAME=COMMAND with \{port\}"),
        rare("a=in-process {", "--server: needs NAME=COMMAND"),
        rare("a=in-process [1]", "--server: needs NAME=COMMAND"),
        rare("a=serve 'x {port}", "--server: needs NAME=COMMAND"),
        rare('a=in-process {"model": "nowhere-at-all"}', "nowhere-at-all"),
        rare("a=/nowhere/server {port}", "a: /nowhere/server cannot be started: No such file"),
        (
            f"a={sys.executable} -c 'print(\"no room\"); raise SystemExit(3)' {{port}}",
            "a: the server exited with code 3: no room",
        ),
    ],
)
def test_what_does_not_start_is_told_in_one_line(server: str, match: str, tmp_path: Path) -> None:
    done = compare(*WORK, "--at-once", "1", "--server", server, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert re.search(match, line), line
    assert "Traceback" not in done.stderr


def test_a_measured_comparison_is_shown_whole_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "bench" / "results" / "h200" / "server-mixed.json"
    found = Comparison.model_validate(json.loads(file.read_text())["comparison"])
    print_comparison(found, Console(width=80))
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert all(out.count(each.name) == len(each.cells) + 1 for each in found.contenders)


def test_rates_are_numbers_or_shares() -> None:
    assert rates_of(["40", "0.5x"], 10.0) == [40, 5]
    for text, reference in (("fast", 1.0), ("0", 1.0), ("-1x", 1.0), ("0.5x", None), ("nan", 1.0), ("inf", 1.0)):
        with pytest.raises(ConfigError, match="--rate"):
            rates_of([text], reference)
    with pytest.raises(ConfigError, match="--server"):
        ServerContender.parse("headway serve {port}")
