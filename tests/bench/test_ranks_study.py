"""The study of several ranks: its predictions; its report, over files made up for these tests; and the commands of its script."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from headway.bench.generate.results import OfflineReport, PeerEngine, PeersFile
from headway.bench.studies import all_reduce
from headway.bench.studies.command import study_app
from headway.bench.studies.engines import engines
from headway.bench.studies.ranks import ranks as ranks_study
from headway.bench.studies.ranks_report import PlannedRun, RanksPrediction, markdown, report_of
from headway.cli.app import app
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import write_json

ROOT = Path(__file__).resolve().parents[2]


def made_up(folder: Path, name: str, model: str, rate: float, date: str, command: str = "") -> None:
    """A file of one workload with figures that nobody measured."""
    given: Any = OfflineReport.read(ROOT / "bench" / "results" / "h100x2" / "throughput-8b-tp2.json").model_dump(by_alias=True)
    cell = {**given["cells"][0], "tokens_per_second": rate}
    report = {**given, "cells": [cell], "model": model, "date": date, "command": command}
    write_json(OfflineReport.model_validate(report), folder / name)


def test_a_report_puts_one_gpu_vllm_and_earlier_predictions_beside(tmp_path: Path) -> None:
    made_up(tmp_path, "throughput-8b-tp1.json", "llama-3-8b", 100.0, "2026-01-03")
    made_up(tmp_path, "throughput-8b-tp2.json", "llama-3-8b", 150.0, "2026-01-03")
    made_up(tmp_path, "throughput-70b-fp8-tp2.json", "llama-3-70b", 40.0, "2026-01-01", "headway --quantization fp8")
    peer = PeerEngine(name="vllm", version="0", settings="", tokens_per_second={"1 x 512/512": 120.0})
    write_json(PeersFile(device="", model="", date="2026-01-03", peers=[peer]), tmp_path / "vllm-8b-tp2.json")
    runs = [
        PlannedRun(model=model, weights=weights, ranks=size, batch=1, input_len=512, output_len=512, tokens_per_second=rate,
                   first_token_ms=1.0, per_token_ms=1.0)
        for model, weights, size, rate in (("llama-3-8b", "model", 1, 110.0), ("llama-3-8b", "model", 2, 180.0),
                                           ("llama-3-70b", "fp8", 2, 44.0))
    ]  # fmt: skip
    made = {"command": "", "gpu": "NVIDIA H100 80GB HBM3", "runs": runs, "sum_bytes": [], "sum_us": {}}
    write_json(RanksPrediction(date="2026-01-02", **made), tmp_path / "predicted.json")
    later, row = report_of(tmp_path).rows
    assert (later.work, later.planned, later.one) == ("llama-3-70b, fp8, 1 x 512/512", None, None), "measured before"
    assert (row.one, row.speedup, row.vllm, row.ratio) == (100.0, 1.5, 120.0, 1.25)
    assert (row.planned, row.planned_one) == (180.0, 110.0)
    assert (row.off, row.off_one) == (pytest.approx(20.0), pytest.approx(10.0))
    assert report_of(tmp_path).median_off == pytest.approx(15.0)
    text = markdown(report_of(tmp_path))
    assert "| llama-3-8b, 1 x 512/512 | 2 | 150 | 100 | 1.50 | 120 | 1.25 | 180 | +20.0 | 110 |" in text
    assert "15.0 % off in the median" in text
    with pytest.raises(ConfigError, match="report: needs files such as throughput-8b-tp2.json, got none in"):
        report_of(tmp_path / "empty")


STUDIES: dict[str, Any] = {"ranks": ranks_study, "all_reduce": all_reduce.all_reduce, "engines": engines}


@pytest.mark.slow  # a process, and the tree of all commands
def test_the_script_asks_for_what_there_is(tmp_path: Path) -> None:
    """Every command of the parts for several GPUs, written down instead of run, is understood."""
    stub = tmp_path / "stub"
    stub.write_text('#!/bin/sh\necho "$@" >>"$COMMANDS"\n')
    stub.chmod(0o755)
    commands = tmp_path / "commands"
    environment = {**os.environ, "HEADWAY": f"{stub} headway", "PYTHON": str(stub), "COMMANDS": str(commands)}
    done = subprocess.run(["sh", "bench/reproduce.sh", str(tmp_path / "out"), "ranks"], cwd=ROOT, env=environment, check=True,
                          capture_output=True, text=True)  # fmt: skip
    assert done.stderr == ""
    lines = [shlex.split(line) for line in commands.read_text().splitlines()]
    assert len(lines) == 15
    for words in lines:
        understand(words)
    files = {words[words.index("--output") + 1] for words in lines}
    assert len(files) == 11
    refused = subprocess.run(["sh", "bench/reproduce.sh", str(tmp_path), "rank"], cwd=ROOT, env=environment, check=False,
                             capture_output=True, text=True)  # fmt: skip
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.endswith("ranks-70b ranks-vllm ranks-tests, got rank\n")


def understand(words: list[str]) -> None:
    """Parse a command, and call nothing."""
    if words[0] == "headway":
        command: Any = typer.main.get_command(app)
        for name in words[1:3]:
            command = command.commands[name]
        command.make_context(words[2], words[3:])
        return
    place = words.index("-m")
    module = words[place + 1].removeprefix("headway.bench.studies.")
    command = typer.main.get_command(study_app(STUDIES[module]))
    command.make_context(module, words[place + 2 :])
