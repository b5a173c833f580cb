"""Layouts: shapes as the kernels of the field expect them, and one writer each that `gather` reads back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grid import DTYPES, LAYOUTS
from headway.core.contract.layout import HND, NHD, VLLM_5D, CacheGeometry, CacheLayout
from headway.registry import Registry

CPU = torch.device("cpu")


def geometry(dtype: torch.dtype = torch.float32, head_dim: int = 32) -> CacheGeometry:
    return CacheGeometry(num_blocks=5, block_size=8, num_kv_heads=3, head_dim=head_dim, dtype=dtype, device=CPU)


def test_shapes_are_those_of_the_kernels() -> None:
    nhd, hnd = NHD.allocate(geometry()), HND.allocate(geometry())
    assert nhd.key.shape == nhd.value.shape == (5, 8, 3, 32)
    assert hnd.key.shape == hnd.value.shape == (5, 3, 8, 32)
    for dtype, x in ((torch.float32, 4), (torch.bfloat16, 8), (torch.float16, 8)):
        cache = VLLM_5D.allocate(geometry(dtype))
        assert cache.key.shape == (5, 3, 32 // x, 8, x)
        assert cache.value.shape == (5, 3, 32, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_writer_and_gather_are_inverse_and_minus_one_is_skipped(
    registry: Registry, layout: CacheLayout, dtype: torch.dtype
) -> None:
    write = registry.layout(layout.name).load_writer(CPU)
    cache = layout.allocate(geometry(dtype))
    cache.key.fill_(7)
    cache.value.fill_(7)
    k, v = torch.randn(6, 3, 32).to(dtype), torch.randn(6, 3, 32).to(dtype)
    slots = torch.tensor([17, -1, 0, 39, -1, 8])
    write(k, v, cache, slots)
    written = slots[slots >= 0]
    got_k, got_v = cache.gather(written)
    assert torch.equal(got_k, k[slots >= 0])
    assert torch.equal(got_v, v[slots >= 0])
    untouched = torch.tensor([slot for slot in range(40) if slot not in written.tolist()])
    assert all((rows == 7).all() for rows in cache.gather(untouched))


def test_an_element_of_the_5d_key_lies_where_vllm_puts_it(registry: Registry) -> None:
    cache = VLLM_5D.allocate(geometry())
    k, v = torch.randn(1, 3, 32), torch.randn(1, 3, 32)
    registry.layout("vllm_5d").load_writer(CPU)(k, v, cache, torch.tensor([2 * 8 + 5]))
    block, slot, head, dim, x = 2, 5, 1, 22, 4
    assert cache.key[block, head, dim // x, slot, dim % x] == k[0, head, dim]
    assert cache.value[block, head, dim, slot] == v[0, head, dim]


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    slots=st.lists(st.integers(-1, 39), min_size=1, max_size=40, unique_by=lambda slot: slot if slot >= 0 else object()),
    strided=st.booleans(),
)
def test_any_slots_in_any_order(registry: Registry, layout: CacheLayout, slots: list[int], strided: bool) -> None:
    cache = layout.allocate(geometry())
    wide = torch.randn(len(slots), 9, 32)
    k, v = (wide[:, :3], wide[:, 6:]) if strided else (wide[:, :3].contiguous(), wide[:, 6:].contiguous())
    registry.layout(layout.name).load_writer(CPU)(k, v, cache, torch.tensor(slots))
    kept = torch.tensor(slots) >= 0
    got_k, got_v = cache.gather(torch.tensor(slots)[kept])
    assert torch.equal(got_k, k[kept])
    assert torch.equal(got_v, v[kept])


def test_a_head_that_cannot_be_split_is_refused() -> None:
    support = VLLM_5D.check(head_dim=36, dtype=torch.bfloat16)
    assert not support
    assert "a multiple of 8" in str(support)
    assert VLLM_5D.check(head_dim=36, dtype=torch.float32)


def test_equal_axes_are_one_layout_whatever_its_name() -> None:
    assert CacheLayout("mine", NHD.key_axes, NHD.value_axes) == NHD
    assert NHD != HND


def test_a_new_pool_is_zero_in_every_dtype() -> None:
    for dtype in DTYPES:
        cache = NHD.allocate(geometry(dtype))
        assert cache.key.dtype == dtype
        assert not cache.key.any()
