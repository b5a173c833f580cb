"""The rule that cuts a decode into programs: numbers only, no kernel."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.backends.triton.configs import DEFAULT, SM_90, decode_configs
from headway.backends.triton.splits import FEWEST, RunRule, choose_cut, expected_us

H200 = 132
KV = 512  # bytes of K and V of a key, 128 dims in half precision
FEW, MANY = SM_90.decode["few"], SM_90.decode["many"]


def cut(batch: int, length: int, block_size: int = 256) -> tuple[str, int]:
    configs = decode_configs(SM_90, 128, 2, block_size, split_rows=False)
    config, splits = choose_cut(8 * batch, length, KV, 2, H200, configs)
    return ("few" if config == FEW else "many"), splits


@pytest.mark.parametrize(
    ("batch", "length", "expected"),
    [(1, 1024, 32), (4, 8192, 32), (12, 8192, 10), (16, 8192, 8), (24, 4096, 5), (32, 1024, 4), (64, 8192, 2), (128, 1024, 1)],
)
def test_what_steps_on_an_h200_found_within_a_few_percent(batch: int, length: int, expected: int) -> None:
    """There the best, or within 2 % of it: programs that fill the multiprocessors once, none of them waiting for a place."""
    assert cut(batch, length, block_size=16) == ("few", expected)


def test_larger_tiles_serve_many_programs_of_large_blocks() -> None:
    assert [cut(batch, 4096) for batch in (48, 96, 192)] == [("many", 1)] * 3
    assert cut(48, 4096, block_size=16) == ("few", 2)
    assert cut(32, 512) == ("few", 4), "too few programs to fill the multiprocessors"
    assert decode_configs(SM_90, 128, 2, 256, split_rows=True) == (FEW,)
    assert decode_configs(SM_90, 128, 1, 256, split_rows=False) == (SM_90.decode["fp8"],)
    assert decode_configs(DEFAULT, 256, 2, 256, split_rows=False)[0].block_n == 16


def test_no_multiprocessor_gets_a_large_program_more_than_the_others() -> None:
    """35 x 9,606 tokens with 8 kv heads: 280 programs of large tiles are three on some multiprocessors and two on the rest."""
    assert [cut(batch, 9606) for batch in (33, 34, 35, 40, 44)] == [("few", 4), *[("few", 3)] * 4]
    assert cut(48, 9606) == ("many", 1)


def test_no_keys_and_no_sequences_need_no_splits() -> None:
    assert choose_cut(8, 0, KV, 2, H200, (FEW,)) == (FEW, 1)
    assert choose_cut(0, 10, KV, 2, H200, (FEW,)) == (FEW, 1)


@given(st.integers(1, 4096), st.integers(1, 10**6), st.integers(1, 200), st.sampled_from([1, 2, 4, 16]))
def test_the_cut_is_the_cheapest_and_within_its_bounds(items: int, keys: int, multiprocessors: int, rows: int) -> None:
    config, splits = choose_cut(items, keys, KV, rows, multiprocessors, (FEW, MANY))
    assert 1 <= splits <= max(1, -(-keys // FEW.block_n))
    assert splits == 1 or items * splits <= FEW.most_rounds * multiprocessors
    assert config is FEW or splits == 1
    able = (FEW, MANY) if items >= FEWEST * multiprocessors else (FEW,)
    whole = min(expected_us(each, 1, items, keys, KV, rows, multiprocessors) for each in able)
    assert expected_us(config, splits, items, keys, KV, rows, multiprocessors) <= whole


def test_more_rows_make_merging_dearer_and_splits_fewer() -> None:
    counts = [choose_cut(8, 4096, KV, rows, H200, (FEW,))[1] for rows in (2, 4, 16)]
    assert counts == sorted(counts, reverse=True)


def parts_of(count: int, tiles: int, num_kv_heads: int = 8) -> tuple[int, int]:
    """Query tiles that keep their keys, and the parts of the others; `count` query tiles see `tiles` tiles of keys each."""
    rule = RunRule(SM_90.extend, num_kv_heads, 128, 128, H200)
    whole, run = rule.cut(numpy.full(count, tiles, numpy.int32))
    return whole, -(-tiles // run)


def test_an_extend_is_split_where_its_query_tiles_are_fewer_than_multiprocessors() -> None:
    assert parts_of(7, 38) == (0, 2), "200 new tokens of 4,800, 32/8 heads: 56 programs"
    assert parts_of(13, 38, num_kv_heads=2) == (0, 4), "the same, 16/2 heads: 26 programs"
    assert parts_of(16, 469) == (0, 1), "512 new tokens of 60,000: 128 programs"
    assert parts_of(96, 24) == (0, 1), "six full waves"


def test_only_the_last_wave_is_split_where_it_is_not_full() -> None:
    assert parts_of(22, 24) == (16, 2), "176 programs are 128 and 48"
    assert parts_of(17, 400)[0] == 16


def test_few_keys_are_not_split() -> None:
    assert parts_of(4, 1) == (0, 1)
    assert parts_of(4, 2)[1] <= 2


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=200), st.integers(1, 64))
def test_the_programs_that_share_keys_fit_the_workspace(tiles: list[int], num_kv_heads: int) -> None:
    rule = RunRule(SM_90.extend, num_kv_heads, 128, 128, H200)
    seen = numpy.array(sorted(tiles, reverse=True), numpy.int32)
    whole, run = rule.cut(seen)
    parts = -(-seen[whole:] // run)
    assert 0 <= whole < len(seen)
    assert int(parts[parts > 1].sum()) * num_kv_heads <= rule.most_programs()
