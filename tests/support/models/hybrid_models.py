"""Tiny configurations of transformers' models that mix attention with layers that keep a state."""

from __future__ import annotations

from typing import Any

import transformers

import plain_models

SMALL: dict[str, Any] = {**plain_models.SMALL, "num_hidden_layers": 4, "initializer_range": 0.1}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
SHARED = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
EQUAL_DELTA = {**DELTA, "linear_num_key_heads": 4, "linear_value_head_dim": 8}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
MULTIPLIERS = {
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.5, 1.5, 0.8, 1.1, 1.3],
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.75,
}
MIXED = ["linear_attention", "full_attention"] * 2
SINGLE = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
ROUTED = {"num_experts": 6, "num_experts_per_tok": 2}
_STATES = {"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 10, "chunk_size": 16}
NEMOTRON = {**{key: value for key, value in SMALL.items() if key != "num_hidden_layers"}, **_STATES, "head_dim": 16}
ROWS: dict[str, transformers.PretrainedConfig] = {
    "bamba": transformers.BambaConfig(**SMALL, **MAMBA, attn_layer_indices=[1]),
    "bamba, biased": transformers.BambaConfig(
        **SMALL,
        **MAMBA,
        attn_layer_indices=[0, 2],
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        attention_bias=True,
        mlp_bias=True,
    ),
    "bamba, no attention": transformers.BambaConfig(**SMALL, **MAMBA, attn_layer_indices=[]),
    "falcon_h1": transformers.FalconH1Config(**SMALL, **MAMBA, mamba_d_ssm=96, **MULTIPLIERS),
    "falcon_h1, normed": transformers.FalconH1Config(
        **SMALL, **MAMBA, mamba_d_ssm=96, mamba_rms_norm=True, mamba_norm_before_gate=False, projectors_bias=True
    ),
    "granitemoehybrid": transformers.GraniteMoeHybridConfig(
        **SMALL,
        **MAMBA,
        layer_types=MIXED,
        num_local_experts=6,
        shared_intermediate_size=56,
        attention_multiplier=0.4,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        logits_scaling=2.5,
    ),
    "granitemoehybrid, dense, rope": transformers.GraniteMoeHybridConfig(
        **SMALL, **MAMBA, layer_types=MIXED, num_local_experts=0, shared_intermediate_size=56, position_embedding_type="rope"
    ),
    "jamba": transformers.JambaConfig(
        **SMALL, **ROUTED, mamba_d_state=6, mamba_dt_rank=5, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=3
    ),
    "kimi_linear": transformers.KimiLinearConfig(
        **{**SMALL, "num_key_value_heads": 4},
        layer_types=MIXED,
        linear_num_heads=4,
        linear_head_dim=8,
        kv_lora_rank=32,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=20,
        num_local_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
    ),
    "lfm2": transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"] * 2, block_multiple_of=16),
    "lfm2, biased": transformers.Lfm2Config(
        **SMALL, layer_types=["conv", "full_attention"] * 2, conv_bias=True, block_auto_adjust_ff_dim=False
    ),
    "lfm2, no attention": transformers.Lfm2Config(**SMALL, layer_types=["conv"] * 4, block_multiple_of=16),
    "lfm2_moe": transformers.Lfm2MoeConfig(
        **SMALL, **ROUTED, layer_types=["conv", "full_attention"] * 2, moe_intermediate_size=40, num_dense_layers=1
    ),
    "minimax": transformers.MiniMaxConfig(
        **SMALL,
        head_dim=16,
        layer_types=MIXED,
        num_local_experts=6,
        block_size=8,
        full_attn_alpha_factor=1.4,
        full_attn_beta_factor=0.7,
        linear_attn_alpha_factor=1.3,
        linear_attn_beta_factor=0.8,
        mlp_alpha_factor=1.2,
        mlp_beta_factor=0.9,
    ),
    "nemotron_h": transformers.NemotronHConfig(**NEMOTRON, layers_block_type=SINGLE),
    "nemotron_h, experts": transformers.NemotronHConfig(
        **NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=56,
        routed_scaling_factor=1.5,
    ),
    "olmo_hybrid": transformers.OlmoHybridConfig(**SMALL, **EQUAL_DELTA, layer_types=MIXED),
    "qwen3_5": transformers.Qwen3_5TextConfig(**SMALL, **DELTA, head_dim=16, full_attention_interval=2),
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig(
        **{key: value for key, value in SMALL.items() if key != "intermediate_size"},
        **DELTA,
        **SHARED,
        head_dim=16,
        full_attention_interval=2,
    ),
    "qwen3_next": transformers.Qwen3NextConfig(
        **SMALL, **DELTA, **SHARED, head_dim=16, full_attention_interval=2, mlp_only_layers=[1]
    ),
    "qwen3_next, no attention": transformers.Qwen3NextConfig(
        **SMALL, **DELTA, **SHARED, head_dim=16, layer_types=["linear_attention"] * 4
    ),
}
_SPLIT_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
READS_IMAGES = transformers.Qwen3_5Config(
    text_config={**SMALL, **DELTA, "head_dim": 16, "full_attention_interval": 2, "rope_parameters": _SPLIT_ROPE},
    vision_config={
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    },
    image_token_id=93,
    video_token_id=94,
    vision_start_token_id=95,
    vision_end_token_id=96,
)
