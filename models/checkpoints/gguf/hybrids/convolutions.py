"""LFM2, dense and with experts, as .gguf files have it: renamed, its kernels without an axis."""

from __future__ import annotations

from typing import Any

from headway.models.checkpoints.gguf.hybrids.header import Header
from headway.models.checkpoints.gguf.hybrids.rules import Rule, attention, convolution, experts, renamed


def lfm2_config(header: Header) -> dict[str, Any]:
    """Short convolutions where a layer has no heads of keys."""
    return {
        **_config(header),
        "block_auto_adjust_ff_dim": False,  # the file has the size that comes of it
    }


def lfm2_moe_config(header: Header) -> dict[str, Any]:
    """With experts behind the first layers."""
    return {
        **_config(header),
        "moe_intermediate_size": header.size("expert_feed_forward_length"),
        "num_experts": header.size("expert_count"),
        "num_experts_per_tok": header.size("expert_used_count"),
        "num_dense_layers": header.size("leading_dense_block_count", 0),
        "use_expert_bias": header.has_in_a_layer("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0),
    }


def _config(header: Header) -> dict[str, Any]:
    return {
        "intermediate_size": header.size("feed_forward_length"),
        "num_key_value_heads": header.size("attention.head_count_kv"),
        "norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if kv else "conv" for kv in header.per_layer("attention.head_count_kv")],
        "conv_L_cache": header.size("shortconv.l_cache"),
        "conv_bias": header.has_in_a_layer("shortconv.in_proj.bias"),
        "rope_parameters": {"rope_type": "default", "rope_theta": header.number("rope.freq_base", 1e4)},
    }


def lfm2_rules(header: Header) -> list[Rule]:
    """Both families' tensors."""
    del header
    norms = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
    norms |= {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
    dense = {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"}
    products = {f"shortconv.{part}_proj": f"conv.{part}_proj" for part in ("in", "out")}
    return [
        *renamed({**norms, **dense, "ffn_gate_inp": "feed_forward.gate"}),
        *renamed(products, kinds=("weight", "bias")),
        *attention(out="out_proj"),
        *experts(*(f"feed_forward.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
        Rule(("shortconv.conv.weight",), "conv.conv.weight", convolution),
        Rule(("shortconv.conv.bias",), "conv.conv.bias"),
        Rule(("exp_probs_b.bias",), "feed_forward.expert_bias"),
    ]
