"""Cache writers in plain PyTorch: right on every layout and device, and the fallback where no kernel writes faster."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.contract.layout import SCALES, LayerCache


def write_rows(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write k, v [num_tokens, num_kv_heads, head_dim or v_head_dim] to slot_mapping [num_tokens]; -1 is skipped.

    Works on any layout through its logical view. On a GPU the test for -1 synchronises, so it cannot be captured in a graph.
    """
    valid = slot_mapping >= 0
    if not valid.all():
        k, v, slot_mapping = k[valid], v[valid], slot_mapping[valid]
    put(k, cache, "key", slot_mapping)
    if cache.layout.has_value:
        put(v, cache, "value", slot_mapping)


def put(rows: Tensor, cache: LayerCache, name: str, slots: Tensor) -> None:
    """Write rows [n, num_kv_heads, head_dim or v_head_dim] to a cache's "key" or "value". slots: int64 [n], none negative."""
    logical = cache.logical_key if name == "key" else cache.logical_value
    if SCALES[name] not in cache.tensors:
        _write(stored(rows, logical.dtype, cache.k_scale if name == "key" else cache.v_scale), logical, slots, cache.block_size)
        return
    kept = cache.by_slot(SCALES[name])
    numbers, scales = quantised(rows, logical.dtype, each_head=kept.dim() == 3)
    _write(numbers, logical, slots, cache.block_size)
    kept[slots // cache.block_size, slots % cache.block_size] = scales.to(kept.dtype)


def stored(rows: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Rows as the cache keeps them: divided by the scale and, in fp8, held inside its range (beyond it lies NaN)."""
    if rows.dtype == dtype:
        return rows if scale == 1.0 else rows / scale
    limit = torch.finfo(dtype).max
    return (rows.float() / scale).clamp(-limit, limit).to(dtype)


def quantised(rows: Tensor, dtype: torch.dtype, each_head: bool = True) -> tuple[Tensor, Tensor]:
    """Rows [n, heads, dim] as numbers of 8 bits times a scale of their own, the row's largest magnitude over the type's largest.

    Whole numbers are rounded to the nearest, ties to even. A row of zeros has the scale 0, and so has one so small that its scale
    would be no normal number, which some hardware takes for 0. A row with a number that is not finite
    has zeros and the scale infinity, whose product is NaN, so that nobody takes it for a row. each_head: a scale for each head,
    and not one for all heads of a token. Returns numbers [n, heads, dim] and float32 scales, [n, heads] or [n].
    """
    integer = not dtype.is_floating_point
    limit = float(torch.iinfo(dtype).max if integer else torch.finfo(dtype).max)
    exact = rows.float()
    largest = exact.abs().amax(-1 if each_head else (-2, -1))
    # Divided by a tensor: by a number torch multiplies with its reciprocal on a GPU, whose last bit may be another.
    scales = torch.where(largest.isfinite(), largest / torch.full_like(largest, limit), torch.inf)
    scales = scales.where(scales >= torch.finfo(torch.float32).tiny, 0.0)
    divisors = scales.unsqueeze(-1) if each_head else scales[:, None, None]
    numbers = (exact / divisors).clamp(-limit, limit).where((divisors > 0) & divisors.isfinite(), 0.0)
    return (numbers.round() if integer else numbers).to(dtype), scales


def _write(rows: Tensor, logical: Tensor, slots: Tensor, block_size: int) -> None:
    if logical.dtype.itemsize == 1:  # torch indexes no fp8: move it as bytes
        rows, logical = rows.view(torch.uint8), logical.view(torch.uint8)
    if logical.is_contiguous():  # slots are consecutive rows
        logical.view(logical.shape[0] * block_size, -1).index_copy_(0, slots, rows.flatten(1))
    else:
        logical[slots // block_size, slots % block_size] = rows.reshape(len(slots), *logical.shape[2:])
