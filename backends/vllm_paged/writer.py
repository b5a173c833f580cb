"""Writing the vllm_5d cache, and moving its blocks."""

from __future__ import annotations

import torch
from numpy import float32, int32
from torch import Tensor

from headway.backends.vllm_paged.decode import CSRC, TILE
from headway.core.contract.layout import LayerCache
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.runtime.nvrtc.launch import Arguments, Launch
from headway.kernels.runtime.nvrtc.store import load

_MANY_TOKENS = 1024
"""Tokens from which smaller blocks of threads, more of them on a multiprocessor, write faster."""
_COPY_THREADS = 256
_COPY_PARTS = 8
"""Blocks of threads that share one cache block."""


def variant_of(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, block_size: int) -> Variant:
    """The compilation that writes such a cache."""
    return Variant.of(CSRC, "cache.cu", dtype, kv_dtype, head_dim, block_size)


def write_rows(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write k, v [num_tokens, num_kv_heads, head_dim] to slot_mapping int64 [num_tokens]; -1 is skipped.

    One launch, no synchronisation: it can be captured in a CUDA graph. An fp8 cache gets k / k_scale and v / v_scale, saturated.
    The rows of a head must be contiguous, at addresses that are multiples of 16 bytes.
    """
    geometry = cache.geometry
    reshape_and_cache(k, v, cache.key, cache.value, slot_mapping, geometry.block_size, cache.k_scale, cache.v_scale)


def reshape_and_cache(
    k: Tensor, v: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor, block_size: int, k_scale: float, v_scale: float
) -> None:
    """As `write_rows`, on the cache's tensors.

    key: [num_blocks, kv_heads, head_dim / x, block_size, x]; value: [num_blocks, kv_heads, head_dim, block_size].
    """
    num_tokens, kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    kernel = load(variant_of(k.dtype, key.dtype, head_dim, block_size), "reshape_and_cache", k.device)
    threads = 128 if num_tokens >= _MANY_TOKENS else 256
    arguments = Arguments(
        *(tensor.data_ptr() for tensor in (k, v, key, value, slot_mapping)),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(int32(num_tokens), int32(kv_heads), float32(k_scale), float32(v_scale)),
    )
    kernel(Launch((kv_heads, -(-num_tokens // TILE), 1), threads), arguments)


def copy_blocks(key: Tensor, value: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks inside one cache, for copy-on-write.

    key, value: of any layout whose outermost axis is the block; pairs: int64 [num_pairs, 2] on the device, source and destination
    blocks. No block may be both.
    """
    swap_blocks(key, value, key, value, pairs)


def swap_blocks(key: Tensor, value: Tensor, to_key: Tensor, to_value: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks from one cache to another of the same geometry, for swapping out and in.

    Either may lie in pinned host memory, which the GPU reads and writes in place; pairs: as for `copy_blocks`, on the GPU.
    """
    if pairs.shape[0] == 0:
        return
    block_bytes = key[0].numel() * key.element_size()
    kernel = load(Variant(CSRC, "blocks.cu"), "copy_blocks", pairs.device)
    caches = (tensor.data_ptr() for tensor in (key, value, to_key, to_value))
    arguments = Arguments(*caches, pairs.data_ptr(), block_bytes // 16)
    kernel(Launch((pairs.shape[0], _COPY_PARTS, 2), _COPY_THREADS), arguments)
