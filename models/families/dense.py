"""Dense model families: differences from Llama's configuration, and checkpoint tensor names."""

from __future__ import annotations

from typing import Any

from headway.core.contract.errors import ModelError
from headway.models.config import BeyondDecoderError, TensorNames


def size_of(config: Any, key: str, least: int = 1) -> int:
    """Return the size under `key`. :raises ModelError: if it is not an integer of at least `least`."""
    value = getattr(config, key, None)
    if type(value) is not int or value < least:
        raise ModelError(f"{key}: needs a whole number of at least {least}, got {value!r}")
    return value


def biases(config: Any) -> dict[str, Any]:
    """Return the bias options of the projections, as stated by `attention_bias` and `mlp_bias`."""
    bias = bool(getattr(config, "attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(getattr(config, "mlp_bias", False))}


def gemma(config: Any) -> dict[str, Any]:
    """Return Gemma's options, which later Gemma versions share."""
    return {"norm": "rms_plus_one", "embedding_scale": config.hidden_size**0.5, **biases(config)}


def gemma2(config: Any) -> dict[str, Any]:
    """Return the options shared by Gemma 2 and Gemma 3."""
    return {
        **gemma(config),
        "activation": config.hidden_activation,
        "scale": config.query_pre_attn_scalar**-0.5,
        "softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
    }


def qwen3(config: Any) -> dict[str, Any]:
    """Return Qwen3's options: QK-norm per head."""
    return {**biases(config), "qk_norm": "head"}


def olmo2(config: Any) -> dict[str, Any]:
    """Return OLMo 2's options: QK-norm over all heads, and no norm before a part."""
    return {**biases(config), "qk_norm": "whole"}


def granite(config: Any) -> dict[str, Any]:
    """Return Granite's options: Llama's, plus factors for scores, embeddings, residuals and logits."""
    return {
        **biases(config),
        "scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": 1.0 / config.logits_scaling,
    }


def smollm3(config: Any) -> dict[str, Any]:
    """Return SmolLM3's options: some layers have no RoPE."""
    return {**biases(config), "rotated": [bool(flag) for flag in config.no_rope_layers]}


def layer_norm(bias: bool, eps: float) -> dict[str, Any]:
    """Return the options of models before Llama: LayerNorm, an ungated MLP, and biases everywhere or nowhere."""
    return {"norm": "layer", "norm_eps": eps, "gated": False, "qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}


def gpt2(config: Any) -> dict[str, Any]:
    """Return GPT-2's options."""
    _refuse(config, scale_attn_by_inverse_layer_idx=True, add_cross_attention=True, scale_attn_weights=False)
    return {
        **layer_norm(True, config.layer_norm_epsilon),
        "num_kv_heads": config.n_head,
        "intermediate_size": config.n_inner or 4 * config.hidden_size,
        "activation": config.activation_function,
        "rotated": [False] * config.num_hidden_layers,
    }


def opt(config: Any) -> dict[str, Any]:
    """Return OPT's options; OPT-350M, which has norms after each part, is unsupported."""
    _refuse(config, do_layer_norm_before=False, _remove_final_layer_norm=True, layer_norm_elementwise_affine=False)
    if config.word_embed_proj_dim != config.hidden_size:
        raise BeyondDecoderError(f"word_embed_proj_dim: needs hidden_size={config.hidden_size}, got {config.word_embed_proj_dim}")
    return {
        **layer_norm(config.enable_bias, 1e-5),
        "num_kv_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_dim,
        "activation": config.activation_function,
        "position_offset": 2,
        "rotated": [False] * config.num_hidden_layers,
    }


def _refuse(config: Any, **values: object) -> None:
    """Check options that have one unsupported value each. values: option name -> unsupported value.

    :raises BeyondDecoderError: if an option has its unsupported value.
    """
    for key, value in values.items():
        if getattr(config, key) == value:
            raise BeyondDecoderError(f"{key}: needs {str(not value).lower()}, got {str(value).lower()}")


GEMMA2_NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
GPT2_NAMES = TensorNames(
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
OLMO2_NAMES = TensorNames(
    attention_norm=None, attention_post_norm="post_attention_layernorm", mlp_norm=None, mlp_post_norm="post_feedforward_layernorm"
)
OPT_NAMES = TensorNames(
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
PHI3_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
STARCODER2_NAMES = TensorNames(up=("mlp.c_fc",), down="mlp.c_proj")
