"""Torch operators `headway::*` for models and tools, with fake implementations for torch.compile. Importing this module compiles
nothing."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from headway.backends.vllm_paged import backend
from headway.backends.vllm_paged.backend import PagedDecode
from headway.core.contract.layout import VLLM_5D, CacheGeometry, LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec


@torch.library.custom_op("headway::reshape_and_cache", mutates_args=("key", "value"), device_types="cuda")
def reshape_and_cache(
    k: Tensor, v: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Write k, v [num_tokens, kv_heads, head_dim] to slot_mapping int64 [num_tokens], skipping -1."""
    backend.reshape_and_cache(k, v, key, value, slot_mapping, value.shape[3], k_scale, v_scale)


@torch.library.custom_op("headway::paged_attention", mutates_args=("out",), device_types="cuda")
def paged_attention(
    out: Tensor,
    q: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: list[float] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Compute attention of one query token per sequence, without host synchronisation.

    q, out: [num_seqs, num_heads, head_dim]; key, value: layout vllm_5d; block_table: int32 [num_seqs, max_blocks]; seq_lens:
    int32 [num_seqs], at most max_seq_len.
    """
    num_seqs, num_heads, head_dim = q.shape
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=value.shape[1],
        head_dim=head_dim,
        scale=scale,
        dtype=q.dtype,
        device=q.device,
        sliding_window=sliding_window,
        softcap=softcap,
        alibi_slopes=None if alibi_slopes is None else tuple(alibi_slopes),
        kv_dtype=None if key.dtype == q.dtype else key.dtype,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    decode = _decode(spec, value.shape[3])
    longest = torch.full((num_seqs,), max_seq_len, dtype=torch.int32)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    metadata = AttentionMetadata(
        num_prefills=0,
        num_decodes=num_seqs,
        num_prefill_tokens=0,
        num_decode_tokens=num_seqs,
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32, device=q.device),
        seq_lens=seq_lens,
        context_lens=seq_lens,
        block_table=block_table,
        slot_mapping=seq_lens,
        block_size=value.shape[3],
        max_query_len=1,
        max_seq_len=max_seq_len,
        query_start_loc_cpu=starts,
        seq_lens_cpu=longest,
        block_table_cpu=block_table,
    )
    geometry = CacheGeometry(key.shape[0], value.shape[3], value.shape[1], head_dim, key.dtype, key.device)
    decode.run(q, LayerCache({"key": key, "value": value}, VLLM_5D, geometry, k_scale, v_scale), decode.plan(metadata), out)


@torch.library.custom_op("headway::copy_blocks", mutates_args=("key", "value"), device_types="cuda")
def copy_blocks(key: Tensor, value: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks within one cache. pairs: int64 [num_pairs, 2]: source and destination."""
    backend.copy_blocks(key, value, pairs)


@torch.library.custom_op("headway::swap_blocks", mutates_args=("to_key", "to_value"))
def swap_blocks(key: Tensor, value: Tensor, to_key: Tensor, to_value: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks from one cache to another. Either cache may be in pinned host memory. pairs: on the GPU, as in
    `copy_blocks`."""
    backend.swap_blocks(key, value, to_key, to_value, pairs)


@lru_cache(maxsize=64)
def _decode(spec: AttentionSpec, block_size: int) -> PagedDecode:
    return PagedDecode(spec, block_size)


for _operator in (reshape_and_cache, paged_attention, copy_blocks, swap_blocks):
    _operator.register_fake(lambda *args, **kwargs: None)  # operators write to their arguments and return nothing
