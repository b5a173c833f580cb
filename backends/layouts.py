"""Cache writers in plain PyTorch: right on every layout and device, and the fallback where no kernel writes faster."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.contract.layout import LayerCache


def write_rows(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write k, v [num_tokens, num_kv_heads, head_dim or v_head_dim] to slot_mapping [num_tokens]; -1 is skipped.

    Works on any layout through its logical view. On a GPU the test for -1 synchronises, so it cannot be captured in a graph.
    """
    valid = slot_mapping >= 0
    if not valid.all():
        k, v, slot_mapping = k[valid], v[valid], slot_mapping[valid]
    _write(stored(k, cache.geometry.dtype, cache.k_scale), cache.logical_key, slot_mapping, cache.block_size)
    if cache.layout.has_value:
        _write(stored(v, cache.geometry.dtype, cache.v_scale), cache.logical_value, slot_mapping, cache.block_size)


def stored(rows: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Rows as the cache keeps them: divided by the scale and, in fp8, held inside its range (beyond it lies NaN)."""
    if rows.dtype == dtype:
        return rows if scale == 1.0 else rows / scale
    limit = torch.finfo(dtype).max
    return (rows.float() / scale).clamp(-limit, limit).to(dtype)


def _write(rows: Tensor, logical: Tensor, slots: Tensor, block_size: int) -> None:
    if logical.dtype.itemsize == 1:  # torch indexes no fp8: move it as bytes
        rows, logical = rows.view(torch.uint8), logical.view(torch.uint8)
    if logical.is_contiguous():  # slots are consecutive rows
        logical.view(logical.shape[0] * block_size, -1).index_copy_(0, slots, rows.flatten(1))
    else:
        logical[slots // block_size, slots % block_size] = rows.reshape(len(slots), *logical.shape[2:])
