"""Layouts: shapes as the kernels of the field expect them, and one writer each that `gather` reads back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_cases import DTYPES, LAYOUTS
from headway.backends.layouts import write_rows
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import HND, LATENT, NHD, VLLM_5D, CacheGeometry, CacheLayout, LayerCache
from headway.core.contract.spec import AttentionSpec
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
    support = VLLM_5D.check(AttentionSpec(4, 2, 36, 0.2, torch.bfloat16), 16)
    assert not support
    assert "a multiple of 8" in str(support)
    assert VLLM_5D.check(AttentionSpec(4, 2, 36, 0.2, torch.float32), 16)


def test_a_value_inside_the_key_needs_a_layout_without_a_value_and_the_other_way_round() -> None:
    latent, plain = AttentionSpec(8, 1, 48, 0.2, v_head_dim=32, value_in_key=True), AttentionSpec(8, 1, 48, 0.2, v_head_dim=32)
    assert LATENT.check(latent, 16)
    assert NHD.check(plain, 16)
    assert "--kv-layout latent" in str(NHD.check(latent, 16))
    assert "--kv-layout nhd" in str(LATENT.check(plain, 16))


def test_sizes_come_from_the_spec() -> None:
    latent = CacheGeometry.of(AttentionSpec(8, 1, 48, 0.2, v_head_dim=32, value_in_key=True), 3, 16)
    plain = CacheGeometry.of(AttentionSpec(8, 2, 48, 0.2, v_head_dim=32, kv_dtype=torch.float8_e4m3fn), 3, 16)
    assert LATENT.bytes_per_block(latent) == 16 * 48 * 4
    assert NHD.bytes_per_block(plain) == 16 * 2 * (48 + 32)
    cache = LATENT.allocate(latent)
    assert cache.value.shape == (3, 16, 1, 32)
    assert cache.value.data_ptr() == cache.key.data_ptr()


@pytest.mark.parametrize("layout", [NHD, HND, VLLM_5D], ids=lambda layout: layout.name)
def test_a_cache_may_be_a_view_of_foreign_memory(layout: CacheLayout) -> None:
    """Keys and values packed behind each other in every block, as other engines allocate them."""
    spec = AttentionSpec(4, 2, 32, 0.2)
    sizes = [layout.shape(name, CacheGeometry.of(spec, 5, 16)) for name in ("key", "value")]
    packed = torch.zeros(5, 2, math.prod(sizes[0][1:]))
    views = {name: packed[:, at].view(sizes[at]) for at, name in enumerate(("key", "value"))}
    cache = LayerCache.wrap(views, layout, spec)
    assert cache.geometry == CacheGeometry.of(spec, 5, 16)
    assert cache.contiguous_blocks
    k, v = torch.randn(2, 3, 2, 32)
    write_rows(k, v, cache, torch.tensor([3, 70, 16]))
    got = cache.gather(torch.tensor([3, 70, 16]))
    assert torch.equal(got[0], k)
    assert torch.equal(got[1], v)
    assert packed.count_nonzero() == 2 * k.numel()
    with pytest.raises(ConfigError, match=r"value: needs shape .*, got"):
        LayerCache({**views, "value": views["value"][1:]}, layout, cache.geometry)


def test_heads_interleaved_with_another_engines_are_no_contiguous_blocks() -> None:
    spec = AttentionSpec(4, 2, 32, 0.2)
    wide = torch.zeros(5, 16, 2, 64)
    cache = LayerCache.wrap({"key": wide[..., :32], "value": wide[..., 32:]}, NHD, spec)
    assert not cache.contiguous_blocks


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"value": ("block", "slot", "head", "dim")}, "tensors: needs a key"),
        ({"key": ("block", "slot", "dim")}, "axes of key: needs each of block, slot, head, dim once"),
        ({"key": ("block", "slot", "head", "dim", "x")}, "pack_bytes: needs the bytes of the axis x"),
        ({"key": ("block", "slot", "head", "dim"), "scale": ("block",)}, "got key, scale"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(tensors: dict[str, tuple[str, ...]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CacheLayout("mine", tensors)


def test_equal_axes_are_one_layout_whatever_its_name() -> None:
    assert CacheLayout("mine", NHD.tensors) == NHD
    assert NHD != HND


def test_a_new_pool_is_zero_in_every_dtype() -> None:
    for dtype in DTYPES:
        cache = NHD.allocate(geometry(dtype))
        assert cache.key.dtype == dtype
        assert not cache.key.any()
