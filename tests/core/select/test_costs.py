"""Costs looked up by shape: between measured points, beyond them, and where there is no time."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.contract.metadata import Phase
from headway.core.select.choice import StepChooser
from headway.core.select.costs import AxisTimes, CostTable, CountAxis, Sample, Shape, StepCosts
from headway.core.select.request import PRESETS, Workload

HERE = ("nhd", 16)


def decode(batch: int, kv_len: int, query_len: int = 1) -> Shape:
    return Shape(Phase.DECODE, batch, query_len, kv_len)


def sample(
    shape: Shape,
    us: float | None,
    backend: str = "a",
    place: tuple[str | None, int | None] = HERE,
    plan: float = 0,
    host: float = 0,
    between: bool = False,
) -> Sample:
    return Sample(shape, backend, *place, us, plan, host, between)


def layer_us(table: CostTable, shape: Shape, backend: str = "a") -> float:
    return table.at(shape, backend, *HERE)[0]


def test_a_measured_point_is_returned_as_it_is() -> None:
    points = {decode(batch, kv_len): 1.0 * batch + kv_len for batch in (1, 8) for kv_len in (64, 512)}
    table = CostTable([sample(shape, us, plan=2 * us) for shape, us in points.items()], 0.02)
    for shape, us in points.items():
        assert table.at(shape, "a", *HERE) == pytest.approx((us, 2 * us))


def test_between_points_logarithms_are_linear() -> None:
    # us = 3 * batch^0.5 * kv_len^0.9 is a plane in logarithms, so every point between is exact
    def law(shape: Shape) -> float:
        return 3 * shape.batch**0.5 * shape.kv_len**0.9

    table = CostTable([sample(s, law(s)) for s in (decode(b, n) for b in (1, 4, 64) for n in (32, 1024, 4096))], 0.02)
    for shape in (decode(2, 100), decode(17, 2000), decode(64, 33)):
        assert layer_us(table, shape) == pytest.approx(law(shape))


def test_device_and_host_are_looked_up_apart_and_the_longer_counts() -> None:
    # the host takes 60 us whatever the size; the device 16, then 256: between them the host's share does not make it 124 us
    table = CostTable([sample(decode(1, n), us, host=60.0) for n, us in ((64, 16.0), (1024, 256.0))], 0.02)
    assert layer_us(table, decode(1, 64)) == pytest.approx(60)
    assert layer_us(table, decode(1, 128)) == pytest.approx(60)
    assert layer_us(table, decode(1, 256)) == pytest.approx(64)
    assert layer_us(table, decode(1, 1024)) == pytest.approx(256)


def test_without_a_host_time_the_devices_stands_in() -> None:
    table = CostTable([sample(decode(1, 64), 10.0), sample(decode(1, 64, 4), 20.0, host=90.0)], 0.02)
    assert layer_us(table, decode(1, 64)) == pytest.approx(10)
    assert layer_us(table, decode(1, 64, 2)) == pytest.approx(30)
    assert layer_us(table, decode(1, 64, 4)) == pytest.approx(90)


def test_beyond_the_range_the_nearest_edge_holds() -> None:
    table = CostTable([sample(decode(b, n), 10.0 * b + n) for b in (2, 8) for n in (64, 512)], 0.02)
    assert layer_us(table, decode(1, 10)) == pytest.approx(84)
    assert layer_us(table, decode(100, 10**6)) == pytest.approx(592)
    assert layer_us(table, decode(8, 512, query_len=5)) == pytest.approx(592)
    assert not table.covers(decode(1, 64))
    assert table.covers(decode(3, 100))
    assert not table.covers(Shape(Phase.PREFILL, 2, 64, 64))


def test_a_row_may_reach_less_far_than_the_next() -> None:
    table = CostTable([sample(decode(1, 64), 1.0), sample(decode(1, 4096), 8.0), sample(decode(16, 64), 4.0)], 0.02)
    assert layer_us(table, decode(1, 4096)) == pytest.approx(8)
    assert layer_us(table, decode(16, 4096)) == pytest.approx(4)
    assert layer_us(table, decode(4, 4096)) == pytest.approx(math.sqrt(8 * 4))


@pytest.mark.parametrize(
    "failed", [sample(decode(1, 512), None, "b"), None], ids=["it failed there", "it was not measured there"]
)
def test_nothing_is_guessed_next_to_a_point_without_a_time(failed: Sample | None) -> None:
    both = [sample(decode(1, n), 5.0, name) for n in (64, 2048) for name in "ab"]
    table = CostTable([*both, sample(decode(1, 512), 5.0), *([failed] if failed else [])], 0.02)
    assert layer_us(table, decode(1, 64), "b") == pytest.approx(5)
    assert layer_us(table, decode(1, 2048), "b") == pytest.approx(5)
    for between in (100, 512, 1000):
        assert layer_us(table, decode(1, between), "b") == math.inf
        assert layer_us(table, decode(1, between), "a") == pytest.approx(5)


def test_a_point_between_corrects_its_surroundings_and_nothing_beyond_the_next_lines() -> None:
    grid = [sample(decode(batch, n), 10.0) for batch in (1, 16, 256) for n in (64, 1024, 16384)]
    flat, table = CostTable(grid, 0.02), CostTable([*grid, sample(decode(16, 256), 40.0, between=True)], 0.02)
    assert layer_us(table, decode(16, 256)) == pytest.approx(40)
    assert layer_us(table, decode(16, 128)) == pytest.approx(20)  # halfway, in logarithms
    assert layer_us(table, decode(4, 256)) == pytest.approx(20)
    assert layer_us(table, decode(64, 512)) == pytest.approx(10 * 4**0.25)
    for shape in (decode(16, 64), decode(16, 1024), decode(16, 4096), decode(1, 256), decode(256, 256), decode(300, 256)):
        assert layer_us(table, shape) == pytest.approx(layer_us(flat, shape)) == pytest.approx(10)
    assert decode(16, 256) not in table.shapes[Phase.DECODE]
    assert StepCosts([(table, 1)], *HERE).between(Phase.DECODE) == [decode(16, 256)]


def test_between_a_failure_is_avoided_and_no_time_is_made_up() -> None:
    grid = [sample(decode(1, n), 10.0, name) for n in (64, 1024) for name in "ab"]
    failed = [sample(decode(1, 256), us, name, between=True) for name, us in (("a", 10.0), ("b", None))]
    table = CostTable([*grid, *failed], 0.02)
    assert layer_us(table, decode(1, 200), "b") == math.inf
    assert layer_us(table, decode(1, 64), "b") == pytest.approx(10)
    assert layer_us(table, decode(1, 200), "a") == pytest.approx(10)
    gap = CostTable([*grid[:-1], sample(decode(1, 256), 5.0, "b", between=True)], 0.02)  # b has no time at 1,024
    assert layer_us(gap, decode(1, 256), "b") == math.inf


def test_a_backend_or_place_without_times_costs_infinitely_much() -> None:
    table = CostTable([sample(decode(1, 64), 5.0)], 0.02)
    assert layer_us(table, decode(1, 64), "b") == math.inf
    assert table.at(decode(1, 64), "a", "nhd", 64)[0] == math.inf


def test_a_time_without_a_place_holds_everywhere() -> None:
    shape = Shape(Phase.PREFILL, 2, 64, 64)
    table = CostTable([sample(shape, 5.0, place=(None, None))], 0.02)
    assert table.at(shape, "a", "hnd", 256)[0] == pytest.approx(5)


def test_an_excluded_backend_has_no_times() -> None:
    table = CostTable([sample(decode(1, 64), 5.0), sample(decode(1, 64), 1.0, "b")], 0.02, excluded={"b": "wrong"})
    assert layer_us(table, decode(1, 64), "b") == math.inf


def test_a_step_is_every_layer_and_one_plan_for_each_kind() -> None:
    kinds = [CostTable([sample(decode(1, 64), us, plan=100.0)], noise) for us, noise in ((5.0, 0.02), (7.0, 0.05))]
    costs = StepCosts([(kinds[0], 3), (kinds[1], 2)], *HERE)
    assert costs.step_us("a", decode(1, 64)) == pytest.approx(2 * 100 + 3 * 5 + 2 * 7)
    assert costs.noise == 0.05


def test_a_ranking_is_fastest_first_and_leaves_out_who_has_no_time() -> None:
    table = CostTable([sample(decode(1, 64), 5.0), sample(decode(1, 64), 3.0, "b"), sample(decode(1, 64), None, "c")], 0.02)
    ranked = StepCosts([(table, 1)], *HERE).ranking(decode(1, 64), ["a", "b", "c", "d"])
    assert [name for name, _ in ranked] == ["b", "a"]
    assert [us for _, us in ranked] == pytest.approx([3, 5], rel=1e-2)


def test_the_plan_can_decide() -> None:
    shape = decode(1, 64)
    table = CostTable([sample(shape, 5.0, "a", plan=100.0), sample(shape, 6.0, "b", plan=1.0)], 0.02)
    assert StepCosts([(table, 1)], *HERE).ranking(shape, "ab")[0][0] == "b"
    assert StepCosts([(table, 1000)], *HERE).ranking(shape, "ab")[0][0] == "a"


def test_of_a_captured_prompt_the_devices_time_alone_counts() -> None:
    """Its graph holds the plan, and a replay needs no launches; a captured verification is planned for its lengths at each."""
    prompt, verification = Shape(Phase.PREFILL, 1, 64, 64), decode(1, 64, query_len=4)
    table = CostTable([sample(shape, 10.0, plan=50.0, host=30.0) for shape in (prompt, verification)], 0.02)
    assert table.at(prompt, "a", *HERE) == pytest.approx((30.0, 50.0))
    captured = [table.at(replace(shape, captured=True), "a", *HERE) for shape in (prompt, verification)]
    assert captured == [pytest.approx((10.0, 0.0)), pytest.approx((10.0, 50.0))]


def test_unlike_sequences_count_as_alike_ones_of_their_cost() -> None:
    assert Shape.of(Phase.DECODE, [1, 1, 1], [10, 20, 33]) == Shape(Phase.DECODE, 3, 1, 21)
    assert Shape.of(Phase.PREFILL, [512] * 4, [512] * 4) == Shape(Phase.PREFILL, 4, 512, 512)
    assert Shape.of(Phase.EXTEND, [16, 16], [2048, 2048]) == Shape(Phase.EXTEND, 2, 16, 2048)
    lens = [128] * 64 + [8192]  # 98 % of the work is one prompt's
    mixed = Shape.of(Phase.PREFILL, lens, lens)
    assert mixed.kv_len == mixed.query_len > 4000
    assert mixed.batch <= 4


@given(st.lists(st.tuples(st.integers(1, 10**5), st.integers(0, 10**5)), min_size=1, max_size=80))
def test_alike_sequences_have_the_tokens_and_the_work_of_the_unlike_ones(lens: list[tuple[int, int]]) -> None:
    query_lens, kv_lens = [n for n, _ in lens], [n + cached for n, cached in lens]
    shape = Shape.of(Phase.EXTEND, query_lens, kv_lens)
    tokens, work = sum(query_lens), sum(n * kv for n, kv in zip(query_lens, kv_lens, strict=True))
    assert 1 <= shape.batch <= len(lens)
    assert min(query_lens) <= shape.query_len <= max(query_lens)
    assert shape.batch * shape.query_len == pytest.approx(tokens, rel=0.5)
    assert shape.kv_len == pytest.approx(work / tokens, abs=0.5)


_LINES = {"batch": (1000, 16000, 256000), "kv_len": (64000, 512000, 4096000)}
"""Of a grid so fine in whole numbers that one step of a length moves no time by a thousandth, however steep its slope."""

_PLACES = st.tuples(
    st.sampled_from([1000, 6000, 16000, 64000, 256000]), st.sampled_from([64000, 90000, 181000, 362000, 724000, 2896000, 4096000])
)


def _refined(places: list[tuple[int, int]], times: Random) -> tuple[CostTable, dict[Shape, float]]:
    """A grid of equal times, corrected at places of (batch, kv_len) that are not points of it; and the times there."""
    grid = {(batch, kv_len) for batch in _LINES["batch"] for kv_len in _LINES["kv_len"]}
    found = {decode(*place): times.choice([5.0, 20.0]) for place in places if place not in grid}
    samples = [sample(decode(*place), 10.0) for place in sorted(grid)]
    return CostTable([*samples, *(sample(shape, us, between=True) for shape, us in found.items())], 0.02), found


@given(st.lists(_PLACES, min_size=1, unique=True), _PLACES, st.randoms(use_true_random=False))
def test_times_never_jump_where_a_correction_ends(places: list[tuple[int, int]], at: tuple[int, int], random: Random) -> None:
    """A lookup goes by the corrections that reach into its cell of the grid: one left out would show at the edge of the cell."""
    table, _ = _refined(places, random)
    batch, kv_len = at
    near = [decode(batch + over, kv_len) for over in (-1, 0, 1)], [decode(batch, kv_len + over) for over in (-1, 0, 1)]
    for shapes in near:
        times = [layer_us(table, shape) for shape in shapes]
        assert max(times) / min(times) < 1.01


@given(st.lists(_PLACES, min_size=1, unique=True), st.randoms(use_true_random=False))
def test_a_correction_ends_at_the_next_lines_of_the_grid(places: list[tuple[int, int]], random: Random) -> None:
    """Also that of a place between its lines on both axes, whose row and column hold no other: it says nothing of far lengths."""
    table, found = _refined(places, random)
    for batch in _LINES["batch"]:
        for kv_len in _LINES["kv_len"]:
            assert layer_us(table, decode(batch, kv_len)) == pytest.approx(10.0)
    in_rows = [shape for shape in found if shape.batch in _LINES["batch"] or shape.kv_len in _LINES["kv_len"]]
    for shape in in_rows:  # and no later one takes back what was measured in a row of the grid
        assert layer_us(table, shape) == pytest.approx(found[shape])


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
    assert [record.levelno for record in caplog.records if "outside the measured range" in record.message] == [logging.INFO]


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


AXES = {
    "rows": CountAxis("rows", tuple(2**n for n in range(14))),
    "tokens": CountAxis("tokens", tuple(2**n for n in range(14)), nearest=True),
    "bytes": CountAxis("bytes", tuple(2**n for n in range(10, 24)), nearest=True),
}


@pytest.mark.parametrize("unit", AXES)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 2**25))
def test_over_one_axis_the_fastest_of_the_cell_that_a_count_takes_serves(unit: str, seed: int, count: int) -> None:
    axis, random = AXES[unit], Random(seed)
    us = {name: [random.choice([None, random.uniform(1, 9)]) for _ in axis.counts] for name in "abc"}
    able, handicap = random.sample("abcd", 3), {"a": 1.3}
    if axis.nearest:
        measured = min(axis.counts, key=lambda known: abs(math.log(max(count, 1) / known)))
    else:
        measured = next((known for known in axis.counts if known >= count), axis.counts[-1])
    times = {name: us[name][axis.counts.index(measured)] for name in able if name in us}
    weighed = {name: time * handicap.get(name, 1.0) for name, time in times.items() if time is not None}
    fastest = AxisTimes(axis, us, "").fastest(count, able, handicap)
    assert fastest == (min(weighed, key=weighed.__getitem__) if weighed else None)


def test_over_one_axis_ranges_begin_where_the_kernel_changes() -> None:
    larger, nearest = CountAxis("rows", (1, 2, 4, 8)), CountAxis("tokens", (1, 2, 4, 8), nearest=True)
    serving = {1: "a", 2: "a", 4: "b", 8: "a"}.__getitem__
    assert larger.changes(serving) == {1: "a", 3: "b", 5: "a"}
    assert nearest.changes(serving) == {1: "a", 4: "b", 8: "a"}
    assert larger.describe({1: "a", 1025: "b"}, "a rule") == "a from 1, b from 1,025 rows on (a rule)"
