"""Dense model families: differences from Llama's configuration, and checkpoint tensor names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.core.contract.errors import ModelError
from headway.models.config import BeyondDecoderError, LayerConfig, LayerInputsConfig, TensorNames


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


SLIDING = "sliding_attention"
FULL = "full_attention"


def layer_kinds(config: Any, default: str = FULL) -> list[str]:
    """Return the kind of each layer's attention, SLIDING or FULL. default: kind of all layers if `layer_types` is not stated.

    :raises ModelError: if there is not one kind for each layer.
    :raises BeyondDecoderError: if a kind is unknown.
    """
    count = config.num_hidden_layers
    kinds = list(getattr(config, "layer_types", None) or [default] * count)
    if len(kinds) != count:
        raise ModelError(f"layer_types: needs one for each of the {count} layers, got {len(kinds)}")
    unknown = sorted(set(kinds) - {SLIDING, FULL})
    if unknown:
        raise BeyondDecoderError(f"layer_types: needs {SLIDING} or {FULL}, got {', '.join(map(str, unknown))}")
    return kinds


def config_of_layer(config: Any, index: int) -> Any:
    """Return the configuration of one layer if its layers have different sizes (`per_layer_config`), else `config`."""
    return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config


def gemma4(config: Any) -> dict[str, Any]:
    """Return the options of Gemma 4's text models: other sizes in global layers, shared KV caches, and per-layer inputs."""
    if config.use_bidirectional_attention == "all":
        raise BeyondDecoderError("use_bidirectional_attention: needs null or vision, got all")
    if getattr(config, "enable_moe_block", False):
        raise BeyondDecoderError("enable_moe_block: needs false, got true")
    of_layers = (getattr(config, "to_dict", dict[str, Any])().get("per_layer_config") or {}).values()
    others = sorted({key for each in of_layers for key in each} - {"head_dim", "num_key_value_heads"})
    if others:
        raise BeyondDecoderError(f"per_layer_config: needs head_dim and num_key_value_heads only, got {', '.join(others)}")
    layers = _gemma4_layers(config)
    shared = [index for index, layer in enumerate(layers) if layer.shares_kv is not None]
    unused = [
        f"{prefix}.layers.{index}.self_attn.{name}"
        for prefix in ("model", "model.language_model")
        for index in shared
        for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    ]
    size, inputs = getattr(config, "hidden_size_per_layer_input", None), None
    if size:
        vocab = size_of(config, "vocab_size_per_layer_input", config.vocab_size)
        inputs = LayerInputsConfig(vocab, len(layers), size_of(config, "hidden_size_per_layer_input"))
    return {
        **biases(config),
        "layers": layers,
        "layer_inputs": inputs,
        "names": replace(GEMMA4_NAMES, ignored_modules=(*GEMMA4_NAMES.ignored_modules, *unused)),
        "embedding_scale": config.hidden_size**0.5,
        "activation": config.hidden_activation,
        "scale": 1.0,
        "qk_norm": "head",
        "v_norm": True,
        "logit_softcap": config.final_logit_softcapping,
    }


def _gemma4_layers(config: Any) -> list[LayerConfig]:
    """Return the sizes of Gemma 4's layers. The last `num_kv_shared_layers` layers read the KV caches of earlier layers."""
    kinds, count = layer_kinds(config), config.num_hidden_layers
    first = count - size_of(config, "num_kv_shared_layers", 0)
    own = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    missing = sorted(set(kinds) - set(own))
    if missing:
        need = f"at most {count - 1}, with a layer of each kind that has a KV cache"
        raise ModelError(f"num_kv_shared_layers: needs {need}, got {config.num_kv_shared_layers} (no {missing[0]} has one)")
    layers = []
    for index, kind in enumerate(kinds):
        sizes = config_of_layer(config, index)
        layers.append(
            LayerConfig(
                sliding_window=size_of(config, "sliding_window") if kind == SLIDING else None,
                head_dim=size_of(sizes, "head_dim"),
                num_kv_heads=size_of(sizes, "num_key_value_heads"),
                intermediate_size=config.intermediate_size * (2 if index >= first and config.use_double_wide_mlp else 1),
                value_is_key=config.attention_k_eq_v and kind == FULL,
                shares_kv=own[kind] if index >= first else None,
            )
        )
    return layers


def qwen3(config: Any) -> dict[str, Any]:
    """Return Qwen3's options: QK-norm per head."""
    return {**biases(config), "qk_norm": "head"}


def olmo2(config: Any) -> dict[str, Any]:
    """Return OLMo 2's options: QK-norm over all heads, and no norm before a part."""
    return {**biases(config), "qk_norm": "whole"}


def diffllama(config: Any) -> dict[str, Any]:
    """Return DiffLlama's options: differential attention, whose heads are paired."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if kv_heads % 2:
        raise ModelError(f"num_key_value_heads: needs an even number for differential attention, got {kv_heads}")
    return {**biases(config), "mlp_bias": False, "differential": True}


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
GEMMA4_NAMES = replace(
    GEMMA2_NAMES,
    scalar="layer_scalar",
    ignored_modules=("model.vision_", "model.audio_", "model.embed_vision.", "model.embed_audio."),
    aliases=(("model.", "model.language_model."),),
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
