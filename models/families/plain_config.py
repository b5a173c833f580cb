"""Reader of common config.json files that avoids importing transformers, the slowest step of a start."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from headway.core.contract.spec import DTYPES

_KINDS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")  # Model types whose config.json is read without transformers
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "max_position_embeddings",
)
_EXPERTS: dict[str, type] = {
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"), int),
    "norm_topk_prob": bool,
    "mlp_only_layers": list,
}
"""Type of each additional key of a mixture of experts."""
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Additional RoPE keys of Llama 3.1."""
_SWITCHES = {"attention_bias": False, "mlp_bias": False}  # With the default, which is the same in all architectures
_KNOWN = {
    *_SIZES,
    *_EXPERTS,
    *_SWITCHES,
    *("architectures", "model_type", "hidden_act", "head_dim", "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
    *("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"),
    # Keys without effect on inference.
    *("_name_or_path", "_model_name_or_path", "attention_dropout", "bos_token_id", "initializer_range", "is_llama_config"),
    *("pad_token_id", "pretraining_tp", "rope_interleaved", "transformers.js_config", "transformers_version", "unk_token_id"),
    *("quantization_config", "compression_config"),  # read elsewhere
    *("output_router_logits", "router_aux_loss_coef", "use_cache"),
}


def plain_config(config: Mapping[str, Any]) -> SimpleNamespace | None:
    """Return a complete, common config.json as transformers would read it; None if transformers must read it."""
    read, kind = dict(config), config.get("model_type")
    if kind not in _KINDS or not set(read) <= _KNOWN or "eos_token_id" not in read:
        return None
    experts = _EXPERTS if kind == "qwen3_moe" else {}
    if set(read) & set(_EXPERTS) != set(experts) or not all(type(read[name]) is expected for name, expected in experts.items()):
        return None
    sizes = [read.get(name) for name in (*_SIZES, *(["head_dim"] if "head_dim" in read or kind.startswith("qwen3") else []))]
    sizes += [read[name] for name, expected in experts.items() if expected is int]
    if not all(type(size) is int and size > 0 for size in sizes) or read["hidden_size"] % read["num_attention_heads"]:
        return None
    switches = {name: read.get(name, default) for name, default in _SWITCHES.items()}
    flags = (*switches.values(), read.get("tie_word_embeddings"), read.get("use_sliding_window", False))
    if not all(type(flag) is bool for flag in flags) or type(read.get("hidden_act")) is not str:
        return None
    dtype, rope, epsilon = read.get("dtype", read.get("torch_dtype")), _rope_parameters(read), read.get("rms_norm_eps")
    if dtype not in DTYPES or ("dtype" in read and "torch_dtype" in read):
        return None
    if rope is None or type(epsilon) is not float or not _attends_to_all(kind, read):
        return None
    return SimpleNamespace(
        **{name: read[name] for name in (*_SIZES, *experts, "model_type", "hidden_act", "tie_word_embeddings", "eos_token_id")},
        **switches,
        architectures=read.get("architectures"),
        head_dim=read.get("head_dim") or read["hidden_size"] // read["num_attention_heads"],
        rms_norm_eps=epsilon,
        rope_parameters=rope,
        sliding_window=None,
        layer_types=None,
        dtype=DTYPES[dtype],
    )


def _rope_parameters(read: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return unscaled or Llama 3.1 RoPE parameters from the keys of transformers 4 or 5; None for other RoPE types."""
    scaling = read.get("rope_scaling")
    if "rope_parameters" in read:
        parameters = read["rope_parameters"]
        if not isinstance(parameters, dict) or "rope_theta" in read or "rope_scaling" in read:
            return None
    elif scaling is None or isinstance(scaling, dict):
        parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": read.get("rope_theta")}
    else:
        return None
    wanted = {"rope_theta", *(_LLAMA3 if parameters.get("rope_type") == "llama3" else ())}
    if set(parameters) != {"rope_type", *wanted} or parameters["rope_type"] not in ("default", "llama3"):
        return None
    return parameters if all(type(parameters[name]) in (int, float) for name in wanted) else None


def _attends_to_all(kind: str, read: Mapping[str, Any]) -> bool:
    """Return whether config.json states that every layer attends to the whole context."""
    windows = {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"} & set(read)
    if kind == "llama":
        return not windows
    if kind == "mistral":
        return windows == {"sliding_window"} and read["sliding_window"] is None
    layers = read.get("layer_types")
    return not read.get("use_sliding_window", False) and (
        layers is None or layers == ["full_attention"] * read["num_hidden_layers"]
    )
