"""What is measured to check a shipped table, and where points are added to a grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from headway.core.contract.layout import HND, NHD
from headway.core.contract.metadata import Phase
from headway.core.select.costs import Shape
from headway.tuning.measure.points import Point, midpoints
from headway.tuning.measure.prior_check import Extent, adopt
from headway.tuning.table.convert import to_costs
from headway.tuning.table.files import Prior
from headway.tuning.table.schema import Cell, CrossoverTable
from headway.tuning.table.schema import points as by_point
from tables import a_cell, a_table

Factor = Callable[[str, int], float]
LENS = (64, 256, 1024, 4096, 16384, 65536)
US = {"a": lambda n: 10.0 + 0.01 * n, "b": lambda n: 5.0 + 0.02 * n, "c": lambda n: 100.0 + 0.1 * n}
"""Microseconds by the number of keys: b is the fastest up to 500, a beyond, and c nowhere near."""
POINTS = [Point("decode", 1, 1, kv_len) for kv_len in LENS]
CHECKED = [POINTS[0], POINTS[4]]


def cells(points: list[Point], sizes: tuple[int, ...] = (16, 256), factor: Factor = lambda name, kv_len: 1.0) -> list[Cell]:
    return [
        a_cell(
            US[name](at.kv_len) * factor(name, at.kv_len),
            kernel=name,
            case=at.case,
            kv_len=at.kv_len,
            block_size=size,
            host_us=4.0,
        )
        for at in points
        for size in sizes
        for name in US
    ]


@pytest.fixture
def prior() -> CrossoverTable:
    return a_table(*cells(POINTS))


def adopted(prior: CrossoverTable, here: list[Cell]) -> CrossoverTable:
    return adopt(Prior(Path("prior.json"), prior, ()), a_table(*here), CHECKED, POINTS)


def times(table: CrossoverTable, kv_len: int) -> Mapping[tuple[str, int | None], Cell]:
    point = Point("decode", 1, 1, kv_len)
    return {(cell.kernel, cell.block_size): cell for cell in by_point(table.cells)["decode", point.case]}


def test_only_what_may_win_is_measured_over_the_smallest_blocks_that_do(prior: CrossoverTable) -> None:
    extent = Extent.of(prior, [(NHD, 16), (NHD, 256)], ["a", "b", "c"])
    assert (extent.layouts, extent.block_sizes) == (["nhd"], [16])
    assert list(extent.given_up) == ["decode"]
    assert extent.given_up["decode"] == {"c": "at best 10.00 times the fastest of those here in the shipped table"}
    assert Extent.of(prior, [(NHD, 16)], ["c"]).given_up == {}, "those who beat it are not here"
    unknown = Extent.of(prior, [(layout, size) for size in (16, 256) for layout in (NHD, HND)], ["a", "b", "c"])
    assert (unknown.layouts, unknown.block_sizes) == (["nhd", "hnd"], [16, 256]), "what the table does not know is measured whole"


def test_around_a_point_times_are_multiplied_by_what_a_backend_was_off_there(prior: CrossoverTable) -> None:
    here = cells(CHECKED, (16,), lambda name, kv_len: 1.3 if name == "b" and kv_len == 64 else 1.0)
    table = adopted(prior, here)
    assert (table.prior.disagreed, table.complete) == ([], True)
    assert table.prior.corrected == ["decode 1q1s64: b 1.30 times as long as expected"]
    for kv_len, factor in ((256, 1.3), (16384, 1.0), (65536, 1.0)):
        for size in (16, 256):
            found = times(table, kv_len)
            assert found["b", size].median_us == pytest.approx(factor * US["b"](kv_len), rel=1e-3)
            assert found["a", size].median_us == pytest.approx(US["a"](kv_len), rel=1e-3)


def test_verification_that_a_shipped_table_launched_goes_without_the_hosts_time(prior: CrossoverTable) -> None:
    """Engines replay it, and so does the check: the shipped table's other points of it stand for replays as well."""

    def verify(batch: int, **changes: object) -> Cell:
        return a_cell(20.0, phase="verify", case=f"{batch}q4s64", batch=batch, query_len=4, **changes)

    launched = [verify(batch, host_us=90.0) for batch in (1, 4, 128)]
    table = adopt(
        Prior(Path("prior.json"), a_table(*launched), ()),
        a_table(verify(1, graph=True)),
        [Point("verify", 1, 4, 64)],
        [Point("verify", batch, 4, 64) for batch in (1, 4, 128)],
    )
    assert not table.prior.disagreed
    assert [(cell.batch, cell.graph, cell.host_us) for cell in table.cells] == [
        (1, True, None),
        (4, True, None),
        (128, False, 90.0),
    ]


def test_at_a_checked_point_the_table_tells_what_was_not_tried_there(prior: CrossoverTable) -> None:
    given_up = {"block_size": None, "layout": None, "status": "dropped", "reason": "at best 9.24 times the fastest"}
    here = [cell for cell in cells(CHECKED, (16,)) if cell.kernel != "c"]
    here += [a_cell(None, kernel="c", case=point.case, kv_len=point.kv_len, **given_up) for point in CHECKED]
    found = times(adopted(prior, here), 64)
    assert found.keys() == {(name, size) for name in US for size in (16, 256)}
    assert {key for key, cell in found.items() if cell.source == "measured"} == {("a", 16), ("b", 16)}
    assert found["c", 16].median_us == pytest.approx(US["c"](64))


def test_a_backend_that_is_far_off_leaves_nothing_around(prior: CrossoverTable) -> None:
    table = adopted(prior, cells(CHECKED, (16,), lambda name, kv_len: 2.5 if name == "b" and kv_len == 64 else 1.0))
    assert table.prior.disagreed == ["decode 1q1s64: b takes 1.48 times as long as a, expected 0.59, on nhd 16"]
    assert table.prior.corrected == []
    assert {cell.kv_len for cell in table.cells} == {64, 4096, 16384, 65536}
    assert not table.complete


@pytest.mark.parametrize(("factor", "counts"), [(1.4, False), (3.0, True)])
def test_a_hosts_moment_decides_nothing(factor: float, counts: bool) -> None:
    """Launches take longer than the device; those of one backend took longer here, by as much as a host varies or by more."""
    slow = [cell.model_copy(update={"host_us": 200.0}) for cell in cells(POINTS)]
    here = [
        cell.model_copy(update={"host_us": 200.0 * (factor if cell.kernel == "b" else 1.0)}) for cell in cells(CHECKED, (16,))
    ]
    prior = adopted(a_table(*slow), here).prior
    assert prior.disagreed == []
    assert bool(prior.corrected) == counts


CROSSING = {256: (10.0, 20.0), 4096: (100.0, 50.0)}
"""kv_len -> microseconds of a and b."""


def cells_at(times: dict[int, tuple[float, ...]], batch: int = 1, query_len: int = 1, **changes: object) -> list[Cell]:
    phase = "decode" if query_len == 1 else "verify"
    return [
        a_cell(
            us, kernel=name, batch=batch, query_len=query_len, kv_len=n, case=f"{batch}q{query_len}s{n}", phase=phase, **changes
        )
        for n, found in times.items()
        for name, us in zip("abc", found, strict=False)
    ]


def test_between_two_winners_the_middle_by_logarithms() -> None:
    (point,) = midpoints(cells_at(CROSSING), 0.02)
    assert (point.phase, point.batch, point.query_len, point.kv_len) == ("decode", 1, 1, 1024)
    assert point.case == "1q1s1k"


@pytest.mark.parametrize(
    "times",
    [
        {256: (10.0, 20.0), 4096: (50.0, 100.0)},  # one winner
        {256: (10.0, 10.1), 4096: (100.0, 98.0)},  # ties
        {256: (10.0, 20.0), 320: (100.0, 50.0)},  # too near
        {256: (10.0,), 4096: (100.0,)},  # nobody else
    ],
)
def test_nothing_is_added_where_it_would_not_help(times: dict[int, tuple[float, ...]]) -> None:
    assert midpoints(cells_at(times), 0.02) == []
    assert midpoints(cells_at(CROSSING), 1.1) == []


def test_every_axis_is_looked_along_and_the_costliest_change_comes_first() -> None:
    found = cells_at(CROSSING) + cells_at({256: (100.0, 20.0), 4096: (100.0, 50.0)}, batch=16)
    assert [(point.batch, point.kv_len) for point in midpoints(found, 0.02)] == [(4, 256), (1, 1024)]
    verify = cells_at({512: (10.0, 20.0)}, query_len=2) + cells_at({512: (20.0, 10.0)}, query_len=8)
    (point,) = midpoints(verify, 0.02)
    assert (point.phase, point.query_len, point.kv_len) == ("verify", 4, 512)


def test_a_prompts_two_lengths_are_one() -> None:
    found = [
        a_cell(us, kernel=name, phase="prefill", batch=2, query_len=n, kv_len=n, case=f"2q{n}")
        for n, times in ((64, (10.0, 20.0)), (1024, (40.0, 30.0)))
        for name, us in zip("ab", times, strict=True)
    ]
    (point,) = midpoints(found, 0.02)
    assert (point.phase, point.batch, point.query_len, point.kv_len, point.case) == ("prefill", 2, 256, 256, "2q256")


def test_a_second_round_goes_on_from_the_first() -> None:
    more = cells_at({1024: (20.0, 40.0)}, between=True)
    (point,) = midpoints(cells_at(CROSSING) + more, 0.02)
    assert point.kv_len == 2048
    assert midpoints(cells_at(CROSSING) + more + cells_at({2048: (45.0, 45.0)}, between=True), 0.02) == []


def test_each_layout_has_winners_of_its_own_and_a_prompt_without_one_counts_in_all() -> None:
    first = cells_at({256: (10.0, 20.0), 4096: (50.0, 100.0)})
    second = cells_at(CROSSING, block_size=256)
    assert [point.kv_len for point in midpoints(first + second, 0.02)] == [1024]
    free = cells_at({256: (10.0,), 4096: (100.0,)}, layout=None, block_size=None)
    placed = [cell.model_copy(update={"kernel": "b"}) for cell in cells_at({256: (20.0,), 4096: (50.0,)})]
    assert [point.kv_len for point in midpoints(free + placed, 0.02)] == [1024]


def test_points_between_reach_the_lookup() -> None:
    table = a_table(*cells_at(CROSSING), *cells_at({1024: (12.0, 48.0)}, between=True))
    costs = to_costs(table)
    assert [shape.kv_len for shape in costs.shapes[Phase.DECODE]] == [256, 4096]
    assert costs.at(Shape(Phase.DECODE, 1, 1, 1024), "a", "nhd", 16)[0] == pytest.approx(12)
