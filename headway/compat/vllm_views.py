"""Settings and metrics of an engine under vLLM's names, for vLLM's programs and logits processors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from headway.core.engine.data.stats import EngineSnapshot

if TYPE_CHECKING:
    import torch

    from headway.engine_args import EngineArgs
    from headway.models.loader import LoadedModel


class UsageContext(Enum):
    """Context in which an engine is started, for vLLM's usage reports; Headway sends none."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class CompilationConfig(SimpleNamespace):
    """The option `compilation_config` as an object. Only cudagraph_mode and cudagraph_capture_sizes are used."""


@dataclass
class ModelSettings:
    """Model configuration, as `VllmConfig.model_config`."""

    model: str
    tokenizer: str
    dtype: torch.dtype
    max_model_len: int
    seed: int
    vocab_size: int
    folder: Path

    def get_vocab_size(self) -> int:
        """Return the size of the vocabulary."""
        return self.vocab_size

    @cached_property
    def hf_config(self) -> Any:
        """transformers' configuration of the model."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder, trust_remote_code=False)


@dataclass
class VllmConfig:
    """Configuration of an engine, under vLLM's names."""

    model_config: ModelSettings
    scheduler_config: SimpleNamespace
    parallel_config: SimpleNamespace
    cache_config: SimpleNamespace | None = None
    """Settings of the KV cache. None until the engine has allocated its cache."""
    speculative_config: None = None
    lora_config: None = None
    additional_config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, args: EngineArgs, model: LoadedModel) -> VllmConfig:
        """Return the settings that describe these options and a loaded model."""
        decoder = model.decoder
        config = args.engine_config().for_device(decoder.device)
        longest, ranks = args.max_model_len or decoder.max_position_embeddings, args.tensor_parallel_size
        tokenizer, size = args.tokenizer or args.model, decoder.vocab_size
        return cls(
            ModelSettings(args.model, tokenizer, decoder.dtype, longest, args.seed, size, model.folder),
            SimpleNamespace(
                max_num_seqs=args.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens or 0,
                max_model_len=longest,
                async_scheduling=bool(config.async_scheduling),
            ),
            SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1, data_parallel_size=1, world_size=ranks),
        )


COUNTERS: Final = {
    "prompt_tokens": ("Prompt tokens of admitted requests.", "num_prompt_tokens"),
    "generation_tokens": ("Generated tokens.", "num_output_tokens"),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "num_prompt_tokens"),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "num_cached_tokens"),
    "num_preemptions": ("Sequences that were preempted and recomputed.", "num_preemptions"),
    "spec_decode_num_drafts": ("Drafts, of one or more tokens each, that were verified.", "num_drafts"),
    "spec_decode_num_draft_tokens": ("Draft tokens that were verified.", "num_draft_tokens"),
    "spec_decode_num_accepted_tokens": ("Draft tokens that were accepted.", "num_accepted_tokens"),
}
"""Name of a counter -> its help text and its field in EngineStats."""


@dataclass
class EngineMetric:
    """A metric. vLLM calls the class Metric."""

    name: str
    labels: dict[str, str]


@dataclass
class EngineCounter(EngineMetric):
    """A metric that only grows. vLLM calls the class Counter."""

    value: int


@dataclass
class EngineGauge(EngineMetric):
    """A metric with a current value. vLLM calls the class Gauge."""

    value: float


@dataclass
class EngineVector(EngineMetric):
    """Several counts under one name. vLLM calls the class Vector; Headway does not use it."""

    values: list[int]


@dataclass
class EngineHistogram(EngineMetric):
    """Counts of values by upper bound. vLLM calls the class Histogram; only the server's /metrics has histograms."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(now: EngineSnapshot, model_name: str) -> list[EngineMetric]:
    """Return the metrics of an engine, with the names of the server's /metrics."""
    labels = {"model_name": model_name, "engine": "0"}
    used = now.num_used_blocks / now.num_blocks if now.num_blocks else 0.0
    gauges = {"num_requests_running": now.num_running, "num_requests_waiting": now.num_waiting, "kv_cache_usage_perc": used}
    return [
        *(EngineGauge(f"vllm:{name}", labels, value) for name, value in gauges.items()),
        *(EngineCounter(f"vllm:{name}", labels, getattr(now.totals, field)) for name, (_, field) in COUNTERS.items()),
    ]
