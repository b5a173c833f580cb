"""Every query row meets every key that it sees exactly once, whatever the cut."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.backends.hopper.schedule import Problem, choose
from headway.backends.hopper.tiles import AttentionTile, tiles_of
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec

LENGTHS = st.lists(st.tuples(st.integers(1, 700), st.one_of(st.just(0), st.integers(1, 6000))), min_size=1, max_size=6)


def _problem(lengths: list[tuple[int, int]], group: int = 4, heads: int = 8, window: int | None = None) -> Problem:
    queries = [q for q, _ in lengths]
    kv_lens = numpy.array([sum(each) for each in lengths])
    return Problem(numpy.cumsum([0, *queries]), numpy.array(queries), kv_lens, group, heads, window, 512, 132)


@settings(max_examples=80, deadline=None)
@given(
    lengths=LENGTHS,
    group=st.sampled_from([1, 2, 4, 7, 8]),
    heads=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([64, 128, 256]),
    window=st.one_of(st.none(), st.integers(1, 900)),
    num_splits=st.one_of(st.none(), st.integers(1, 40)),
)
def test_each_row_meets_each_key_once(
    lengths: list[tuple[int, int]], group: int, heads: int, head_dim: int, window: int | None, num_splits: int | None
) -> None:
    tiles = tiles_of(head_dim, head_dim)
    schedule = choose(_problem(lengths, group, heads, window), (tiles.wide, tiles.narrow), num_splits)
    tile = schedule.tile
    rows = tile.rows // group * group
    seen = [numpy.zeros((q * group, -(-(q + c) // tile.keys)), dtype=numpy.int64) for q, c in lengths]
    partials: set[int] = set()
    tickets: dict[tuple[int, int], set[int]] = {}
    starts = numpy.cumsum([0] + [q for q, _ in lengths])
    for start, query_len, kv_len, seq, number, first, last, splits, split, partial, ticket, _ in schedule.items.tolist():
        assert (start, query_len, kv_len) == (starts[seq], lengths[seq][0], sum(lengths[seq]))
        assert first < last
        seen[seq][number * rows : (number + 1) * rows, first:last] += 1
        if splits > 1:
            assert 0 <= partial + split < schedule.num_partials
            assert partial + split not in partials
            partials.add(partial + split)
            tickets.setdefault((seq, number), set()).add(ticket)
    assert len(partials) == schedule.num_partials
    assert all(len(each) == 1 for each in tickets.values())
    assert len(set.union(set(), *tickets.values())) == len(tickets) == schedule.num_tickets
    for (query_len, context), met in zip(lengths, seen, strict=True):
        assert met.max() == 1
        for row in range(query_len * group):
            sees = context + row // group + 1
            lowest = 0 if window is None else max(sees - window, 0)
            assert met[row, lowest // tile.keys : -(-sees // tile.keys)].all()


@pytest.mark.parametrize(("queries", "context", "most"), [(200, 5000, 1.35), (512, 60000, 1.15), (64, 30000, 1.3)])
def test_few_rows_are_cut_so_that_the_gpu_is_occupied(queries: int, context: int, most: float) -> None:
    tiles = tiles_of(128, 128)
    schedule = choose(_problem([(queries, context)]), (tiles.wide, tiles.narrow))
    lengths = schedule.items[:, 6] - schedule.items[:, 5]
    free = [0.0] * 132
    for length in sorted(numpy.tile(lengths, 8).tolist(), reverse=True):
        free[free.index(min(free))] += length
    assert max(free) <= most * lengths.sum() * 8 / 132


def test_many_rows_are_not_cut() -> None:
    tiles = tiles_of(128, 128)
    schedule = choose(_problem([(8192, 0)]), (tiles.wide, tiles.narrow))
    assert schedule.tile == tiles.wide
    assert schedule.num_partials == 0


def test_padding_sequences_have_no_items() -> None:
    metadata = AttentionMetadata.build([1], [-1], [[]], 16)
    spec = AttentionSpec(32, 8, 128, 1.0, torch.bfloat16)
    assert len(choose(Problem.of(metadata, spec, 132), (AttentionTile(2, 128, 2),)).items) == 0
