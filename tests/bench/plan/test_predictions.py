"""Predictions match recorded results as closely as docs/benchmarks/planning.md states; a replayed trace equals the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.bench.studies.plan_points import (
    arrivals,
    errors,
    halves,
    kernel_cells,
    kernel_errors,
    measured_points,
    predict,
    simulate,
    weight_points,
)
from headway.plan.devices import H200

POINTS = measured_points()


def test_points_are_of_several_models_and_none_is_there_twice() -> None:
    assert len(POINTS) >= 40
    assert len({point.model for point in POINTS}) == 4
    assert len({(str(point), point.metric) for point in POINTS}) == len(POINTS)
    chosen, judged = halves(POINTS)
    assert not set(chosen) & set(judged)


def test_a_few_points_are_near_what_was_measured() -> None:
    few = [point for point in POINTS if point.batch * point.output_len <= 512][::3]
    assert len({point.model for point in few}) == 4
    assert errors(few, H200).median < 0.07
    assert errors(few, H200).worst < 0.2


@pytest.mark.slow
def test_both_halves_are_as_far_off_as_the_page_says() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "planning.md").read_text()
    for what, points in zip(("fitting points", "evaluation points"), halves(POINTS), strict=True):
        found = errors(points, H200)
        assert f"| {what} | {len(points)} | {100 * found.median:.1f} % | {100 * found.worst:.1f} % |" in page
        assert found.median < 0.1
        assert found.worst < 0.25


@pytest.mark.slow
def test_weights_in_other_formats_are_as_far_off_as_the_page_says() -> None:
    points = weight_points()
    assert {point.weights for point in points} == {"model", "fp8", "int4", "mxfp4"}
    found = errors(points, H200)
    page = (Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "planning.md").read_text()
    words = (
        f"of {len(points)} predicted times per token is {100 * found.median:.1f} %, and the worst is {100 * found.worst:.0f} %"
    )
    assert words in " ".join(page.split())
    assert found.median < 0.1
    assert found.worst < 0.25


@pytest.mark.slow
def test_more_tokens_were_measured_where_more_are_predicted() -> None:
    """The order of plans that one GPU can run: batch sizes, lengths and cache types of one model."""
    ours = [point for point in POINTS if point.model == "qwen3-0.6b" and point.metric == "per_token_ms"]
    rates = [(point.batch / point.measured, point.batch / predict(point, H200)) for point in ours]
    pairs = [(one, other) for one in rates for other in rates if one[0] > 1.1 * other[0]]
    assert len(pairs) > len(rates) * len(rates) / 4
    assert all(one[1] > other[1] for one, other in pairs)


def test_attention_by_the_data_sheet_is_near_the_tables() -> None:
    found = kernel_errors(kernel_cells()[1::2], H200)
    assert found.median < 0.1
    assert found.worst < 0.6


@pytest.mark.parametrize("index", [0, 3, 5])
def test_the_replay_of_a_trace_is_the_simulation(index: int) -> None:
    point = next(point for point in POINTS[index:] if point.batch * point.output_len <= 1024)
    assert predict(point, H200) == pytest.approx(simulate(point, H200))


@pytest.mark.slow
def test_arrivals_at_a_server_are_near_in_the_median() -> None:
    found = {what: predicted / measured - 1 for what, measured, predicted in arrivals(H200)}
    assert all(abs(off) < 0.15 for what, off in found.items() if "output_token" in what and what.endswith("p50"))
    assert all(-0.3 < off < 0.1 for what, off in found.items() if "first_token" in what and what.endswith("p50"))
