"""The list of programs of a prefill or extend: every query row meets every key that it sees, once."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy
import pytest

pytest.importorskip("triton")
from headway.backends.triton.splits import TileSchedule, schedule_tiles

BLOCK_M, BLOCK_N = 16, 16


def work_of(
    lens: list[tuple[int, int]], parts: int, group: int = 4, window: int | None = None, whole: int = 0, causal: bool = True
) -> TileSchedule:
    starts = numpy.cumsum([0, *(query_len for query_len, _ in lens)], dtype=numpy.int32)
    kv_lens = numpy.array([kv_len for _, kv_len in lens], numpy.int32)

    def cut(tiles: numpy.ndarray) -> tuple[int, int]:
        return whole, -(-int(tiles.max()) // parts)

    return schedule_tiles(starts, kv_lens, group, BLOCK_M, BLOCK_N, window, cut, causal)


def check(
    lens: list[tuple[int, int]], parts: int, group: int = 4, window: int | None = None, whole: int = 0, causal: bool = True
) -> TileSchedule:
    """That the programs of each query tile cover the keys its rows see, in order, and that merges name their slots."""
    work = work_of(lens, parts, group, window, whole, causal)
    starts = numpy.cumsum([0] + [query_len for query_len, _ in lens])
    slots_of: dict[tuple[int, int], list[int]] = {}
    runs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for seq, token, query_len, kv_len, number, first, end, slot in work.rows[: work.programs].tolist():
        assert (query_len, kv_len) == lens[seq]
        assert token == starts[seq]
        runs.setdefault((seq, number), []).append((first * BLOCK_N, end))
        slots_of.setdefault((seq, number), []).append(slot)
    for seq, (query_len, kv_len) in enumerate(lens):
        tiles = -(-query_len * group // BLOCK_M) if kv_len else 0
        assert sorted(number for at, number in runs if at == seq) == list(range(tiles))
        for number in range(tiles):
            oldest = kv_len - query_len + number * BLOCK_M // group
            newest = kv_len - query_len + min((number + 1) * BLOCK_M - 1, query_len * group - 1) // group
            seen = 0 if window is None else max(oldest - window + 1, 0)
            mine = runs[seq, number]
            assert seen - BLOCK_N < mine[0][0] <= seen
            last = newest if causal else kv_len - 1 if window is None else newest + window - 1
            assert newest < mine[-1][1]
            assert min(last, kv_len - 1) <= mine[-1][1] - 1 < last + BLOCK_M
            assert mine[-1][1] <= (newest + 1 if causal else kv_len)
            assert all(end == following for (_, end), (following, _) in pairwise(mine))
            assert all(first < end for first, end in mine)
            assert len(mine) <= parts
    merged = {}
    for token, query_len, number, slot, count, *_ in work.rows[work.programs :].tolist():
        seq = next(i for i, (length, _) in enumerate(lens) if starts[i] == token and length == query_len)
        merged[seq, number] = list(range(slot, slot + count))
    assert merged == {tile: slots for tile, slots in slots_of.items() if len(slots) > 1}
    used = [slot for slots in merged.values() for slot in slots]
    assert sorted(used) == list(range(work.slots))
    return work


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("window", [None, 40, 1])
def test_every_row_meets_every_key_it_sees_once(parts: int, window: int | None) -> None:
    draw = random.Random(parts)
    for group in (1, 3, 4, 32):
        lens = [(query_len, query_len + draw.choice([0, 1, draw.randrange(400)])) for query_len in (1, 5, 33, 70)]
        check([*lens, (1, 1), (17, 17)], parts, group, window)


@pytest.mark.parametrize("window", [None, 40, 1])
def test_a_row_that_is_not_causal_meets_later_keys_too(window: int | None) -> None:
    for group, parts in ((1, 1), (3, 2), (32, 7)):
        check([(length, length) for length in (1, 5, 33, 70, 200)], parts, group, window, causal=False)


def test_nothing_is_merged_where_nothing_is_split() -> None:
    assert check([(20, 20), (7, 300)], 1).merges == 0
    assert check([(7, 300)], 4).slots == 2 * 4


def test_the_first_tiles_may_keep_all_their_keys() -> None:
    work = check([(20, 320)], 4, whole=3)
    slots = work.rows[: work.programs, 7].tolist()
    assert slots == [-1, -1, -1, *range(8)]


def test_padding_has_no_program() -> None:
    assert work_of([(1, 0), (5, 9), (1, 0)], 1).rows[:, 0].tolist() == [1, 1]
    assert work_of([(1, 0)], 3).programs == 0


def test_the_longest_sequence_and_its_last_tile_come_first() -> None:
    rows = work_of([(9, 9), (9, 50)], 1, 4).rows
    assert rows[:, [0, 4]].tolist() == [[1, 2], [1, 1], [1, 0], [0, 2], [0, 1], [0, 0]]
