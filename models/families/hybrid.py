"""Hybrid families that mix attention with recurrent layers: conversion of their configurations, and tensor names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from headway.core.contract.errors import ModelError
from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.spec import DTYPES
from headway.core.contract.state import CONV, GATED_DELTA, KDA, LIGHTNING, StateSpec
from headway.core.system.text import shown
from headway.models.config import BeyondDecoderError, ExpertNames, LayerConfig, Multipliers, StateConfig, StateNames, TensorNames
from headway.models.families.dense import OLMO2_NAMES, olmo2, qwen3, size_of
from headway.models.families.experts import (
    MIXTRAL_NAMES,
    QWEN2_MOE_NAMES,
    latent_attention,
    mixtral,
    qwen_expert_sizes,
    qwen_experts,
    sigmoid_experts,
)

Known = TypeVar("Known")

STATE = LayerConfig(attention=False, state=True)
"""Layer with a recurrent part instead of attention."""
LINEAR_OR_FULL = {"linear_attention": STATE, "full_attention": LayerConfig()}
"""Layer parts for each value of layer_types, as most families define them."""

_DELTA = StateNames(
    conv=("linear_attn.conv1d",),
    A_log="linear_attn.A_log",
    dt_bias="linear_attn.dt_bias",
    out_norm="linear_attn.norm",
    out="linear_attn.out_proj",
)
_QWEN3_NEXT_INPUTS = (("linear_attn.in_proj_qkvz", ("q", "k", "v", "z")), ("linear_attn.in_proj_ba", ("b", "a")))
_QWEN3_5_INPUTS = (
    ("linear_attn.in_proj_qkv", ("q", "k", "v")),
    *((f"linear_attn.in_proj_{section}", (section,)) for section in ("z", "b", "a")),
)
QWEN3_NEXT_NAMES = TensorNames(
    experts=QWEN2_MOE_NAMES.experts,
    state=replace(_DELTA, inputs=_QWEN3_NEXT_INPUTS, by_key_head=True),
    ignored=QWEN2_MOE_NAMES.ignored,
    ignored_modules=("mtp.",),
)
QWEN3_5_NAMES = replace(
    QWEN3_NEXT_NAMES,
    state=replace(_DELTA, inputs=_QWEN3_5_INPUTS),
    ignored_modules=("mtp.", "model.visual."),
    aliases=(("model.", "model.language_model."),),
)
_OLMO_HYBRID_STATE = StateNames(
    norm="attention_layer_norm",
    inputs=(
        *((f"linear_attn.{section}_proj", (section,)) for section in ("q", "k", "v", "a", "b")),
        ("linear_attn.g_proj", ("z",)),
    ),
    conv=("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
    A_log="linear_attn.A_log",
    dt_bias="linear_attn.dt_bias",
    out_norm="linear_attn.o_norm",
    out="linear_attn.o_proj",
)
OLMO_HYBRID_NAMES = replace(
    OLMO2_NAMES,
    state=_OLMO_HYBRID_STATE,
    aliases=(("post_attention_layernorm", "feedforward_layer_norm"),),  # as transformers writes it
)
LFM2_NAMES = TensorNames(
    norm="model.embedding_norm",
    attention_norm="operator_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.out_proj",
    mlp_norm="ffn_norm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    experts=ExpertNames(
        router="feed_forward.gate",
        correction_bias="feed_forward.expert_bias",
        gate="feed_forward.experts.{}.w1",
        up="feed_forward.experts.{}.w3",
        down="feed_forward.experts.{}.w2",
    ),
    state=StateNames(norm="operator_norm", inputs=(("conv.in_proj", ("B", "C", "x")),), conv=("conv.conv",), out="conv.out_proj"),
)
KIMI_NAMES = TensorNames(
    experts=replace(
        MIXTRAL_NAMES.experts,
        correction_bias="block_sparse_moe.gate.e_score_correction_bias",
        shared="block_sparse_moe.shared_experts",
    ),
    state=StateNames(
        inputs=(
            *((f"self_attn.{section}_proj", (section,)) for section in ("q", "k", "v", "b")),
            ("self_attn.f_a_proj", ("f",)),
            ("self_attn.g_a_proj", ("g",)),
        ),
        conv=("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
        A_log="self_attn.A_log",
        dt_bias="self_attn.dt_bias",
        out_norm="self_attn.o_norm",
        out="self_attn.o_proj",
        low_rank=("self_attn.f_b_proj", "self_attn.g_b_proj"),
    ),
    aliases=(("mlp.", "block_sparse_moe."),),  # as transformers writes dense layers
)


def qwen3_5(config: Any) -> dict[str, Any]:
    """Return Qwen3.5's options: gated delta layers and gated attention."""
    return {
        **qwen3(config),
        "norm": "rms_plus_one",
        "output_gate": True,
        "state": gated_delta(config),
        "layers": parts_of(config.layer_types, LINEAR_OR_FULL),
    }


def qwen3_next(config: Any) -> dict[str, Any]:
    """Return Qwen3-Next's options: Qwen3.5's, plus experts and a gated shared expert."""
    return {**qwen3_5(config), **qwen_experts(config)}


def qwen3_5_moe(config: Any) -> dict[str, Any]:
    """Return the options of Qwen3.5 with experts in every layer, whose routing weights are always normalized."""
    return {**qwen3_5(config), "experts": qwen_expert_sizes(config, renormalize=True)}


def olmo_hybrid(config: Any) -> dict[str, Any]:
    """Return OLMo Hybrid's options: gated delta layers with norms before each part, and OLMo 2's attention with norms after."""
    rotated = (config.rope_parameters or {}).get("rope_theta") is not None
    state = gated_delta(config, beta_scale=2.0 if config.linear_allow_neg_eigval else 1.0)
    normed_before = replace(OLMO_HYBRID_NAMES, mlp_norm="feedforward_layer_norm", mlp_post_norm=None)
    known = {**LINEAR_OR_FULL, "linear_attention": replace(STATE, names=normed_before)}
    return {
        **olmo2(config),
        "rotated": [rotated] * config.num_hidden_layers,
        "state": replace(state, norm_eps=1e-5),
        "layers": parts_of(config.layer_types, known),
    }


def lfm2(config: Any) -> dict[str, Any]:
    """Return LFM2's options: short convolutions and attention."""
    inner = config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        factor, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
        inner = 2 * inner // 3 if factor is None else int(factor * (2 * inner // 3))
        inner = inner if factor is None else multiple * -(-inner // multiple)
    channels, bias = config.hidden_size, bool(config.conv_bias)
    spec = StateSpec(CONV, 0, 0, 0, 0, channels, size_of(config, "conv_L_cache", least=2), activation="none")
    return {
        "intermediate_size": inner,
        "norm_eps": config.norm_eps,
        "activation": "silu",
        "qk_norm": "head",
        "state": StateConfig(spec, gate="none", conv_bias=bias, in_bias=bias, out_bias=bias),
        "layers": parts_of(config.layer_types, {"conv": STATE, "full_attention": LayerConfig()}),
    }


def lfm2_moe(config: Any) -> dict[str, Any]:
    """Return LFM2-MoE's options: LFM2's, with experts after the leading dense layers."""
    experts = ExpertsConfig(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        scoring="sigmoid",
        renormalize=bool(config.norm_topk_prob),
        scale=float(config.routed_scaling_factor),
        correction_bias=bool(config.use_expert_bias),
    )
    return {**lfm2(config), "experts": experts, "dense_layers": range(config.num_dense_layers)}


def kimi_linear(config: Any) -> dict[str, Any]:
    """Return Kimi Linear's options: Kimi delta attention, latent attention without positions, and DeepSeek's experts."""
    heads, dim = size_of(config, "linear_num_heads"), size_of(config, "linear_head_dim")
    spec = StateSpec(
        kind=KDA,
        num_heads=heads,
        num_key_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_channels=3 * heads * dim,
        conv_width=size_of(config, "linear_conv_kernel_dim", least=2),
        state_dtype=state_dtype(config),
        scale=dim**-0.5,
        qk_norm=True,
    )
    kinds = parts_of(config.mlp_layer_types, {"dense": True, "sparse": False}, "mlp_layer_types")
    return {
        **latent_attention(config),
        "experts": sigmoid_experts(config),
        "dense_layers": {index for index, dense in enumerate(kinds) if dense},
        "rotated": [False] * config.num_hidden_layers,
        "state": StateConfig(spec, gate="sigmoid", norm_size=dim),
        "layers": parts_of(config.layer_types, LINEAR_OR_FULL),
    }


def gated_delta(config: Any, beta_scale: float = 1.0) -> StateConfig:
    """Return the configuration of gated delta layers (Qwen3-Next, Qwen3.5, OLMo Hybrid)."""
    heads, key_heads = size_of(config, "linear_num_value_heads"), size_of(config, "linear_num_key_heads")
    if heads % key_heads:
        raise ModelError(f"linear_num_value_heads: needs a multiple of linear_num_key_heads={key_heads}, got {heads}")
    key_dim, value_dim = size_of(config, "linear_key_head_dim"), size_of(config, "linear_value_head_dim")
    spec = StateSpec(
        kind=GATED_DELTA,
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_channels=2 * key_heads * key_dim + heads * value_dim,
        conv_width=size_of(config, "linear_conv_kernel_dim", least=2),
        state_dtype=state_dtype(config),
        scale=key_dim**-0.5,
        qk_norm=True,
        beta_scale=beta_scale,
    )
    return StateConfig(spec, norm_size=value_dim)


def parts_of(kinds: Sequence[object] | None, known: Mapping[str, Known], key: str = "layer_types") -> list[Known]:
    """Return the parts of each layer. known: parts for each kind of layer. :raises BeyondDecoderError: if kinds are missing or
    unknown."""
    if kinds is None:
        raise BeyondDecoderError(f"{key}: needs {' or '.join(known)} for each layer, got none")
    for index, kind in enumerate(kinds):
        if kind not in known:
            raise BeyondDecoderError(f"{key}: needs {' or '.join(known)}, got {shown(kind)} in layer {index}")
    return [known[str(kind)] for kind in kinds]


def state_dtype(config: Any) -> torch.dtype:
    """Return the dtype of recurrent states: float32, unless the configuration names a different one; `auto` means float32."""
    for key in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        named = getattr(config, key, None)
        if named in (None, "auto"):
            continue
        name = str(named).removeprefix("torch.")
        if name not in DTYPES:
            raise ModelError(f"{key}: needs auto or {' or '.join(DTYPES)}, got {shown(named)}")
        return DTYPES[name]
    return torch.float32


MINIMAX_NAMES = replace(
    MIXTRAL_NAMES,
    attention_norm=None,
    state=StateNames(
        norm=None,
        inputs=(("self_attn.qkv_proj", ("q", "k", "v")), ("self_attn.output_gate", ("z",))),
        by_key_head=True,
        out_norm="self_attn.norm",
        out="self_attn.out_proj",
    ),
    ignored=(".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay"),
)


def minimax(config: Any) -> dict[str, Any]:
    """Return MiniMax-01's options: decays that become weaker in later layers, and factors folded into output projections."""
    heads, count = config.num_attention_heads, config.num_hidden_layers
    dim = config.head_dim or config.hidden_size // heads
    spec = StateSpec(LIGHTNING, heads, heads, dim, dim, state_dtype=state_dtype(config))
    mlp = float(config.mlp_alpha_factor)
    known = {
        "linear_attention": replace(STATE, normed_scales=(float(config.linear_attn_alpha_factor), mlp)),
        "full_attention": LayerConfig(normed_scales=(float(config.full_attn_alpha_factor), mlp)),
    }
    layers = parts_of(config.layer_types, known)
    falling = [1 - index / (count - 1 + 1e-5) + 1e-5 for index in range(count)]
    slopes = [tuple(2.0 ** (-8 * (head + 1) / heads) * factor for head in range(heads)) for factor in falling]
    return {
        **mixtral(config),
        "multipliers": Multipliers(
            attention=float(config.full_attn_beta_factor),
            state=float(config.linear_attn_beta_factor),
            mlp=float(config.mlp_beta_factor),
        ),
        "state": StateConfig(spec, gate="sigmoid", norm_size=heads * dim, norm_eps=1e-6),
        "layers": [replace(layer, slopes=of_layer) for layer, of_layer in zip(layers, slopes, strict=True)],
    }
