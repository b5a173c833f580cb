"""The rule that cuts a decode into programs: numbers only, no kernel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.backends.triton.configs import DEFAULT, SM_90, decode_configs
from headway.backends.triton.splits import FEWEST, MAX_ROUNDS, choose_cut, expected_us

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
    assert splits == 1 or items * splits <= MAX_ROUNDS * multiprocessors
    assert config is FEW or splits == 1
    able = (FEW, MANY) if items >= FEWEST * multiprocessors else (FEW,)
    whole = min(expected_us(each, 1, items, keys, KV, rows, multiprocessors) for each in able)
    assert expected_us(config, splits, items, keys, KV, rows, multiprocessors) <= whole


def test_more_rows_make_merging_dearer_and_splits_fewer() -> None:
    counts = [choose_cut(8, 4096, KV, rows, H200, (FEW,))[1] for rows in (2, 4, 16)]
    assert counts == sorted(counts, reverse=True)
