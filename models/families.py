"""The families of models that the decoder computes: one row each, from transformers' configuration to ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.core.contract.errors import ModelError
from headway.models.config import Activation, DecoderConfig, LayerConfig
from headway.models.names import LLAMA_NAMES, TensorNames
from headway.models.rope import read_rope


@dataclass(frozen=True)
class Family:
    """One family: what its checkpoints call tensors, and where its configuration departs from Llama's."""

    architecture: str
    """transformers' class."""
    options: Callable[[Any], dict[str, Any]] = lambda config: {}
    """Fields of DecoderConfig that the common reading would get wrong."""
    names: TensorNames = LLAMA_NAMES


def _gemma(config: Any) -> dict[str, Any]:
    """What Gemma 2 and Gemma 3 share."""
    return {
        "norm": "rms_plus_one",
        "activation": config.hidden_activation,
        "scale": config.query_pre_attn_scalar**-0.5,
        "softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
        "embedding_scale": config.hidden_size**0.5,
        **_biases(config),
    }


def _biases(config: Any) -> dict[str, Any]:
    bias = bool(getattr(config, "attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(getattr(config, "mlp_bias", False))}


_GEMMA = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _biases),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", lambda config: {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", lambda config: {**_biases(config), "qk_norm": "head"}),
    "gemma2": Family("Gemma2ForCausalLM", _gemma, _GEMMA),
    "gemma3_text": Family("Gemma3ForCausalLM", lambda config: {**_gemma(config), "qk_norm": "head"}, _GEMMA),
}
"""By model_type. SmolLM and SmolLM2 are Llama."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
"""transformers' names."""


def read_decoder_config(config: Any) -> DecoderConfig:
    """Read a transformers PretrainedConfig, or what `plain_config` makes of a file.

    :raises ModelError: an architecture, activation or RoPE type that the decoder does not compute, or an impossible number.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        named = ", ".join(config.architectures or [kind])
        known = ", ".join(family.architecture for family in FAMILIES.values())
        raise ModelError(f"model architecture: needs one of {known}, got {named}")
    family = FAMILIES[kind]
    options = family.options(config)
    heads = config.num_attention_heads
    head_dim = options.get("head_dim") or getattr(config, "head_dim", None) or config.hidden_size // heads
    read: dict[str, Any] = {
        "intermediate_size": getattr(config, "intermediate_size", None),
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "norm_eps": getattr(config, "rms_norm_eps", None),
        "activation": getattr(config, "hidden_act", None),
        **options,
    }
    if "layers" not in read:
        read["layers"], read["ropes"] = _layers(config, head_dim)
    activation, eps = read["activation"], read["norm_eps"]
    if activation not in _ACTIVATIONS:
        raise ModelError(f"hidden_act: needs one of {', '.join(_ACTIVATIONS)}, got {activation}")
    if not isinstance(eps, (int, float)) or not math.isfinite(eps) or eps <= 0:
        raise ModelError(f"rms_norm_eps: needs a number above 0, got {eps!r}")
    read["activation"] = _ACTIVATIONS[activation]
    return DecoderConfig(
        model_type=kind,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=heads,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        names=family.names,
        **read,
    )


def _layers(config: Any, head_dim: int) -> tuple[tuple[LayerConfig, ...], tuple[Any, ...]]:
    """Each layer's window and rotary embedding, and the different ones of the latter."""
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    if len(kinds) != count:
        raise ModelError(f"layer_types: needs one for each of the {count} layers, got {len(kinds)}")
    by_kind = set(kinds) <= set(config.rope_parameters or ())
    found = {kind: read_rope(config, head_dim, kind if by_kind else None) for kind in dict.fromkeys(kinds)}
    ropes = tuple(dict.fromkeys(found.values()))
    layers = [LayerConfig(window if kind == "sliding_attention" else None, ropes.index(found[kind])) for kind in kinds]
    return tuple(layers), ropes
