"""Configurations of mixture-of-experts layers and latent attention, for each model family."""

from __future__ import annotations

import math
from typing import Any

from headway.core.contract.errors import ModelError
from headway.core.contract.experts import ExpertsConfig
from headway.kernels.step.config import LatentConfig
from headway.models.config import BeyondDecoderError, ExpertNames, TensorNames
from headway.models.families.dense import qwen3, size_of

MIXTRAL_NAMES = TensorNames(
    experts=ExpertNames(
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{}.w1",
        up="block_sparse_moe.experts.{}.w3",
        down="block_sparse_moe.experts.{}.w2",
    )
)
QWEN2_MOE_NAMES = TensorNames(experts=ExpertNames(shared="mlp.shared_expert"), ignored=(".mlp.shared_expert_gate.weight",))
"""Tensor names of Qwen2-MoE. The shared expert's gate is ignored if the shared expert has size 0."""
GPT_OSS_NAMES = TensorNames(experts=ExpertNames(router="mlp.router", interleaved=True))


def mixtral(config: Any) -> dict[str, Any]:
    """Return Mixtral's options: experts in every layer."""
    return {"experts": ExpertsConfig(_count(config), config.num_experts_per_tok, config.intermediate_size)}


def qwen2_moe(config: Any) -> dict[str, Any]:
    """Return Qwen2-MoE's options: a gated shared expert, and biases of q, k and v."""
    return {**qwen_experts(config), "qkv_bias": bool(config.qkv_bias)}


def qwen3_moe(config: Any) -> dict[str, Any]:
    """Return Qwen3-MoE's options: no shared expert, and QK-norm per head."""
    return {**qwen_experts(config), **qwen3(config)}


def qwen_experts(config: Any) -> dict[str, Any]:
    """Return the options shared by Qwen2-MoE and Qwen3-MoE: experts in some or all layers."""
    experts = qwen_expert_sizes(config, bool(config.norm_topk_prob))
    step, layers = config.decoder_sparse_step, range(config.num_hidden_layers)
    if type(step) is not int or step < 1:
        raise ModelError(f"decoder_sparse_step: needs a whole number of at least 1, got {step!r}")
    plain = set(config.mlp_only_layers or ())
    return {"experts": experts, "dense_layers": {index for index in layers if index in plain or (index + 1) % step}}


def qwen_expert_sizes(config: Any, renormalize: bool) -> ExpertsConfig:
    """Return the configuration of Qwen's experts, with an optional gated shared expert."""
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    return ExpertsConfig(
        num_experts=_count(config),
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        shared_intermediate_size=shared,
        shared_gate=shared > 0,
        renormalize=renormalize,
    )


def gpt_oss(config: Any) -> dict[str, Any]:
    """Return gpt-oss's options: biases everywhere, and a clamped gate."""
    experts = ExpertsConfig(
        num_experts=_count(config),
        top_k=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        router_bias=True,
        biases=True,
        swiglu_alpha=float(getattr(config, "swiglu_alpha", 1.702)),
        swiglu_limit=float(getattr(config, "swiglu_limit", 7.0)),
    )
    return {"experts": experts, "sinks": True, "qkv_bias": bool(config.attention_bias), "o_bias": bool(config.attention_bias)}


def deepseek_experts(config: Any) -> dict[str, Any]:
    """Return the options for experts of DeepSeek-V2 and V3 (Moonlight): leading dense layers, then routed and shared experts."""
    third = config.model_type == "deepseek_v3"
    method = getattr(config, "topk_method", "greedy")
    expected = "sigmoid" if third else "softmax"
    scoring = getattr(config, "scoring_func", None) or expected
    if not third and method not in ("greedy", "group_limited_greedy"):
        raise BeyondDecoderError(f"topk_method: needs greedy or group_limited_greedy, got {method!r}")
    if scoring != expected:
        raise BeyondDecoderError(f"scoring_func: needs {expected} for {config.model_type}, got {scoring!r}")
    if not third and getattr(config, "norm_topk_prob", False):
        raise BeyondDecoderError(
            "norm_topk_prob: needs false for deepseek_v2, whose weights are not divided by their sum, got true"
        )
    if getattr(config, "mlp_bias", False):
        raise BeyondDecoderError(f"mlp_bias: needs false for {config.model_type}, got true")
    if getattr(config, "moe_layer_freq", 1) != 1:
        raise BeyondDecoderError(f"moe_layer_freq: needs 1, got {config.moe_layer_freq!r}")
    experts = sigmoid_experts(config, third, third or method == "group_limited_greedy")
    return {"experts": experts, "dense_layers": range(config.first_k_dense_replace)}


def sigmoid_experts(config: Any, third: bool = True, grouped: bool = True) -> ExpertsConfig:
    """Return the configuration of DeepSeek's experts, also used by Kimi Linear. third: True for V3, False for V2."""
    return ExpertsConfig(
        num_experts=_count(config),
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        shared_intermediate_size=config.moe_intermediate_size * (config.n_shared_experts or 0),
        scoring="sigmoid" if third else "softmax",
        renormalize=third and bool(config.norm_topk_prob),
        scale=float(config.routed_scaling_factor),
        num_groups=config.n_group if grouped else 1,
        top_k_groups=config.topk_group if grouped else 1,
        group_score="top2" if third else "max",
        correction_bias=third,
    )


def _count(config: Any) -> Any:
    """Return the number of routed experts. The name of its key depends on the transformers release and the family."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    field = next((name for name in reversed(names) if getattr(config, name, None) is not None), names[1])
    found = getattr(config, field, None)
    if type(found) is not int or found < 1:
        raise ModelError(f"{field}: needs a whole number of at least 1, got {found}")
    return found


def deepseek(config: Any) -> dict[str, Any]:
    """Return the options of DeepSeek-V2 and V3 (Moonlight)."""
    return {**deepseek_experts(config), **latent_attention(config)}


def latent_attention(config: Any) -> dict[str, Any]:
    """Return the options of latent attention: sizes, scale and biases."""
    rank = getattr(config, "q_lora_rank", None)
    if rank is not None and (type(rank) is not int or rank < 1):
        raise ModelError(f"q_lora_rank: needs null or a whole number of at least 1, got {rank!r}")
    latent = LatentConfig(
        kv_lora_rank=size_of(config, "kv_lora_rank"),
        qk_nope_head_dim=size_of(config, "qk_nope_head_dim"),
        qk_rope_head_dim=size_of(config, "qk_rope_head_dim"),
        v_head_dim=size_of(config, "v_head_dim"),
        q_lora_rank=rank,
        # DeepSeek-V2 rotates pairs of neighbouring elements; V3's configuration states it.
        interleaved=bool(getattr(config, "rope_interleave", True)),
    )
    bias = bool(getattr(config, "attention_bias", False))
    scale = latent.q_dim**-0.5 * _sharpening(getattr(config, "rope_parameters", None) or {})
    return {"latent": latent, "scale": scale, "qkv_bias": bias, "o_bias": bias}


def _sharpening(rope: dict[str, Any]) -> float:
    """Return YaRN's attention factor (Peng et al. 2023), which DeepSeek applies to the scores instead of to cos and sin."""
    whole, factor = rope.get("mscale_all_dim") or 0, rope.get("factor") or 1
    if rope.get("rope_type", "default") == "default" or not whole or factor <= 1:
        return 1.0
    return float((0.1 * whole * math.log(factor) + 1.0) ** 2)
