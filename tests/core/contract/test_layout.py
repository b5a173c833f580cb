"""Layouts: shapes as the kernels of the field expect them, and one writer each that `gather` reads back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_cases import DTYPES, LAYOUTS
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import (
    HND,
    LATENT,
    NHD,
    NHD_INT8,
    VLLM_5D,
    CacheGeometry,
    CacheLayout,
    LayerCache,
    quantised,
    write_rows,
)
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
    dtype=st.sampled_from(DTYPES),
)
def test_the_writer_and_gather_are_inverse_for_any_slots(
    registry: Registry, layout: CacheLayout, slots: list[int], strided: bool, dtype: torch.dtype
) -> None:
    cache = layout.allocate(geometry(dtype))
    for tensor in cache.tensors.values():
        tensor.fill_(7)
    wide = torch.randn(len(slots), 9, 32).to(dtype)
    k, v = (wide[:, :3], wide[:, 6:]) if strided else (wide[:, :3].contiguous(), wide[:, 6:].contiguous())
    registry.layout(layout.name).load_writer(CPU)(k, v, cache, torch.tensor(slots))
    kept = torch.tensor(slots) >= 0
    got_k, got_v = cache.gather(torch.tensor(slots)[kept])
    assert torch.equal(got_k, k[kept])
    assert torch.equal(got_v, v[kept])
    untouched = torch.tensor([slot for slot in range(40) if slot not in slots], dtype=torch.int64)
    assert all((rows == 7).all() for rows in cache.gather(untouched)), "-1 is skipped"


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
        ({"key": ("block", "slot", "head", "dim"), "value_scale": ("block", "slot")}, "got key, value_scale"),
        ({"key": ("block", "slot", "head", "dim"), "key_scale": ("block",)}, "axes of key_scale: needs each of block, slot once"),
        (
            {"key": ("block", "slot", "head", "dim"), "key_scale": ("block", "slot")},
            "dtypes: needs an element type of each scale",
        ),
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


INT8 = AttentionSpec(6, 3, 32, 0.2, torch.bfloat16, kv_dtype=torch.int8)


def test_a_layout_keeps_scales_beside_its_numbers() -> None:
    cache = NHD_INT8.allocate(CacheGeometry.of(INT8, 5, 8))
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in cache.tensors.items()} == {
        "key": ((5, 8, 3, 32), torch.int8),
        "value": ((5, 8, 3, 32), torch.int8),
        "key_scale": ((5, 3, 8), torch.float32),
        "value_scale": ((5, 3, 8), torch.float32),
    }
    assert NHD_INT8.bytes_per_block(cache.geometry) == 8 * INT8.cache_row_bytes == 8 * 3 * 2 * (32 + 4)
    assert len({NHD, NHD_INT8, CacheLayout("mine", NHD_INT8.tensors, dtypes=NHD_INT8.dtypes)}) == 2
    assert CacheLayout("halves", NHD_INT8.tensors, dtypes={**NHD_INT8.dtypes, "key_scale": torch.float16}) != NHD_INT8


def test_a_cache_of_whole_numbers_and_a_layout_with_scales_need_each_other() -> None:
    plain = AttentionSpec(6, 3, 32, 0.2, torch.bfloat16)
    latent = AttentionSpec(8, 1, 48, 0.2, v_head_dim=32, value_in_key=True, kv_dtype=torch.int8)
    assert NHD_INT8.check(INT8, 16)
    assert "needs a layout that holds a cache of int8_per_token_head" in str(NHD.check(INT8, 16))
    assert "(--kv-layout nhd_int8)" in str(HND.check(INT8, 16))
    assert "got nhd_int8, which holds int8_per_token_head (--kv-layout nhd)" in str(NHD_INT8.check(plain, 16))
    assert "kv_cache_dtype: needs auto or fp8_e4m3, as values lie in keys" in str(LATENT.check(latent, 16))


@pytest.mark.parametrize("scale_axes", [("block", "head", "slot"), ("block", "slot")], ids=["each head", "all heads"])
def test_rows_come_back_as_numbers_times_their_scales(scale_axes: tuple[str, ...]) -> None:
    """Rows are a multiple of their largest over 127, so that nothing is lost."""
    layout = CacheLayout(
        "mine",
        {**VLLM_5D.tensors, "key_scale": scale_axes, "value_scale": scale_axes},
        16,
        {"key": torch.int8, "value": torch.int8, "key_scale": torch.float32, "value_scale": torch.float32},
    )
    cache = layout.allocate(CacheGeometry.of(INT8, 5, 8))
    numbers = torch.randint(-127, 128, (2, 4, 3, 32))
    numbers[..., 0] = 127
    k, v = numbers.float() * torch.tensor([2.0, 0.25, 1.0, 64.0])[:, None, None]
    slots = torch.tensor([3, 39, 16, 8])
    write_rows(k, v, cache, slots)
    assert torch.equal(cache.gather(slots)[0], k)
    assert torch.equal(cache.gather(slots)[1], v)
    assert torch.equal(cache.logical_key[0, 3].flatten(1), numbers[0, 0].to(torch.int8))
    scales = cache.logical_scale("key")
    assert scales.shape == (5, 8, 3)
    assert scales[4, 7].tolist() == [0.25] * 3
    assert not any(rows.any() for rows in cache.gather(torch.tensor([0, 9, 38])))


def test_numbers_are_rounded_to_the_nearest_and_rows_of_zeros_are_safe() -> None:
    rows = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, -0.0], [1.0, math.nan, 0.0, 0.0], [math.inf, 1.0, 0.0, 0.0]])
    numbers, scales = quantised(rows[:, None], torch.int8)
    assert numbers[:2, 0].tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert scales[:2, 0].tolist() == [1.0, 0.0]
    assert (numbers * scales[..., None])[2:].isnan().all(), "a row that is not finite is not taken for one"
    tiny = torch.tensor([[[3e-45, -1e-45]]])
    numbers, scales = quantised(tiny, torch.int8)
    assert (numbers * scales[..., None]).isfinite().all()
