"""Model families that the decoder supports, and the conversion from transformers' configurations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.core.contract.errors import ModelError
from headway.kernels.step.config import Activation
from headway.models.config import (
    LLAMA_NAMES,
    BeyondDecoderError,
    DecoderConfig,
    LayerConfig,
    RopeConfig,
    StateConfig,
    TensorNames,
)
from headway.models.families import dense, experts, hybrid
from headway.models.families.dense import FULL, SLIDING, config_of_layer, layer_kinds
from headway.models.families.rope import read_rope


@dataclass(frozen=True)
class Family:
    """A model family: tensor names of its checkpoints, and differences from Llama's configuration."""

    architecture: str
    """Name of the transformers class."""
    options: Callable[[Any], dict[str, Any]] = lambda config: {}
    """Function that returns the DecoderConfig fields that the common conversion would set wrongly."""
    names: TensorNames = LLAMA_NAMES
    windowed: bool = True
    """True if the family uses sliding_window, in all layers or, with layer_types, only in sliding-window layers."""
    partial_rotary: bool = False


FAMILIES: dict[str, Family] = {
    "bamba": Family("BambaForCausalLM", hybrid.bamba, hybrid.BAMBA_NAMES, windowed=False, partial_rotary=True),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", experts.deepseek, windowed=False),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", experts.deepseek, windowed=False),
    "diffllama": Family("DiffLlamaForCausalLM", dense.diffllama, windowed=False),
    "falcon_h1": Family("FalconH1ForCausalLM", hybrid.falcon_h1, hybrid.FALCON_H1_NAMES, windowed=False),
    "gemma": Family("GemmaForCausalLM", dense.gemma, windowed=False),
    "gemma2": Family("Gemma2ForCausalLM", dense.gemma2, dense.GEMMA2_NAMES),
    "gemma3_text": Family("Gemma3ForCausalLM", lambda config: {**dense.gemma2(config), "qk_norm": "head"}, dense.GEMMA2_NAMES),
    "gemma4_text": Family("Gemma4ForCausalLM", dense.gemma4, dense.GEMMA4_NAMES, windowed=False),
    "gemma4_unified_text": Family("Gemma4UnifiedForCausalLM", dense.gemma4, dense.GEMMA4_NAMES, windowed=False),
    "gpt2": Family("GPT2LMHeadModel", dense.gpt2, dense.GPT2_NAMES, windowed=False),
    "gpt_oss": Family("GptOssForCausalLM", experts.gpt_oss, experts.GPT_OSS_NAMES),
    "granite": Family("GraniteForCausalLM", dense.granite, windowed=False),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", hybrid.granite_hybrid, hybrid.GRANITE_HYBRID_NAMES, windowed=False),
    "jamba": Family("JambaForCausalLM", hybrid.jamba, hybrid.JAMBA_NAMES, windowed=False),
    "kimi_linear": Family("KimiLinearForCausalLM", hybrid.kimi_linear, hybrid.KIMI_NAMES, windowed=False),
    "lfm2": Family("Lfm2ForCausalLM", hybrid.lfm2, hybrid.LFM2_NAMES, windowed=False),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", hybrid.lfm2_moe, hybrid.LFM2_NAMES, windowed=False),
    "llama": Family("LlamaForCausalLM", dense.biases, windowed=False),
    "minimax": Family("MiniMaxForCausalLM", hybrid.minimax, hybrid.MINIMAX_NAMES),
    "mistral": Family("MistralForCausalLM"),
    "mixtral": Family("MixtralForCausalLM", experts.mixtral, experts.MIXTRAL_NAMES),
    "nemotron_h": Family("NemotronHForCausalLM", hybrid.nemotron_h, hybrid.NEMOTRON_H_NAMES, windowed=False),
    "olmo2": Family("Olmo2ForCausalLM", dense.olmo2, dense.OLMO2_NAMES, windowed=False),
    "olmo_hybrid": Family("OlmoHybridForCausalLM", hybrid.olmo_hybrid, hybrid.OLMO_HYBRID_NAMES, windowed=False),
    "opt": Family("OPTForCausalLM", dense.opt, dense.OPT_NAMES, windowed=False),
    "phi3": Family("Phi3ForCausalLM", names=dense.PHI3_NAMES, partial_rotary=True),
    "qwen2": Family("Qwen2ForCausalLM", lambda config: {"qkv_bias": True}),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", experts.qwen2_moe, experts.QWEN2_MOE_NAMES),
    "qwen3": Family("Qwen3ForCausalLM", dense.qwen3),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", experts.qwen3_moe),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", hybrid.qwen3_5_moe, hybrid.QWEN3_5_NAMES, False, True),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", hybrid.qwen3_5, hybrid.QWEN3_5_NAMES, windowed=False, partial_rotary=True),
    "qwen3_next": Family("Qwen3NextForCausalLM", hybrid.qwen3_next, hybrid.QWEN3_NEXT_NAMES, windowed=False, partial_rotary=True),
    "smollm3": Family("SmolLM3ForCausalLM", dense.smollm3),
    "starcoder2": Family(
        "Starcoder2ForCausalLM", lambda config: dense.layer_norm(config.use_bias, config.norm_epsilon), dense.STARCODER2_NAMES
    ),
}
"""Model families keyed by model_type. SmolLM and SmolLM2 have Llama's model_type."""

TEXT_PARTS = ("gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe")
"""Multimodal model types whose text_config belongs to a family in FAMILIES; the decoder runs only that text model."""

ACTIVATION_NAMES: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Headway's activations, keyed by transformers' names."""


def known_architectures() -> str:
    """Return the supported architectures, for error messages."""
    return ", ".join(family.architecture for family in FAMILIES.values())


def read_decoder_config(config: Any, longest: int | None = None) -> DecoderConfig:
    """Convert a PretrainedConfig or a result of `plain_config`. longest: see `read_rope`.

    :raises ModelError: if a number is impossible.
    :raises BeyondDecoderError: if the decoder does not support the architecture, activation or RoPE type.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        named = ", ".join(config.architectures or [kind])
        raise BeyondDecoderError(f"model architecture: needs one of {known_architectures()}, got {named}")
    family = FAMILIES[kind]
    options = family.options(config)
    whole, config = config, config_of_layer(config, 0)
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and hidden % heads:
        raise ModelError(f"num_attention_heads: needs a divisor of hidden_size={hidden}, got {heads}")
    head_dim = head_dim or hidden // heads
    window = (getattr(config, "sliding_window", None) or None) if family.windowed else None
    layers, ropes = _layers(whole, head_dim, window, options.pop("rotated", None), options.pop("layers", None), longest)
    partial = [rope.rotary_dim / len(rope.inv_freq) / 2 for rope in ropes]
    if set(partial) - {1.0} and not family.partial_rotary:
        raise BeyondDecoderError(f"partial_rotary_factor: needs 1 in {family.architecture}, got {min(partial):g}")
    read: dict[str, Any] = {
        "intermediate_size": getattr(config, "intermediate_size", None),
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "scale": head_dim**-0.5,
        "norm_eps": getattr(config, "rms_norm_eps", None),
        "activation": getattr(config, "hidden_act", None),
        "names": family.names,
        **options,
    }
    without_experts = read.pop("dense_layers", ()) if "experts" in read else range(len(layers))
    layers = tuple(
        layer if layer.mlp is None or index in without_experts else replace(layer, mlp="experts")
        for index, layer in enumerate(layers)
    )
    read["activation"] = _checked_activation(config, read, any(layer.mlp == "experts" for layer in layers))
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
        **read,
    )


def _checked_activation(config: Any, read: Mapping[str, Any], routed: bool) -> Activation:
    """Return the MLPs' activation. routed: True if there are experts. :raises BeyondDecoderError, ModelError: if unsupported."""
    named, eps = read["activation"], read["norm_eps"]
    field = _field_of(config, _ACTIVATION_FIELDS, named)
    if named not in ACTIVATION_NAMES:
        raise BeyondDecoderError(f"{field}: needs one of {', '.join(ACTIVATION_NAMES)}, got {named}")
    if not isinstance(eps, (int, float)) or not math.isfinite(eps) or eps <= 0:
        raise ModelError(f"{_field_of(config, _EPSILON_FIELDS, eps)}: needs a number above 0, got {eps!r}")
    activation = ACTIVATION_NAMES[named]
    if routed and activation != read["experts"].activation:
        raise BeyondDecoderError(f"{field}: needs {read['experts'].activation} for experts, got {named}")
    _check_convolution(config, read.get("state"))
    return activation


def _field_of(config: Any, names: Sequence[str], value: object) -> str:
    """Return the name of the first field with this value; else the last name, which most families use."""
    return next((name for name in names if getattr(config, name, None) == value), names[-1])


_ACTIVATION_FIELDS = ("mlp_hidden_act", "hidden_activation", "activation_function", "hidden_act")
_EPSILON_FIELDS = ("norm_epsilon", "layer_norm_epsilon", "norm_eps", "rms_norm_eps")


def _check_convolution(config: Any, state: StateConfig | None) -> None:
    """Check that the activation of the convolution is silu. transformers applies the MLPs' activation to the convolution."""
    if state is None or not state.spec.conv_channels or state.spec.activation != "silu":
        return
    field = "mamba_hidden_act" if hasattr(config, "mamba_hidden_act") else "hidden_act"
    named = getattr(config, field)
    if ACTIVATION_NAMES.get(named) != "silu":
        raise BeyondDecoderError(f"{field}: needs silu, behind the convolution of layers with a state as well, got {named}")


def _layers(
    config: Any,
    head_dim: int,
    window: int | None,
    rotated: Sequence[bool] | None,
    parts: Sequence[LayerConfig] | None,
    longest: int | None,
) -> tuple[tuple[LayerConfig, ...], tuple[RopeConfig, ...]]:
    """Return the layers, with sliding windows and RoPE indices, and the rotary embeddings.

    rotated: for each layer, True if it has RoPE; None means that all layers have RoPE. parts: parts of each layer; None if all
    layers have the same parts.
    """
    count = config.num_hidden_layers
    if parts is None:
        kinds, parts = layer_kinds(config, SLIDING), [LayerConfig()] * count
    else:
        windows = [(layer.sliding_window or window) if layer.attention else None for layer in parts]
        kinds = [FULL if each is None else SLIDING for each in windows]
        rotated = [layer.attention and rotates for layer, rotates in zip(parts, rotated or [True] * len(parts), strict=True)]
    rotated = [True] * count if rotated is None else rotated
    rotated_kinds = dict.fromkeys(kind for kind, rotates in zip(kinds, rotated, strict=True) if rotates)
    by_kind = set(kinds) <= set(config.rope_parameters or ()) if rotated_kinds else False
    found = {}
    for kind in rotated_kinds:
        first = kinds.index(kind)
        of_kind = config_of_layer(config, first)
        found[kind] = read_rope(of_kind, parts[first].head_dim or head_dim, kind if by_kind else None, longest)
    ropes = tuple(dict.fromkeys(found.values()))
    layers = [
        replace(
            layer,
            sliding_window=(layer.sliding_window or window) if kind == SLIDING else None,
            rope=ropes.index(found[kind]) if rotates else None,
        )
        for layer, kind, rotates in zip(parts, kinds, rotated, strict=True)
    ]
    return tuple(layers), ropes
