"""The families of models that the decoder computes: one row each, from transformers' configuration to ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.core.contract.errors import ModelError
from headway.models.config import Activation, DecoderConfig, LayerConfig, RopeConfig
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
    windowed: bool = True
    """Whether the family obeys sliding_window, in the layers of that type where layer_types tells types."""
    partial_rotary: bool = False
    """Whether it obeys partial_rotary_factor."""


def _biases(config: Any) -> dict[str, Any]:
    bias = bool(getattr(config, "attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(getattr(config, "mlp_bias", False))}


def _gemma(config: Any) -> dict[str, Any]:
    """What the first Gemma has and all share."""
    return {"norm": "rms_plus_one", "embedding_scale": config.hidden_size**0.5, **_biases(config)}


def _gemma2(config: Any) -> dict[str, Any]:
    """What Gemma 2 and Gemma 3 share."""
    return {
        **_gemma(config),
        "activation": config.hidden_activation,
        "scale": config.query_pre_attn_scalar**-0.5,
        "softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
    }


def _granite(config: Any) -> dict[str, Any]:
    return {
        **_biases(config),
        "scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": 1.0 / config.logits_scaling,
    }


def _smollm3(config: Any) -> dict[str, Any]:
    """Every few layers have no RoPE."""
    return {**_biases(config), "rotated": [bool(flag) for flag in config.no_rope_layers]}


def _layer_norm(bias: bool, eps: float) -> dict[str, Any]:
    """What the models before Llama share: LayerNorm, an MLP that is not gated, and biases everywhere or nowhere."""
    biases = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}
    return {"norm": "layer", "norm_eps": eps, "gated": False, **biases}


def _gpt2(config: Any) -> dict[str, Any]:
    _refuse(config, scale_attn_by_inverse_layer_idx=True, add_cross_attention=True, scale_attn_weights=False)
    return {
        **_layer_norm(True, config.layer_norm_epsilon),
        "num_kv_heads": config.n_head,
        "intermediate_size": config.n_inner or 4 * config.hidden_size,
        "activation": config.activation_function,
        "rotated": [False] * config.num_hidden_layers,
    }


def _opt(config: Any) -> dict[str, Any]:
    _refuse(config, do_layer_norm_before=False, _remove_final_layer_norm=True, layer_norm_elementwise_affine=False)
    if config.word_embed_proj_dim != config.hidden_size:
        raise ModelError(f"word_embed_proj_dim: needs hidden_size={config.hidden_size}, got {config.word_embed_proj_dim}")
    return {
        **_layer_norm(config.enable_bias, 1e-5),
        "num_kv_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_dim,
        "activation": config.activation_function,
        "position_offset": 2,
        "rotated": [False] * config.num_hidden_layers,
    }


def _refuse(config: Any, **values: object) -> None:
    """Refuse what a family's rare switches ask for and the decoder does not compute."""
    for key, value in values.items():
        if getattr(config, key) == value:
            raise ModelError(f"{key}: needs {str(not value).lower()}, got {str(value).lower()}")


_GEMMA2 = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_GPT2 = TensorNames(
    embed="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{}.",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    mlp_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
    ignored=(".attn.bias", ".attn.masked_bias"),
)
_OLMO2 = TensorNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
_OPT = TensorNames(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{}.",
    attention_norm="self_attn_layer_norm",
    o="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
)
_PHI3 = TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
_STARCODER2 = TensorNames(up=("mlp.c_fc",), down="mlp.c_proj")

FAMILIES: dict[str, Family] = {
    "gemma": Family("GemmaForCausalLM", _gemma, windowed=False),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2, _GEMMA2),
    "gemma3_text": Family("Gemma3ForCausalLM", lambda config: {**_gemma2(config), "qk_norm": "head"}, _GEMMA2),
    "gpt2": Family("GPT2LMHeadModel", _gpt2, _GPT2, windowed=False),
    "granite": Family("GraniteForCausalLM", _granite, windowed=False),
    "llama": Family("LlamaForCausalLM", _biases, windowed=False),
    "mistral": Family("MistralForCausalLM"),
    "olmo2": Family("Olmo2ForCausalLM", lambda config: {**_biases(config), "qk_norm": "whole"}, _OLMO2, windowed=False),
    "opt": Family("OPTForCausalLM", _opt, _OPT, windowed=False),
    "phi3": Family("Phi3ForCausalLM", names=_PHI3, partial_rotary=True),
    "qwen2": Family("Qwen2ForCausalLM", lambda config: {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", lambda config: {**_biases(config), "qk_norm": "head"}),
    "smollm3": Family("SmolLM3ForCausalLM", _smollm3),
    "starcoder2": Family("Starcoder2ForCausalLM", lambda config: _layer_norm(config.use_bias, config.norm_epsilon), _STARCODER2),
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


def known_architectures() -> str:
    """What a refusal lists."""
    return ", ".join(family.architecture for family in FAMILIES.values())


def read_decoder_config(config: Any) -> DecoderConfig:
    """Read a transformers PretrainedConfig, or what `plain_config` makes of a file.

    :raises ModelError: an architecture, activation or RoPE type that the decoder does not compute, or an impossible number.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        named = ", ".join(config.architectures or [kind])
        raise ModelError(f"model architecture: needs one of {known_architectures()}, got {named}")
    family = FAMILIES[kind]
    options = family.options(config)
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and hidden % heads:
        raise ModelError(f"num_attention_heads: needs a divisor of hidden_size={hidden}, got {heads}")
    head_dim = head_dim or hidden // heads
    window = getattr(config, "sliding_window", None) if family.windowed else None
    layers, ropes = _layers(config, head_dim, window, options.pop("rotated", None))
    if any(rope.rotary_dim != head_dim for rope in ropes) and not family.partial_rotary:
        raise ModelError(f"partial_rotary_factor: needs 1 in {family.architecture}, got another")
    read: dict[str, Any] = {
        "intermediate_size": getattr(config, "intermediate_size", None),
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "scale": head_dim**-0.5,
        "norm_eps": getattr(config, "rms_norm_eps", None),
        "activation": getattr(config, "hidden_act", None),
        **options,
    }
    activation, eps = read["activation"], read["norm_eps"]
    if activation not in _ACTIVATIONS:
        raise ModelError(f"hidden_act: needs one of {', '.join(_ACTIVATIONS)}, got {activation}")
    if not isinstance(eps, (int, float)) or not math.isfinite(eps) or eps <= 0:
        raise ModelError(f"rms_norm_eps: needs a number above 0, got {eps!r}")
    read["activation"] = _ACTIVATIONS[activation]
    return DecoderConfig(
        model_type=kind,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        num_heads=heads,
        head_dim=head_dim,
        layers=layers,
        ropes=ropes,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        names=family.names,
        **read,
    )


def _layers(
    config: Any, head_dim: int, window: int | None, rotated: Sequence[bool] | None
) -> tuple[tuple[LayerConfig, ...], tuple[RopeConfig, ...]]:
    """Each layer's window and rotary embedding, and the different ones of the latter. rotated: None: all layers are."""
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [_SLIDING] * count
    if len(kinds) != count:
        raise ModelError(f"layer_types: needs one for each of the {count} layers, got {len(kinds)}")
    unknown = sorted(set(kinds) - {_SLIDING, "full_attention"})
    if unknown:
        raise ModelError(f"layer_types: needs {_SLIDING} or full_attention, got {', '.join(map(str, unknown))}")
    rotated = [True] * count if rotated is None else rotated
    turning = dict.fromkeys(kind for kind, turns in zip(kinds, rotated, strict=True) if turns)
    by_kind = set(kinds) <= set(config.rope_parameters or ()) if turning else False
    found = {kind: read_rope(config, head_dim, kind if by_kind else None) for kind in turning}
    ropes = tuple(dict.fromkeys(found.values()))
    layers = [
        LayerConfig(window if kind == _SLIDING else None, ropes.index(found[kind]) if turns else None)
        for kind, turns in zip(kinds, rotated, strict=True)
    ]
    return tuple(layers), ropes


_SLIDING = "sliding_attention"
