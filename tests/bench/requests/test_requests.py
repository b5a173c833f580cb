"""`python -m headway.bench.studies.requests` with a tiny model on the CPU: every study, its table and its file."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from headway.bench.studies.command import study_app
from headway.bench.studies.requests.__main__ import print_report, requests
from headway.bench.studies.requests.engines import ask, cell, same
from headway.bench.studies.requests.results import RequestsReport
from headway.bench.studies.requests.sampling import WISHES
from headway.bench.studies.requests.speculation import Following, write_successor_model
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.sampling.params import SamplingParams
from headway.llm import LLM
from sandbox import save_tiny_model

QUICK = ["--device", "cpu", "--batch-size", "1,2", "--input-len", "8", "--output-len", "8", "--second-turn-len", "60"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(save_tiny_model(tmp_path / "model"))


def run(model: str, *arguments: str) -> RequestsReport:
    output = Path(model) / "result.json"
    own = [*QUICK, "--repeat", "1", "--attn-backend", "sdpa", "--model", model, "--output", str(output)]
    done = CliRunner().invoke(study_app(requests), [*arguments, *own])
    assert done.exception is None, done.exception
    report = RequestsReport.read(output)
    console = Console(width=80, record=True)
    print_report(report, console)
    shown = console.export_text()
    assert all(study in shown for study in arguments)
    assert max(map(len, shown.splitlines())) <= 80
    return report


def test_a_successor_model_follows_its_cycle(model: str, tmp_path: Path) -> None:
    successor = write_successor_model(model, tmp_path, torch.device("cpu"), torch.float32)
    assert sorted(successor) == list(range(300))
    llm = LLM(str(tmp_path), attn_backend="sdpa", device="cpu", skip_tokenizer_init=True, kv_cache_memory=2**21)
    prompts = [[5, 7], [250], [11] * 40]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        expected, token = [], prompt[-1]
        for _ in range(12):
            token = successor[token]
            expected.append(token)
        assert list(output.outputs[0].token_ids) == expected


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_guesses_are_right_as_often_as_is_asked(acceptance: float) -> None:
    successor = [(token * 7 + 3) % 101 for token in range(101)]
    guesses = Following(successor, acceptance, Random(1)).begin(1).propose([4], 4000)
    right = sum(guess == successor[before] for before, guess in zip([4, *guesses[:-1]], guesses, strict=True))
    assert right / len(guesses) == pytest.approx(acceptance, abs=0.03)


def test_gains_are_of_times_or_of_rates() -> None:
    assert cell("sampling", "x", "y", "tok/s", [50.0, 10.0, 60.0], 100.0).gain == 0.5
    assert cell("overload", "x", "y", "s", [2.0], 3.0).gain == 1.5
    assert same([[1, 2], [3]], [[1, 2], [4]]) == 0.5


def test_an_unknown_study_is_refused(model: str) -> None:
    error = CliRunner().invoke(study_app(requests), ["speed", "--model", model]).exception
    assert isinstance(error, ConfigError)
    assert "second-turn" in str(error)


def test_a_request_that_writes_less_is_no_figure(model: str) -> None:
    llm = LLM(model, attn_backend="sdpa", device="cpu", skip_tokenizer_init=True, max_model_len=32, kv_cache_memory=2**21)
    with pytest.raises(HeadwayError, match="needs 16 output tokens, got 4"):
        ask(llm, [[1] * 28], 16)


@pytest.mark.slow
def test_sampling_parameters(model: str) -> None:
    cells = run(model, "sampling").cells
    assert [row.way for row in cells] == list(WISHES) * 2
    assert all(row.gain > 0 and len(row.all) == 1 for row in cells)


@pytest.mark.slow
def test_guesses_memory_and_preemption(model: str) -> None:
    report = run(model, "speculation", "second-turn", "overload")
    cells = {(row.study, row.load, row.way): row for row in report.cells}
    for load in ("1 sequence", "2 sequences"):
        assert cells["speculation", load, "70% are right"].equal == 1
    back = cells["second-turn", "60 tokens", "from the host's memory"].counts
    assert back["tokens brought back"] > 0
    assert cells["overload", "2 sequences", "swap"].equal == 1
