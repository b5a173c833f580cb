"""Whether a table fits, what differs between two, and two put together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.core.contract.errors import UnsupportedError
from headway.core.contract.metadata import Phase
from headway.core.select.costs import Shape
from headway.tuning.table.compare import diff, differences, merge, partly_measured, remarks
from headway.tuning.table.convert import to_costs
from headway.tuning.table.noise import mark_ties, noise_of
from headway.tuning.table.schema import Cell, CrossoverTable, KernelRecord, SpecRecord
from tables import SPEC, a_cell, a_device, a_table


def test_a_table_fits_the_machine_it_was_measured_on() -> None:
    assert differences(a_table(), a_device(), SpecRecord.of(SPEC)) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"name": "another"}, "device"),
        ({"compute_capability": "9.0"}, "compute capability"),
        ({"driver": "1.2"}, "driver"),
        ({"torch": "9.9"}, "torch"),
        ({"libraries": {"headway": "0.0"}}, "headway"),
    ],
)
def test_another_device_or_other_software_is_named(changes: dict[str, object], what: str) -> None:
    found = differences(a_table(), a_device(**changes))
    assert what in [reason.what for reason in found]
    assert all(reason.hint for reason in found)


@pytest.mark.parametrize(
    ("was", "now", "changes"),
    [
        ({"ptxas": "12.8.61"}, {"ptxas": "12.8.93"}, [("ptxas", "12.8.61", "12.8.93")]),
        ({"ptxas": "12.8.93"}, {"ptxas": "12.8.93", "nvrtc": "13.0"}, [("nvrtc", "none", "13.0")]),
        (None, {"ptxas": "12.8.93"}, [("ptxas", "unknown", "12.8.93")]),
        (None, {}, []),
    ],
)
def test_another_compiler_of_the_gpus_code_is_named(
    was: dict[str, str] | None, now: dict[str, str] | None, changes: list[tuple[str, str, str]]
) -> None:
    found = differences(a_table(device=a_device(compilers=was)), a_device(compilers=now))
    assert [(reason.what, reason.need, reason.got) for reason in found] == changes


def test_only_what_changes_times_makes_another_layer() -> None:
    table = a_table()
    assert differences(table, a_device(), SpecRecord.of(replace(SPEC, scale=0.7))) == []
    for other in (replace(SPEC, num_kv_heads=4), replace(SPEC, sliding_window=8), replace(SPEC, softcap=1.0)):
        assert [reason.what for reason in differences(table, a_device(), SpecRecord.of(other))] == ["attention layer"]


def test_a_backend_of_another_version_or_owner_is_named() -> None:
    record = KernelRecord(name="a", owner="fast-attention", version="1.0", available=True)
    table = a_table(a_cell(), kernels=[record])
    assert differences(table, a_device(), owners={"a": ("fast-attention", "1.0")}) == []
    (reason,) = differences(table, a_device(), owners={"a": ("fast-attention", "1.1")})
    assert (reason.what, reason.need, reason.got) == ("backend a of fast-attention", "1.0", "1.1")
    (reason,) = differences(table, a_device(), owners={"a": ("another", "1.0")})
    assert (reason.need, reason.got) == ("fast-attention", "another")
    assert differences(table, a_device(), owners={}) == []


def test_what_is_worth_knowing_is_remarked() -> None:
    lines = "\n".join(remarks(a_table(complete=False), a_device(threads=77), ["a", "b", "new"]))
    assert "77" in lines
    assert "never chosen by auto: new" in lines
    assert "--resume" in lines
    assert remarks(a_table(), a_device(), ["a", "b"]) == []
    assert remarks(a_table(device=a_device(threads=None)), a_device(threads=2), ["a", "b"]) == []  # a GPU's table


def test_a_diff_shows_what_changed_beyond_the_noise() -> None:
    before = a_table(*(a_cell(10.0, kernel=name) for name in "abcde"))
    times = {"a": 10.2, "b": 15.0, "c": 5.0, "d": None, "f": 1.0}
    after = a_table(*(a_cell(us, kernel=name) for name, us in times.items()))
    found = {change.cell.kernel: (change.status, change.factor) for change in diff(before, after, 0.05)}
    assert found == {
        "b": ("slower", pytest.approx(1.5)),
        "c": ("faster", pytest.approx(0.5)),
        "d": ("ok -> error", None),
        "e": ("only in the first", None),
        "f": ("only in the second", None),
    }
    assert diff(before, before, 0.0) == []


def test_merging_takes_the_later_of_equal_cells_and_marks_ties_again() -> None:
    old = a_table(a_cell(10.0), a_cell(99.0, kernel="b"), date="2026-01-01T00:00:00+00:00")
    new = a_table(a_cell(10.05, kernel="b"), complete=False, date="2026-02-01T00:00:00+00:00")
    for tables in ([old, new], [new, old]):
        merged = merge(tables)
        assert {cell.kernel: (cell.median_us, cell.status) for cell in merged.cells} == {"a": (10.0, "tie"), "b": (10.05, "tie")}
        assert not merged.complete
        assert {record.name for record in merged.kernels} == {"a", "b"}


def test_parts_that_measured_a_dense_prefill_twice_keep_the_faster() -> None:
    dense = {"phase": "prefill", "case": "1q64", "query_len": 64, "layout": None, "block_size": None}
    rough = {"status": "dropped", "reason": "5.0 times the fastest"}
    backends = [KernelRecord(name=name, owner="built-in", available=True) for name in "abcd"]

    def part(date: str, layout: str, *cells: Cell) -> CrossoverTable:
        return a_table(a_cell(10.0, kernel="d", layout=layout), *cells, kernels=backends, date=date)

    first = (a_cell(20.0, **dense), a_cell(60.0, kernel="b", **dense, host_us=90.0), a_cell(25.0, kernel="c", **dense, **rough))
    second = (a_cell(30.0, **dense), a_cell(61.0, kernel="b", **dense, host_us=70.0), a_cell(30.0, kernel="c", **dense))
    parts = [part("2026-01-01T00:00:00+00:00", "nhd", *first), part("2026-01-02T00:00:00+00:00", "vllm_5d", *second)]
    found = {cell.kernel: cell.median_us for cell in merge(parts).cells if cell.layout is None}
    assert found == {"a": 20.0, "b": 61.0, "c": 30.0}
    again = [parts[0], part("2026-01-02T00:00:00+00:00", "nhd", *second)]  # measured anew: the later counts
    assert {cell.kernel: cell.median_us for cell in merge(again).cells if cell.layout is None}["a"] == 30.0


def test_a_refusal_in_one_part_hides_no_time_of_another() -> None:
    refused = {"status": "unsupported", "reason": "kv_layout: needs nhd, got vllm_5d", "layout": None, "block_size": None}
    first = a_table(a_cell(20.0), a_cell(10.0, kernel="b"), date="2026-01-01T00:00:00+00:00")
    second = a_table(a_cell(19.0, layout="vllm_5d"), a_cell(None, kernel="b", **refused), date="2026-01-02T00:00:00+00:00")
    found = {(cell.kernel, cell.layout): cell.median_us for cell in merge([first, second]).cells}
    assert found == {("a", "nhd"): 20.0, ("b", "nhd"): 10.0, ("a", "vllm_5d"): 19.0}


def test_tables_of_different_machines_are_not_merged_and_the_odd_one_is_named() -> None:
    old, new = a_table(device=a_device(driver="x")), a_table(date="2026-12-01T00:00:00+00:00")
    for tables, names in (([old, new], ["a.json", "b.json"]), ([new, old], ["b.json", "a.json"])):
        with pytest.raises(UnsupportedError, match="driver of a.json: needs none as b.json has, got x"):
            merge(tables, names)
    with pytest.raises(UnsupportedError, match="driver of table 1: needs none as table 3 has"):
        merge([old, new, new])
    with pytest.raises(UnsupportedError, match="attention layer of table 1"):
        merge([a_table(), a_table(spec=SpecRecord.of(replace(SPEC, head_dim=64)))])
    with pytest.raises(UnsupportedError, match="graph_len of table 1: needs 5 as table 2 has"):
        merge([a_table(), a_table(graph_len=5)])


def test_points_measured_for_some_backends_only_are_counted() -> None:
    assert partly_measured(a_table()) == 0
    assert partly_measured(a_table(a_cell(), a_cell(case="1q1s128", kv_len=128), a_cell(kernel="b"))) == 1


def test_ties_are_those_that_cannot_be_told_from_the_fastest_of_their_layout() -> None:
    cells = [
        a_cell(10.0, kernel="a"),
        a_cell(10.05, kernel="b"),
        a_cell(10.9, kernel="c", p20_us=9.9),
        a_cell(12.0, kernel="d", p20_us=9.9),
        a_cell(1.0, kernel="a", block_size=64),
        a_cell(2.0, kernel="b", block_size=64),
    ]
    assert [cell.status for cell in mark_ties(cells)] == ["tie", "tie", "tie", "ok", "ok", "ok"]
    assert mark_ties(mark_ties(cells)) == mark_ties(cells)


def test_the_host_counts_where_it_is_slower_than_the_device() -> None:
    cells = [a_cell(10.0, kernel="a", host_us=40.0), a_cell(20.0, kernel="b", host_us=5.0)]
    assert [cell.layer_us for cell in cells] == [40.0, 20.0]
    assert [cell.status for cell in mark_ties(cells)] == ["ok", "ok"]


def test_a_dense_prefill_ties_with_those_of_each_layout() -> None:
    dense = {"phase": "prefill", "case": "1q64", "query_len": 64}
    cells = [
        a_cell(10.0, kernel="a", layout=None, block_size=None, **dense),
        a_cell(30.0, kernel="c", layout=None, block_size=None, **dense),
        a_cell(30.1, kernel="d", layout=None, block_size=None, **dense),
        a_cell(10.0, kernel="b", **dense),
    ]
    assert [cell.status for cell in mark_ties(cells)] == ["tie", "ok", "ok", "tie"]


def test_noise_is_the_usual_spread_within_bounds() -> None:
    assert noise_of([a_cell(10.0, p20_us=9.5, p80_us=10.5)]) == pytest.approx(0.05)
    assert noise_of([a_cell(10.0, p20_us=10.0, p80_us=10.0)]) == 0.01
    assert noise_of([a_cell(10.0, p20_us=1.0, p80_us=50.0)]) == 0.10
    assert noise_of([a_cell(None)]) == 0.01


def test_a_table_becomes_costs() -> None:
    record = KernelRecord(name="b", owner="x", available=True, reason="self-test: wrong")
    absent = KernelRecord(name="c", owner="x", available=False, reason="no GPU")
    cells = (a_cell(10.0, host_us=30.0, plan_us=4.0), a_cell(1.0, kernel="b"))
    table = a_table(*cells, kernels=[KernelRecord(name="a", owner="x", available=True), record, absent])
    costs = to_costs(table)
    shape = Shape(Phase.DECODE, 1, 1, 64)
    assert costs.at(shape, "a", "nhd", 16) == pytest.approx((30.0, 4.0))
    assert costs.at(shape, "b", "nhd", 16)[0] == float("inf")
    assert costs.excluded == {"b": "self-test: wrong"}
    assert "2026-11-21" in costs.source


def test_a_rough_time_counts_and_holds_where_the_loser_was_not_tried() -> None:
    given_up = {"status": "dropped", "reason": "9 times the fastest on nhd 16: not tried here", "kernel": "b"}
    lost = {"status": "dropped", "reason": "9.0 times the fastest in its first runs: not timed further", "kernel": "b"}
    longer = {"case": "1q1s256", "kv_len": 256}
    table = a_table(
        *(a_cell(us, block_size=size, **at) for size in (16, 64) for us, at in ((10.0, {}), (100.0, longer))),
        *(a_cell(50.0, kernel="b", block_size=size, **longer) for size in (16, 64)),
        a_cell(90.0, **lost),
        a_cell(None, block_size=64, **given_up),
    )
    costs = to_costs(table)
    for size in (16, 64):
        near, far = (costs.at(Shape(Phase.DECODE, 1, 1, kv_len), "b", "nhd", size)[0] for kv_len in (64, 250))
        assert near == pytest.approx(90)
        assert far < costs.at(Shape(Phase.DECODE, 1, 1, 250), "a", "nhd", size)[0]
