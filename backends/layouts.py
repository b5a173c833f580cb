"""Cache writers in plain PyTorch: right on every layout and device, and the fallback where no kernel writes faster."""

from __future__ import annotations

from torch import Tensor

from headway.core.layout import LayerCache


def write_rows(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write k, v [num_tokens, num_kv_heads, head_dim] to slot_mapping [num_tokens]; -1 is skipped.

    Works on any layout through its logical view. On a GPU the test for -1 synchronises, so it cannot be captured in a graph.
    """
    valid = slot_mapping >= 0
    if not valid.all():
        k, v, slot_mapping = k[valid], v[valid], slot_mapping[valid]
    _write(k, cache.logical_key, slot_mapping, cache.block_size)
    _write(v, cache.logical_value, slot_mapping, cache.block_size)


def _write(rows: Tensor, logical: Tensor, slots: Tensor, block_size: int) -> None:
    if logical.is_contiguous():  # slots are consecutive rows
        logical.view(logical.shape[0] * block_size, -1).index_copy_(0, slots, rows.reshape(len(slots), -1))
    else:
        logical[slots // block_size, slots % block_size] = rows.reshape(len(slots), *logical.shape[2:])
