"""Predictions beside what bench/results holds: within what docs/plan.md says, and the replay of a trace is the simulation."""

from __future__ import annotations

import pytest

from headway.bench.studies.plan.points import measured_points
from headway.bench.studies.plan.predict import arrivals, errors, halves, kernel_cells, kernel_errors, predict, simulate
from headway.plan.utilisation import H200

POINTS = measured_points()


def test_points_are_of_several_models_and_none_is_there_twice() -> None:
    assert len(POINTS) >= 40
    assert len({point.model for point in POINTS}) == 4
    assert len({(str(point), point.metric) for point in POINTS}) == len(POINTS)
    chosen, judged = halves(POINTS)
    assert not set(chosen) & set(judged)


def test_a_few_points_are_near_what_was_measured() -> None:
    few = [point for point in POINTS if point.batch * point.output_len <= 1024]
    assert len({point.model for point in few}) == 4
    assert errors(few, H200).median < 0.07
    assert errors(few, H200).worst < 0.2


@pytest.mark.slow
def test_points_that_chose_no_utilisation_are_within_a_quarter() -> None:
    _, judged = halves(POINTS)
    found = errors(judged, H200)
    assert found.median < 0.05
    assert found.worst < 0.2


@pytest.mark.slow
def test_more_tokens_were_measured_where_more_are_predicted() -> None:
    """The order of plans that one GPU can run: batch sizes, lengths and cache types of one model."""
    ours = [point for point in POINTS if point.model == "qwen3-0.6b" and point.metric == "per_token_ms"]
    rates = [(point.batch / point.measured, point.batch / predict(point, H200)) for point in ours]
    assert [measured for measured, _ in sorted(rates, key=lambda pair: pair[1])] == sorted(measured for measured, _ in rates)


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
