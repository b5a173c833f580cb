"""The end-to-end benchmark times the same work on both sides, and says so in its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.bench.generate.throughput import TextWorkload, ThroughputReport, num_passes, run_throughput, same_tokens
from headway.bench.generate.workloads import PROMPTS, take_prompts
from headway.cli.measure.bench_throughput import print_report
from headway.llm import LLM
from sandbox import save_tiny_model

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(save_tiny_model(tmp_path_factory.mktemp("model"))), kv_cache_memory="16MiB", num_threads=1)


def test_both_engines_write_the_same_tokens_and_every_pass_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tiny model's byte tokens make the long prompts longer than its 256 positions.
    monkeypatch.setattr(
        "headway.bench.generate.throughput.take_prompts", lambda count: ["a cache of", "the quick", "lazy dog", "k"][:count]
    )
    workload = TextWorkload(num_prompts=4, output_len=12, repeat=2)
    told: list[str] = []
    report = run_throughput(llm, workload, compare=True, command="headway bench throughput", advance=told.append)
    assert told == ["headway"] * 3 + ["transformers"] * 3
    assert len(told) == num_passes(workload, compare=True)
    ours, theirs = report.results
    assert (ours.same_tokens, theirs.same_tokens) == (None, 1.0)
    for result in (ours, theirs):
        assert 0 < result.slowest <= result.tokens_per_second <= result.fastest
        assert result.time_to_first_token_ms > 0
        assert result.time_per_output_token_ms > 0
    assert report.speedup == ours.tokens_per_second / theirs.tokens_per_second
    again = ThroughputReport.model_validate_json(report.model_dump_json(by_alias=True))
    assert again == report
    assert '"schema":"headway.throughput/1"' in report.model_dump_json(by_alias=True)


def test_the_table_cuts_nothing_off_at_80_columns_and_tells_of_a_machine_that_was_not_steady(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ThroughputReport.model_validate_json((RESULTS / "cpu" / "throughput-smollm2.json").read_bytes())
    monkeypatch.setenv("COLUMNS", "80")
    print_report(report)
    text = capsys.readouterr().out
    assert "…" not in text
    assert "458.2-467.4" in text
    assert "not steady" not in text
    shaken = report.results[0].model_copy(update={"slowest": 100.0})
    busy = report.model_copy(
        update={"results": [shaken, *report.results[1:]], "busy": "other processes kept 1.9 of 2 cores busy"}
    )
    print_report(busy)
    text = capsys.readouterr().out
    assert "passes disagree, 100.0 to 467.4" in " ".join(text.split())
    assert "1.9 of 2 cores busy" in text


def test_tokens_are_compared_up_to_the_end_of_a_text() -> None:
    eos = frozenset({9})
    assert same_tokens([[1, 2, 9, 5]], [[1, 2, 7, 7]], eos) == 1.0
    assert same_tokens([[1, 2, 3, 4]], [[1, 2, 8, 4]], eos) == 0.5, "after the first difference the texts are different texts"
    assert same_tokens([[1, 2], [3, 4]], [[1, 2], [5, 4]], eos) == 0.5


def test_prompts_are_all_different_however_many_are_wanted() -> None:
    assert take_prompts(5) == PROMPTS[:5]
    assert len(set(take_prompts(40))) == 40
