"""Hybrid families that mix attention with recurrent layers: conversion of their configurations, and tensor names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from headway.core.contract.errors import ModelError
from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.spec import DTYPES
from headway.core.contract.state import CONV, GATED_DELTA, KDA, LIGHTNING, MAMBA1, MAMBA2, StateSpec
from headway.core.system.text import shown
from headway.models.config import BeyondDecoderError, ExpertNames, LayerConfig, Multipliers, StateConfig, StateNames, TensorNames
from headway.models.families.dense import OLMO2_NAMES, biases, olmo2, qwen3, size_of
from headway.models.families.dense import granite as granite_factors
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


_SECTIONS = ("z", "x", "B", "C", "dt")


def _mamba2_names(module: str) -> StateNames:
    return StateNames(
        inputs=((f"{module}.in_proj", _SECTIONS),),
        conv=(f"{module}.conv1d",),
        A_log=f"{module}.A_log",
        dt_bias=f"{module}.dt_bias",
        D=f"{module}.D",
        out_norm=f"{module}.norm",
        out=f"{module}.out_proj",
    )


_MAMBA2 = _mamba2_names("mamba")
BAMBA_NAMES = TensorNames(
    norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    state=_MAMBA2,
)
FALCON_H1_NAMES = replace(BAMBA_NAMES, attention_norm=None, state=replace(_MAMBA2, norm=None))
GRANITE_HYBRID_NAMES = TensorNames(
    up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    experts=ExpertNames(
        router="block_sparse_moe.router.layer",
        stacked_gate_up="block_sparse_moe.input_linear.weight",
        stacked_down="block_sparse_moe.output_linear.weight",
        shared="shared_mlp",
        shared_up=("input_linear",),
        shared_down="output_linear",
    ),
    state=_MAMBA2,
)
NEMOTRON_H_NAMES = TensorNames(
    embed="backbone.embeddings",
    norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    attention_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    mlp_norm="norm",
    experts=ExpertNames(
        router="mixer.gate",
        correction_bias="mixer.gate.e_score_correction_bias",
        up="mixer.experts.{}.up_proj",
        down="mixer.experts.{}.down_proj",
        shared="mixer.shared_experts",
        shared_up=("up_proj",),
    ),
    up=("mixer.up_proj",),
    down="mixer.down_proj",
    state=replace(_mamba2_names("mixer"), norm="norm"),
    ignored_modules=("mtp.",),
    aliases=(("backbone.", "model."),),
)
JAMBA_NAMES = replace(
    BAMBA_NAMES,
    experts=ExpertNames(
        router="feed_forward.router",
        gate="feed_forward.experts.{}.gate_proj",
        up="feed_forward.experts.{}.up_proj",
        down="feed_forward.experts.{}.down_proj",
    ),
    state=StateNames(
        inputs=(("mamba.in_proj", ("x", "z")),),
        conv=("mamba.conv1d",),
        A_log="mamba.A_log",
        dt_bias="mamba.dt_proj.bias",
        D="mamba.D",
        out="mamba.out_proj",
        low_rank=("mamba.dt_proj",),
        from_conv="mamba.x_proj",
        from_conv_norms=("mamba.dt_layernorm", "mamba.b_layernorm", "mamba.c_layernorm"),
    ),
)


def bamba(config: Any) -> dict[str, Any]:
    """Return Bamba's options: Mamba-2 and attention."""
    return {**biases(config), "state": mamba2(config), "layers": parts_of(config.layer_types, LINEAR_OR_FULL)}


def granite_hybrid(config: Any) -> dict[str, Any]:
    """Return Granite 4's options: Mamba-2, attention with Granite's factors, and a shared MLP with optional experts."""
    options = {
        **granite_factors(config),
        "mlp_bias": False,
        "intermediate_size": config.shared_intermediate_size,
        "rotated": [config.position_embedding_type == "rope"] * config.num_hidden_layers,
        "state": mamba2(config),
        "layers": parts_of(config.layer_types, LINEAR_OR_FULL),
    }
    if config.num_local_experts:
        options["experts"] = ExpertsConfig(
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            intermediate_size=config.intermediate_size,
            shared_intermediate_size=config.shared_intermediate_size,
        )
    return options


def falcon_h1(config: Any) -> dict[str, Any]:
    """Return Falcon-H1's options: attention and Mamba-2 in parallel in every layer, with factors for many parts."""
    before = float(config.attention_in_multiplier)
    if config.attention_bias and before != 1.0:
        raise BeyondDecoderError(f"attention_in_multiplier: needs 1 with attention_bias, got {before:g}")
    if config.mamba_proj_bias and config.ssm_in_multiplier != 1.0:
        raise BeyondDecoderError(f"ssm_in_multiplier: needs 1 with mamba_proj_bias, got {config.ssm_in_multiplier:g}")
    gate, down = map(float, config.mlp_multipliers)
    sections = zip(_SECTIONS, config.ssm_multipliers, strict=True)
    normed = bool(config.mamba_rms_norm)
    state = mamba2(config)
    return {
        **biases(config),
        "embedding_scale": float(config.embedding_multiplier),
        "logit_scale": float(config.lm_head_multiplier),
        "multipliers": Multipliers(
            qkv=(before, before * float(config.key_multiplier), before),
            attention=float(config.attention_out_multiplier),
            state=float(config.ssm_out_multiplier),
            mlp=down,
            gate=gate,
            sections=tuple((name, float(config.ssm_in_multiplier * factor)) for name, factor in sections),
        ),
        "state": replace(
            state,
            norm_size=state.norm_size if normed else 0,
            gate_first=normed and not config.mamba_norm_before_gate,
            out_bias=bool(config.projectors_bias),
        ),
        "layers": [LayerConfig(state=True)] * config.num_hidden_layers,
    }


def nemotron_h(config: Any) -> dict[str, Any]:
    """Return Nemotron-H's options: each layer has a single part: Mamba-2, attention, an MLP or experts."""
    known = {
        "linear_attention": replace(STATE, mlp=None),
        "full_attention": LayerConfig(mlp=None),
        "mlp": LayerConfig(attention=False),
        "moe": LayerConfig(attention=False),
    }
    layers = parts_of(config.layer_types, known, "layers_block_type")
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias")
    experts = {}
    if "moe" in config.layer_types:
        plain = {index for index, kind in enumerate(config.layer_types) if kind == "mlp"}
        experts = {"experts": _nemotron_experts(config), "dense_layers": plain}
    return {
        **experts,
        "norm_eps": config.layer_norm_epsilon,
        "gated": False,
        "activation": config.mlp_hidden_act,
        "mlp_bias": bool(config.mlp_bias),
        "rotated": [False] * config.num_hidden_layers,
        "state": _normed(config, names, (config.time_step_min, math.inf)),
        "layers": layers,
    }


def _nemotron_experts(config: Any) -> ExpertsConfig:
    """Return the configuration of ungated experts with V3 routing. :raises BeyondDecoderError: if the experts are latent or have
    biases."""
    if config.moe_latent_size is not None:
        layer = config.layer_types.index("moe")
        raise BeyondDecoderError(
            f"moe_latent_size: needs null, got {config.moe_latent_size} (layer {layer} is the first with it)"
        )
    if config.mlp_bias:
        raise BeyondDecoderError("mlp_bias: needs false in a model with experts, got true")
    shared = config.moe_shared_expert_intermediate_size or config.intermediate_size
    return replace(sigmoid_experts(config), shared_intermediate_size=shared, gated=False)


def jamba(config: Any) -> dict[str, Any]:
    """Return Jamba's options: Mamba 1, attention without positions, and experts at a regular layer interval."""
    channels = size_of(config, "mamba_expand") * config.hidden_size
    spec = StateSpec(
        kind=MAMBA1,
        num_heads=channels,
        num_key_heads=1,
        key_dim=size_of(config, "mamba_d_state"),
        value_dim=1,
        conv_channels=channels,
        conv_width=size_of(config, "mamba_d_conv", least=2),
        state_dtype=state_dtype(config),
    )
    bias = bool(config.mamba_proj_bias)
    counts = config.layers_num_experts
    options = {
        "rotated": [False] * config.num_hidden_layers,
        "state": StateConfig(
            spec, dt_rank=size_of(config, "mamba_dt_rank"), conv_bias=bool(config.mamba_conv_bias), in_bias=bias, out_bias=bias
        ),
        "layers": parts_of(config.layer_types, LINEAR_OR_FULL),
    }
    if any(count > 1 for count in counts):
        options["experts"] = ExpertsConfig(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            intermediate_size=config.intermediate_size,
            renormalize=False,
        )
        options["dense_layers"] = {index for index, count in enumerate(counts) if count == 1}
    return options


def mamba2(config: Any) -> StateConfig:
    """Return the configuration of Mamba-2, read from the keys of Bamba, Granite 4 and Falcon-H1."""
    names = ("n_heads", "d_head", "n_groups", "d_state", "d_conv", "conv_bias", "proj_bias")
    return _normed(config, [f"mamba_{name}" for name in names], config.time_step_limit or (0.0, math.inf))


def _normed(config: Any, names: Sequence[str], limits: Sequence[float]) -> StateConfig:
    """Return the configuration of Mamba-2 with gated, then group-normalized output. names: keys of five sizes and two biases.

    :raises ModelError: if the groups do not divide the heads.
    """
    num_heads, head_dim, groups, state = (size_of(config, name) for name in names[:4])
    if num_heads % groups:
        raise ModelError(f"mamba heads: needs a multiple of the {groups} groups, got {num_heads}")
    spec = StateSpec(
        kind=MAMBA2,
        num_heads=num_heads,
        num_key_heads=groups,
        key_dim=state,
        value_dim=head_dim,
        conv_channels=num_heads * head_dim + 2 * groups * state,
        conv_width=size_of(config, names[4], least=2),
        state_dtype=state_dtype(config),
        dt_limits=(float(limits[0]), float(limits[1])),
    )
    conv_bias, bias = (bool(getattr(config, name)) for name in names[5:])
    size = spec.out_channels // groups
    return StateConfig(
        spec, norm_size=size, norm_all_weights=True, gate_first=True, conv_bias=conv_bias, in_bias=bias, out_bias=bias
    )
