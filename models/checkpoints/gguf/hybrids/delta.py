"""Qwen3-Next, Qwen3.5 and Kimi-Linear as .gguf files have them."""

from __future__ import annotations

from functools import partial
from typing import Any

from headway.models.checkpoints.gguf.hybrids.header import Header
from headway.models.checkpoints.gguf.hybrids.rules import (
    Rule,
    attention,
    by_key_head,
    convolution,
    experts,
    flat,
    flat_log_of_decay,
    grouped,
    grouped_columns,
    latent_up,
    renamed,
    without_one,
)

_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_ROUTED = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")


def qwen3_next_config(header: Header) -> dict[str, Any]:
    """Three gated delta layers for one of attention, with experts."""
    return {**_qwen_config(header), **_expert_sizes(header), "norm_topk_prob": True}


def qwen3_5_config(header: Header) -> dict[str, Any]:
    """The same, its value heads in another order; positions of text alone."""
    values = _qwen_config(header)
    sections = [size for size in header.get("rope.dimension_sections", []) if size]
    if sections:
        values["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}
    return values


def qwen3_5_moe_config(header: Header) -> dict[str, Any]:
    """With experts."""
    return {**qwen3_5_config(header), **_expert_sizes(header)}


def _qwen_config(header: Header) -> dict[str, Any]:
    heads, inner = header.size("ssm.time_step_rank"), header.size("ssm.inner_size")
    head_dim = header.size("attention.key_length", header.size("embedding_length") // header.size("attention.head_count"))
    interval = header.size("full_attention_interval", 4)
    recurrent = header.get("attention.recurrent_layers") or [(layer + 1) % interval != 0 for layer in range(header.num_layers)]
    share = header.size("rope.dimension_count", head_dim // 4) / head_dim
    return {
        "num_key_value_heads": header.size("attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": header.size("feed_forward_length", 1) or 1,
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["linear_attention" if state else "full_attention" for state in recurrent[: header.num_layers]],
        "linear_conv_kernel_dim": header.size("ssm.conv_kernel"),
        "linear_key_head_dim": header.size("ssm.state_size"),
        "linear_num_key_heads": header.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads if heads else 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": header.number("rope.freq_base", 1e4),
            "partial_rotary_factor": share,
        },
    }


def _expert_sizes(header: Header) -> dict[str, Any]:
    return {
        "num_experts": header.size("expert_count"),
        "num_experts_per_tok": header.size("expert_used_count"),
        "moe_intermediate_size": header.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": header.size("expert_shared_feed_forward_length"),
    }


def qwen3_next_rules(header: Header) -> list[Rule]:
    """Sections of one product for q, k, v and the gate, one key head after the other; older files have it so already."""
    sizes = header.size("ssm.group_count"), header.size("ssm.state_size")
    product = "linear_attn.in_proj_qkvz.weight"
    return [
        *_gated_delta(header),
        *renamed({"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}),
        Rule(("attn_qkv.weight", "attn_gate.weight"), product, partial(by_key_head, *sizes)),
        *renamed({"ssm_out": "linear_attn.out_proj"}),
        Rule(("ssm_conv1d.weight",), "linear_attn.conv1d.weight", convolution),
        Rule(("ssm_a",), "linear_attn.A_log", flat_log_of_decay),
        Rule(("ssm_dt.bias",), "linear_attn.dt_bias"),
    ]


def qwen3_5_rules(header: Header) -> list[Rule]:
    """Value heads of all key heads in turn, on every tensor that has them."""
    keys, heads = header.size("ssm.group_count"), max(header.size("ssm.time_step_rank"), 1)
    key_rows, value_dim = 2 * keys * header.size("ssm.state_size"), header.size("ssm.inner_size") // heads
    of_head, of_value = partial(grouped, keys, 1, 0), partial(grouped, keys, value_dim, 0)
    behind_keys = partial(grouped, keys, value_dim, key_rows)
    return [
        *_gated_delta(header),
        *renamed({"attn_qkv": "linear_attn.in_proj_qkv"}, behind_keys),
        *renamed({"attn_gate": "linear_attn.in_proj_z"}, of_value),
        *renamed({"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}, of_head),
        *renamed({"ssm_out": "linear_attn.out_proj"}, partial(grouped_columns, keys, value_dim)),
        Rule(("ssm_conv1d.weight",), "linear_attn.conv1d.weight", lambda kernel: behind_keys(convolution(kernel))),
        Rule(("ssm_a",), "linear_attn.A_log", lambda a: of_head(flat_log_of_decay(a))),
        Rule(("ssm_dt.bias",), "linear_attn.dt_bias", of_head),
    ]


def _gated_delta(header: Header) -> list[Rule]:
    """What both families have alike: all norms but the state's are written with the 1 that they are added to."""
    shared = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
    return [
        *renamed(_NORMS, without_one),
        *renamed({"ssm_norm": "linear_attn.norm", "ffn_gate_inp": "mlp.gate", **_DENSE, **shared}),
        *renamed({"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}, lambda gate: gate.reshape(1, -1)),
        *attention(),
        *experts(*_ROUTED),
    ]


def kimi_config(header: Header) -> dict[str, Any]:
    """Kimi delta attention beside latent attention without positions."""
    rope, layers = header.size("rope.dimension_count"), header.num_layers
    heads = header.size("attention.head_count")
    dense = header.size("leading_dense_block_count", 0)
    return {
        "num_key_value_heads": heads,
        "intermediate_size": header.size("feed_forward_length"),
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if kv else "linear_attention" for kv in header.per_layer("attention.head_count_kv")],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "linear_num_heads": heads,
        "linear_head_dim": header.size("kda.head_dim"),
        "linear_conv_kernel_dim": header.size("ssm.conv_kernel"),
        "q_lora_rank": header.size("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": header.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": header.size("attention.key_length_mla") - rope,
        "v_head_dim": header.size("attention.value_length_mla"),
        "num_local_experts": header.size("expert_count"),
        "num_experts_per_tok": header.size("expert_used_count"),
        "moe_intermediate_size": header.size("expert_feed_forward_length"),
        "n_shared_experts": header.size("expert_shared_count"),
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0),
        "n_group": header.size("expert_group_count", 1),
        "topk_group": header.size("expert_group_used_count", 1),
        "norm_topk_prob": True,
    }


def kimi_rules(header: Header) -> list[Rule]:
    """The latent's product to keys and values is cut in two, its half for keys transposed."""
    del header
    convolutions = [
        Rule((f"ssm_conv1d_{part}.weight",), f"self_attn.{part}_conv1d.weight", convolution) for part in ("q", "k", "v")
    ]
    products = {f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")}
    shared = {f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    latent = {"attn_kv_a_mqa": "kv_a_proj_with_mqa", "attn_kv_a_norm": "kv_a_layernorm", "attn_kv_b": "kv_b_proj"}
    queries = {"attn_q_a": "q_a_proj", "attn_q_a_norm": "q_a_layernorm", "attn_q_b": "q_b_proj"}
    routed = [f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")]
    return [
        *renamed({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}),
        *renamed({source: f"self_attn.{target}" for source, target in {**latent, **queries}.items()}),
        *renamed({"ssm_beta": "self_attn.b_proj", "ssm_norm": "self_attn.o_norm", **products, **shared, **_DENSE}),
        *renamed({"ffn_gate_inp": "block_sparse_moe.gate"}),
        *attention(),
        *convolutions,
        *experts(*routed),
        Rule(("attn_k_b.weight", "attn_v_b.weight"), "self_attn.kv_b_proj.weight", latent_up),
        Rule(("ssm_a",), "self_attn.A_log", lambda a: flat_log_of_decay(a).reshape(1, 1, -1, 1)),
        Rule(("ssm_dt.bias",), "self_attn.dt_bias", flat),
        Rule(("exp_probs_b.bias",), "block_sparse_moe.gate.e_score_correction_bias"),
    ]
