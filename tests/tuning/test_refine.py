"""Where points are added to a grid: between neighbours whose winners differ by more than the noise."""

from __future__ import annotations

import pytest

from headway.core.contract.metadata import Phase
from headway.core.select.costs import Shape
from headway.tuning.measure.points import midpoints
from headway.tuning.table.convert import to_costs
from headway.tuning.table.schema import Cell
from tables import a_cell, a_table

CROSSING = {256: (10.0, 20.0), 4096: (100.0, 50.0)}
"""kv_len -> microseconds of a and b."""


def cells(times: dict[int, tuple[float, ...]], batch: int = 1, query_len: int = 1, **changes: object) -> list[Cell]:
    phase = "decode" if query_len == 1 else "verify"
    return [
        a_cell(
            us, backend=name, batch=batch, query_len=query_len, kv_len=n, case=f"{batch}q{query_len}s{n}", phase=phase, **changes
        )
        for n, found in times.items()
        for name, us in zip("abc", found, strict=False)
    ]


def test_between_two_winners_the_middle_by_logarithms() -> None:
    (point,) = midpoints(cells(CROSSING), 0.02)
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
    assert midpoints(cells(times), 0.02) == []
    assert midpoints(cells(CROSSING), 1.1) == []


def test_every_axis_is_looked_along_and_the_costliest_change_comes_first() -> None:
    found = cells(CROSSING) + cells({256: (100.0, 20.0), 4096: (100.0, 50.0)}, batch=16)
    assert [(point.batch, point.kv_len) for point in midpoints(found, 0.02)] == [(4, 256), (1, 1024)]
    verify = cells({512: (10.0, 20.0)}, query_len=2) + cells({512: (20.0, 10.0)}, query_len=8)
    (point,) = midpoints(verify, 0.02)
    assert (point.phase, point.query_len, point.kv_len) == ("verify", 4, 512)


def test_a_prompts_two_lengths_are_one() -> None:
    found = [
        a_cell(us, backend=name, phase="prefill", batch=2, query_len=n, kv_len=n, case=f"2q{n}")
        for n, times in ((64, (10.0, 20.0)), (1024, (40.0, 30.0)))
        for name, us in zip("ab", times, strict=True)
    ]
    (point,) = midpoints(found, 0.02)
    assert (point.phase, point.batch, point.query_len, point.kv_len, point.case) == ("prefill", 2, 256, 256, "2q256")


def test_a_second_round_goes_on_from_the_first() -> None:
    more = cells({1024: (20.0, 40.0)}, between=True)
    (point,) = midpoints(cells(CROSSING) + more, 0.02)
    assert point.kv_len == 2048
    assert midpoints(cells(CROSSING) + more + cells({2048: (45.0, 45.0)}, between=True), 0.02) == []


def test_each_layout_has_winners_of_its_own_and_a_prompt_without_one_counts_in_all() -> None:
    first = cells({256: (10.0, 20.0), 4096: (50.0, 100.0)})
    second = cells(CROSSING, block_size=256)
    assert [point.kv_len for point in midpoints(first + second, 0.02)] == [1024]
    free = cells({256: (10.0,), 4096: (100.0,)}, layout=None, block_size=None)
    placed = [cell.model_copy(update={"backend": "b"}) for cell in cells({256: (20.0,), 4096: (50.0,)})]
    assert [point.kv_len for point in midpoints(free + placed, 0.02)] == [1024]


def test_points_between_reach_the_lookup() -> None:
    table = a_table(*cells(CROSSING), *cells({1024: (12.0, 48.0)}, between=True))
    costs = to_costs(table)
    assert [shape.kv_len for shape in costs.shapes[Phase.DECODE]] == [256, 4096]
    assert costs.at(Shape(Phase.DECODE, 1, 1, 1024), "a", "nhd", 16)[0] == pytest.approx(12)
