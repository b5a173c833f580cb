"""Reading an ordinary config.json without transformers, whose import takes longer than all else before an engine is ready."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from headway.core.contract.spec import DTYPES
from headway.models.checkpoint import ARCHITECTURES

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_SWITCHES = {"attention_bias": False, "mlp_bias": False}
"""With the default that they have in every architecture."""
_KNOWN = {
    *_SIZES,
    *_SWITCHES,
    *("architectures", "model_type", "hidden_act", "head_dim", "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
    *("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"),
    # What says nothing about inference.
    *("_name_or_path", "attention_dropout", "bos_token_id", "initializer_range", "pad_token_id", "pretraining_tp"),
    *("transformers_version", "use_cache", "rope_interleaved", "is_llama_config"),
}


def plain_config(config: Mapping[str, Any]) -> SimpleNamespace | None:
    """What transformers would read from a config.json that writes out all that the decoder needs and has nothing unusual.

    None for any other, where a default, an older spelling or a rare key decides: that is left to transformers.
    """
    read, kind = dict(config), config.get("model_type")
    if kind not in ARCHITECTURES or not set(read) <= _KNOWN or "eos_token_id" not in read:
        return None
    sizes = [read.get(name) for name in (*_SIZES, *(["head_dim"] if "head_dim" in read or kind == "qwen3" else []))]
    if not all(type(size) is int and size > 0 for size in sizes) or read["hidden_size"] % read["num_attention_heads"]:
        return None
    switches = {name: read.get(name, default) for name, default in _SWITCHES.items()}
    flags = (*switches.values(), read.get("tie_word_embeddings"), read.get("use_sliding_window", False))
    if not all(type(flag) is bool for flag in flags) or type(read.get("hidden_act")) is not str:
        return None
    dtype, theta, epsilon = read.get("dtype", read.get("torch_dtype")), _theta(read), read.get("rms_norm_eps")
    if dtype not in DTYPES or ("dtype" in read and "torch_dtype" in read):
        return None
    if theta is None or type(epsilon) is not float or not _attends_to_all(kind, read):
        return None
    return SimpleNamespace(
        **{name: read[name] for name in (*_SIZES, "model_type", "hidden_act", "tie_word_embeddings", "eos_token_id")},
        **switches,
        architectures=read.get("architectures"),
        head_dim=read.get("head_dim") or read["hidden_size"] // read["num_attention_heads"],
        rms_norm_eps=epsilon,
        rope_parameters={"rope_theta": theta, "rope_type": "default"},
        sliding_window=None,
        layer_types=None,
        dtype=DTYPES[dtype],
    )


def _theta(read: Mapping[str, Any]) -> float | None:
    """The base of unscaled RoPE, in the spelling of transformers 4 or 5."""
    parameters = read.get("rope_parameters")
    if parameters is None:
        theta = read.get("rope_theta") if read.get("rope_scaling") is None else None
    else:
        known = isinstance(parameters, dict) and set(parameters) == {"rope_theta", "rope_type"}
        alone = known and parameters["rope_type"] == "default" and not {"rope_theta", "rope_scaling"} & set(read)
        theta = parameters["rope_theta"] if alone else None
    return theta if type(theta) in (int, float) else None


def _attends_to_all(kind: str, read: Mapping[str, Any]) -> bool:
    """Whether every layer attends to the whole context, and the file says so."""
    windows = {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"} & set(read)
    if kind == "llama":
        return not windows
    if kind == "mistral":
        return windows == {"sliding_window"} and read["sliding_window"] is None
    layers = read.get("layer_types")
    return not read.get("use_sliding_window", False) and (
        layers is None or layers == ["full_attention"] * read["num_hidden_layers"]
    )
