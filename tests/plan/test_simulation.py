"""Times of steps, a simulated replica over them with arrivals and routing, and the search for a deployment."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.select.costs import Shape
from headway.plan.attention_times import AttentionTimes, MeasuredLayer
from headway.plan.demand import Demand, LatencyLimits
from headway.plan.devices import GPU_KINDS, H200, MESSAGE_BYTES
from headway.plan.model_costs import (
    WEIGHT_FORMATS,
    EngineLimits,
    EngineMemory,
    RankCosts,
    engine_memory,
    rank_costs,
    read_planned_model,
)
from headway.plan.results import PlanReport, report_of
from headway.plan.search import FleetSearch
from headway.plan.simulation import Replica, SimulatedRequest
from headway.plan.step_time import StepPredictor, StepWork
from headway.tuning.table.files import read_table


@pytest.fixture(scope="module")
def costs() -> RankCosts:
    return rank_costs(*read_planned_model("llama-3-8b"))


def memory_of(costs: RankCosts, batch: int = 64, length: int = 640, **limits: bool) -> EngineMemory:
    return engine_memory(GPU_KINDS["h200"], costs, EngineLimits(batch, length, **limits))


def test_a_lone_request_takes_its_prompt_and_each_of_its_steps(costs: RankCosts) -> None:
    times = StepPredictor(GPU_KINDS["h200"], costs)
    found = Replica(times, memory_of(costs), request_seconds=0.001).run([SimulatedRequest(5.0, 500, 40)])
    prompt = times.step(StepWork(query_lens=[500], kv_lens=[500], num_sampled=1))
    steps = [times.step(StepWork(num_decodes=1, decode_kv=length, num_sampled=1)) for length in range(501, 540)]
    assert found.output_tokens == 40
    assert found.num_steps == 40
    first = 0.001 + 1e-6 * (prompt.host + prompt.device)
    assert found.first_token == [pytest.approx(first)]
    assert found.seconds == pytest.approx(first + 1e-6 * sum(step.device for step in steps))


def test_random_requests_all_end_with_their_tokens(costs: RankCosts) -> None:
    draw = random.Random()
    requests = [SimulatedRequest(draw.random(), draw.randint(1, 400), draw.randint(1, 90)) for _ in range(80)]
    requests.sort(key=lambda request: request.arrival)
    whole = memory_of(costs, batch=16, length=490)
    scarce = replace(whole, num_pages=2 * -(-490 // 16))
    times = StepPredictor(GPU_KINDS["h200"], costs)
    for memory in (whole, scarce):
        found = Replica(times, memory).run(requests)
        assert found.output_tokens == sum(request.output_len for request in requests)
        assert len(found.first_token) == 80
        assert min(found.first_token) > 0
    assert found.num_preemptions > 0
    assert found.seconds > Replica(times, whole).run(requests).seconds


def test_full_load_keeps_its_concurrency_and_is_steady(costs: RankCosts) -> None:
    """Twice as long a window gives the same throughput, and Little's law holds between it and the latencies."""
    times, demand = StepPredictor(GPU_KINDS["h200"], costs), Demand(512, 128)
    requests, measured = demand.full_load(32)
    found = Replica(times, memory_of(costs, 32)).run(requests, 32, measured)
    running = found.tokens_per_second * (statistics.mean(found.per_token) + statistics.mean(found.first_token) / 128)
    assert running == pytest.approx(32, rel=0.06)
    more = Replica(times, memory_of(costs, 32)).run([*requests, *requests[32:]], 32, range(32, 32 + 2 * len(measured)))
    assert more.tokens_per_second == pytest.approx(found.tokens_per_second, rel=0.04)


def test_a_replica_of_a_fleet_sees_its_share_of_the_arrivals() -> None:
    demand = Demand(100, 10, 500.0)
    for routing in ("round-robin", "prefix-aware"):
        gaps = numpy.diff([each.arrival for each in replace(demand, routing=routing).arrivals(50, 4000)])
        assert gaps.mean() == pytest.approx(0.1, rel=0.08)
        even = 50**-0.5 if routing == "round-robin" else 1.0
        assert gaps.std() / gaps.mean() == pytest.approx(even, rel=0.12)


def test_prefix_aware_routing_finds_more_in_the_cache(costs: RankCosts) -> None:
    """40 beginnings of 400 tokens and room for some 12 of them on each of 8 replicas."""
    demand = Demand(450, 8, 200.0, prefix_len=400, num_prefixes=40)
    memory = replace(memory_of(costs, 8, 458, enable_prefix_caching=True), num_pages=8 * 29 + 100)
    shares = {}
    for routing in ("round-robin", "prefix-aware"):
        requests = replace(demand, routing=routing).arrivals(8, 300)
        shares[routing] = Replica(StepPredictor(GPU_KINDS["h200"], costs), memory).run(requests).cached_share
    assert shares["prefix-aware"] > 0.8
    assert shares["round-robin"] < 0.7


def test_given_arrivals_are_read_and_dealt_out(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    path.write_text("".join(f'{{"arrival": {at / 4}, "input_len": {10 + at}, "output_len": 5}}\n' for at in range(9)))
    demand = Demand.of_file(path, LatencyLimits())
    assert (demand.rate, demand.input_len, demand.mean_output_len) == (4.0, 18, 5)
    assert [each.input_len for each in demand.arrivals(3, 99)] == [10, 13, 16]
    path.write_text('{"arrival": 0, "input_len": 10}\n')
    with pytest.raises(ConfigError, match="line 1"):
        Demand.of_file(path, LatencyLimits())


def test_too_little_memory_is_refused_in_words(costs: RankCosts) -> None:
    with pytest.raises(ConfigError, match=r"14\.\d+ GiB of weights"):
        engine_memory(replace(GPU_KINDS["l40s"], memory_bytes=15 * 2**30), costs, EngineLimits(1, 1024))
    small = replace(GPU_KINDS["l40s"], memory_bytes=int(21.5 * 2**30))
    with pytest.raises(ConfigError, match="one sequence of max_model_len=8192"):
        engine_memory(small, costs, EngineLimits(16, 8192))


ROOT = Path(__file__).resolve().parents[2]
GPU = GPU_KINDS["h200"]


@pytest.fixture(scope="module")
def measured() -> MeasuredLayer:
    return MeasuredLayer.of(read_table(ROOT / "bench/results/h200/crossover-32-8-128.json"))


def predictor(model: str, size: int = 1, *tables: MeasuredLayer) -> StepPredictor:
    return StepPredictor(GPU, rank_costs(*read_planned_model(model), size), H200, AttentionTimes(GPU, H200, tables))


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3-next-80b-a3b"])
def test_more_work_takes_longer_and_more_ranks_less(model: str) -> None:
    one, four = predictor(model), predictor(model, 4)
    steps = [StepWork(num_decodes=count, decode_kv=1000, num_sampled=count) for count in (1, 8, 64, 256)]
    times = [one.step(work).device for work in steps]
    assert times == sorted(times)
    assert one.step(replace(steps[2], decode_kv=8000)).device > times[2]
    for work, time in zip(steps, times, strict=True):
        parts = four.step(work)
        assert parts.sums > 0
        assert time / 4 < parts.device < time
    assert one.step(steps[0]).sums == 0


def test_a_decode_reads_at_least_its_weights_and_cache_once() -> None:
    """The roofline, counted apart: no prediction is faster than the memory."""
    config, _ = read_planned_model("llama-3-8b")
    weights = 2 * (config.num_layers * (4096 * (6144 + 4096) + 3 * 4096 * 14336) + 4096 * 128256)
    cache = 64 * 1500 * 2 * 8 * 128 * 2 * 32
    floor_us = (weights + cache) / GPU.read_rate * 1e6
    found = predictor("llama-3-8b").step(StepWork(num_decodes=64, decode_kv=1500, num_sampled=64)).device
    assert floor_us < found < 1.6 * floor_us


def test_a_prompt_computes_at_most_at_the_matrix_rate() -> None:
    params = 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336)
    floor_us = 2 * params * 8192 / GPU.matrix_rate * 1e6
    work = StepWork(query_lens=[8192], kv_lens=[8192], num_sampled=1)
    assert floor_us < predictor("llama-3-8b").step(work).device < 2 * floor_us


def test_a_table_tells_of_its_points_and_of_like_layers(measured: MeasuredLayer) -> None:
    times = AttentionTimes(GPU, H200, [measured])
    spec, shape = measured.spec, Shape(Phase.DECODE, 64, 1, 4096)
    assert times.source(spec) == "table"
    assert times.us(spec, shape) == pytest.approx(measured.fastest_us(shape) - H200.alone_us)
    beyond = replace(shape, batch=1024)
    assert times.us(spec, beyond) == pytest.approx(4 * times.us(spec, replace(shape, batch=256)), rel=0.05)
    half = replace(spec, num_heads=16, num_kv_heads=4)
    assert times.source(half) == "like"
    assert times.us(half, beyond) == pytest.approx(times.us(spec, beyond) / 2, rel=0.05)
    eight_bits = replace(spec, kv_dtype=torch.float8_e4m3fn)
    assert 0.5 < times.us(eight_bits, beyond) / times.us(spec, beyond) < 0.6
    other = replace(spec, head_dim=256, v_head_dim=256)
    assert times.source(other) == "data sheet"
    assert math.isfinite(times.us(other, shape))


@pytest.mark.parametrize("name", GPU_KINDS)
def test_sums_take_the_measured_times_and_lie_between_them(name: str) -> None:
    table = GPU_KINDS[name].all_reduce
    for ranks, times in table.by_ranks.items():
        assert [table.us(ranks, size) for size in MESSAGE_BYTES] == pytest.approx(times)
        assert table.us(ranks, 2 * MESSAGE_BYTES[-1]) == pytest.approx(2 * times[-1])
        assert table.us(ranks, 1) == times[0]
    size = 3 * 2**20
    low, between, high = (table.us(ranks, size) for ranks in (2, 3, 4))
    assert min(low, high) <= between <= max(low, high)
    assert table.us(1, size) == 0


def test_the_page_shows_what_is_predicted_for_more_ranks(measured: MeasuredLayer) -> None:
    page = (ROOT / "docs" / "benchmarks" / "planning.md").read_text()
    for count, length in ((1, 768), (64, 1280), (256, 1280)):
        work = StepWork(num_decodes=count, decode_kv=length, num_sampled=count)
        parts = [predictor("llama-3-8b", size, measured).step(work) for size in (1, 2, 4, 8)]
        cells = [f"{each.device / 1e3:.2f}" + (f" ({each.sums / 1e3:.2f})" if each.sums else "") for each in parts]
        assert f"| {count}, {length:,} | {' | '.join(cells)} |" in page


PLAIN = [WEIGHT_FORMATS["model"]]


def search(demand: Demand, num_gpus: int = 2, model: str = "qwen3-0.6b", gpu: str = "h200") -> FleetSearch:
    return FleetSearch(*read_planned_model(model), GPU_KINDS[gpu], num_gpus, demand)


@cache
def full_load() -> tuple[FleetSearch, PlanReport]:
    found = search(Demand(200, 24, limits=LatencyLimits(per_token_ms=6.0)))
    best = found.run(list(found.layouts([1, 2, 4], ["auto", "fp8_e4m3"], PLAIN)))
    return found, report_of(found, best, "qwen3-0.6b", "headway plan qwen3-0.6b")


def test_the_best_plan_gives_the_most_tokens_of_a_gpu_within_the_limits() -> None:
    found, report = full_load()
    rates = [row.tokens_per_second_per_gpu for row in report.plans]
    assert rates == sorted(rates, reverse=True)
    assert all(row.per_token_ms <= 6.0 for row in report.plans)
    able = [plan.tokens_per_second_per_gpu for plan in found.plans if plan.per_token_ms <= 6.0]
    assert rates[0] == max(able)
    assert report.plans[0].reason == ""
    assert all("of the best plan's tokens" in row.reason for row in report.plans[1:])
    assert {row.layout: row.reason for row in report.refused} == {"tensor-parallel size 4": "4 GPUs for one replica, of 2"}


def test_larger_batches_give_more_and_slower_tokens() -> None:
    found, _ = full_load()
    for layout in {plan.layout for plan in found.full_load}:
        curve = [plan for plan in found.full_load if plan.layout == layout]
        assert [plan.batch for plan in curve] == sorted(plan.batch for plan in curve)
        for before, after in pairwise(curve):
            assert after.tokens_per_second > 0.95 * before.tokens_per_second
            assert after.per_token_ms > 0.97 * before.per_token_ms
        assert curve[-1].memory_bytes < 0.9 * GPU_KINDS["h200"].memory_bytes


def test_the_command_starts_what_was_planned() -> None:
    _, report = full_load()
    row = next(row for row in report.plans if (row.tensor_parallel_size, row.kv_cache_dtype) == (2, "fp8_e4m3"))
    start = "headway serve qwen3-0.6b --tensor-parallel-size 2 --kv-cache-dtype fp8_e4m3"
    assert row.command == f"{start} --max-num-seqs {row.batch} --max-model-len 224"


def test_a_higher_rate_takes_more_gpus_and_no_replica_misses_its_limits() -> None:
    taken = []
    for rate in (40.0, 2000.0, 6000.0):
        found = search(Demand(200, 24, rate, LatencyLimits(first_token_ms=100.0, per_token_ms=6.0)), 4000)
        (best,) = found.run(list(found.layouts([1], ["auto"], PLAIN)))
        taken.append(best.num_gpus)
        assert best.first_token_ms <= 100.0
        assert best.per_token_ms <= 6.0
    assert taken[0] == 1
    assert 1 < taken[1] < 20
    assert taken[2] == pytest.approx(3 * taken[1], rel=0.4)


def test_limits_that_nothing_meets_say_which_and_by_how_much() -> None:
    found = search(Demand(200, 24, limits=LatencyLimits(per_token_ms=0.1)))
    best = found.run(list(found.layouts([1, 2], ["auto"], PLAIN)))
    with pytest.raises(
        ConfigError, match=r"got time per token 0\.\d+ ms, limit 0\.1 ms for 95 % of requests by the closest of 2 plans"
    ):
        report_of(found, best, "qwen3-0.6b", "")


def test_a_rate_that_is_too_high_says_what_can_be_served() -> None:
    found = search(Demand(200, 24, 1e6), 1)
    best = found.run(list(found.layouts([1], ["auto"], PLAIN)))
    with pytest.raises(ConfigError, match=r"throughput [\d,]+ tokens/s, 24,000,000 arrive"):
        report_of(found, best, "qwen3-0.6b", "")


def test_a_model_that_fits_no_gpu_says_what_it_needs() -> None:
    found = search(Demand(200, 24), 2, "qwen3-next-80b-a3b", "a100")
    best = found.run(list(found.layouts([1, 2], ["auto"], PLAIN)))
    with pytest.raises(ConfigError, match=r"memory: needs 74\.\d+ GiB of weights .* a GPU \(tensor-parallel size 2"):
        report_of(found, best, "qwen3-next-80b-a3b", "")


def test_weights_that_take_another_checkpoint_have_no_command() -> None:
    found = search(Demand(200, 24), 1, "llama-3-8b", "l40s")
    best = found.run(list(found.layouts([1], ["auto"], [WEIGHT_FORMATS["int4"]])))
    report = report_of(found, best, "llama-3-8b", "")
    assert report.plans[0].command == ""
    assert any("weights in int4: linear layers read their bytes at 0.64 of the 16-bit rate" in line for line in report.sources)
    assert any("an estimate for this kind of GPU" in line for line in report.sources)
