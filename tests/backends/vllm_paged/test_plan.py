"""Cutting a decode up, and what the backend refuses; nothing here needs a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend_cases import spec
from headway.backends.vllm_paged.backend import VllmPagedAttention
from headway.backends.vllm_paged.decode import MAX_WARPS, PARTITIONS, GPUResources, choose, shared_bytes, stages_of
from headway.core.contract.backend import GraphLevel
from headway.core.contract.layout import NHD, VLLM_5D
from headway.core.contract.metadata import Phase

H200 = GPUResources(multiprocessors=132, bytes_per_us=4.2e6)
TILE_BYTES = 8192


@given(st.integers(1, 5000), st.integers(1, 10000), st.floats(0.01, 1.0))
def test_a_cut_is_one_that_can_be_launched(items: int, longest: int, filled: float) -> None:
    cut = choose(items, max(longest, int(items * longest * filled)), longest, TILE_BYTES, H200)
    assert 1 <= cut.warps <= MAX_WARPS
    assert cut.partitions in PARTITIONS
    assert cut.partitions <= longest


@pytest.mark.parametrize(
    ("sequences", "context", "single"), [(8, 512, True), (1, 8192, False), (64, 2048, True), (256, 8192, True)]
)
def test_short_contexts_and_many_sequences_take_the_single_pass(sequences: int, context: int, single: bool) -> None:
    items, longest = sequences * 8, context // 16
    assert (choose(items, items * longest, longest, TILE_BYTES, H200).partitions == 1) is single


def test_few_long_contexts_occupy_the_machine() -> None:
    cut = choose(8, 8 * 2048, 2048, TILE_BYTES, H200)
    assert 8 * cut.partitions >= 100


def test_one_long_sequence_among_short_ones_is_partitioned() -> None:
    long, short = 2048, 4
    ragged = choose(64 * 8, 8 * long + 63 * 8 * short, long, TILE_BYTES, H200)
    assert ragged.partitions > choose(64 * 8, 64 * 8 * long, long, TILE_BYTES, H200).partitions


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("tile_bytes", [2048, 8192, 32768])
def test_at_least_one_warp_fits(arch: str, tile_bytes: int) -> None:
    assert 2 <= stages_of(tile_bytes, arch) * tile_bytes <= shared_bytes(arch)


def layer(**changes: object):
    return spec(**{"head_dim": 128, "dtype": torch.bfloat16, "device": torch.device("cuda"), **changes})


@pytest.mark.parametrize(
    ("changes", "block_size", "reason"),
    [
        ({"head_dim": 72}, 16, "head_dim: needs 64 or 80 or 96"),
        ({}, 24, "block_size: needs 8 or a multiple of 16, got 24"),
        ({}, 12, "block_size: needs a multiple of 8, got 12"),
        ({"kv_dtype": torch.float8_e4m3fn}, 8, "block_size: needs a multiple of 16 for an fp8 cache, got 8"),
        ({"dtype": torch.float32, "kv_dtype": torch.float8_e4m3fn}, 16, "dtype: needs bfloat16 or float16 with an fp8 cache"),
        ({"device": torch.device("cpu")}, 16, "device: needs cuda, got cpu"),
    ],
    ids=str,
)
def test_what_it_cannot_do_it_refuses(changes: dict[str, object], block_size: int, reason: str) -> None:
    assert reason in str(VllmPagedAttention.supports(layer(**changes), VLLM_5D, block_size, Phase.DECODE))


def test_it_decodes_on_its_layout_only() -> None:
    assert VllmPagedAttention.supports(layer(), VLLM_5D, 16, Phase.DECODE)
    assert "kv_layout: needs vllm_5d, got nhd" in str(VllmPagedAttention.supports(layer(), NHD, 16, Phase.DECODE))
    for phase in (Phase.PREFILL, Phase.EXTEND):
        assert "phase: needs decode" in str(VllmPagedAttention.supports(layer(), VLLM_5D, 16, phase))
    assert VllmPagedAttention.graph_level is GraphLevel.UNIFORM
