"""Deterministic mode: the bits of a request's logits hang on the request alone, not on what else is in its batch.

What a batch changes elsewhere is taken out here: the backend (one, pinned, and asked to be batch invariant), how a prompt is cut
into steps, preemption, and prefix hits. A model does its share if its layers' specs ask to be batch invariant.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import replace

from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.config import EngineConfig
from headway.core.engine.scheduler import Scheduler
from headway.core.engine.sequence import Sequence
from headway.core.select.request import parse_backend_request
from headway.core.select.selector import BackendSource, Selector

log = logging.getLogger("headway")


def prepare(source: BackendSource, specs: Items[AttentionSpec], config: EngineConfig) -> EngineConfig:
    """The options with one backend pinned and the prefix cache off.

    :raises ConfigError: the model's layers do not ask to be batch invariant.
    """
    if not all(spec.batch_invariant for spec in specs):
        need = "a model that keeps its rows' bits, and whose attention layers ask for the same"
        raise ConfigError("deterministic", need, specs[0], "make it with batch_invariant=True, as LLM does")
    pinned = pin(source, specs, config)
    log.info("deterministic: attention pinned to %s; no prefix cache, no preemption, prompts cut at fixed places", pinned)
    return replace(config, attn_backend=pinned, enable_prefix_caching=False)


def pin(source: BackendSource, specs: Items[AttentionSpec], config: EngineConfig) -> str:
    """--attn-backend with each auto replaced by one backend, the first by rank in decode that declares to be batch invariant.

    One for PREFILL and EXTEND in any case: whether a step of prompts counts as the one or the other hangs on its neighbours.
    Where no backend will do, the request as it is: the selector's refusal has the reasons.
    """
    request = parse_backend_request(config.attn_backend)
    if "auto" not in request.values():
        return config.attn_backend
    for name in source.rank(specs[0], Phase.DECODE, list(source.backends)):
        prefill, decode = (name if request[phase] == "auto" else request[phase] for phase in (Phase.PREFILL, Phase.DECODE))
        text = name if prefill == decode else f"prefill={prefill},decode={decode}"
        try:
            Selector(source, specs, text, config.kv_layout, config.block_size, config.attn_options)
        except UnsupportedError:
            continue
        return text
    return config.attn_backend


class IndependentScheduler(Scheduler):
    """Takes every sequence through the same steps, whoever runs beside it.

    A prompt's chunks have a fixed size, half the budget, so that decodes have room beside one; a chunk that does not fit waits
    whole. A sequence is admitted once the pool has room for all of it: nothing is preempted, for what it would recompute as a
    prompt are other bits than those it decoded.
    """

    def _num_tokens(self, seq: Sequence, budget: int) -> int:
        count = min(seq.num_to_compute, self._chunk) if self.enable_chunked_prefill else seq.num_to_compute
        return count if count <= budget else 0

    def _room(self, seq: Sequence, count: int) -> int:
        return max(count, seq.max_len - seq.num_computed)

    @property
    def _chunk(self) -> int:
        return max(self.max_num_batched_tokens // 2, 1)
