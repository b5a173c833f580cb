"""The pool's size, and the memory texts users write."""

from __future__ import annotations

import pytest
import torch

from backend_cases import spec
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import NHD
from headway.core.engine.data import pool
from headway.core.engine.data.groups import page_format

LAYOUTS = [NHD] * 3
SPECS = [spec()] * 3  # 2 kv heads x 32 x 4 bytes, key and value: 512 bytes a token and layer
FORMAT = page_format(SPECS, LAYOUTS, 16, 4096)


def test_the_pool_fills_the_memory_but_never_more_than_all_sequences_could() -> None:
    size = pool.pool_size(FORMAT, max_model_len=100, max_num_seqs=8, chunk=100, memory=1_000_000)
    assert size.num_bytes == size.num_pages * 16 * 512 * 3
    assert 1_000_000 - 16 * 512 * 3 < size.num_bytes <= 1_000_000
    roomy = pool.pool_size(FORMAT, max_model_len=100, max_num_seqs=2, chunk=100, memory=10**9)
    assert roomy.num_pages == 2 * 7
    layers = pool.allocate(SPECS, LAYOUTS, size)
    assert sum(layer.key.nbytes + layer.value.nbytes for layer in layers) == size.num_bytes


def test_a_pool_too_small_for_one_sequence_says_what_fits_and_that_hint_works() -> None:
    with pytest.raises(ConfigError) as caught:
        pool.pool_size(FORMAT, max_model_len=4096, max_num_seqs=8, chunk=128, memory=1_000_000)
    assert "max_model_len=4096" in caught.value.reason.need
    fits = int(caught.value.reason.hint.split()[-1])
    assert pool.pool_size(FORMAT, fits, 8, 128, 1_000_000).num_pages * 16 >= fits
    assert pool.longest_that_fits(FORMAT, 128, 1_000_000, at_most=4096) == fits


def test_default_pool_holds_at_least_one_sequence() -> None:
    size = pool.pool_size(FORMAT, max_model_len=2048, max_num_seqs=4, chunk=128, memory=None)
    assert size.num_tokens(2048) >= 2048
    assert torch.device("cpu") == SPECS[0].device
