"""The engine's options, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from headway.core.contract.errors import ConfigError
from headway.core.sampling.params import SEED_RANGE, is_seed
from headway.core.select.workload import Workload

BLOCK_MULTIPLE = 8
"""Every block size is a multiple of this: no kernel reads smaller steps."""


@dataclass(frozen=True)
class EngineConfig:
    """What `LLM` and the command line hand to the engine; names are vLLM's where it has them."""

    attn_backend: str = "auto"
    """auto, a backend's name, or "prefill=NAME,decode=NAME"."""
    attn_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Backend name -> option -> value."""
    workload: str = "chat"
    """What `auto` expects to serve: chat, long, batch, or BATCHxINPUT+OUTPUT; a measured table's layout is chosen for it."""
    kv_layout: str = "auto"
    block_size: int | None = None
    """Tokens in a block; None: the selector's choice."""
    max_model_len: int | None = None
    """Most tokens of prompt and output; None: what the model was made for, or what the pool holds if that is less."""
    max_num_batched_tokens: int | None = None
    """Tokens of one step; None: 2,048 on a CPU and 16,384 on a GPU, which a smaller product of a prompt leaves half idle."""
    max_num_seqs: int = 256
    """Sequences of one step."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    kv_cache_memory: int | None = None
    """Bytes of the pool; None: on a CPU a share of what is free, on a GPU what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, activations and cache."""
    enforce_eager: bool = False
    """Launch every step kernel by kernel: no CUDA graphs."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Batch sizes whose decode is captured; None: 1, 2, 4, 8 and steps of 8 up to max_num_seqs and 256."""
    async_scheduling: bool | None = None
    """Launch a step before the one before has been read; None: on a GPU, where it hides the host's work."""
    deterministic: bool = False
    """The bits of a request's logits do not depend on what else is in its batch; see headway.core.engine.deterministic."""
    seed: int = 0
    """Seeds requests that bring no seed of their own."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_memory"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(name, "a whole number of at least 1", repr(value))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError("gpu_memory_utilization", "a number above 0 and at most 1", repr(self.gpu_memory_utilization))
        sizes = self.cudagraph_capture_sizes
        if sizes is not None and (not sizes or any(not isinstance(size, int) or size < 1 for size in sizes)):
            raise ConfigError(
                "cudagraph_capture_sizes", "whole numbers of at least 1", repr(sizes), "enforce_eager turns graphs off"
            )
        Workload.parse(self.workload)
        if sizes is not None and min(sizes) > self.max_num_seqs:
            raise ConfigError("cudagraph_capture_sizes", f"a size of at most max_num_seqs={self.max_num_seqs}", repr(sizes))
        if not is_seed(self.seed):
            raise ConfigError("seed", SEED_RANGE, repr(self.seed))
        if self.block_size is not None and self.block_size % BLOCK_MULTIPLE:
            near = max(BLOCK_MULTIPLE, round(self.block_size / BLOCK_MULTIPLE) * BLOCK_MULTIPLE)
            raise ConfigError("block_size", f"a multiple of {BLOCK_MULTIPLE}", self.block_size, f"{near} is the nearest")

    def for_device(self, device: torch.device) -> EngineConfig:
        """With what hangs on the device filled in."""
        gpu = device.type == "cuda"
        tokens, overlap = self.max_num_batched_tokens, self.async_scheduling
        return replace(
            self,
            max_num_batched_tokens=(16384 if gpu else 2048) if tokens is None else tokens,
            async_scheduling=gpu if overlap is None else overlap,
        )

    @property
    def step_tokens(self) -> int:
        """`max_num_batched_tokens`, once `for_device` has filled it in."""
        assert self.max_num_batched_tokens is not None
        return self.max_num_batched_tokens

    def check_budget(self, max_model_len: int) -> None:
        """Check that every prompt can be scheduled.

        :raises ConfigError: chunked prefill is off and a prompt of max_model_len exceeds the budget.
        """
        if not self.enable_chunked_prefill and self.step_tokens < max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                f"at least max_model_len={max_model_len} where chunked prefill is off",
                self.step_tokens,
                "raise it, lower max_model_len, or turn chunked prefill on",
            )
