"""Tiny configurations of transformers' models that mix attention with layers that keep a state."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, Qwen3NextConfig

VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,  # large, so that attention is far from uniform and a wrong key shows
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
SHARED = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
ROWS: dict[str, PretrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(**SMALL, **DELTA, **SHARED, head_dim=16, full_attention_interval=2, mlp_only_layers=[1]),
}
