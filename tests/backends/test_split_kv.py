"""The rule that splits the keys of query tiles: numbers only, no kernel."""

from __future__ import annotations

import heapq

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.backends.split_kv import MAX_PARTIALS, Ints, Programs, Split

H200 = Programs(132, start=1.3, partial=1.3, merge=0.7)
SEPARATE = Programs(132, start=1.8, partial=0.9, launch=2.7)
"""Partial results are merged by a kernel of its own."""
LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=200)


def queue_time(programs: Programs, lengths: Ints, split: Split) -> float:
    """Time if each program takes the next item whenever it ends one: the items that are not split, then the longest parts."""
    parts = split.parts(lengths)
    costs = programs.costs(parts)
    ends = [0.0] * programs.count
    for cost in (*costs[: split.whole], *-numpy.sort(-costs[split.whole :])):
        heapq.heapreplace(ends, ends[0] + float(cost))
    most = int(parts.count.max())
    return max(ends) + (programs.launch + programs.merge * most if most > 1 else 0.0)


@given(LENGTHS, st.integers(1, 400), st.integers(0, 200), st.booleans())
def test_parts_cover_the_key_tiles_of_each_item(lengths: list[int], run: int, whole: int, tapered: bool) -> None:
    parts = Split(whole, run).parts(numpy.array(lengths))
    if tapered and max(lengths) <= 7 * run and 1 << -(-max(lengths) // run) <= 4 * run:
        parts = Split(whole, run, tapered=True).parts(numpy.array(lengths))
    assert (parts.first < parts.last).all()
    for item, length in enumerate(lengths):
        mine = parts.tile == item
        assert parts.first[mine].tolist() == [0, *parts.last[mine].tolist()[:-1]]
        assert parts.last[mine].tolist()[-1] == length
        assert set(parts.count[mine]) == {mine.sum()}
        assert item >= whole or mine.sum() == 1


@pytest.mark.parametrize("programs", [H200, SEPARATE])
@given(lengths=LENGTHS, heads=st.integers(1, 64))
def test_a_split_pays_and_its_partial_results_fit_the_workspace(programs: Programs, lengths: list[int], heads: int) -> None:
    items = numpy.sort(numpy.array(lengths))[::-1].repeat(heads)
    split, time = programs.split(items, heads)
    assert split.whole % heads == 0
    parts = split.parts(items)
    assert numpy.count_nonzero(parts.count > 1) <= MAX_PARTIALS * programs.count
    if len(items) <= 16 * programs.count:
        unsplit = queue_time(programs, items, Split(len(items), 3000))
        assert queue_time(programs, items, split) <= min(1.02 * time + 1, 1.1 * unsplit + 4)
