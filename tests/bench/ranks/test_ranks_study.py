"""The study of several ranks, on two of a CPU; its report, over files made up for these tests; and the commands of its script."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from headway.bench.generate.results import OfflineReport, PeerEngine, PeersFile
from headway.bench.studies import all_reduce
from headway.bench.studies.command import study_app
from headway.bench.studies.engines.__main__ import measure
from headway.bench.studies.ranks.__main__ import ranks as ranks_study
from headway.bench.studies.ranks.faults import kill_ranks, refuse, without_peers
from headway.bench.studies.ranks.predict import WORKS, predict_runs
from headway.bench.studies.ranks.report import markdown, report_of
from headway.bench.studies.ranks.results import PlannedRun, RanksPrediction
from headway.bench.studies.ranks.tokens import RanksUnderTest, Wrote, check_tokens, compare, families, save_model
from headway.cli.app import app
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import write_json

ROOT = Path(__file__).resolve().parents[3]
CPU = RanksUnderTest("cpu", 2, jobs=1)


def wrote(*texts: list[int], best: dict[str, float] | None = None) -> Wrote:
    return Wrote(texts, [[best or {}] * len(text) for text in texts], 1.0, 0)


def test_texts_are_the_same_or_part_at_a_tie() -> None:
    one = wrote([1, 2, 3], [4, 5, 6], best={"1": -0.1, "5": -0.7, "9": -0.8, "8": -2.0})
    same = compare("llama", "float32", one, one)
    assert (same.tokens, same.same, same.gaps, same.ok) == (6, 6, [], True)
    tie = wrote([1, 2, 3], [4, 9, 1])
    assert compare("llama", "bfloat16", one, tie).gaps == [pytest.approx(0.1)]
    assert compare("llama", "bfloat16", one, tie).same == 4
    assert compare("llama", "bfloat16", one, tie).ok
    assert not compare("llama", "float32", one, tie).ok, "none at all in float32"
    assert compare("qwen3_moe", "bfloat16", one, wrote([1, 2, 3], [4, 8, 1])).ok, "another expert, in half of the texts"
    assert not compare("qwen3_moe", "bfloat16", one, wrote([7, 2, 3], [4, 8, 1])).ok
    assert compare("qwen3_moe", "bfloat16", one, wrote([7, 2, 3], [4, 8, 1])).gaps == [1e3, pytest.approx(1.3)]


def test_every_family_is_tried_and_unknown_ones_are_refused() -> None:
    from headway.models.families.families import FAMILIES

    assert len(families([])) == len(FAMILIES) + 2
    assert families(["llama", "qwen3_moe"]) == ["qwen3_moe", "llama"]
    with pytest.raises(ConfigError, match="--family: needs one of .*, got 'nobody'"):
        families(["nobody"])


@pytest.mark.slow
def test_two_ranks_of_a_cpu_write_what_one_writes_and_end_as_they_should(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "llama")
    ((name, found),) = check_tokens({"llama": folder}, CPU, time.monotonic() + 60)
    assert (name, [each.ok for each in found]) == ("llama", [True, True]), found
    assert [(each.dtype, each.tokens) for each in found] == [("float32", 128), ("bfloat16", 128)]
    for seed in (0, 6):  # rank 1, and rank 0
        kill, after = kill_ranks(folder, CPU, 1, seed)
        assert (kill.ok, after.ok) == (True, True), (kill, after)
    refused = refuse(folder, CPU)
    assert refused.ok, refused
    assert check_tokens({"llama": folder}, CPU, 0.0).__next__() == ("llama", []), "no time is left"


def test_a_slow_family_hides_none_that_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    told, begun = threading.Event(), []

    def run_engines(folder: Path, *_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        begun.append(folder.name)
        if folder.name == "slow":
            assert told.wait(20)
        yield {"event": "ended", "text": f"{folder.name} has ended"}

    monkeypatch.setattr("headway.bench.studies.ranks.tokens.run_engines", run_engines)
    models = {name: Path(name) for name in ("slow", "quick", "quicker", "never")}
    found = check_tokens(models, RanksUnderTest("cpu", 2, jobs=2), time.monotonic() + 60)
    order = []
    for name, lines in found:
        order.append(name)
        assert [line.error for line in lines] == [f"{name} has ended"] * 2
        if name == "never":
            told.set()
    assert order == ["quick", "quicker", "never", "slow"]
    told.clear()
    begun.clear()
    models |= {str(number): Path("slow") for number in range(9)}
    stopped = check_tokens(models, RanksUnderTest("cpu", 2, jobs=2), time.monotonic() + 60)
    assert next(stopped)[0] == "quick"
    told.set()
    stopped.close()  # type: ignore[attr-defined]
    assert len(begun) < len(models), "what has not begun when nobody asks any more never begins"


@pytest.mark.slow
def test_what_cannot_start_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ((_, found),) = check_tokens({"nothing": tmp_path}, CPU, time.monotonic() + 60)
    assert not any(each.ok for each in found)
    assert "config.json" in found[0].error
    fault = without_peers(tmp_path, CPU)
    assert (fault.ok, fault.error) == (False, "it has not written")
    assert "config.json" in fault.text


def test_predictions_are_of_all_works_and_those_that_are_kept_are_of_two_gpus() -> None:
    for kind, title in (("h100", "NVIDIA H100 80GB HBM3"), ("h200", "NVIDIA H200")):
        kept = RanksPrediction.read(ROOT / "bench" / "results" / f"{kind}x2" / "predicted.json")
        assert kept.gpu == title
        assert {run.ranks for run in kept.runs} == {1, 2}
        assert {(run.model, run.weights, run.batch) for run in kept.runs} == {
            (work.model, work.weights, batch) for work in WORKS for batch in work.batches
        }
    with pytest.raises(ConfigError, match="--gpu: needs one of h100"):
        predict_runs("tpu", 2)


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


STUDIES: dict[str, Any] = {"ranks": ranks_study, "all_reduce": all_reduce.all_reduce, "engines": measure}


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
    assert len(lines) == 17
    for words in lines:
        understand(words)
    files = {words[words.index("--output") + 1] for words in lines}
    assert len(files) == 12
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
