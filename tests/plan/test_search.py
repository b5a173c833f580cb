"""Plans: ranked, held to their limits, with the reasons of those that lose."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from headway.core.contract.errors import ConfigError
from headway.plan.demand import Demand, LatencyLimits
from headway.plan.devices import GPU_KINDS
from headway.plan.model_costs import WEIGHT_FORMATS, read_planned_model
from headway.plan.results import PlanReport, report_of
from headway.plan.search import FleetSearch

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
    assert any("weights in int4: products read their bytes at 0.64 of the rate of 16 bits" in line for line in report.sources)
    assert any("a guess for this kind of GPU" in line for line in report.sources)
