"""vLLM's names that Headway lacks or spells otherwise, and what to write in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from headway.core.contract.errors import refuse_unknown

_NO_ADAPTERS: Final = "not supported yet: merge the adapter into its model with peft's merge_and_unload()"
_TEXT_ALONE: Final = "not supported yet, because models read text alone"
_FREE_MEMORY: Final = "del llm frees the device's memory"


def _each(names: str, hint: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), hint)


LLM_OPTIONS: Final = {
    "attention_backend": "Headway calls it attn_backend",
    "attention_config": "Headway calls it attn_backend and attn_options",
    "batch_invariant": "Headway calls it deterministic",
    "cuda_graph_sizes": "Headway calls it cudagraph_capture_sizes",
    "disable_log_stats": "Headway calls it log_stats_interval: seconds between two lines of statistics in the log",
    "kv_cache_memory_bytes": "Headway calls it kv_cache_memory",
    "kv_offloading_size": "Headway calls it kv_offload_size: bytes, or a text such as '4GiB'",
    "speculative_config": "Headway calls it speculate and num_speculative_tokens: speculate='ngram' or 'suffix'",
    "swap_space": "Headway calls it kv_offload_size: bytes, or a text such as '4GiB'; preemption_mode='swap' always swaps",
    **_each(
        "pipeline_parallel_size data_parallel_size enable_expert_parallel",
        "not supported: tensor_parallel_size cuts a model over GPUs; docs/replicas.md has several engines",
    ),
    "distributed_executor_backend": "leave it out: tensor_parallel_size starts a process for each rank",
    "disable_custom_all_reduce": "leave it out: ranks sum by NCCL or our kernel, as measured",
    **_each(
        "max_seq_len_to_capture max_context_len_to_capture compilation_config",
        "cudagraph_capture_sizes says what is captured; enforce_eager=True captures nothing",
    ),
    "quantization_param_path": "not supported yet: scales of the cache are the checkpoint's; see kv_cache_dtype",
    **_each(
        "tokenizer tokenizer_mode tokenizer_revision",
        "the tokenizer of the model's folder is used; skip_tokenizer_init=True loads none",
    ),
    **_each(
        "guided_decoding_backend structured_outputs_config",
        "leave it out: llguidance compiles all forms of structured outputs",
    ),
    **_each("enable_lora max_lora_rank", _NO_ADAPTERS),
    **_each("limit_mm_per_prompt mm_processor_kwargs", _TEXT_ALONE),
    "calculate_kv_scales": "not supported yet: fp8 has the checkpoint's scales; see kv_cache_dtype, int8_per_token_head",
    "convert": "Headway calls it task: embed or score",
    "cpu_offload_gb": "not supported yet, because weights and cache live on one device; a smaller kv_cache_memory makes room",
    "disable_log_requests": "leave it out: RequestOutput.metrics has the times of each request",
    "download_dir": "set the environment variable HF_HOME",
    "enable_sleep_mode": _FREE_MEMORY,
    "generation_config": "leave it out: get_default_sampling_params() reads the model's own; SamplingParams override them",
    "hf_overrides": "not supported: edit the config.json of the model's folder",
    "kv_offloading_backend": "leave it out: kv_offload_size keeps blocks in the host's memory, kv_offload_dir on disk too",
    "logits_processors": "SamplingParams(logits_processors=[...]) takes functions, and names that plugins register",
    "long_prefill_token_threshold": "max_num_batched_tokens bounds the tokens of a step, and so the chunks of long prompts",
    "max_num_partial_prefills": "not supported: prompts are served one after the other; max_num_batched_tokens bounds a step",
    "num_gpu_blocks_override": "kv_cache_memory sets the size of the cache",
    "revision": "not supported yet: load the folder that huggingface-cli download --revision writes",
    "served_model_name": "not supported: the model's name is the one it was loaded by",
    "trust_remote_code": "not supported: Headway never runs code that a model brings; leave it out",
}
"""Options of vLLM's LLM that Headway has by another name or not at all -> what to do."""

NEUTRAL_VALUES: Final[Mapping[str, tuple[object, ...]]] = {
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size"), (1,)),
    **dict.fromkeys(("swap_space", "cpu_offload_gb"), (0,)),
    **dict.fromkeys(("trust_remote_code", "enable_lora", "enable_expert_parallel", "enable_sleep_mode"), (False,)),
    "convert": ("auto", "none"),
    "tokenizer_mode": ("auto",),
    "disable_log_stats": (True,),
}
"""Options of vLLM's LLM -> the values that ask for what Headway does anyway; None is such a value of all of them."""

CALL_KEYWORDS: Final = {
    **_each("lora_request prompt_adapter_request", _NO_ADAPTERS),
    "tokenization_kwargs": "tokenise by hand with get_tokenizer() and pass the ids",
    "mm_processor_kwargs": _TEXT_ALONE,
    "chat_template_content_format": 'leave it out: messages take texts, and lists of {"type": "text"} parts',
    "guided_options_request": "SamplingParams(structured_outputs=...) says the form of a completion",
    "prompt_token_ids": 'pass them as prompts: a list of ids, or {"prompt_token_ids": ids}',
    "params": "it is called sampling_params",
}
"""Keywords of vLLM's generate and chat -> what to do."""

METHODS: Final = {
    "encode": "embed and score run models that are pooled; get_tokenizer() turns texts into ids",
    "classify": "score runs classifiers of one label; elsewhere structured_outputs with a choice of labels classifies",
    "reward": "score runs classifiers of one label",
    "beam_search": "SamplingParams(best_of=..., n=...) returns the likeliest of several completions",
    **_each("start_profile stop_profile", "headway bench throughput --profile FILE writes a trace"),
    **_each("sleep wake_up", _FREE_MEMORY),
    **_each("collective_rpc apply_model", "Headway runs a model in this process: llm.model.decoder is it"),
    "get_metrics": "llm.stats() has the engine's counters",
    "llm_engine": "it is called engine",
    "set_tokenizer": "the tokenizer of the model's folder is used",
}
"""Attributes of vLLM's LLM -> what to do."""


def is_neutral(option: str, value: object) -> bool:
    """Whether an option of vLLM's LLM has a value that asks for nothing."""
    neutral = NEUTRAL_VALUES.get(option, ())
    return option in LLM_OPTIONS and (value is None or any(value is each or value == each for each in neutral))


def check_keywords(owner: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse keywords that a method does not take, except those of vLLM's that are None.

    :raises ConfigError: an unknown keyword, with what comes nearest.
    """
    asked = [name for name, value in given.items() if value is not None or name not in CALL_KEYWORDS]
    refuse_unknown(owner, asked, known, CALL_KEYWORDS, "docs/sampling.md")


def missing_attribute(name: str) -> AttributeError:
    """The error of reading an attribute that LLM lacks."""
    hint = f": {METHODS[name]}" if name in METHODS else ""
    return AttributeError(f"LLM has no attribute {name!r}{hint}")
