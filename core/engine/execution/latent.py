"""Attention of a latent (MLA) layer: the GEMMs around a backend that supports one of the layer's specs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy
import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Plan
from headway.core.contract.kernel import upload
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.model import LatentLayer
from headway.core.contract.spec import AttentionSpec

GATHERED_BYTES = 2**29
"""Maximum size in bytes of the expanded keys and values of a step's contexts. They are in memory while one layer is computed."""
FLOPS_PER_BYTE = 150
"""Number of multiply-adds that take as long as moving one byte. It converts the bytes that gathering moves into multiply-adds of
attention."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Plan of an EXTEND whose contexts are gathered from the cache and expanded, with the backend instance that attends to
    them."""

    backend: AttentionBackend
    plan: Plan
    slots: Tensor
    """int64 [blocks * block_size]: all slots of all blocks of the sequences, block after block."""
    new: Tensor
    """int64 [n]: indices of this step's tokens in `slots`."""


def attend(
    heads: LatentLayer,
    phase: Phase,
    backend: AttentionBackend,
    plan: Plan,
    tensors: tuple[Tensor, Tensor, Tensor],
    cache: LayerCache,
    slots: Tensor,
    writes: bool,
) -> None:
    """Compute attention for a part of a step. The latents are cached first, unless `writes` is True: then the backend writes
    them.

    tensors: q [n, num_heads, expanded head_dim], latent [n, 1, cached head_dim], and out [n, num_heads, expanded v_head_dim].
    slots: int64 [n], cache slots of the latents.
    """
    q, latent, out = tensors
    if phase is Phase.PREFILL:
        if cache.geometry.dtype != latent.dtype:  # rounded as decode will read them, so that chunk boundaries do not matter
            latent = _cached(cache, slots.clamp_min(0), latent.dtype)
        k, v = heads.expand(latent)
        backend.prefill(q, k, v, cache, plan, out)
        return
    if isinstance(plan, Gathered):
        k, v = heads.expand(_cached(cache, plan.slots, latent.dtype))
        spec, layout, size = plan.backend.spec, plan.backend.layout, plan.backend.block_size
        blocks = {name: t.view((-1, size, *t.shape[1:])) for name, t in (("key", k), ("value", v))}
        own = LayerCache.wrap(blocks, layout, spec)
        plan.backend.prefill(q, k.index_select(0, plan.new), v.index_select(0, plan.new), own, plan.plan, out)
        return
    queries, value_dim = heads.absorb(q), cache.geometry.v_head_dim
    attended = queries.new_empty((*queries.shape[:2], value_dim))
    value = latent[..., :value_dim]
    if writes:
        backend.write_and_decode(queries, latent, value, cache, plan, attended)
    elif phase is Phase.DECODE:
        backend.decode(queries, cache, plan, attended)
    else:
        backend.prefill(queries, latent, value, cache, plan, attended)
    heads.project(attended, out)


def gathers(view: AttentionMetadata, cached: AttentionSpec, expanded: AttentionSpec) -> bool:
    """Return whether an EXTEND is faster with expanded contexts than with absorbed queries, and the expanded contexts fit in
    memory.

    Attention over expanded keys needs fewer multiplications for each query-key pair than attention over latents. But every key
    must first be expanded, so expanding pays only with enough new tokens. The latent has `cached.v_head_dim` elements per key.
    """
    heads, latent = expanded.num_heads, cached.v_head_dim
    elements = expanded.head_dim + expanded.v_head_dim
    keys = sum(-(-kv_len // view.block_size) * view.block_size for kv_len in view.kv_lens)
    num_bytes = keys * heads * elements * expanded.dtype.itemsize
    pairs = sum(n * (kv_len - n) + n * (n + 1) // 2 for n, kv_len in zip(view.query_lens, view.kv_lens, strict=True))
    saved = 2 * heads * pairs * (cached.head_dim + cached.v_head_dim - elements)
    expanding = 2 * keys * latent * heads * (elements - cached.head_dim + latent) + 2 * FLOPS_PER_BYTE * num_bytes
    return num_bytes <= GATHERED_BYTES and saved > expanding


def plan_gathered(view: AttentionMetadata, backend: AttentionBackend) -> Gathered:
    """Return the plan of a step's view, for caches in separate memory in which the blocks of the view's sequences are
    contiguous."""
    size = view.block_size
    counts = [-(-kv_len // size) for kv_len in view.kv_lens]
    ends = numpy.cumsum(counts)
    table = numpy.zeros(view.block_table_cpu.shape, dtype=numpy.int32)
    blocks, new = numpy.empty(int(ends[-1]), dtype=numpy.int64), []
    known = view.block_table_cpu.numpy()
    for row, (count, end) in enumerate(zip(counts, ends.tolist(), strict=True)):
        table[row, :count] = numpy.arange(end - count, end)
        blocks[end - count : end] = known[row, :count]
        last = (end - count) * size + view.kv_lens[row]
        new.append(numpy.arange(last - view.query_lens[row], last))
    slots = (blocks[:, None] * size + numpy.arange(size)).reshape(-1)
    device, host = view.block_table.device, torch.from_numpy(table)
    indices = upload(torch.from_numpy(numpy.concatenate(new)), device)
    own = replace(view, block_table=upload(host, device), block_table_cpu=host, slot_mapping=indices, num_blocks=len(blocks))
    return Gathered(backend, backend.plan(own), upload(torch.from_numpy(slots), device), indices)


def _cached(cache: LayerCache, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return latents [len(slots), 1, head_dim] from the cache, in the layer's dtype."""
    rows, _ = cache.gather(slots)
    return rows if rows.dtype == dtype else (rows.float() * cache.k_scale).to(dtype)
