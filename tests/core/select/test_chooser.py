"""The choice of each step: the fastest, unless the current one is as fast; cheap; and few graphs."""

from __future__ import annotations

import logging

import pytest

from headway.core.contract.metadata import Phase
from headway.core.select.costs import CostTable, Sample, Shape, StepCosts
from headway.core.select.selection import PRESETS, StepChooser, Workload

BATCHES, LENGTHS = (1, 16, 256), (64, 1024, 16384)
D = Phase.DECODE


def chooser(noise: float = 0.02, **times: object) -> StepChooser:
    """times: backend -> function of (batch, kv_len)."""
    shapes = [Shape(D, batch, 1, kv_len) for batch in BATCHES for kv_len in LENGTHS]
    samples = [Sample(s, name, "nhd", 16, law(s.batch, s.kv_len)) for s in shapes for name, law in times.items()]
    return StepChooser(StepCosts([(CostTable(samples, noise), 1)], "nhd", 16), {D: list(times)})


def crossing(at: int, slope: float = 1.0) -> dict[str, object]:
    """Two backends of which one is faster up to a length."""
    return {"short": lambda batch, kv_len: 10 * (kv_len / at) ** slope, "long": lambda batch, kv_len: 10.0}


def test_the_fastest_is_chosen_on_both_sides_of_a_crossover() -> None:
    for kv_len, name in ((64, "short"), (500, "short"), (8000, "long"), (16384, "long")):
        assert chooser(**crossing(2000)).choose(D, 4, 1, kv_len) == name


def test_the_current_one_stays_within_the_noise_and_goes_beyond_it() -> None:
    picky = chooser(noise=0.10, **crossing(2000))
    assert picky.choose(D, 1, 1, 1000) == "short"
    assert picky.choose(D, 1, 1, 2080) == "short"  # 4 hundredths slower: within the noise
    assert picky.choose(D, 1, 1, 4000) == "long"
    assert picky.choose(D, 1, 1, 1950) == "long"
    assert picky.choose(D, 1, 1, 1000) == "short"


def test_a_switch_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    one = chooser(**crossing(2000))
    with caplog.at_level(logging.DEBUG, "headway"):
        for kv_len in (100, 100, 8000, 8000):
            one.choose(D, 1, 1, kv_len)
    assert [record.args[-2:] for record in caplog.records] == [("short", None), ("long", "short")]


def test_beyond_the_range_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    one = chooser(**crossing(2000))
    with caplog.at_level(logging.INFO, "headway"):
        for kv_len in (100_000, 200_000, 10):
            one.choose(D, 1, 1, kv_len)
    assert [record.levelno for record in caplog.records if "beyond" in record.message] == [logging.INFO]


def test_without_any_time_nothing_is_chosen() -> None:
    assert chooser(a=lambda batch, kv_len: None, b=lambda batch, kv_len: None).choose(D, 1, 1, 64) is None


def test_a_second_graph_only_where_it_gains_more_than_the_noise() -> None:
    assert chooser(**crossing(2000)).decode_candidates(4) == ["short", "long"]
    close = chooser(noise=0.05, a=lambda batch, kv_len: 10.0, b=lambda batch, kv_len: 9.8 if kv_len == 64 else 11.0)
    assert close.decode_candidates(1) == ["a"]


def test_candidates_are_those_of_the_batch_size_and_never_three() -> None:
    by_batch = chooser(small=lambda batch, kv_len: batch, large=lambda batch, kv_len: 16.0)
    assert by_batch.decode_candidates(1) == ["small"]
    assert by_batch.decode_candidates(256) == ["large"]
    lens = {"a": 64, "b": 1024, "c": 16384}
    three = chooser(**{name: lambda batch, kv_len, own=own: 1.0 if kv_len == own else 2.0 for name, own in lens.items()})
    assert len(three.decode_candidates(1)) == 2
    assert {three.choose(D, 1, 1, kv_len) for kv_len in range(64, 16384, 64)} <= set(three.decode_candidates(1))


def test_verification_runs_outside_graphs_and_may_take_a_third() -> None:
    lens = {"a": 64, "b": 1024, "c": 16384}
    shapes = [Shape(D, 1, query_len, kv_len) for query_len in (1, 8) for kv_len in LENGTHS]
    samples = [Sample(s, name, "nhd", 16, 1.0 if s.kv_len == own else 2.0) for s in shapes for name, own in lens.items()]
    one = StepChooser(StepCosts([(CostTable(samples, 0.02), 1)], "nhd", 16), {D: list(lens)})
    assert [one.choose(D, 1, 8, kv_len) for kv_len in LENGTHS] == ["a", "b", "c"]


def test_workloads_are_read_and_become_steps() -> None:
    assert Workload.parse("long") is PRESETS["long"]
    steps = dict(Workload.parse("8x512+100").steps())
    assert steps == {Shape(Phase.PREFILL, 4, 512, 512): 2.0, Shape(D, 8, 1, 562): 100.0}
    long = Workload(2, 6144, 10).steps()
    assert [(s.phase, s.batch, s.query_len, s.kv_len, count) for s, count in long] == [
        (Phase.PREFILL, 1, 2048, 2048, 2.0),
        (Phase.EXTEND, 1, 2048, 4096, 2.0),
        (Phase.EXTEND, 1, 2048, 6144, 2.0),
        (D, 2, 1, 6149, 10.0),
    ]
    cached = Workload(16, 1280, 256, cached_len=1024).steps()
    assert cached[0] == (Shape(Phase.EXTEND, 8, 256, 1280), 2.0)
