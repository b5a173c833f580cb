"""An engine's figures as the list of metrics that vLLM's `LLM.get_metrics` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headway.core.engine.data.stats import EngineSnapshot

COUNTERS: Final = {
    "prompt_tokens": ("Tokens of prompts that were admitted.", "num_prompt_tokens"),
    "generation_tokens": ("Tokens that were written.", "num_output_tokens"),
    "prefix_cache_queries": ("Tokens of prompts that were looked up in the cache.", "num_prompt_tokens"),
    "prefix_cache_hits": ("Tokens of prompts that were found in the cache.", "num_cached_tokens"),
    "num_preemptions": ("Sequences that gave their blocks back and were computed again.", "num_preemptions"),
    "spec_decode_num_drafts": ("Guesses, of one token or several each, that were verified.", "num_drafts"),
    "spec_decode_num_draft_tokens": ("Guessed tokens that were verified.", "num_draft_tokens"),
    "spec_decode_num_accepted_tokens": ("Guessed tokens that were right.", "num_accepted_tokens"),
}
"""Name -> help text, field of EngineStats."""


@dataclass
class EngineMetric:
    """A figure. vLLM calls the class Metric."""

    name: str
    labels: dict[str, str]


@dataclass
class EngineCounter(EngineMetric):
    """A figure that only grows. vLLM calls the class Counter."""

    value: int


@dataclass
class EngineGauge(EngineMetric):
    """A figure of this moment. vLLM calls the class Gauge."""

    value: float


@dataclass
class EngineVector(EngineMetric):
    """Several counts under one name. vLLM calls the class Vector; no figure of Headway's is one."""

    values: list[int]


@dataclass
class EngineHistogram(EngineMetric):
    """Counts of values by upper bound. vLLM calls the class Histogram; the server's /metrics has those of requests."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(now: EngineSnapshot, model_name: str) -> list[EngineMetric]:
    """The figures of an engine, under the names that its server's /metrics has."""
    labels = {"model_name": model_name, "engine": "0"}
    used = now.num_used_blocks / now.num_blocks if now.num_blocks else 0.0
    gauges = {"num_requests_running": now.num_running, "num_requests_waiting": now.num_waiting, "kv_cache_usage_perc": used}
    return [
        *(EngineGauge(f"vllm:{name}", labels, value) for name, value in gauges.items()),
        *(EngineCounter(f"vllm:{name}", labels, getattr(now.totals, field)) for name, (_, field) in COUNTERS.items()),
    ]
