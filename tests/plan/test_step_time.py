"""Predicted steps: what makes them longer, where a table tells, and what sums over ranks take."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.core.contract.metadata import Phase
from headway.core.select.costs import Shape
from headway.plan.attention_times import AttentionTimes, MeasuredLayer
from headway.plan.devices import GPU_KINDS, H200, MESSAGE_BYTES
from headway.plan.model_costs import rank_costs, read_planned_model
from headway.plan.step_time import StepPredictor, StepWork
from headway.tuning.table.files import read_table

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
    longer = one.step(replace(steps[2], decode_kv=8000)).device
    assert longer > times[2]
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
    page = (ROOT / "docs" / "plan.md").read_text()
    for count, length in ((1, 768), (64, 1280), (256, 1280)):
        work = StepWork(num_decodes=count, decode_kv=length, num_sampled=count)
        parts = [predictor("llama-3-8b", size, measured).step(work) for size in (1, 2, 4, 8)]
        cells = [f"{each.device / 1e3:.2f}" + (f" ({each.sums / 1e3:.2f})" if each.sums else "") for each in parts]
        assert f"| {count}, {length:,} | {' | '.join(cells)} |" in page
