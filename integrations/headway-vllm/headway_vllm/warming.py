"""Attention of every shape that a backend chooses kernels by, before the first request: nothing is compiled while one waits."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.contract import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    CacheWriter,
    LayerCache,
    Lengths,
    Phase,
    StepLimits,
)
from headway.core.contract.backend import fits, powers
from headway.core.select.selector import Selector

log = logging.getLogger("headway")


@torch.inference_mode()
def warm(selector: Selector, caches: dict[AttentionSpec, LayerCache], writer: CacheWriter, limits: StepLimits) -> int:
    """Run each backend that may be called, over a cache of each kind that is only read; returns how many steps that were.

    One that raises is named in the log, and raises again in the first step like it.
    """
    count = 0
    for spec, cache in caches.items():
        for num_tokens in powers(limits.max_num_tokens):
            _, k, v = _tensors(spec, num_tokens)
            writer(k, v, cache, torch.full((num_tokens,), -1, device=spec.device))
        for phase in Phase:
            for name in (selector.selection.names[phase], *selector.selection.others.get(phase, ())):
                backend = selector.instances[name][spec]
                try:
                    for step in backend.warmup_steps(phase, limits):
                        if fits(step, limits):
                            _run(backend, spec, cache, step)
                            count += 1
                except Exception as error:
                    log.warning("headway-vllm: warm-up of %s in %s: %s: %s", name, phase.value, type(error).__name__, error)
    selector.forget()
    return count


def _run(backend: AttentionBackend, spec: AttentionSpec, cache: LayerCache, step: Sequence[Lengths]) -> None:
    num_blocks, size = cache.geometry.num_blocks, cache.block_size
    metadata = AttentionMetadata.build(
        [each.query_len for each in step],
        [each.context_len for each in step],
        [[block % num_blocks for block in range(-(-(each.query_len + each.context_len) // size))] for each in step],
        size,
        spec.device,
        num_draft_tokens=[each.num_drafts for each in step],
        num_blocks=num_blocks,
    )
    q, k, v = _tensors(spec, metadata.num_tokens)
    out = torch.empty(q.shape, dtype=spec.dtype, device=spec.device)
    if metadata.phase is Phase.DECODE:
        backend.decode(q, cache, backend.plan(metadata), out)
    else:
        backend.prefill(q, k, v, cache, backend.plan(metadata), out)


def _tensors(spec: AttentionSpec, num_tokens: int) -> Sequence[Tensor]:
    """q, k and v as slices of one tensor, as a merged product leaves them."""
    rows = torch.zeros(num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
    first, last = spec.num_heads, spec.num_heads + spec.num_kv_heads
    return rows[:, :first], rows[:, first:last], rows[:, last:]
