"""Engine options and their validation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args, get_type_hints

from headway.core.contract.adapters import AdapterSlots
from headway.core.contract.errors import ConfigError
from headway.core.contract.layer import BLOCK_MULTIPLE, INVARIANCES, Invariance
from headway.core.sampling.params import SEED_RANGE, is_seed
from headway.core.system.text import shown

if TYPE_CHECKING:
    import torch
    from pydantic import TypeAdapter

    from headway.core.select.request import BackendRequest

_MOST_SEQS = 2**20  # Maximum of max_num_seqs: host and device buffers have one row per sequence
_MOST_RANK = 512  # Maximum rank of an adapter, as in vLLM
_AT_LEAST_ONE: Final = (
    *("block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size"),
    *("max_loras", "max_lora_rank"),
)

MAX_DRAFT_TOKENS = 7
"""Maximum number of draft tokens per sequence and step. Together with the newest token they form the longest decode query."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine options, with vLLM's names. Their descriptions here are used for `LLM`'s keywords, the flags and docs/options.md."""

    attn_backend: Annotated[
        str | Mapping[str, str] | BackendRequest,
        'Attention backend: auto, NAME, or "prefill=NAME,decode=NAME"; for a kind of layers: "window:decode=NAME,full=NAME". '
        "hub:FOLDER or hub:OWNER/NAME[@VERSION] is a hub kernel.",
    ] = "auto"
    attn_options: Annotated[Mapping[str, Mapping[str, str]], "Options of attention backends: NAME -> key -> value."] = field(
        default_factory=dict
    )
    state_backend: Annotated[
        str | BackendRequest, 'Backend for recurrent (state) layers: auto, NAME, or "prefill=NAME,decode=NAME".'
    ] = "auto"
    workload: Annotated[str, "Expected workload, used by auto: chat, long, batch, or BATCHxINPUT+OUTPUT such as 16x1024+256."] = (
        "chat"
    )
    kv_layout: Annotated[str, "KV cache layout: auto, nhd, hnd, vllm_5d, nhd_int8, or a plugin's."] = "auto"
    kv_cache_dtype: Annotated[
        str | Mapping[str, str],
        "KV cache dtype: auto (the model's), fp8_e4m3 or int8_per_token_head; for a kind of layers: full=fp8_e4m3,window=auto.",
    ] = "auto"
    block_size: Annotated[
        int | None, "Number of tokens per KV cache block, a multiple of 8. Default: selected automatically."
    ] = None
    max_model_len: Annotated[
        int | None,
        "Maximum length of prompt plus output, in tokens. Default: the model's limit, or less if the cache is smaller.",
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, "Maximum number of tokens per step; longer prompts are split. Default: 16,384 on a GPU, 2,048 on a CPU."
    ] = None
    max_num_seqs: Annotated[int, "Maximum number of sequences per step."] = 256
    tensor_parallel_size: Annotated[int, "Number of tensor-parallel ranks, each a process with its own GPU."] = 1
    scheduling_policy: Annotated[
        str, "Order of requests: fcfs (first come, first served) or priority (lower numbers first, then fcfs)."
    ] = "fcfs"
    enable_prefix_caching: Annotated[bool, "Reuse the KV cache of prompts with a common prefix."] = True
    enable_prompt_embeds: Annotated[bool, "Accept embeddings as prompts, in the form {'prompt_embeds': tensor}."] = False
    enable_chunked_prefill: Annotated[bool, "Split a long prompt into chunks over several steps."] = True
    free_window_blocks: Annotated[bool, "Free cache blocks that have left a layer's sliding window."] = True
    kv_cache_memory: Annotated[
        int | str | None, "Size of the KV cache, in bytes or with a unit, such as 2GiB. Default: as much as fits in memory."
    ] = None
    preemption_mode: Annotated[
        str,
        "How to preempt a request when the KV cache is full: recompute, swap (to host memory) or auto (the cheaper method).",
    ] = "auto"
    kv_offload_size: Annotated[
        int | str | None,
        "Host memory for blocks evicted from the KV cache, in bytes or with a unit, such as 4GiB. Default: none.",
    ] = None
    kv_offload_dir: Annotated[
        str | None, "Folder that keeps evicted blocks on disk across restarts. Needs kv_offload_size. Default: none."
    ] = None
    kv_offload_dir_size: Annotated[
        int | str, "Maximum total size of files in kv_offload_dir, in bytes or with a unit, such as 64GiB."
    ] = "16GiB"
    gpu_memory_utilization: Annotated[float, "Fraction of GPU memory for weights, activations and KV cache."] = 0.9
    enforce_eager: Annotated[bool, "Do not use CUDA graphs."] = False
    cudagraph_capture_sizes: Annotated[
        Sequence[int] | None, "Decode batch sizes to capture as CUDA graphs. Default: sizes up to max_num_seqs."
    ] = None
    async_scheduling: Annotated[
        bool | None, "Launch a step before reading the previous step's result. Default: True on a GPU."
    ] = None
    speculate: Annotated[
        str | None,
        "Source of draft tokens, used only while that is faster: ngram, suffix, or a plugin's proposer. Default: none.",
    ] = None
    num_speculative_tokens: Annotated[int, "Maximum number of draft tokens per sequence and step, 1 to 7."] = 7
    enable_lora: Annotated[bool, "Accept requests with LoRA adapters. A batch can use several adapters."] = False
    max_loras: Annotated[int, "Maximum number of LoRA adapters per step. Memory for them is allocated at the start."] = 1
    max_lora_rank: Annotated[int, "Maximum rank of a LoRA adapter."] = 16
    max_cpu_loras: Annotated[int | None, "Number of unused LoRA adapters to cache in host memory. Default: max_loras."] = None
    check_books: Annotated[bool, "Check after every step that each KV cache block is free, cached or in use. Slow."] = False
    deterministic: Annotated[bool, "Make the result of a request bitwise identical in every batch. Slower."] = False
    deterministic_level: Annotated[
        str,
        "What deterministic keeps: batch (a request has the same bits in every batch) or full (also in every chunk, phase and "
        "prefix hit, after preemption, and with drafts).",
    ] = "batch"
    max_logprobs: Annotated[
        int, "Maximum log-probabilities per token that a request may ask for. -1 means the whole vocabulary."
    ] = 20
    seed: Annotated[int, "Random seed for requests without a seed."] = 0
    record_steps: Annotated[int, "Number of latest steps to keep for records, which headway replay checks. 0 keeps none."] = 0
    record_tensors: Annotated[bool, "Keep the queries and outputs of recorded steps too. Slower: without CUDA graphs."] = False
    record_text: Annotated[bool, "Write token ids to records."] = False
    record_folder: Annotated[str | None, "Folder of records. Default: records in Headway's cache folder."] = None
    record_bytes: Annotated[int | str, "Maximum size of the tensors in a record, in bytes or with a unit, such as 64MiB."] = (
        "3MiB"
    )

    def __post_init__(self) -> None:
        """Check every option, and replace texts with parsed values. :raises ConfigError: if a value or combination is invalid."""
        from headway.core.select.request import BackendRequest, Workload, parse_cache_dtypes  # the help needs no torch

        check_kinds(self)
        self._set("attn_backend", BackendRequest.parse(self.attn_backend))
        self._set("state_backend", BackendRequest.parse(self.state_backend, "state_backend"))
        if self.backend_request.names_kind("state") and str(self.state_backend) != "auto":
            raise ConfigError("attn_backend", "one choice for state layers", f"state_backend={self.state_backend} as well")
        options = self.attn_options
        if not isinstance(options, Mapping) or not all(isinstance(own, Mapping) for own in options.values()):
            raise ConfigError("attn_options", 'a mapping such as {"BACKEND": {"option": "value"}}', shown(options))
        if self.kv_cache_memory is not None:
            self._set("kv_cache_memory", parse_bytes("kv_cache_memory", self.kv_cache_memory))
        self._check_offload()
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, "a whole number of at least 1", repr(value))
        if self.max_num_seqs > _MOST_SEQS:
            raise ConfigError("max_num_seqs", f"a whole number of at most {_MOST_SEQS}", self.max_num_seqs)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError("gpu_memory_utilization", "a number above 0 and at most 1", repr(self.gpu_memory_utilization))
        if self.max_logprobs < -1:
            raise ConfigError("max_logprobs", "a whole number of at least -1", repr(self.max_logprobs))
        self._check_capture_sizes()
        self._check_ranks()
        self._check_adapters()
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ConfigError("scheduling_policy", "fcfs or priority", repr(self.scheduling_policy))
        Workload.parse(self.workload)
        dtypes = parse_cache_dtypes(self.kv_cache_dtype)
        self._set("kv_cache_dtype", ",".join(f"{kind}={name}" if kind else name for kind, name in dtypes.items()))
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFT_TOKENS:
            need = f"a whole number from 1 to {MAX_DRAFT_TOKENS}"
            raise ConfigError("num_speculative_tokens", need, repr(self.num_speculative_tokens))
        if self.deterministic_level not in INVARIANCES:
            raise ConfigError("deterministic_level", " or ".join(INVARIANCES), repr(self.deterministic_level))
        if not self.deterministic and self.deterministic_level != "batch":
            raise ConfigError(f"deterministic_level={self.deterministic_level}", "deterministic", "it off", "--deterministic")
        if self.speculate is not None and self.invariance is Invariance.BATCH:
            hint = "leave one of them out, or deterministic_level='full'"
            raise ConfigError("speculate", "steps whose shape changes no bit, which deterministic forbids", self.speculate, hint)
        if not is_seed(self.seed):
            raise ConfigError("seed", SEED_RANGE, repr(self.seed))
        if self.block_size is not None:
            check_block_size(self.block_size)
        self._check_records()

    def _check_records(self) -> None:
        self._set("record_bytes", parse_bytes("record_bytes", self.record_bytes))
        if self.record_folder is not None and Path(self.record_folder).exists() and not Path(self.record_folder).is_dir():
            raise ConfigError("record_folder", "a folder", f"the file {self.record_folder}")
        if self.record_steps < 0:
            raise ConfigError("record_steps", "a whole number of at least 0", repr(self.record_steps))
        if self.record_tensors and not self.record_steps:
            raise ConfigError("record_tensors", "record_steps of at least 1", "0", "record_steps=16")
        if self.record_steps and self.tensor_parallel_size > 1:
            raise ConfigError("record_steps", "tensor_parallel_size=1", self.tensor_parallel_size, "leave one of them out")

    @property
    def invariance(self) -> Invariance:
        """Level that a token's logits must keep."""
        return INVARIANCES[self.deterministic_level] if self.deterministic else Invariance.NONE

    def _set(self, option: str, value: object) -> None:
        """Replace an option of the frozen object with its parsed value."""
        object.__setattr__(self, option, value)

    def _check_offload(self) -> None:
        if self.preemption_mode not in ("auto", "recompute", "swap"):
            raise ConfigError("preemption_mode", "auto, recompute or swap", repr(self.preemption_mode))
        self._set("kv_offload_dir_size", parse_bytes("kv_offload_dir_size", self.kv_offload_dir_size))
        if self.kv_offload_size is None:
            need = "kv_offload_size, the host memory that blocks are copied to"
            if self.preemption_mode == "swap":
                raise ConfigError("preemption_mode=swap", need, "none", "kv_offload_size='4GiB', or preemption_mode='auto'")
            if self.kv_offload_dir is not None:
                raise ConfigError("kv_offload_dir", need + " on their way", "none", "kv_offload_size='4GiB'")
            return
        self._set("kv_offload_size", parse_bytes("kv_offload_size", self.kv_offload_size))
        if self.invariance is Invariance.BATCH or not self.enable_prefix_caching:
            why = "deterministic, which has none" if self.deterministic else "enable_prefix_caching=False"
            raise ConfigError("kv_offload_size", "the prefix cache, by whose names blocks are found again", why)

    def _check_ranks(self) -> None:
        if self.tensor_parallel_size > 1 and self.kv_offload_size is not None:
            option, need = f"tensor_parallel_size={self.tensor_parallel_size}", "a cache in the ranks' own memory"
            raise ConfigError(option, need, "kv_offload_size, which copies blocks of one rank", "leave one of them out")

    def _check_adapters(self) -> None:
        if self.max_lora_rank > _MOST_RANK:
            raise ConfigError("max_lora_rank", f"a whole number of at most {_MOST_RANK}", self.max_lora_rank)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError("max_cpu_loras", f"a whole number of at least max_loras={self.max_loras}", self.max_cpu_loras)

    def _check_capture_sizes(self) -> None:
        sizes = self.cudagraph_capture_sizes
        if sizes is None:
            return
        listed = tuple(sizes) if isinstance(sizes, Iterable) else ()
        if not listed or not all(map(_is_count, listed)):
            raise ConfigError(
                "cudagraph_capture_sizes", "whole numbers of at least 1", repr(sizes), "enforce_eager turns graphs off"
            )
        if min(listed) > self.max_num_seqs:
            raise ConfigError("cudagraph_capture_sizes", f"a size of at most max_num_seqs={self.max_num_seqs}", repr(sizes))
        self._set("cudagraph_capture_sizes", listed)

    @property
    def backend_request(self) -> BackendRequest:
        """The parsed option `attn_backend`."""
        assert not isinstance(self.attn_backend, (str, Mapping))
        return self.attn_backend

    @property
    def state_request(self) -> BackendRequest:
        """The choice of backends for state layers: `state_backend`, or the kind `state` of `attn_backend`."""
        assert not isinstance(self.state_backend, str)
        return self.backend_request.for_states(self.state_backend)

    @property
    def adapter_slots(self) -> AdapterSlots | None:
        """Number and size of the adapter slots. None without enable_lora."""
        return AdapterSlots(self.max_loras, self.max_lora_rank) if self.enable_lora else None

    @property
    def offload_bytes(self) -> tuple[int, int]:
        """`kv_offload_size` (0 for none) and `kv_offload_dir_size`, in bytes."""
        assert not isinstance(self.kv_offload_size, str)
        assert not isinstance(self.kv_offload_dir_size, str)
        return self.kv_offload_size or 0, self.kv_offload_dir_size

    @property
    def pool_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes. None means as much as fits in memory."""
        assert not isinstance(self.kv_cache_memory, str)
        return self.kv_cache_memory

    def for_device(self, device: torch.device) -> EngineConfig:
        """Return the options with device-dependent defaults filled in."""
        gpu = device.type == "cuda"
        tokens, overlap = self.max_num_batched_tokens, self.async_scheduling
        return replace(
            self,
            max_num_batched_tokens=(16384 if gpu else 2048) if tokens is None else tokens,
            async_scheduling=gpu if overlap is None else overlap,
        )

    @property
    def step_tokens(self) -> int:
        """`max_num_batched_tokens` as an integer, after `for_device` has filled in its default."""
        assert self.max_num_batched_tokens is not None
        return self.max_num_batched_tokens

    def check_budget(self, max_model_len: int) -> None:
        """Check that every prompt can be scheduled.
        :raises ConfigError: if chunked prefill is off and max_model_len exceeds the token budget."""
        if not self.enable_chunked_prefill and self.step_tokens < max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                f"at least max_model_len={max_model_len} where chunked prefill is off",
                self.step_tokens,
                "raise it, lower max_model_len, or turn chunked prefill on",
            )


_NEEDS: Final = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", NoneType: "None"}
"""Type of an option -> its description in the error for a wrong value."""
_WORD: Final = 2**63  # Maximum size of any number, on any machine


@cache
def _plain_options(options: type) -> Mapping[str, tuple[TypeAdapter[Any], str]]:
    """Return a mapping from option name to (validator, description of valid values), without options that have their own
    parser."""
    from pydantic import ConfigDict, TypeAdapter  # imported here: the command line's help does not need it

    later = dict.fromkeys(("Kernel", "BackendRequest", "Registry"), object)
    found = {}
    for name, hint in get_type_hints(options, localns=later).items():
        kinds = get_args(hint) or (hint,)
        if set(kinds) <= set(_NEEDS) and not {int, str} <= set(kinds):
            found[name] = TypeAdapter(hint, config=ConfigDict(strict=True)), " or ".join(_NEEDS[kind] for kind in kinds)
    return found


def check_kinds(options: Any) -> None:
    """Check options against a dataclass's annotations; paths become strings.

    :raises ConfigError: if an option is invalid.
    """
    from pydantic import ValidationError

    for name, (kind, need) in _plain_options(options.__class__).items():
        value = getattr(options, name)
        if isinstance(value, PathLike) and _NEEDS[str] in need:
            value = str(value)
            object.__setattr__(options, name, value)
        try:
            kind.validate_python(value)
        except ValidationError:
            raise ConfigError(name, need, shown(value)) from None
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(name, need, shown(value))
        if isinstance(value, int) and not -_WORD <= value < _WORD:
            raise ConfigError(name, "a whole number of at most 64 bits", shown(value))


def check_block_size(size: int, option: str = "block_size") -> None:
    """Check the number of tokens in a cache block. :raises ConfigError: if no kernel supports blocks of this size."""
    if size < 1 or size % BLOCK_MULTIPLE:
        near = max(BLOCK_MULTIPLE, round(size / BLOCK_MULTIPLE) * BLOCK_MULTIPLE)
        raise ConfigError(option, f"a multiple of {BLOCK_MULTIPLE}", size, f"{near} is the nearest")


def parse_bytes(what: str, value: object) -> int:
    """Return a size in bytes from a number or a text such as "2GiB" (GB is 1000**3). what: name of the option.
    :raises ConfigError: if the value is not a positive size."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = 0 if isinstance(value, (bool, float)) else int(TypeAdapter(ByteSize).validate_python(value))
    except (ValidationError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(what, "a positive number of bytes such as 2GiB or 512MiB", repr(value))
    return size


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
