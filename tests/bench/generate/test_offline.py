"""Offline runs, throughput and rooflines: every workload is written in full, and the files and tables say what was run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from headway.bench.generate.profile import Window, covered
from headway.bench.generate.results import OfflineReport, PeersFile, markdown, print_offline
from headway.bench.generate.roofline import Rates, Roofline, keys_seen
from headway.bench.generate.run import OfflineOptions, run_offline
from headway.bench.generate.throughput import TextWorkload, ThroughputReport, num_passes, run_throughput, same_tokens
from headway.bench.generate.workloads import PROMPTS, Nano, RandomTokens, Requests, RequestSet, random_workloads, take_prompts
from headway.cli.measure.bench_throughput import print_report
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.stats import EngineStats
from headway.core.system.json_files import write_json
from headway.llm import LLM
from headway.models.checkpoints.locate import SHAPES
from headway.models.checkpoints.weights import DummyWeights
from headway.models.families.families import read_decoder_config
from headway.models.layers.decoder import Decoder
from headway.models.loader import read_config
from sandbox import save_tiny_model
from tiny_bench import CPU


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
    assert "4 x 40/12: 3 steps with piecewise CUDA graphs: a prompt in the step (3)." in text
    assert "4 x 40/12: 9 steps without a CUDA graph: more than 2048 tokens (9)." in text
    assert "pieces" not in markdown(report, None)


def test_nanos_work_is_that_of_its_own_script() -> None:
    work = Nano().requests(151936)
    assert (len(work.prompts), work.num_prompt_tokens, work.num_output_tokens) == (256, 142_827, 133_966)
    assert work.prompts[0][:3] == [6311, 6890, 663]  # the first draws after random.seed(0) and the first length
    assert all(100 <= size <= 1024 for size in (*map(len, work.prompts), *work.output_lens))
    assert Nano().max_len == max(len(p) + n for p, n in zip(work.prompts, work.output_lens, strict=True)) == 2011
    assert Nano().temperature == 0.6


def test_random_tokens_have_the_lengths_and_stay_in_the_vocabulary() -> None:
    work = RandomTokens(3, 200, 7)
    requests = work.requests(50)
    assert [len(prompt) for prompt in requests.prompts] == [200] * 3
    assert requests.output_lens == [7] * 3
    assert {token for prompt in requests.prompts for token in prompt} == set(range(50))
    assert len({tuple(prompt) for prompt in requests.prompts}) == 3, "equal prompts would share their cache"
    assert requests == work.requests(50)
    assert (work.label, work.max_len) == ("3 x 200/7", 207)


def test_halfway_a_sequence_has_half_of_its_output_behind_it() -> None:
    assert Requests([[1, 2, 3], [4]], [8, 5]).halfway() == [[1, 2, 3, 1, 2, 3, 1], [4, 4, 4]]


@pytest.mark.parametrize(
    ("inputs", "outputs", "labels"),
    [
        ("8", None, ["1 x 8/8", "4 x 8/8"]),
        ("8,16", None, ["1 x 8/8", "4 x 8/8", "1 x 16/16", "4 x 16/16"]),
        ("8, 16", "2,3", ["1 x 8/2", "4 x 8/2", "1 x 16/3", "4 x 16/3"]),
        ("8,16", "5", ["1 x 8/5", "4 x 8/5", "1 x 16/5", "4 x 16/5"]),
        ("8", "5,6", ["1 x 8/5", "4 x 8/5", "1 x 8/6", "4 x 8/6"]),
    ],
)
def test_lists_make_a_grid(inputs: str, outputs: str | None, labels: list[str]) -> None:
    assert [each.label for each in random_workloads("1,4", inputs, outputs, 0.0)] == labels


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (("0", "8", None), "--batch-size: needs whole numbers from 1 to 1,048,576"),
        (("1,", "8", None), "--batch-size"),
        (("1", "8k", None), "--input-len"),
        (("1", "8", "-3"), "--output-len"),
        (("1", "8,9,10", "1,2"), "--output-len: needs one length, or one for each of the 3"),
    ],
)
def test_other_lists_are_refused(lists: tuple[str, str, str | None], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        random_workloads(*lists, 0.0)


RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


@pytest.fixture(scope="module")
def throughput_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(save_tiny_model(tmp_path_factory.mktemp("model"))), kv_cache_memory="16MiB", num_threads=1)


def test_both_engines_write_the_same_tokens_and_every_pass_is_told(throughput_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tiny model's byte tokens make the long prompts longer than its 256 positions.
    monkeypatch.setattr(
        "headway.bench.generate.throughput.take_prompts", lambda count: ["a cache of", "the quick", "lazy dog", "k"][:count]
    )
    workload = TextWorkload(num_prompts=4, output_len=12, repeat=2)
    told: list[str] = []
    report = run_throughput(throughput_llm, workload, compare=True, command="headway bench throughput", advance=told.append)
    assert told == ["headway"] * 3 + ["transformers"] * 3
    assert len(told) == num_passes(workload, compare=True)
    ours, theirs = report.results
    assert (ours.same_tokens, theirs.same_tokens) == (None, 1.0)
    for result in (ours, theirs):
        assert 0 < result.slowest <= result.tokens_per_second <= result.fastest
        assert result.time_to_first_token_ms > 0
        assert result.time_per_output_token_ms > 0
    assert report.speedup == ours.tokens_per_second / theirs.tokens_per_second
    assert ThroughputReport.model_validate_json(report.model_dump_json(by_alias=True)) == report
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


META = torch.device("meta")


class MetaWeights(DummyWeights):
    """Shapes without memory; counts the numbers that are taken."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16, META)
        self.count = 0

    def draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        sinks = name.endswith("sinks")  # which the host reads
        tensor = torch.zeros(shape) if sinks else torch.empty(shape, dtype=self.dtype, device=META)
        self.count += tensor.numel()
        return tensor


@pytest.fixture(params=["qwen3-0.6b", "llama-3-8b"])
def model(request: pytest.FixtureRequest) -> tuple[Decoder, int]:
    weights = MetaWeights()
    return Decoder(read_decoder_config(read_config(SHAPES / request.param)), weights), weights.count


def test_weights_read_a_step_are_those_of_the_model_less_norms_and_a_separate_embedding(model: tuple[Decoder, int]) -> None:
    decoder, count = model
    config = decoder.config
    norms = (2 * config.num_layers + 1) * config.hidden_size + 2 * config.num_layers * config.head_dim * (
        config.qk_norm is not None
    )
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert Roofline(config, decoder.attention_specs).weight_bytes == 2 * (count - norms - embedding)


@pytest.mark.slow
def test_the_shapes_that_ship_are_of_the_published_sizes() -> None:
    sizes = {}
    for folder in SHAPES.iterdir():
        weights = MetaWeights()
        decoder = Decoder(read_decoder_config(read_config(folder)), weights)
        sizes[folder.name] = (weights.count, Roofline(decoder.config, decoder.attention_specs).kv_bytes)
    assert sizes == {
        "qwen3-0.6b": (596_049_920, 114_688),
        "qwen3-30b-a3b": (30_532_122_624, 98_304),
        "gemma-4-e2b": (4_628_575_523, 43_008),  # without what reads images and sound; 20 layers read another layer's cache
        "llama-3-8b": (8_030_261_248, 131_072),
        "llama-3-70b": (70_553_706_496, 327_680),
        "gpt-oss-20b": (20_914_757_184, 49_152),
        "qwen3-next-80b-a3b": (79_674_391_296, 24_576),  # less what proposes drafts
    }


def test_of_experts_a_step_reads_those_that_its_tokens_touch() -> None:
    config = read_decoder_config(read_config(SHAPES / "qwen3-30b-a3b"))
    roofline = Roofline(config, [AttentionSpec(32, 4, 128, 1.0, torch.bfloat16, CPU)] * 48)
    expert = 48 * 3 * 768 * 2048
    assert roofline.expert_bytes(0) == 0
    assert roofline.expert_bytes(1) == pytest.approx(2 * 8 * expert)
    assert roofline.expert_bytes(1000) == pytest.approx(2 * 128 * expert)
    dense = 48 * 2048 * (2 * 4096 + 2 * 512 + 128) + 151936 * 2048
    assert roofline.weight_bytes == 2 * dense
    floor = roofline.floor(EngineStats(num_steps=10, num_decode_tokens=160), [], 1, Rates(1.0, 1.0))
    assert floor.decode == pytest.approx(10 * (2 * dense + roofline.expert_bytes(16)) / 1e9)
    more = roofline.prefill_flops([7]) - 4 * 32 * 128 * 48 * 28
    assert more == 2 * (7 * (dense - 151936 * 2048 + 8 * expert) + 151936 * 2048)


def test_each_of_several_ranks_reads_and_computes_its_part() -> None:
    config = read_decoder_config(read_config(SHAPES / "qwen3-30b-a3b"))
    whole, part = (Roofline(config, [AttentionSpec(32 // n, 4 // n, 128, 1.0, torch.bfloat16, CPU)] * 48, n) for n in (1, 2))
    stats, rates = EngineStats(num_steps=10, num_decode_tokens=160, kv_tokens_read=1000), Rates(4000.0, 700.0)
    one, two = (each.floor(stats, [8192], 16384, rates) for each in (whole, part))
    assert (2 * two.decode, 2 * two.prefill) == (pytest.approx(one.decode), pytest.approx(one.prefill))


def test_the_floor_is_bytes_over_the_read_rate_and_operations_over_the_matrix_rate(model: tuple[Decoder, int]) -> None:
    decoder, _ = model
    roofline = Roofline(decoder.config, decoder.attention_specs)
    stats = EngineStats(num_steps=10, kv_tokens_read=1000)
    rates = Rates(read_gbps=4000.0, matrix_tflops=700.0)
    floor = roofline.floor(stats, [8192], 16384, rates)
    assert floor.decode == pytest.approx((10 * roofline.weight_bytes + 1000 * roofline.kv_bytes) / 4e12)
    saved = roofline.weight_bytes / 4e12  # the prompt's one step reads the weights while it computes
    assert floor.prefill == pytest.approx(roofline.prefill_flops([8192]) / 7e14 - saved)
    assert roofline.floor(stats, [1], 16384, rates).prefill == 0, "one token computes less than it reads"


def test_a_prompts_operations_are_two_a_weight_and_token_and_four_a_key(model: tuple[Decoder, int]) -> None:
    decoder, _ = model
    config, roofline = decoder.config, Roofline(decoder.config, decoder.attention_specs)
    head = config.vocab_size * config.hidden_size
    products = 2 * ((roofline.weight_bytes // 2 - head) * 3 + head)
    assert roofline.prefill_flops([3]) == products + 4 * config.num_layers * config.num_heads * config.head_dim * (1 + 2 + 3)


@pytest.mark.parametrize(("length", "window"), [(7, None), (7, 7), (7, 9), (7, 3), (1, 1), (5, 1)])
def test_keys_are_those_that_causality_and_window_show(length: int, window: int | None) -> None:
    assert keys_seen(length, window) == sum(min(at + 1, window or length) for at in range(length))
