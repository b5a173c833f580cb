"""vLLM's vocabulary: options of its `EngineArgs`, keywords of its methods, and how Headway handles each."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from headway.core.contract.errors import ConfigError, refuse_unknown
from headway.core.engine.data.config import MAX_DRAFT_TOKENS
from headway.core.system.text import shown

log = logging.getLogger("headway")

TEXT_ONLY: Final = "not supported yet, because models read text alone"
NO_TRANSFER: Final = "not supported: caches are not handed from engine to engine; docs/offload.md has what outlives a request"


def of_each(names: str, hint: str) -> dict[str, str]:
    """Return name -> hint for several names with the same hint. names: the names, separated by spaces."""
    return dict.fromkeys(names.split(), hint)


LLM_OPTIONS: Final = {
    **of_each(
        "pipeline_parallel_size data_parallel_size data_parallel_size_local enable_expert_parallel nnodes "
        "decode_context_parallel_size prefill_context_parallel_size enable_eplb",
        "not supported: tensor_parallel_size cuts a model over GPUs; docs/replicas.md has several engines",
    ),
    "quantization_param_path": "not supported yet: scales of the cache are the checkpoint's; see kv_cache_dtype",
    "tokenizer_mode": "the tokenizer is transformers' own; skip_tokenizer_init=True loads none",
    "code_revision": "not supported: Headway runs no code that a model brings",
    "tokenizer_revision": "not supported yet: tokenizer names the folder that huggingface-cli download --revision writes",
    "enable_lora_bias": "not supported: adapters have no biases; docs/lora.md says what they may be",
    **of_each("limit_mm_per_prompt mm_processor_kwargs enable_mm_embeds", TEXT_ONLY),
    "calculate_kv_scales": "not supported yet: fp8 has the checkpoint's scales; see kv_cache_dtype, int8_per_token_head",
    "cpu_offload_gb": "not supported yet, because weights and cache live on one device; a smaller kv_cache_memory makes room",
    **of_each("override_generation_config", "SamplingParams override what the model recommends; see generation_config"),
    **of_each("rope_scaling rope_theta", "not supported alone: hf_overrides replaces values of the model's config.json"),
    "hf_config_path": "not supported: the folder of the model has its config.json",
    "config_format": "not supported: a model has a config.json in Hugging Face's form",
    "kv_offloading_backend": "leave it out: kv_offload_size keeps blocks in the host's memory, kv_offload_dir on disk too",
    **of_each("kv_transfer_config kv_events_config ec_transfer_config", NO_TRANSFER),
    "num_gpu_blocks_override": "kv_cache_memory sets the size of the cache",
    "model_loader_extra_config": "not supported: weights are read as safetensors or .gguf files",
    "logprobs_mode": "not supported: log-probabilities are those of the model's own logits (raw_logprobs)",
    "structured_outputs_config": "its backend may be any, since llguidance compiles all forms; the rest is not supported here",
    "reasoning_parser": "not supported: a completion is one text",
    "pooler_config": "not supported: the files of the model say how it is pooled",
    "override_pooler_config": "not supported: the files of the model say how it is pooled",
    "attention_config": "its backend alone is read: Headway calls it attn_backend, and the rest attn_options",
    **of_each("worker_cls scheduler_cls", "not supported: plugins register backends, layouts and proposers"),
    "disable_sliding_window": "not supported: a model's windows are part of what it computes",
    "speculative_config": "method may be ngram, suffix or draft_model",
    "additional_config": "not supported: docs/options.md lists the options",
}
"""Options of vLLM's LLM that Headway lacks or names differently -> a hint for the user."""

FLAGS: Final = {
    **LLM_OPTIONS,
    "attention_backend": "Headway calls it attn_backend",
    "batch_invariant": "Headway calls it deterministic",
    "cuda_graph_sizes": "Headway calls it cudagraph_capture_sizes",
    "enable_sleep_mode": "leave it out: an engine can always sleep; --operator-paths has /sleep and /wake_up",
    "disable_log_stats": "Headway calls it log_stats_interval: seconds between two lines of statistics in the log",
    "kv_cache_memory_bytes": "Headway calls it kv_cache_memory",
    "kv_offloading_size": "Headway calls it kv_offload_size: bytes, or a text such as '4GiB'",
    "speculative_config": "Headway calls it speculate or speculative_model, and num_speculative_tokens",
    "swap_space": "Headway calls it kv_offload_size: bytes, or a text such as '4GiB'; preemption_mode='swap' always swaps",
    "convert": "Headway calls it task: embed, score or reward",
    "distributed_executor_backend": "leave it out: tensor_parallel_size starts a process for each rank",
    "disable_custom_all_reduce": "leave it out: ranks sum by NCCL or our kernel, as measured",
    **of_each(
        "max_seq_len_to_capture max_context_len_to_capture compilation_config",
        "cudagraph_capture_sizes says what is captured; enforce_eager=True captures nothing",
    ),
    "guided_decoding_backend": "leave it out: llguidance compiles all forms of structured outputs",
    "enable_log_requests": "headway serve calls it log_requests",
    **of_each(
        "disable_log_requests no_enable_log_requests disable_uvicorn_access_log",
        "leave it out: --log-requests alone logs requests",
    ),
    **of_each(
        "uvicorn_log_level log_level", "headway -v serve logs what the engine chooses, --log-requests a line for every request"
    ),
    **of_each(
        "api_server_count workers",
        "leave it out: one process reads requests, another computes; docs/replicas.md has several servers",
    ),
    **of_each("allowed_methods allowed_headers", "leave it out: pages of --allowed-origins may use every method and header"),
    "allow_credentials": "leave it out: no path reads cookies; keys come in headers, which pages of --allowed-origins may send",
    **of_each("ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs", "not supported: a proxy before the server can speak TLS"),
    **of_each("root_path middleware uds", "not supported: a proxy before the server can do that"),
    "chat_template_content_format": "leave it out: the template shows whether it reads texts or parts",
    "default_chat_template_kwargs": "not supported: requests have chat_template_kwargs",
    "enable_prompt_tokens_details": "leave it out: usage always has prompt_tokens_details",
    "enable_force_include_usage": "not supported: requests have stream_options",
    "return_tokens_as_token_ids": "not supported: requests have a field of this name",
    "exclude_tools_when_tool_choice_none": "leave it out: tools are not shown where tool_choice is none",
    "long_prefill_token_threshold": "max_num_batched_tokens bounds the tokens of a step, and so the chunks of long prompts",
    "max_num_partial_prefills": "leave it out: max_num_batched_tokens bounds a step",
    "trust_remote_code": "leave it out: Headway never runs code that a model brings",
}
"""Options of vLLM's commands that Headway's commands lack -> a hint. The Python API accepts most of them."""

NEUTRAL_VALUES: Final[Mapping[str, tuple[object, ...]]] = {
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "data_parallel_size_local", "nnodes"), (1,)),
    **dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), (1,)),
    **dict.fromkeys(("enable_lora_bias", "enable_expert_parallel", "enable_eplb", "enable_mm_embeds"), (False,)),
    **dict.fromkeys(("calculate_kv_scales", "disable_sliding_window"), (False,)),
    **dict.fromkeys(("override_generation_config", "rope_scaling", "model_loader_extra_config"), ({},)),
    **dict.fromkeys(("mm_processor_kwargs", "additional_config", "structured_outputs_config", "attention_config"), ({},)),
    **dict.fromkeys(("worker_cls", "config_format"), ("auto", "hf")),
    **dict.fromkeys(("reasoning_parser",), ("",)),
    "tokenizer_revision": ("main",),
    "code_revision": ("main",),
    "cpu_offload_gb": (0,),
    "tokenizer_mode": ("auto", "hf", "slow"),
    "logprobs_mode": ("raw_logprobs",),
    "kv_offloading_backend": ("native",),
}
"""Option of `LLM_OPTIONS` -> values that are accepted because they match Headway's behavior. None is accepted for every
option."""

_HARMLESS: Final = """
aggregate_engine_logging all2all_backend allowed_local_media_path allowed_media_domains collect_detailed_traces
compilation_config cpu_offload_params cudagraph_metrics data_parallel_address data_parallel_backend data_parallel_external_lb
data_parallel_hybrid_lb data_parallel_rank data_parallel_rpc_port data_parallel_start_rank dbo_decode_token_threshold
dbo_prefill_token_threshold default_mm_loras delay_factor disable_async_output_proc disable_cascade_attn
disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats
disable_mm_preprocessor_cache disable_nccl_for_dp_synchronization distributed_timeout_seconds enable_dbo
enable_flashinfer_autotune enable_layerwise_nvtx_tracing enable_log_requests enable_logging_iteration_details
enable_mfu_metrics enable_sleep_mode enable_server_load_tracking enable_tower_connector_lora eplb_config expert_placement_strategy
fail_on_environ_validation fully_sharded_loras guided_decoding_backend guided_decoding_disable_fallback hf_token
ignore_patterns interleave_mm_strings io_processor_plugin kv_cache_metrics kv_sharing_fast_prefill language_model_only
linear_backend long_lora_scaling_factors long_prefill_token_threshold lora_dtype lora_extra_vocab_size lora_target_modules
mamba_block_size mamba_cache_mode master_addr master_port max_context_len_to_capture max_log_len
max_long_partial_prefills max_num_partial_prefills max_parallel_loading_workers max_seq_len_to_capture
media_io_kwargs mm_encoder_attn_backend mm_encoder_only mm_encoder_tp_mode mm_processor_cache_gb mm_processor_cache_type
mm_shm_cache_max_object_size_mb moe_backend multi_step_stream_outputs node_rank num_lookahead_slots num_redundant_experts
num_scheduler_steps offload_backend optimization_level otlp_traces_endpoint performance_mode prefix_caching_hash_algo
profiler_config ray_workers_use_nsight renderer_num_workers rope_scaling_type safetensors_load_strategy scheduler_delay_factor
scheduler_reserve_full_isl served_model_name show_hidden_metrics_for_version skip_mm_profiling stream_interval swap_space
tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type ubatch_size use_tqdm_on_load use_v2_block_manager
video_pruning_rate
"""
ANY_VALUE: Final = frozenset(_HARMLESS.split())
"""vLLM's options that affect neither the output nor the memory of a text model here: names of metrics and logs, alternative
implementations, and settings of features whose main option is rejected."""

SHORT_FLAGS: Final = {"-tp": "--tensor-parallel-size", "-q": "--quantization"}
"""vLLM's short options -> the long option."""

_ATTENTION: Final = {
    "TORCH_SDPA": "sdpa",
    "TRITON_ATTN": "triton",
    "FLASH_ATTN": "flash_attn",
    "XFORMERS": "xformers",
    "FLEX_ATTENTION": "flex",
    "FLASHINFER": "flashinfer",
}
"""vLLM's name of an attention backend -> Headway's name."""


_TASKS: Final[Mapping[object, str]] = {"embed": "embed", "embedding": "embed", "classify": "score", "reward": "reward"}
"""vLLM's name for the task of a pooling model -> Headway's name."""

VALUES: Final[Mapping[str, Mapping[object, str]]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "model_impl": {"vllm": "headway"},
    "task": _TASKS,
}
"""Option that vLLM also has -> vLLM's name for a value -> Headway's name. The command line accepts vLLM's names too."""


def from_vllm(options: Mapping[str, Any], own: frozenset[str]) -> dict[str, Any]:
    """Return a call's options under Headway's names: vLLM's options are translated, or left out if they have no effect.

    None selects an option's default. own: Headway's option names. Unknown options are returned unchanged, to be rejected later.
    :raises ConfigError: if an option of vLLM has a value without an equivalent.
    """
    translated: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or (name not in own and (name in ANY_VALUE or _is_neutral(name, value))):
            continue
        if name in _VALUES:
            translated.update(_VALUES[name](value))
        else:
            translated[name] = value
    if options.get("compilation_config") is not None:
        translated = {**_compilation(options["compilation_config"]), **translated}
    return translated


def _is_neutral(option: str, value: object) -> bool:
    if option == "limit_mm_per_prompt":
        return isinstance(value, Mapping) and not any(value.values())
    neutral = NEUTRAL_VALUES.get(option, ())
    return option in LLM_OPTIONS and any(value is each or value == each for each in neutral)


def _trust(value: object) -> dict[str, Any]:
    if value:
        log.warning("trust_remote_code: ignored; Headway never runs code from a model")
    return {}


def _attention(value: object) -> dict[str, Any]:
    name = str(getattr(value, "name", value))
    return {"attn_backend": _ATTENTION.get(name.upper(), name.lower())}


def _attention_config(value: Any) -> dict[str, Any]:
    given = {name: each for name, each in _fields(value).items() if each is not None}
    if set(given) - {"backend"}:
        raise ConfigError("attention_config", "a backend alone", ", ".join(given), LLM_OPTIONS["attention_config"])
    return _attention(given["backend"]) if given else {}


def _speculation(value: Any) -> dict[str, Any]:
    """Return vLLM's speculative_config as Headway's options. Draft tokens do not affect the output."""
    given = {name: each for name, each in _fields(value).items() if each is not None}
    method = str(given.get("method", "draft_model" if "model" in given else "ngram"))
    if method == "[ngram]":
        method = "ngram"
    if method not in ("ngram", "suffix", "ngram_gpu", "draft_model"):
        need = "the method ngram, suffix or draft_model"
        raise ConfigError("speculative_config", need, method, "heads of EAGLE, Medusa and MTP are not supported yet")
    if method == "draft_model" and not isinstance(given.get("model"), str):
        raise ConfigError("speculative_config", "the draft's name as model", shown(given.get("model")))
    most = given.get("num_speculative_tokens", MAX_DRAFT_TOKENS)
    if isinstance(most, int) and most > MAX_DRAFT_TOKENS:
        log.warning("speculative_config: num_speculative_tokens is limited to %d, got %d", MAX_DRAFT_TOKENS, most)
        most = MAX_DRAFT_TOKENS
    source = {"speculative_model": given["model"]} if method == "draft_model" else {"speculate": method.removesuffix("_gpu")}
    return {**source, "num_speculative_tokens": most}


def _structured(value: Any) -> dict[str, Any]:
    surplus = {name: each for name, each in _fields(value).items() if each and name not in ("backend", "disable_fallback")}
    if surplus:
        hint = LLM_OPTIONS["structured_outputs_config"]
        raise ConfigError("structured_outputs_config", "a backend alone", ", ".join(surplus), hint)
    return {}


def _compilation(value: Any) -> dict[str, Any]:
    """Return the CUDA graph options of a compilation_config; its other entries configure vLLM's compiler."""
    if isinstance(value, int):
        return {}
    given = _fields(value)
    mode = given.get("cudagraph_mode")
    if mode is not None and str(getattr(mode, "name", mode)).upper() == "NONE":
        return {"enforce_eager": True}
    sizes = given.get("cudagraph_capture_sizes")
    return {"cudagraph_capture_sizes": sizes} if sizes else {}


def _fields(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, str) or not hasattr(value, "__dict__"):
        raise ConfigError("the configuration", "a dict", shown(value))
    fields: Mapping[str, Any] = vars(value)
    return fields


def _converted(value: object) -> dict[str, Any]:
    """Return the task of the option `convert`."""
    if value in ("auto", "none"):
        return {}
    if value not in _TASKS:
        raise ConfigError(
            "convert", "none, embed, classify or reward", shown(value), "score answers for classifiers of one label"
        )
    return {"task": _TASKS[value]}


def _executor(value: object) -> dict[str, Any]:
    """Return no options: Headway starts the ranks of tensor_parallel_size itself, whichever executor is requested."""
    alone = value == "external_launcher" and os.environ.get("WORLD_SIZE", "1") == "1"
    if value not in ("mp", "uni", "ray") and not alone:
        hint = "tensor_parallel_size starts a process for each rank"
        need = "mp, uni or ray, or one process alone that torchrun has started"
        raise ConfigError("distributed_executor_backend", need, shown(value), hint)
    if value == "ray":
        log.warning("distributed_executor_backend: Ray is not used; ranks are processes on this machine")
    return {}


def _renamed(name: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function that translates an option to this name."""
    return lambda value: {name: value}


_VALUES: Final[Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "attention_backend": _attention,
    "attention_config": _attention_config,
    "batch_invariant": _renamed("deterministic"),
    "convert": _converted,
    "cuda_graph_sizes": lambda sizes: {"cudagraph_capture_sizes": sizes} if sizes else {},
    "distributed_executor_backend": _executor,
    "kv_cache_memory_bytes": _renamed("kv_cache_memory"),
    "kv_offloading_size": lambda size: {"kv_offload_size": int(size * 2**30)} if size else {},
    "speculative_config": _speculation,
    "speculative_model": lambda model: {"speculate": "ngram"} if model == "[ngram]" else {"speculative_model": model},
    "structured_outputs_config": _structured,
    "trust_remote_code": _trust,
}
"""vLLM's option -> the function that translates its value to Headway's options."""

ACCEPTED_OPTIONS: Final = frozenset(ANY_VALUE | set(_VALUES) | set(NEUTRAL_VALUES))
"""vLLM's options that Headway accepts, some of them only with certain values."""

CALL_KEYWORDS: Final = {
    "prompt_adapter_request": "not supported: adapters are of low rank (LoRA), by lora_request",
    "lora_request": "not supported here: adapters are for models that generate text",
    "tokenization_kwargs": "tokenise by hand with get_tokenizer() and pass the ids",
    "mm_processor_kwargs": TEXT_ONLY,
    "guided_options_request": "SamplingParams(structured_outputs=...) says the form of a completion",
    "reasoning_ended": "not supported: a structured output begins with the completion",
    "data_parallel_rank": "not supported: docs/replicas.md has several engines",
    "params": "it is called sampling_params",
}
"""Keywords of vLLM's generate, chat and add_request -> a hint."""

_NO_EFFECT: Final[Mapping[str, tuple[object, ...]]] = {
    "chat_template_content_format": ("auto", "string", "openai"),
    "trace_headers": (None, {}),
    "tokenization_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
"""Keyword -> the values, other than None, that have no effect in Headway."""

METHODS: Final = {
    **of_each("pause_generation resume_generation is_paused", "not supported here: headway serve has /pause and /resume"),
    "save_sharded_state": "not supported: each rank reads its part of the model's own files",
    "set_tokenizer": "the option tokenizer names another tokenizer",
    **of_each("init_weight_transfer_engine update_weights", "not supported: collective_rpc hands a function load_weights"),
    **of_each("enqueue wait_for_completion", "llm_engine has add_request and step"),
}
"""Attributes of vLLM's LLM and LLMEngine -> a hint."""


def check_keywords(owner: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Check a call's keywords. vLLM's keywords are accepted if they have no effect. :raises ConfigError: if a keyword is
    unknown."""
    effective = [name for name, value in given.items() if not _has_no_effect(name, value)]
    refuse_unknown(owner, effective, known, CALL_KEYWORDS, "docs/sampling.md")


def _has_no_effect(name: str, value: object) -> bool:
    if name not in CALL_KEYWORDS and name not in _NO_EFFECT:
        return False
    return value is None or any(value == each for each in _NO_EFFECT.get(name, ()))


def missing_attribute(name: str, owner: str = "LLM") -> AttributeError:
    """Return the error for an attribute that LLM, or another owner, lacks."""
    hint = f": {METHODS[name]}" if name in METHODS else ""
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")
