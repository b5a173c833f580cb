"""The engine's options, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.core.errors import ConfigError
from headway.core.sampling_params import SEED_RANGE, is_seed

BLOCK_MULTIPLE = 8
"""Every block size is a multiple of this: no kernel reads smaller steps."""


@dataclass(frozen=True)
class EngineConfig:
    """What `LLM` and the command line hand to the engine; names are vLLM's where it has them."""

    attn_backend: str = "auto"
    """auto, a backend's name, or "prefill=NAME,decode=NAME"."""
    attn_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Backend name -> option -> value."""
    kv_layout: str = "auto"
    block_size: int | None = None
    """Tokens in a block; None: the selector's choice."""
    max_model_len: int | None = None
    """Most tokens of prompt and output; None: what the model was made for, or what the pool holds if that is less."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step."""
    max_num_seqs: int = 256
    """Sequences of one step."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    kv_cache_memory: int | None = None
    """Bytes of the pool; None: a share of what is free."""
    seed: int = 0
    """Seeds requests that bring no seed of their own."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_memory"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(name, "a whole number of at least 1", repr(value))
        if not is_seed(self.seed):
            raise ConfigError("seed", SEED_RANGE, repr(self.seed))
        if self.block_size is not None and self.block_size % BLOCK_MULTIPLE:
            near = max(BLOCK_MULTIPLE, round(self.block_size / BLOCK_MULTIPLE) * BLOCK_MULTIPLE)
            raise ConfigError("block_size", f"a multiple of {BLOCK_MULTIPLE}", self.block_size, f"{near} is the nearest")

    def check_budget(self, max_model_len: int) -> None:
        """Check that every prompt can be scheduled.

        :raises ConfigError: chunked prefill is off and a prompt of max_model_len exceeds the budget.
        """
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                f"at least max_model_len={max_model_len} where chunked prefill is off",
                self.max_num_batched_tokens,
                "raise it, lower max_model_len, or turn chunked prefill on",
            )
