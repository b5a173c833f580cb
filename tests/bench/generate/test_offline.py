"""Offline runs: every workload is written in full, its figures are of one pass, and the file and tables say what was run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from headway.bench.generate.profile import Window, covered
from headway.bench.generate.results import OfflineReport, PeersFile, markdown, print_offline
from headway.bench.generate.run import OfflineOptions, run_offline
from headway.bench.generate.workloads import RandomTokens, RequestSet
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.system.json_files import write_json
from headway.llm import LLM
from sandbox import save_tiny_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    return LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, kv_cache_memory="16MiB", num_threads=1)


def run(llm: LLM, *workloads: RequestSet, told: list[str] | None = None, **options: object) -> OfflineReport:
    return run_offline(
        llm,
        workloads,
        OfflineOptions(**options),
        load_format="dummy",
        start_seconds=1.5,
        command="headway bench throughput",
        advance=(told if told is not None else []).append,
    )


@pytest.fixture(scope="module")
def report(llm: LLM) -> OfflineReport:
    return run(llm, RandomTokens(4, 40, 12), RandomTokens(1, 8, 1, 0.7), repeat=3)


def test_adapters_are_measured_beside_the_base(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    options = {"skip_tokenizer_init": True, "kv_cache_memory": "16MiB", "num_threads": 1, "autotune_budget": 0}
    adapted = LLM(str(folder), **options, enable_lora=True, max_loras=3, max_lora_rank=4, max_cpu_loras=3)
    told: list[str] = []
    made = run(adapted, RandomTokens(4, 10, 3), told=told, repeat=1, warmup=0, adapters=3)
    assert [(cell.label, cell.num_adapters) for cell in made.cells] == [("4 x 10/3", 0), ("4 x 10/3 + 3 adapters", 3)]
    assert told == ["4 x 10/3"] * 2
    assert adapted.engine.adapter_table.num_in_slots == 3
    shown = io.StringIO()
    print_offline(made, Console(file=shown, width=120))
    assert "4 x 10/3 + 3 adapters: " in shown.getvalue()
    assert "of the tokens/s without adapters" in shown.getvalue()


def test_adapters_need_slots(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="--lora: needs an engine with enable_lora=True, got one without"):
        run(llm, RandomTokens(1, 5, 2), adapters=1)


def test_a_cells_figures_fit_together(report: OfflineReport) -> None:
    cell, single = report.cells
    assert (cell.label, cell.batch_size, cell.input_len, cell.output_len) == ("4 x 40/12", 4, 40, 12)
    assert (cell.prompt_tokens, cell.output_tokens) == (160, 48)
    assert cell.tokens_per_second == pytest.approx(48 / cell.seconds)
    assert cell.slowest <= cell.tokens_per_second <= cell.fastest
    assert cell.num_steps == 12, "one step for all prompts, which are not cached from the pass before, and one a token"
    assert sum(cell.steps_by_backend.values()) >= 12
    assert 0 < 1e-3 * cell.time_to_first_token_ms < cell.seconds
    assert 1e-3 * (cell.time_to_first_token_ms + 11 * cell.time_per_output_token_ms) == pytest.approx(cell.seconds, rel=0.2)
    assert cell.roofline_share == pytest.approx(cell.floor_seconds / cell.seconds)
    assert 1e-3 * 12 * (cell.host_ms_per_step + cell.wait_ms_per_step) <= cell.seconds
    parts = dict(cell.host_ms_by_part)
    assert parts.pop("outputs") > 0
    assert sum(parts.values()) == pytest.approx(cell.host_ms_per_step)
    assert min(parts.values()) >= 0
    assert f"{cell.label}: host time per step in ms: schedule " in markdown(report, None)
    assert (cell.num_graph_steps, cell.gpu_idle_share, cell.num_preemptions) == (0, None, 0)
    assert (single.temperature, single.time_per_output_token_ms) == (0.7, None), "there is no second token to time"


def test_a_request_that_ends_early_is_an_error(llm: LLM) -> None:
    with pytest.raises(HeadwayError, match="request 0 needs 100 output tokens, got 56"):
        run(llm, RandomTokens(1, 200, 100), repeat=1)  # the model was made for 256 positions


def test_the_file_is_read_back(report: OfflineReport, tmp_path: Path) -> None:
    write_json(report, tmp_path / "x.json")
    assert OfflineReport.read(tmp_path / "x.json") == report
    assert json.loads((tmp_path / "x.json").read_text())["schema"] == "headway.offline/1"
    with pytest.raises(ConfigError, match="headway.offline-peers/1"):
        PeersFile.read(tmp_path / "x.json")


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_cuts_nothing_off(report: OfflineReport, width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    print_offline(report, console)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for word in ("40/12", f"{report.cells[0].tokens_per_second:,.0f}", "decode sdpa", "max_num_seqs"):
        assert word in text


def test_the_document_shows_peers_beside_it_and_the_best_in_bold(report: OfflineReport) -> None:
    peers = PeersFile(
        device="D",
        model="M",
        date="today",
        peers=[
            {"name": "slow", "version": "1", "settings": "s", "tokens_per_second": {"4 x 40/12": 1.0}},
            {"name": "fast", "version": "2", "settings": "s", "tokens_per_second": {"1 x 8/1": 1e9}},
        ],
    )
    rows = [line.split(" | ") for line in markdown(report, peers).splitlines() if line.startswith("| ")]
    assert rows[0][-2:] == ["slow 1", "fast 2 |"]
    first, second = rows[1:]
    assert first[1] == f"**{report.cells[0].tokens_per_second:,.0f}**"
    assert first[-2:] == ["1", " |"]
    assert second[-1] == "**1,000,000,000** |"
    assert "**" not in second[1]
    assert {len(row) for row in rows} == {11}
    row = next(line for line in markdown(report, None).splitlines() if line.startswith(f"| {report.cells[0].label} |"))
    assert len(row.split(" | ")) == 9


def test_the_window_opens_halfway_and_leaves_nothing_behind(llm: LLM, tmp_path: Path) -> None:
    work = RandomTokens(3, 40, 40)
    window = Window(llm.engine, llm.device, work.requests(llm.model.decoder.vocab_size), 0.0)
    running = llm.engine.scheduler.running
    assert [seq.num_prompt_tokens for seq in running] == [60] * 3
    assert all(seq.num_tokens > 60 for seq in running), "only decode steps are left"
    assert (window.num_steps, window.open, window.gpu_idle_share()) == (5, True, None)
    window.write_trace(tmp_path / "deep" / "trace.json")
    names = [event.get("name") for event in json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]]
    assert names.count("headway.step") == 5
    assert {"headway::attention", "headway.layers"} & set(names), "layers in Python, or as one call of our C"
    window.close()
    assert not llm.engine.has_unfinished
    (cell,) = run(llm, work, repeat=1).cells
    assert cell.output_tokens == 120


def test_a_trace_of_too_short_outputs_is_refused(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--profile: needs outputs of at least 16 tokens"):
        run(llm, RandomTokens(2, 8, 4), repeat=1, trace=tmp_path / "t.json")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--profile: needs a file in a folder"):
        run(llm, RandomTokens(2, 8, 16), repeat=1, trace=tmp_path / "file" / "t.json")
    assert not llm.engine.has_unfinished


def test_overlapping_spans_count_once() -> None:
    assert covered([(0, 2), (5, 6), (1, 3), (5.5, 5.75)]) == 4
    assert covered([]) == 0


@pytest.mark.gpu
def test_the_gpu_is_busy_part_of_the_time(tmp_path: Path) -> None:
    llm = LLM("qwen3-0.6b", load_format="dummy", dtype="bfloat16", max_model_len=512, max_num_seqs=4, kv_cache_memory="1GiB")
    (cell,) = run(llm, RandomTokens(4, 64, 64), repeat=1, trace=tmp_path / "t.json").cells
    assert 0 < cell.gpu_idle_share < 1
    assert cell.num_graph_steps > 0
    assert 0 < cell.roofline_share < 1
    assert "kernel" in (tmp_path / "t.json").read_text()


def test_what_ran_outside_of_a_graph_is_told_below_the_table(report: OfflineReport) -> None:
    cell = report.cells[0].model_copy(
        update={"steps_in_pieces": {"a prompt in the step": 3}, "steps_without_graph": {"more than 2048 tokens": 9}}
    )
    text = markdown(report.model_copy(update={"cells": [cell]}), None)
    assert "4 x 40/12: 3 steps in pieces of graphs: a prompt in the step (3)." in text
    assert "4 x 40/12: 9 steps launched kernel by kernel: more than 2048 tokens (9)." in text
    assert "pieces" not in markdown(report, None)
