"""The KV cache writer: one launch writes k and v of a step to their slots, in any layout."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.backends.triton.layer import NO_SCALES, Addressing, scales_of
from headway.backends.triton.tiles import head_offsets
from headway.core.contract.layout import LayerCache
from headway.kernels.runtime.triton_launch import Launcher, aligned, launches_early


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def write_kv(
    k_ptr,  # [num_tokens, kv_heads, HEAD_DIM]
    v_ptr,  # [num_tokens, kv_heads, V_HEAD_DIM]
    key_ptr,  # a cache in any layout, addressed by the strides of its logical view [block, slot, head, dim / X, X]
    value_ptr,
    slots_ptr,  # int64 [num_tokens]; -1 is skipped
    key_scale_ptr,  # SCALED: float32, addressed by strides of [block, slot, head]
    value_scale_ptr,
    num_tokens,
    k_scale,
    v_scale,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    key_stride_block,
    key_stride_slot,
    key_stride_head,
    key_stride_dim,
    key_stride_x,
    value_stride_block,
    value_stride_slot,
    value_stride_head,
    value_stride_dim,
    value_stride_x,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_VALUE: tl.constexpr,  # False if the value is part of the key
    BLOCK_SIZE: tl.constexpr,
    K_X: tl.constexpr,
    V_X: tl.constexpr,
    BLOCK_T: tl.constexpr,
    V_SLOTS_INNER: tl.constexpr,  # adjacent slots of the value are contiguous
    FP8: tl.constexpr,
    SCALED: tl.constexpr,  # rows are int8 with a scale per row
    SCALE_STRIDES: tl.constexpr,  # three strides of the key's scales, then three of the value's
    PDL: tl.constexpr,  # launched before the kernels it depends on have ended
):
    """Write k and v to the cache. Grid (kv_heads, cdiv(num_tokens, BLOCK_T)): adjacent programs process heads of a token."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slots_ptr + t, mask=t < num_tokens, other=-1)
    d = tl.arange(0, BLOCK_D)
    rows = t.to(tl.int64)[:, None]
    dv = tl.arange(0, BLOCK_DV)
    kept = (slots >= 0)[:, None]
    k_rows = k_ptr + rows * k_stride_token + head * k_stride_head
    v_rows = v_ptr + rows * v_stride_token + head * v_stride_head
    k = tl.load(k_rows + d[None, :], mask=kept & (d[None, :] < HEAD_DIM), other=0.0)
    v = tl.load(v_rows + dv[None, :], mask=kept & (dv[None, :] < V_HEAD_DIM) & HAS_VALUE, other=0.0)
    if SCALED:
        k, k_scales = quantise(k)
        v, v_scales = quantise(v)
        blocks = slots // BLOCK_SIZE
        inner = slots % BLOCK_SIZE
        k_places = blocks * SCALE_STRIDES[0] + inner * SCALE_STRIDES[1] + head * SCALE_STRIDES[2]
        v_places = blocks * SCALE_STRIDES[3] + inner * SCALE_STRIDES[4] + head * SCALE_STRIDES[5]
        tl.store(key_scale_ptr + k_places, k_scales, mask=slots >= 0)
        tl.store(value_scale_ptr + v_places, v_scales, mask=slots >= 0)
    store_kv(
        k, v, key_ptr, value_ptr, slots, head, k_scale, v_scale,
        key_stride_block, key_stride_slot, key_stride_head, key_stride_dim, key_stride_x,
        value_stride_block, value_stride_slot, value_stride_head, value_stride_dim, value_stride_x,
        HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, HAS_VALUE, BLOCK_SIZE, K_X, V_X, V_SLOTS_INNER, FP8,
    )  # fmt: skip


@triton.jit
def quantise(tile):
    """Return rows [BLOCK_T, BLOCK_D] as integers from -127 to 127, and scales [BLOCK_T]. The results are bit-identical to
    `layout.quantised`."""
    tile = tile.to(tl.float32)
    sizes = tl.abs(tile)
    finite = tl.min((sizes < float("inf")).to(tl.int32), 1) > 0
    scales = tl.where(finite, tl.div_rn(tl.max(sizes, 1), 127.0), float("inf"))
    scales = tl.where(scales >= 1.1754943508222875e-38, scales, 0.0)  # the smallest normal number
    used = finite & (scales > 0.0)
    divisors = tl.broadcast_to(tl.where(used, scales, 1.0)[:, None], tile.shape)
    numbers = tl.minimum(tl.maximum(tl.div_rn(tile, divisors), -127.0), 127.0)
    numbers = (numbers + 12582912.0) - 12582912.0  # 1.5 * 2^23: adding it rounds to nearest, ties to even
    return tl.where(used[:, None], numbers, 0.0), scales


@triton.jit
def store_kv(
    k, v, key_ptr, value_ptr, slots, head, k_scale, v_scale,
    key_stride_block, key_stride_slot, key_stride_head, key_stride_dim, key_stride_x,
    value_stride_block, value_stride_slot, value_stride_head, value_stride_dim, value_stride_x,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_X: tl.constexpr, V_X: tl.constexpr, V_SLOTS_INNER: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Store one head's k and v [BLOCK_T, BLOCK_D or BLOCK_DV] to slots [BLOCK_T], skipping -1. Arguments are as in `write_kv`."""
    live = slots >= 0
    slots = tl.where(live, slots, 0)
    blocks = slots // BLOCK_SIZE
    inner = slots % BLOCK_SIZE
    key_stride_slot = key_stride_slot // K_X * K_X  # a no-op that tells the compiler about alignment
    k_rows = blocks * key_stride_block + inner * key_stride_slot + head * key_stride_head
    v_rows = blocks * value_stride_block + inner * value_stride_slot + head * value_stride_head
    _store(key_ptr, k_rows, key_stride_dim, key_stride_x, k, k_scale, live, HEAD_DIM, BLOCK_D, K_X, K_X > 1, FP8)
    if HAS_VALUE:
        _store(
            value_ptr, v_rows, value_stride_dim, value_stride_x, v, v_scale, live, V_HEAD_DIM, BLOCK_DV, V_X, V_SLOTS_INNER, FP8
        )


@triton.jit
def _store(ptr, rows, stride_dim, stride_x, tile, scale, live, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, X: tl.constexpr,
           TURN: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    """Store a tile [BLOCK_T, BLOCK_D]. TURN: True to assign adjacent threads to adjacent slots instead of chunks of a row.

    Among axes of equal contiguity, the compiler assigns threads to the first axis. With TURN, this is the slot axis, after the X
    elements of a chunk.
    """
    BLOCK_T: tl.constexpr = tile.shape[0]
    if FP8:  # on a GPU the conversion saturates to +-448, but not in the interpreter
        tile = tl.div_rn(tile.to(tl.float32), scale)
        tile = tl.minimum(tl.maximum(tile, -448.0), 448.0)
    tile = tile.to(ptr.dtype.element_ty)
    if TURN:
        piece = tl.arange(0, BLOCK_D // X)
        offsets = rows[:, None, None] + (piece * stride_dim)[None, :, None] + (tl.arange(0, X) * stride_x)[None, None, :]
        mask = live[:, None, None] & (piece * X < HEAD_DIM)[None, :, None]
        tl.store(ptr + offsets, tl.reshape(tile, (BLOCK_T, BLOCK_D // X, X)), mask=mask)
    else:
        inside = tl.arange(0, BLOCK_D) < HEAD_DIM
        offsets = head_offsets(stride_dim, stride_x, X, BLOCK_D)
        tl.store(ptr + (rows[:, None] + offsets[None, :]), tile, mask=live[:, None] & inside[None, :])


class Writer:
    """Function that writes k, v [num_tokens, num_kv_heads, head_dim or v_head_dim] to slot_mapping [num_tokens], skipping -1.

    A write is one launch without synchronisation, so it can be captured in a CUDA graph. An FP8 cache stores k / k_scale and v /
    v_scale, saturated; an int8 cache stores quantized rows with a scale per row.
    """

    def __init__(self) -> None:
        self._launch = Launcher(write_kv)
        self._known: dict[
            Hashable, tuple[tuple[int, ...], dict[str, Any]]
        ] = {}  # Strides and constants, by everything that they depend on

    def __call__(self, k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
        num_tokens, num_kv_heads, head_dim = k.shape
        v_head_dim = v.shape[2]
        if num_tokens == 0:
            return
        block_t, num_warps = tile_of(num_tokens)
        scales = scales_of(cache)
        cached = (cache.key.stride(), cache.value.stride(), *(each.stride() for each in scales), cache.geometry)
        pointers = aligned(k.data_ptr(), v.data_ptr(), *(each.data_ptr() for each in (cache.key, cache.value, *scales)))
        key = (cached, cache.layout, k.dtype, k.stride(), v.stride(), pointers, block_t, num_warps)
        known = self._known.get(key)
        if known is None:
            addressing = Addressing.of(cache)
            known = self._known[key] = (
                addressing.strides,
                {
                    "HEAD_DIM": head_dim,
                    "BLOCK_D": triton.next_power_of_2(head_dim),
                    "V_HEAD_DIM": v_head_dim,
                    "BLOCK_DV": triton.next_power_of_2(v_head_dim),
                    "HAS_VALUE": cache.layout.has_value,
                    "BLOCK_SIZE": cache.block_size,
                    "K_X": addressing.k_x,
                    "V_X": addressing.v_x,
                    "BLOCK_T": block_t,
                    "V_SLOTS_INNER": addressing.v_slots_inner,
                    "FP8": cache.key.dtype == torch.float8_e4m3fn,
                    **addressing.constants,
                    "PDL": launches_early(k.device),
                },
            )
        strides, constants = known
        numbers = (num_tokens, cache.k_scale, cache.v_scale)
        rows = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        arguments = (k, v, cache.key, cache.value, slot_mapping, *(scales or NO_SCALES), *numbers, *rows, *strides)
        self._launch(key, (num_kv_heads, triton.cdiv(num_tokens, block_t), 1), arguments, constants, num_warps=num_warps)


def tile_of(num_tokens: int) -> tuple[int, int]:
    """Return (tokens per program, warps). Large tiles have many loads in flight; small tiles fill the GPU if there are few
    tokens."""
    if num_tokens >= 4096:
        return 64, 4
    if num_tokens >= 1024:
        return 16, 4
    return (16, 2) if num_tokens >= 256 else (4, 1)
