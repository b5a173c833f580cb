"""A simulated replica: the engine's scheduler over predicted steps, arrivals and routing."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from headway.core.contract.errors import ConfigError
from headway.plan.demand import Demand, LatencyLimits
from headway.plan.devices import GPU_KINDS
from headway.plan.model_costs import EngineLimits, EngineMemory, RankCosts, engine_memory, rank_costs, read_planned_model
from headway.plan.simulation import Replica, SimulatedRequest
from headway.plan.step_time import StepPredictor, StepWork


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
