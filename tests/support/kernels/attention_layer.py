"""One attention layer of an engine on the backend `triton`: what a step of it launches, and what Triton compiles that for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headway.backends.triton.backend import TritonAttention
from headway.backends.triton.write_kernel import Writer
from headway.core.contract.backend import Lengths, StepLimits, fits
from headway.core.contract.layout import CacheGeometry, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec


def variant_of(kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any]) -> tuple[object, ...]:
    """All that Triton compiles a kernel for. constants: with num_warps and other options."""
    parts: list[object] = [kernel.__name__, tuple(sorted((name, str(value)) for name, value in constants.items()))]
    for parameter, argument in zip(kernel.params, arguments, strict=False):
        if isinstance(argument, torch.Tensor):
            aligned = not parameter.do_not_specialize_on_alignment and argument.data_ptr() % 16 == 0
            parts.append((str(argument.dtype), aligned))
        elif isinstance(argument, int) and not parameter.do_not_specialize:
            parts.append((argument == 1, argument % 16 == 0))
        elif isinstance(argument, int):
            parts.append("int")
        elif isinstance(argument, float) or argument is None:
            parts.append(type(argument).__name__)
        else:  # a tensor descriptor
            parts.append((type(argument).__name__, tuple(argument.block_shape)))
    return tuple(parts)


class AttentionLayer:
    """An attention layer: its backend, its writer, and a step's tensors with the strides of a merged projection."""

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, limits: StepLimits) -> None:
        self.spec, self.block_size, self.limits = spec, block_size, limits
        self.backend, self.writer = TritonAttention(spec, layout, block_size), Writer()
        num_blocks = -(-limits.max_model_len // block_size) + 1
        self.cache: LayerCache = layout.allocate(CacheGeometry.of(spec, num_blocks, block_size))
        heads, kv_heads, tokens = spec.num_heads, spec.num_kv_heads, limits.max_num_tokens

        def rows(*shape: int) -> torch.Tensor:
            return torch.empty(tokens, *shape, dtype=spec.dtype, device=spec.device)

        if spec.value_in_key:
            self._k = rows(kv_heads, spec.head_dim)
            self._q, self._v = rows(heads, spec.head_dim), self._k[..., : spec.v_head_dim]
        elif spec.head_dim != spec.v_head_dim:
            self._q, self._k = rows(heads + kv_heads, spec.head_dim).split([heads, kv_heads], dim=1)
            self._v = rows(kv_heads, spec.v_head_dim)
        else:
            self._q, self._k, self._v = rows(heads + 2 * kv_heads, spec.head_dim).split([heads, kv_heads, kv_heads], dim=1)

    def step(self, query_lens: list[int], context_lens: list[int], drafts: list[int]) -> None:
        """Launch what an engine launches for one layer."""
        ends = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
        tables = [list(range(-(-end // self.block_size))) for end in ends]
        device = self.spec.device
        step = AttentionMetadata.build(query_lens, context_lens, tables, self.block_size, device, num_draft_tokens=drafts)
        q, k, v = (tensor[: step.num_tokens] for tensor in (self._q, self._k, self._v))
        out = q.new_empty((step.num_tokens, self.spec.num_heads, self.spec.v_head_dim))
        alone = step.num_prefills == 0 and step.max_query_len == 1
        if not self.spec.dense and not (alone and self.backend.decode_writes):
            self.writer(k, v, self.cache, step.slot_mapping)
        start = 0
        for view in (step.prefill, step.decode):
            if view is None:
                continue
            rows = slice(start, start + view.num_tokens)
            plan = self.backend.plan(view)
            if view.phase is not Phase.DECODE:
                self.backend.prefill(q[rows], k[rows], v[rows], self.cache, plan, out[rows])
            elif alone and self.backend.decode_writes:
                self.backend.write_and_decode(q, k, v, self.cache, plan, out)
            else:
                self.backend.decode(q[rows], self.cache, plan, out[rows])
            start += view.num_tokens

    def warm_up(self) -> None:
        """As core/engine/execution/warmup.py does."""
        for phase in Phase:
            if self.spec.dense and phase is not Phase.PREFILL:
                continue
            for step in self.backend.warmup_steps(phase, self.limits):
                for whole in (step, [Lengths(1, 0), *step]) if phase is Phase.DECODE else (step,):
                    if fits(whole, self.limits):
                        self.step(*map(list, zip(*whole, strict=True)))
        for count in range(1, self.limits.max_num_tokens + 1, 7):
            self.step([count], [0], [0])
