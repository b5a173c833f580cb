"""`headway bench throughput`: what its options run, and which of them do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from headway.bench.generate.results import OfflineReport
from headway.bench.generate.throughput import ThroughputReport
from headway.cli.measure.bench_throughput import throughput
from headway.core.contract.errors import ConfigError, ModelError
from sandbox import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def call(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(throughput)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_grid_of_random_work_is_one_command(folder: Path, tmp_path: Path) -> None:
    path, trace = tmp_path / "x.json", tmp_path / "t.json"
    small = ("--model", folder, "--load-format", "dummy", "--repeat", 1, "--warmup", 0, "--output", path)
    engine = ("--kv-layout", "hnd", "--block-size", 32, "--attn-backend", "sdpa.math", "--max-num-seqs", 3, "--enforce-eager")
    answer = call(*small, *engine, "--batch-size", "1,3", "--input-len", 9, "--max-num-batched-tokens", 20)
    assert answer.exit_code == 0, answer.output
    report = OfflineReport.read(path)
    assert [(cell.label, cell.temperature) for cell in report.cells] == [("1 x 9/9", 0), ("3 x 9/9", 0)]
    wanted = {
        "decode": "sdpa.math",
        "kv_layout": "hnd",
        "block_size": "32",
        "max_model_len": "18",
        "max_num_seqs": "3",
        "max_num_batched_tokens": "20",
        "enforce_eager": "true",
        "tokenizer": "no",
    }
    assert wanted.items() <= report.settings.items()
    assert (report.load_format, report.repeat, report.warmup) == ("dummy", 1, 0)
    assert report.start_seconds > 0
    for label in ("1 x 9/9", "3 x 9/9"):
        assert label in answer.output
    answer = call(*small, "--batch-size", 2, "--input-len", 5, "--output-len", 16, "--temperature", 0.5, "--profile", trace)
    assert answer.exit_code == 0, answer.output
    assert OfflineReport.read(path).cells[0].temperature == 0.5
    assert "traceEvents" in trace.read_text()


def test_adapters_are_measured_by_one_option(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    small = ("--model", folder, "--load-format", "dummy", "--repeat", 1, "--warmup", 0, "--no-autotune")
    answer = call(*small, "--batch-size", 3, "--input-len", 5, "--output-len", 2, "--lora", 2, "--lora-rank", 4, "--output", path)
    assert answer.exit_code == 0, answer.output
    cells = OfflineReport.read(path).cells
    assert [(cell.label, cell.num_adapters) for cell in cells] == [("3 x 5/2", 0), ("3 x 5/2 + 2 adapters", 2)]
    assert "of the tokens/s without adapters" in answer.output
    refused = call(*small, "--lora", 2)
    assert isinstance(refused.exception, ConfigError)
    assert "--lora: needs random prompts, got texts" in str(refused.exception)


def test_texts_are_the_default(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.bench.generate.throughput.take_prompts", lambda count: ["lazy dog", "k"][:count])
    path = tmp_path / "x.json"
    answer = call("--model", folder, "--num-prompts", 2, "--output-len", 4, "--repeat", 1, "--block-size", 16, "--output", path)
    assert answer.exit_code == 0, answer.output
    report = ThroughputReport.model_validate_json(path.read_text())
    assert (report.num_prompts, report.output_len, report.results[0].settings["block_size"]) == (2, 4, "16")


GRID = ("--batch-size", "1,2", "--input-len", "4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workload", "sharegpt"), "--workload: needs nano, got 'sharegpt'"),
        (("--workload", "nano", "--input-len", "4"), "--workload: needs no --batch-size"),
        (("--batch-size", "4"), "--batch-size and --input-len: needs both"),
        (("--batch-size", "x", "--input-len", "4"), "--batch-size: needs whole numbers"),
        (("--output-len", "1"), "--output-len: needs one number of at least 2 for texts"),
        (("--compare", "vllm"), "--compare: needs transformers, got 'vllm'"),
        (("--compare", "transformers", "--load-format", "dummy"), "--compare: .*got random weights"),
        (("--profile", "t.json", *GRID), "--profile: needs one random workload, .*got 2 of them"),
        (("--temperature", "1"), "--temperature: needs random prompts"),
        (("--input-len", "300", "--batch-size", "1"), "max_model_len: needs at most 256"),
    ],
)
def test_options_that_do_not_go_together_say_why(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    error = call("--model", folder, *arguments).exception
    assert isinstance(error, ConfigError)
    with pytest.raises(ConfigError, match=words):
        raise error


def test_shapes_without_the_format_are_refused() -> None:
    error = call("--model", "qwen3-0.6b", *GRID).exception
    assert isinstance(error, ModelError)
    assert "load_format dummy" in str(error)


def test_texts_need_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    error = call("--model", tmp_path, "--load-format", "dummy", "--num-prompts", 1).exception
    assert isinstance(error, ConfigError)
    assert "loaded without a tokenizer" in str(error)
