"""An engine's settings in the places where vLLM's programs and logits processors read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from headway.engine_args import EngineArgs
    from headway.models.loader import LoadedModel


class UsageContext(Enum):
    """Who starts an engine; Headway reports to nobody."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class CompilationConfig(SimpleNamespace):
    """The option `compilation_config` as an object: cudagraph_mode and cudagraph_capture_sizes are read."""


@dataclass
class ModelSettings:
    """`VllmConfig.model_config`."""

    model: str
    tokenizer: str
    dtype: torch.dtype
    max_model_len: int
    seed: int
    vocab_size: int
    folder: Path

    def get_vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.vocab_size

    @cached_property
    def hf_config(self) -> Any:
        """transformers' configuration of the model."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder, trust_remote_code=False)


@dataclass
class CacheSettings:
    """`VllmConfig.cache_config`."""

    block_size: int
    num_gpu_blocks: int
    cache_dtype: str
    gpu_memory_utilization: float
    enable_prefix_caching: bool


@dataclass
class SchedulerSettings:
    """`VllmConfig.scheduler_config`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    async_scheduling: bool


@dataclass
class ParallelSettings:
    """`VllmConfig.parallel_config`."""

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """Ranks that hold the model together."""
        return self.tensor_parallel_size


@dataclass
class VllmConfig:
    """What an engine runs with, under vLLM's names."""

    model_config: ModelSettings
    scheduler_config: SchedulerSettings
    parallel_config: ParallelSettings
    cache_config: CacheSettings | None = None
    """None before the engine has its cache."""
    speculative_config: None = None
    lora_config: None = None
    additional_config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, args: EngineArgs, model: LoadedModel, max_model_len: int | None = None) -> VllmConfig:
        """The settings by the options and the loaded model. max_model_len: the engine's; None: the longest that it may be."""
        decoder = model.decoder
        config = args.engine_config().for_device(decoder.device)
        longest = max_model_len or args.max_model_len or decoder.max_position_embeddings
        return cls(
            ModelSettings(
                args.model,
                args.tokenizer or args.model,
                decoder.dtype,
                longest,
                args.seed,
                decoder.vocab_size,
                model.folder,
            ),
            SchedulerSettings(args.max_num_seqs, config.max_num_batched_tokens or 0, longest, bool(config.async_scheduling)),
            ParallelSettings(args.tensor_parallel_size),
        )
