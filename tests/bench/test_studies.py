"""The studies in bench/studies: experts, shipped tables, other engines, weights in published formats, ranks, step traces."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from headway import LLM, SamplingParams
from headway.bench.generate.profile import STEP
from headway.bench.generate.results import OfflineReport, PeerEngine, PeersFile
from headway.bench.generate.workloads import RandomTokens
from headway.bench.studies import all_reduce
from headway.bench.studies.command import run_study, study_app
from headway.bench.studies.engines import PeerOptions, engines, run_peer
from headway.bench.studies.experts import experts, print_report, ratios
from headway.bench.studies.experts_layer import ExpertsCell, ExpertsReport
from headway.bench.studies.ranks import ranks as ranks_study
from headway.bench.studies.ranks_report import PlannedRun, RanksPrediction, markdown, report_of
from headway.bench.studies.ship_priors import ship
from headway.bench.studies.step_trace import read_trace, step_trace
from headway.bench.studies.weight_shapes import weight_shapes
from headway.cli.app import make_app
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.metadata import Phase
from headway.core.system.json_files import write_json
from headway.core.system.provenance import Origin
from headway.models.checkpoints.formats.config import read_quantization
from headway.models.checkpoints.locate import locate
from headway.tuning.measure.counted_layer import timed_table
from headway.tuning.measure.device import identify_device
from headway.tuning.table.convert import to_costs
from headway.tuning.table.files import find_prior, prior_path, read_table
from headway.tuning.table.schema import DeviceInfo, KernelRecord, LinearRecord, PriorRecord
from sandbox import save_tiny_model
from tables import a_cell, a_device, a_table

app = make_app()


def cell(way: str, tokens: int, us: float | None, peer: bool = False, reason: str = "") -> ExpertsCell:
    return ExpertsCell(
        way=way, peer=peer, shape="s", tokens=tokens, touched=7, median_us=us, layer_us=None if peer else us, reason=reason,
        relative_error=1e-3, bytes_share=None if us is None else 0.5, operations_share=None if us is None else 0.1,
    )  # fmt: skip


CELLS = [
    cell("a", 1, 10.0),
    cell("b", 1, 20.0),
    cell("lib", 1, 20.0, peer=True),
    cell("a", 64, 50.0),
    cell("b", 64, 40.0),
    cell("lib", 64, 20.0, peer=True),
    cell("other", 64, None, peer=True, reason="wrong answer"),
]


def test_ratios_are_of_the_best_of_ours() -> None:
    assert ratios(CELLS) == ["compared with lib: 1.00 times as fast in the geometric mean, 0.50 at worst"]


def test_a_report_is_written_read_and_shown(tmp_path: Path) -> None:
    identity = identify_device(torch.device("cpu")).model_dump()
    device = DeviceInfo(**identity, copy_gbps=1.0, matrix_tflops=2.0, matrix_dtype="bfloat16")
    report = ExpertsReport(
        command="...", origin=Origin.here(), date="2026-11-22", dtype="bfloat16", device=device, read_gbps=3.0,
        libraries={"lib": "1.2"}, chosen={"s": "a from 1 tokens on"}, cells=CELLS,
    )  # fmt: skip
    write_json(report, tmp_path / "experts.json")
    console = Console(width=160, record=True)
    print_report(ExpertsReport.read(tmp_path / "experts.json"), console)
    shown = console.export_text()
    for text in ("10.0 (10.0) · 50%", "other, s, 64 tokens: wrong answer", "auto: a from 1 tokens on", "lib 1.2"):
        assert text in shown


def test_without_a_gpu_the_study_is_refused() -> None:
    done = CliRunner().invoke(study_app(experts), ["--device", "cpu"])
    assert isinstance(done.exception, ConfigError)
    assert "needs a GPU" in str(done.exception)


ROOT = Path(__file__).resolve().parents[2]
COMMIT = Origin(version="1.0", commit="0123456789ab")


def test_a_shipped_table_chooses_as_the_measured_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = ROOT / "bench" / "results" / "h200" / "crossover-16-8-128.json"
    target = ship(measured, tmp_path)
    before, after = read_table(measured), read_table(target)
    assert target.stat().st_size < measured.stat().st_size / 2
    costs, again = to_costs(before), to_costs(after)
    for phase in Phase:
        assert again.shapes[phase] == costs.shapes[phase]
        for shape in [*costs.shapes[phase], *costs.between[phase]]:
            for name in ("triton", "hopper", "flash_attn_3"):
                assert again.at(shape, name, "nhd", 16) == pytest.approx(costs.at(shape, name, "nhd", 16), rel=1e-3)
    monkeypatch.setenv("HEADWAY_PRIORS", str(tmp_path))
    found = find_prior(before.device, before.spec, {})
    assert found.path == target
    assert str(found.record()).startswith("shipped table of 2026-11-22 (NVIDIA H200, driver 580.159.04, torch 2.11.0+cu130")
    assert "commit c4a0fe8900f3" in found.record().made


def test_times_of_products_ship_under_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_PRIORS", str(tmp_path / "priors"))
    table = timed_table(
        LinearRecord(layer="fp8 rows"), a_device(), [KernelRecord(name="kernel", owner="built-in", available=True)], []
    )
    table.complete, table.origin = True, COMMIT
    path = tmp_path / "some-product.json"
    write_json(table, path)
    assert ship(path, tmp_path / "priors") == prior_path(a_device(), table.spec)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"complete": False}, "a whole table"),
        ({"origin": None}, "the sources of one commit"),
        ({"origin": Origin(version="1.0", commit="0123456789ab", modified=True)}, "the sources of one commit"),
        ({"prior": PriorRecord(device=a_device(), origin=None, date="2026-11-21")}, "all measured by one run"),
    ],
)
def test_a_table_that_nobody_can_vouch_for_does_not_ship(tmp_path: Path, changes: dict[str, object], word: str) -> None:
    path = tmp_path / "table.json"
    write_json(a_table(a_cell(), **({"origin": COMMIT} | changes)), path)
    with pytest.raises(ConfigError, match=word):
        ship(path, tmp_path / "priors")
    path.write_text('{"schema": "another/1"}')
    with pytest.raises(ConfigError, match="another/1"):
        ship(path, tmp_path / "priors")


@pytest.fixture(scope="module")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


CPU = torch.device("cpu")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_a_peer_that_is_not_installed_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedError, match="vllm: needs the module vllm, got none installed here .pip install vllm"):
        run_peer(PeerOptions("vllm"), [RandomTokens(1, 4, 2)], CPU)
    monkeypatch.setattr(sys, "argv", ["engines", "vllm", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        run_study(engines)
    assert ended.value.code == 2
    assert "pip install vllm" in capsys.readouterr().err.replace("\n", " ")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="headway or vllm or nano-vllm or transformers or llama.cpp, got 'tgi'"):
        run_peer(PeerOptions("tgi"), [RandomTokens(1, 4, 2)], CPU)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "headway"])
def test_an_engine_is_measured_on_the_requests_of_the_benchmark(engine: str, tiny_model_folder: Path, tmp_path: Path) -> None:
    options = PeerOptions(engine, str(tiny_model_folder), "auto", "float32", repeat=2, warmup=0, command="c")
    found = run_peer(options, [RandomTokens(2, 4, 3), RandomTokens(1, 5, 2)], CPU)
    write_json(found, tmp_path / "p.json")
    (peer,) = PeersFile.read(tmp_path / "p.json").peers
    assert peer.name == engine
    assert list(peer.tokens_per_second) == ["2 x 4/3", "1 x 5/2"]
    for label, rate in peer.tokens_per_second.items():
        assert len(peer.passes[label]) == 2
        assert min(peer.passes[label]) <= rate <= max(peer.passes[label])
    assert found.measured_by == ""
    assert found.origin is not None


SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
LABELS = {
    "bf16": "bf16",
    "fp8": "fp8 (a scale for each row)",
    "fp8-blocks": "fp8 (blocks of 128 x 128)",
    "w4a16": "pack-quantized (4 bits, groups of 128)",
}


@pytest.mark.parametrize("form", LABELS)
def test_an_engine_runs_each_form(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((locate("llama-3-8b", weights=False) / "config.json").read_text())
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps({**config, **SMALL, "num_hidden_layers": 1}))
    weight_shapes(form, tmp_path / form, str(tmp_path / "small"))
    assert capsys.readouterr().out == f"{tmp_path / form}\n"
    read = read_quantization(tmp_path / form, json.loads((tmp_path / form / "config.json").read_text()))
    assert ("bf16" if read is None else read.label) == LABELS[form]
    llm = LLM(
        str(tmp_path / form), load_format="dummy", skip_tokenizer_init=True, device="cpu", max_model_len=64, autotune_budget=0
    )
    (answer,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 4


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
    assert "a median error of 15.0 %" in text
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
    assert len({words[words.index("--output") + 1] for words in lines}) == 11
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
