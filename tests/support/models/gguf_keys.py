"""What llama.cpp's converter writes into a .gguf file of a model's configuration, below its architecture."""

from __future__ import annotations

from typing import Any

Keys = dict[str, Any]
ARCHITECTURES = {
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "jamba": "jamba",
    "kimi_linear": "kimi-linear",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "nemotron_h": "nemotron_h",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
}


def architecture(config: Any) -> str:
    """The file's general.architecture."""
    routed = config.model_type == "nemotron_h" and "moe" in config.layers_block_type
    return "nemotron_h_moe" if routed else ARCHITECTURES[config.model_type]


def keys_of(config: Any) -> Keys:
    """Every key that says something about the model."""
    heads = config.num_attention_heads
    common = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }
    for key, name in (("feed_forward_length", "intermediate_size"), ("attention.layer_norm_rms_epsilon", "rms_norm_eps")):
        if getattr(config, name, None) is not None:
            common[key] = getattr(config, name)
    if (getattr(config, "rope_parameters", None) or {}).get("rope_theta"):
        common["rope.freq_base"] = config.rope_parameters["rope_theta"]
    return common | _FAMILIES[config.model_type](config)


def _of_attention(config: Any, name: str = "full_attention") -> list[int]:
    return [config.num_key_value_heads * (kind == name) for kind in config.layer_types]


def _experts(config: Any, count: str = "num_experts") -> Keys:
    return {"expert_count": getattr(config, count), "expert_used_count": config.num_experts_per_tok}


def _mamba2(config: Any) -> Keys:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def _bamba(config: Any) -> Keys:
    rotated = config.hidden_size // config.num_attention_heads // 2
    kv = _of_attention(config)
    return {**_mamba2(config), "attention.head_count_kv": kv, "rope.dimension_count": rotated, "rope.scaling.finetuned": True}


def _granite(config: Any) -> Keys:
    return {
        **_mamba2(config),
        **_experts(config, "num_local_experts"),
        "context_length": 1 << 20,  # whatever the model's is
        "attention.head_count_kv": _of_attention(config),
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.finetuned": False,
    }


def _falcon_h1(config: Any) -> Keys:
    dim = config.hidden_size // config.num_attention_heads
    return {**_mamba2(config), "attention.key_length": dim, "attention.value_length": dim}


def _nemotron_h(config: Any) -> Keys:
    routed = "moe" in config.layers_block_type
    kind, rows = ("moe", config.moe_intermediate_size) if routed else ("mlp", config.intermediate_size)
    keys = {
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.head_count_kv": _of_attention(config),
        "attention.key_length": config.head_dim,
        "feed_forward_length": [rows * (layer == kind) for layer in config.layers_block_type],
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
        "rope.scaling.finetuned": False,
    }
    if not routed:
        return keys
    return keys | {
        **_experts(config, "n_routed_experts"),
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def _jamba(config: Any) -> Keys:
    return {
        **_experts(config),
        "attention.head_count_kv": _of_attention(config),
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_dt_rank,
    }


def _lfm2(config: Any) -> Keys:
    inner, multiple = config.intermediate_size, getattr(config, "block_multiple_of", 1)
    if getattr(config, "block_auto_adjust_ff_dim", False):
        inner = int(config.block_ffn_dim_multiplier * int(2 * inner / 3))
        inner = multiple * ((inner + multiple - 1) // multiple)
    return {
        "feed_forward_length": inner,
        "attention.head_count_kv": _of_attention(config),
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "shortconv.l_cache": config.conv_L_cache,
    }


def _lfm2_moe(config: Any) -> Keys:
    return {
        **_lfm2(config),
        **_experts(config),
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
    }


def _delta(config: Any) -> Keys:
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 4,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
    }


def _delta_experts(config: Any) -> Keys:
    return {
        **_delta(config),
        **_experts(config),
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }


def _kimi(config: Any) -> Keys:
    return {
        **_experts(config, "num_local_experts"),
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_head_dim,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


_FAMILIES = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "kimi_linear": _kimi,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "nemotron_h": _nemotron_h,
    "qwen3_5_text": lambda config: _delta(config) | {"rope.dimension_sections": [1, 1, 0, 0]},
    "qwen3_5_moe_text": lambda config: _delta_experts(config) | {"rope.dimension_sections": [1, 1, 0, 0]},
    "qwen3_next": _delta_experts,
}
