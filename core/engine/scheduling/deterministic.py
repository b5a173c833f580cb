"""Deterministic mode: a request's logits depend, bit for bit, only on the request, not on the other requests in its batch.

Level BATCH fixes everything outside the model that depends on the batch: the backend (pinned and batch-invariant), the boundaries
of prompt chunks, preemption, and prefix hits. Level PHASE pins backends for which none of these changes a bit, and schedules as
usual. The model's kernels keep a level if the specs of its layers require it.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.layer import Invariance
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ATTENTION
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.select.kernels import Kernels
from headway.core.select.request import BackendRequest, LayerSpecs
from headway.core.select.selector import Selector

log = logging.getLogger("headway")


def prepare_deterministic(source: Kernels, layers: LayerSpecs, config: EngineConfig) -> EngineConfig:
    """Return the options with one backend pinned and, at level BATCH, the prefix cache disabled.

    :raises ConfigError: if the layers do not require the level, or if the level needs one backend for all phases.
    """
    level = config.invariance
    specs: list[AttentionSpec | StateSpec] = [*layers.cached, *layers.states]
    for spec in specs:
        if spec.invariance < level:
            need = "a model that keeps its rows' bits, and whose layers ask for the same"
            raise ConfigError("deterministic", need, spec, f"make it with invariance=Invariance.{level.name}, as LLM does")
    pinned = pin(source, layers, config)
    if level is Invariance.PHASE:
        for own in layers.requests(pinned).values():
            if own.prefill != own.decode:
                need = "one backend for all phases of a layer, with deterministic_level=full"
                raise ConfigError("attn_backend", need, f"prefill={own.prefill},decode={own.decode}")
        log.info("deterministic: attention pinned to %s, whose bits depend only on a token's position and keys", pinned)
        return replace(config, attn_backend=pinned)
    log.info("deterministic: attention pinned to %s; no prefix cache, no preemption, prompts split at fixed positions", pinned)
    return replace(config, attn_backend=pinned, enable_prefix_caching=False)


def pin(source: Kernels, layers: LayerSpecs, config: EngineConfig) -> BackendRequest:
    """Return --attn-backend with `auto` replaced by one backend: the first in the decode ranking that is batch-invariant.

    PREFILL and EXTEND always get the same backend, because the phase of a prompt depends on the other sequences in the step. If
    no backend is suitable, the request is returned unchanged, and the selector's error gives the reasons.
    """
    requested = config.backend_request
    if not layers.cached or not layers.auto_phases(requested):
        return requested
    kernels = source.of(ATTENTION)
    for name in kernels.rank(layers.cached[0], Phase.DECODE, list(kernels.entries)):
        pinned = requested.pinned(name)
        try:
            Selector(
                source, layers, pinned, kv_layout=config.kv_layout, block_size=config.block_size, options=config.attn_options
            )
        except UnsupportedError:
            continue
        return pinned
    return requested


class IndependentScheduler(Scheduler):
    """Scheduler that runs every sequence through the same steps, regardless of the other sequences.

    A prompt's chunks have a fixed size: half the token budget, which leaves room for decodes. A chunk that does not fit in a step
    waits instead of being split. A sequence is admitted once the pool has pages for its maximum length. No sequence is preempted,
    because a preempted sequence would recompute decoded tokens as a prompt, with different bits.
    """

    def _num_tokens(self, seq: Sequence, budget: int) -> int:
        count = min(seq.num_to_compute, self._chunk) if self.enable_chunked_prefill else seq.num_to_compute
        return count if count <= budget else 0

    def _tokens_to_reserve(self, seq: Sequence, count: int) -> int:
        return max(count, seq.max_len - seq.num_computed)

    @property
    def _chunk(self) -> int:
        return max(self.max_num_batched_tokens // 2, 1)
