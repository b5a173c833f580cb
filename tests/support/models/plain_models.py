"""Tiny configurations of transformers' models whose layers all have attention."""

from __future__ import annotations

from typing import Any

import transformers

VOCAB = 97


def sizes(vocab: int, hidden: int, inner: int, layers: int, heads: int = 4, kv_heads: int = 2, **more: Any) -> dict[str, Any]:
    """Fields of a configuration by the names that transformers gives them."""
    named = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**named, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Large weights, so that attention is far from uniform and a wrong key shows.
SMALL = sizes(VOCAB, 48, 80, 3, max_position_embeddings=128, initializer_range=0.2, **IDS)
GEMMA: dict[str, Any] = {**SMALL, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 20}
GEMMA4: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 7,
    "vocab_size_per_layer_input": VOCAB,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
}
"""Two kinds of layers, with heads of different sizes."""
EXPERTS = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
OF_TYPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SHARPENED = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
ROWS: dict[str, transformers.PretrainedConfig] = {
    "deepseek_v2": transformers.DeepseekV2Config(
        **LATENT, q_lora_rank=24, n_routed_experts=12, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "deepseek_v2, as Lite": transformers.DeepseekV2Config(
        **LATENT, q_lora_rank=None, n_routed_experts=10, rope_parameters=SHARPENED
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **LATENT, q_lora_rank=24, n_routed_experts=12, n_group=4, topk_group=2, attention_bias=True
    ),
    "deepseek_v3, as Moonlight": transformers.DeepseekV3Config(
        **LATENT, q_lora_rank=None, n_routed_experts=10, n_group=1, topk_group=1
    ),
    "deepseek_v3, halves turn": transformers.DeepseekV3Config(
        **{**LATENT, "first_k_dense_replace": 3}, q_lora_rank=None, rope_interleave=False, rope_parameters=SHARPENED
    ),
    "diffllama": transformers.DiffLlamaConfig(
        **{**SMALL, "num_attention_heads": 8, "num_key_value_heads": 4}, head_dim=16, attention_bias=True, lambda_std_dev=0.5
    ),
    "gemma": transformers.GemmaConfig(**SMALL, head_dim=16),
    "gemma2": transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": transformers.Gemma3TextConfig(**GEMMA, sliding_window_pattern=2),
    "gemma3, as the larger ones": transformers.Gemma3TextConfig(**GEMMA, sliding_window_pattern=3, rope_parameters=OF_TYPES),
    "gemma4, as 31B": transformers.Gemma4TextConfig(
        **GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=3.0
    ),
    "gemma4, as E2B": transformers.Gemma4TextConfig(
        **{**GEMMA4, "num_key_value_heads": 1, "hidden_size_per_layer_input": 20},
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "gemma4_unified": transformers.Gemma4UnifiedTextConfig(
        **{key: value for key, value in GEMMA4.items() if "per_layer" not in key}, attention_bias=True
    ),
    "gpt2": transformers.GPT2Config(**{**SMALL, "n_inner": 100}),
    "gpt_oss": transformers.GptOssConfig(**SMALL, head_dim=16, num_local_experts=6, num_experts_per_tok=3, sliding_window=7),
    "granite": transformers.GraniteConfig(
        **SMALL, attention_multiplier=0.4, embedding_multiplier=3.0, residual_multiplier=0.6, logits_scaling=2.5, mlp_bias=True
    ),
    "llama": transformers.LlamaConfig(**SMALL, head_dim=16),
    "llama, tied, biased, linear rope": transformers.LlamaConfig(
        **SMALL, head_dim=12, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=LINEAR
    ),
    "llama, yarn": transformers.LlamaConfig(**SMALL, rope_parameters=YARN),
    "llama, llama3 rope": transformers.LlamaConfig(**SMALL, head_dim=12, rope_parameters=LLAMA3),
    "llama, gelu": transformers.LlamaConfig(**SMALL, hidden_act="gelu"),
    "mistral": transformers.MistralConfig(**SMALL, head_dim=16, sliding_window=7),
    "mixtral": transformers.MixtralConfig(**SMALL, head_dim=16, num_local_experts=6, num_experts_per_tok=2, sliding_window=7),
    "olmo2": transformers.Olmo2Config(**SMALL, attention_bias=True),
    "opt": transformers.OPTConfig(
        **{**SMALL, "ffn_dim": 100, "word_embed_proj_dim": 48, "init_std": 0.2, "activation_function": "gelu"}
    ),
    "phi3": transformers.Phi3Config(**SMALL, sliding_window=7),
    "phi3, rotated in part": transformers.Phi3Config(
        **SMALL, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}
    ),
    "qwen2": transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen2_moe": transformers.Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=56, decoder_sparse_step=2),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16, norm_topk_prob=True, mlp_only_layers=[1]),
    "smollm3": transformers.SmolLM3Config(**SMALL, no_rope_layer_interval=2),
    "starcoder2": transformers.Starcoder2Config(**SMALL, sliding_window=7),
}

_IMAGE_TOKENS = {"image_token_id": 91, "video_token_id": 92, "audio_token_id": 93}
_IMAGES = sizes(VOCAB, 16, 24, 1, 2, head_dim=8, patch_size=4, position_embedding_size=16)
_26B = GEMMA4 | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True}
_26B |= {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
GEMMA4_READS_IMAGES = (
    transformers.Gemma4Config(text_config=ROWS["gemma4, as E2B"].to_dict(), vision_config=_IMAGES, **_IMAGE_TOKENS),
    transformers.Gemma4Config(text_config=_26B, vision_config=_IMAGES, **_IMAGE_TOKENS),
    transformers.Gemma4UnifiedConfig(
        text_config=ROWS["gemma4_unified"].to_dict(),
        vision_config={
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 48,
            "mm_posemb_size": 16,
            "output_proj_dims": 48,
        },
        **_IMAGE_TOKENS,
    ),
)
"""Models that read images too, and the text models that Headway computes of them."""
