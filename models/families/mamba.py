"""Families with Mamba layers: conversion of their configurations, and checkpoint tensor names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headway.core.contract.errors import ModelError
from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.state import MAMBA1, MAMBA2, StateSpec
from headway.models.config import BeyondDecoderError, ExpertNames, LayerConfig, Multipliers, StateConfig, StateNames, TensorNames
from headway.models.families.dense import biases, size_of
from headway.models.families.dense import granite as granite_factors
from headway.models.families.experts import sigmoid_experts
from headway.models.families.hybrid import LINEAR_OR_FULL, STATE, parts_of, state_dtype

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
