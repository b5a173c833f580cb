"""Hybrid architectures in .gguf files that Headway reads itself: models with both attention and recurrent layers.

transformers reads these files only in part or not at all. llama.cpp's converter changes the names and layouts of tensors; each
architecture's rules undo the changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from headway.models.checkpoints.gguf.header import Header
from headway.models.checkpoints.gguf.hybrid_rules import (
    Rule,
    as_it_is,
    attention,
    by_key_head,
    convolution,
    experts,
    flat,
    flat_log_of_decay,
    from_pairs,
    grouped,
    grouped_columns,
    latent_up,
    log_of_decay,
    renamed,
    stacked,
    without_one,
)


def lfm2_config(header: Header) -> dict[str, Any]:
    """Return LFM2's configuration: a layer without KV heads is a short convolution."""
    return {
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted size
        "intermediate_size": header.size("feed_forward_length"),
        "norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if kv else "conv" for kv in header.per_layer("attention.head_count_kv")],
        "conv_L_cache": header.size("shortconv.l_cache"),
        "conv_bias": header.has_in_a_layer("shortconv.in_proj.bias"),
        "rope_parameters": {"rope_type": "default", "rope_theta": header.number("rope.freq_base", 1e4)},
    }


def lfm2_moe_config(header: Header) -> dict[str, Any]:
    """Return LFM2-MoE's configuration: LFM2 with experts after the leading dense layers."""
    return {
        **lfm2_config(header),
        **_routed_sizes(header),
        "num_experts": header.size("expert_count"),
        "num_dense_layers": header.size("leading_dense_block_count", 0),
        "use_expert_bias": header.has_in_a_layer("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0),
    }


def _routed_sizes(header: Header) -> dict[str, Any]:
    return {
        "num_experts_per_tok": header.size("expert_used_count"),
        "moe_intermediate_size": header.size("expert_feed_forward_length"),
    }


def lfm2_rules(header: Header) -> list[Rule]:
    """Return the rules for LFM2 and LFM2-MoE."""
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


_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_ROUTED = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")


def qwen3_next_config(header: Header) -> dict[str, Any]:
    """Return Qwen3-Next's configuration: experts, and by default three gated delta layers per attention layer."""
    return {**_qwen_config(header), **_expert_sizes(header), "norm_topk_prob": True}


def qwen3_5_config(header: Header) -> dict[str, Any]:
    """Return the configuration of Qwen3.5's text model, with RoPE for text positions only."""
    values = _qwen_config(header)
    sections = [size for size in header.get("rope.dimension_sections", []) if size]
    if sections:
        values["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}
    return values


def qwen3_5_moe_config(header: Header) -> dict[str, Any]:
    """Return the configuration of Qwen3.5 with experts."""
    return {**qwen3_5_config(header), **_expert_sizes(header)}


def _qwen_config(header: Header) -> dict[str, Any]:
    heads, inner = header.size("ssm.time_step_rank"), header.size("ssm.inner_size")
    head_dim = header.size("attention.key_length", header.size("embedding_length") // header.size("attention.head_count"))
    interval = header.size("full_attention_interval", 4)
    recurrent = header.get("attention.recurrent_layers") or [(layer + 1) % interval != 0 for layer in range(header.num_layers)]
    share = header.size("rope.dimension_count", head_dim // 4) / head_dim
    return {
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
        **_routed_sizes(header),
        "num_experts": header.size("expert_count"),
        "shared_expert_intermediate_size": header.size("expert_shared_feed_forward_length"),
    }


def qwen3_next_rules(header: Header) -> list[Rule]:
    """Return Qwen3-Next's rules: one linear layer for q, k, v and the gate, grouped by key head, as in older files."""
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
    """Return Qwen3.5's rules: value heads are reordered, from interleaved over the key heads to grouped by key head."""
    keys, heads = header.size("ssm.group_count"), max(header.size("ssm.time_step_rank"), 1)
    key_rows, value_dim = 2 * keys * header.size("ssm.state_size"), header.size("ssm.inner_size") // heads
    of_head, of_value = partial(grouped, keys, 1, 0), partial(grouped, keys, value_dim, 0)
    after_keys = partial(grouped, keys, value_dim, key_rows)
    return [
        *_gated_delta(header),
        *renamed({"attn_qkv": "linear_attn.in_proj_qkv"}, after_keys),
        *renamed({"attn_gate": "linear_attn.in_proj_z"}, of_value),
        *renamed({"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}, of_head),
        *renamed({"ssm_out": "linear_attn.out_proj"}, partial(grouped_columns, keys, value_dim)),
        Rule(("ssm_conv1d.weight",), "linear_attn.conv1d.weight", lambda kernel: after_keys(convolution(kernel))),
        Rule(("ssm_a",), "linear_attn.A_log", lambda a: of_head(flat_log_of_decay(a))),
        Rule(("ssm_dt.bias",), "linear_attn.dt_bias", of_head),
    ]


def _gated_delta(header: Header) -> list[Rule]:
    """Return rules shared by Qwen3-Next and Qwen3.5. The file's norm weights already include the added 1, except in the state's
    norm."""
    shared = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
    return [
        *renamed(_NORMS, without_one),
        *renamed({"ssm_norm": "linear_attn.norm", "ffn_gate_inp": "mlp.gate", **_DENSE, **shared}),
        *renamed({"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}, lambda gate: gate.reshape(1, -1)),
        *attention(),
        *experts(*_ROUTED),
    ]


def kimi_config(header: Header) -> dict[str, Any]:
    """Return Kimi Linear's configuration: Kimi delta attention, and latent attention without positions."""
    rope, layers = header.size("rope.dimension_count"), header.num_layers
    heads = header.size("attention.head_count")
    dense = header.size("leading_dense_block_count", 0)
    return {
        "num_key_value_heads": heads,
        "intermediate_size": header.size("feed_forward_length"),
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "layer_types": _state_or_attention(header),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "linear_num_heads": heads,
        "linear_head_dim": header.size("kda.head_dim"),
        "linear_conv_kernel_dim": header.size("ssm.conv_kernel"),
        "q_lora_rank": header.size("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": header.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": header.size("attention.key_length_mla") - rope,
        "v_head_dim": header.size("attention.value_length_mla"),
        **_deepseek_sizes(header),
        "num_local_experts": header.size("expert_count"),
        "norm_topk_prob": True,
    }


def _deepseek_sizes(header: Header) -> dict[str, Any]:
    return {
        **_routed_sizes(header),
        "n_shared_experts": header.size("expert_shared_count"),
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0),
        "n_group": header.size("expert_group_count", 1),
        "topk_group": header.size("expert_group_used_count", 1),
    }


def kimi_rules(header: Header) -> list[Rule]:
    """Return Kimi Linear's rules: the up-projection from the latent is stored as two tensors; the key tensor is transposed."""
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


_MLP = {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}


def granite_config(header: Header) -> dict[str, Any]:
    """Return Granite 4 H's configuration. RoPE is off if the file's `rope.scaling.finetuned` is false."""
    count = header.size("expert_count", 0)
    shared = header.size("expert_shared_feed_forward_length", header.size("feed_forward_length"))
    head_dim = header.size("embedding_length") // header.size("attention.head_count")
    return {
        **_mamba2_sizes(header),
        "num_local_experts": count,
        "num_experts_per_tok": header.size("expert_used_count", 0),
        "intermediate_size": header.size("feed_forward_length"),
        "shared_intermediate_size": shared,
        "attention_multiplier": header.number("attention.scale", 0.0) or head_dim**-0.5,
        "embedding_multiplier": header.number("embedding_scale", 1.0),
        "residual_multiplier": header.number("residual_scale", 1.0),
        "logits_scaling": header.number("logit_scale", 1.0),
        "position_embedding_type": "rope" if header.get("rope.scaling.finetuned", True) else None,
        "layer_types": _state_or_attention(header),
    }


def bamba_config(header: Header) -> dict[str, Any]:
    """Return Bamba's configuration: files use Granite's architecture name, and RoPE rotates only part of each head."""
    head_dim = header.size("embedding_length") // header.size("attention.head_count")
    values = _mamba2_sizes(header)
    values["rope_parameters"]["partial_rotary_factor"] = header.size("rope.dimension_count", head_dim) / head_dim
    attending = [layer for layer, kind in enumerate(_state_or_attention(header)) if kind == "full_attention"]
    return {**values, "intermediate_size": header.size("feed_forward_length"), "attn_layer_indices": attending}


def granite_rules(header: Header) -> list[Rule]:
    """Return Granite 4 H's rules: gate and up are separate tensors, and q and k have Llama's row order."""
    gate_up = {
        "shared_mlp.input_linear": ("ffn_gate", "ffn_up"),
        "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
    }
    shared = ("ffn_gate_shexp", "ffn_up_shexp")
    products = [*gate_up.items(), ("shared_mlp.input_linear", shared)]
    down = {"ffn_down": "shared_mlp.output_linear", "ffn_down_shexp": "shared_mlp.output_linear"}
    return [
        *renamed({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", **down}),
        *renamed({"ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_exps": "block_sparse_moe.output_linear"}),
        *renamed({"ffn_gate_up_exps": "block_sparse_moe.input_linear"}),
        *(Rule(tuple(f"{name}.weight" for name in names), f"{target}.weight", stacked) for target, names in products),
        *_rotated_attention(header),
        *_mamba2("mamba"),
    ]


def bamba_rules(header: Header) -> list[Rule]:
    """Return Bamba's rules: Granite's, with a plain MLP."""
    return [
        *renamed({"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}),
        *renamed(_MLP, kinds=("weight", "bias")),
        *_rotated_attention(header),
        *_mamba2("mamba"),
    ]


def falcon_h1_config(header: Header) -> dict[str, Any]:
    """Return Falcon-H1's configuration.

    Multipliers are folded into the weights, so a tied embedding would give wrong logits.

    :raises ModelError: if the output head is missing.
    """
    if "output.weight" not in header:
        raise header.refuse("falcon-h1", "a tensor output.weight (token_embd.weight has the embedding's factor in it)", "none")
    return {
        **_mamba2_sizes(header),
        "head_dim": header.size("attention.key_length", header.size("embedding_length") // header.size("attention.head_count")),
        "intermediate_size": header.size("feed_forward_length"),
        "mamba_d_ssm": header.size("ssm.inner_size"),
        "mamba_rms_norm": header.has_in_a_layer("ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # llama.cpp supports no other order
        "projectors_bias": header.has_in_a_layer("ssm_out.bias"),
    }


def falcon_h1_rules(header: Header) -> list[Rule]:
    """Return Falcon-H1's rules, which only rename tensors."""
    del header
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
    return [*renamed({**norms, **_MLP}), *_plain_attention(), *_mamba2("mamba")]


def nemotron_h_config(header: Header) -> dict[str, Any]:
    """Return Nemotron-H's configuration. A layer's kind follows from its KV heads, MLP rows and router."""
    kv, inner = header.per_layer("attention.head_count_kv"), header.per_layer("feed_forward_length")
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in header for layer in range(header.num_layers)]
    ups = [f"blk.{layer}.ffn_up.weight" for layer in range(header.num_layers)]
    kinds = [
        "full_attention" if heads else "moe" if moe else "mlp" if rows or up in header else "linear_attention"
        for heads, rows, moe, up in zip(kv, inner, routed, ups, strict=True)
    ]
    of_mlp = [header.shape(up)[0] for up in ups if up in header]  # in a model with experts the keys give only the experts' size
    heads = max(header.size("ssm.time_step_rank"), 1)
    values = {
        "head_dim": header.size("attention.key_length"),
        "layers_block_type": kinds,
        "intermediate_size": max([*inner, *of_mlp, 1]) if not any(routed) else max([*of_mlp, 1]),
        "layer_norm_epsilon": header.number("attention.layer_norm_rms_epsilon", header.get("attention.layer_norm_epsilon")),
        "mamba_num_heads": heads,
        "mamba_head_dim": header.size("ssm.inner_size") // heads,
        "n_groups": header.size("ssm.group_count"),
        "ssm_state_size": header.size("ssm.state_size"),
        "conv_kernel": header.size("ssm.conv_kernel"),
        "use_conv_bias": header.has_in_a_layer("ssm_conv1d.bias"),
        "use_bias": header.has_in_a_layer("ssm_in.bias"),
        "mlp_bias": header.has_in_a_layer("ffn_up.bias"),
        "attention_bias": header.has_in_a_layer("attn_q.bias"),
    }
    return {**values, **_nemotron_experts(header)} if any(routed) else values


def _nemotron_experts(header: Header) -> dict[str, Any]:
    return {
        **_deepseek_sizes(header),
        "n_routed_experts": header.size("expert_count"),
        "moe_shared_expert_intermediate_size": header.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(header.get("expert_weights_norm", False)),
        "moe_latent_size": header.size("moe_latent_size", 0) or None,
    }


def nemotron_h_rules(header: Header) -> list[Rule]:
    """Return Nemotron-H's rules: every layer's module is named `mixer`."""
    shared = {f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")}
    single = {f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")}
    routed = {f"ffn_{part}_exps": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")}
    return [
        *renamed({"attn_norm": "norm", "ffn_gate_inp": "mixer.gate", **shared, **routed}),
        *renamed(single, kinds=("weight", "bias")),
        *_rotated_attention(header, "mixer"),
        *_mamba2("mixer"),
        Rule(("exp_probs_b.bias",), "mixer.gate.e_score_correction_bias"),
    ]


def jamba_config(header: Header) -> dict[str, Any]:
    """Return Jamba's configuration: Mamba 1, attention without positions, and experts at a regular layer interval."""
    attending = [bool(kv) for kv in header.per_layer("attention.head_count_kv")]
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in header for layer in range(header.num_layers)]
    period, offset = _every(header, "attention.head_count_kv", attending)
    expert_period, expert_offset = _every(header, "ffn_gate_inp", routed)
    hidden = header.size("embedding_length")
    return {
        "intermediate_size": header.size("feed_forward_length"),
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "expert_layer_period": expert_period,
        "expert_layer_offset": expert_offset,
        "num_experts": header.size("expert_count", 1) if any(routed) else 1,
        "num_experts_per_tok": header.size("expert_used_count", 1) if any(routed) else 1,
        "mamba_d_state": header.size("ssm.state_size"),
        "mamba_d_conv": header.size("ssm.conv_kernel"),
        "mamba_expand": header.size("ssm.inner_size") // hidden,
        "mamba_dt_rank": header.size("ssm.time_step_rank"),
        "mamba_conv_bias": header.has_in_a_layer("ssm_conv1d.bias"),
        "mamba_proj_bias": header.has_in_a_layer("ssm_in.bias"),
    }


def _every(header: Header, what: str, kinds: list[bool]) -> tuple[int, int]:
    """Return the period and offset of a kind of layer, as in JambaConfig. :raises ModelError: if the spacing is irregular."""
    places = [layer for layer, kind in enumerate(kinds) if kind]
    period = places[1] - places[0] if len(places) > 1 else len(kinds) + 1
    offset = places[0] if places else len(kinds)
    if offset >= period or [layer % period == offset for layer in range(len(kinds))] != kinds:
        raise header.refuse(f"jamba: layers with {what}", "one distance from each to the next", f"layers {places}")
    return period, offset


def jamba_rules(header: Header) -> list[Rule]:
    """Return Jamba's rules: Mamba 1 has a matrix of decays, and norms for dt, B and C."""
    del header
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
    norms |= {f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")}
    return [
        *renamed({**norms, **_MLP, "ffn_gate_inp": "feed_forward.router"}),
        *renamed({"ssm_in": "mamba.in_proj", "ssm_dt": "mamba.dt_proj", "ssm_out": "mamba.out_proj"}, kinds=("weight", "bias")),
        *renamed({"ssm_x": "mamba.x_proj"}),
        *_plain_attention(),
        *experts(*(f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down"))),
        Rule(("ssm_conv1d.weight",), "mamba.conv1d.weight", convolution),
        Rule(("ssm_conv1d.bias",), "mamba.conv1d.bias"),
        Rule(("ssm_a",), "mamba.A_log", log_of_decay),
        Rule(("ssm_d",), "mamba.D", flat),
    ]


def _mamba2_sizes(header: Header) -> dict[str, Any]:
    heads, inner = max(header.size("ssm.time_step_rank"), 1), header.size("ssm.inner_size")
    return {
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": header.size("ssm.group_count"),
        "mamba_d_state": header.size("ssm.state_size"),
        "mamba_d_conv": header.size("ssm.conv_kernel"),
        "mamba_expand": inner // header.size("embedding_length"),
        "mamba_conv_bias": header.has_in_a_layer("ssm_conv1d.bias"),
        "mamba_proj_bias": header.has_in_a_layer("ssm_in.bias"),
        "attention_bias": header.has_in_a_layer("attn_q.bias"),
        "mlp_bias": header.has_in_a_layer("ffn_up.bias"),
        "rope_parameters": {"rope_type": "default", "rope_theta": header.number("rope.freq_base", 1e4)},
    }


def _state_or_attention(header: Header) -> list[str]:
    return ["full_attention" if kv else "linear_attention" for kv in header.per_layer("attention.head_count_kv")]


def _plain_attention() -> list[Rule]:
    return [rule for rule in attention() if rule.target.endswith(".weight")]


def _rotated_attention(header: Header, target: str = "self_attn") -> list[Rule]:
    """Return attention rules that undo the Llama order of q and k rows, which the converter applies even without RoPE."""
    heads = {"q": header.size("attention.head_count"), "k": header.size("attention.head_count_kv")}
    reordered = {f"{target}.{part}_proj": partial(from_pairs, count) for part, count in heads.items()}
    return [
        Rule(rule.sources, rule.target, reordered.get(rule.target.rpartition(".")[0], rule.make)) for rule in attention(target)
    ]


def _mamba2(target: str) -> list[Rule]:
    """Return Mamba-2 rules: the file stores per-head values with a second axis, and norm weights by group."""
    return [
        *renamed({"ssm_in": f"{target}.in_proj", "ssm_out": f"{target}.out_proj"}, kinds=("weight", "bias")),
        *renamed({"ssm_norm": f"{target}.norm"}, flat),
        Rule(("ssm_conv1d.weight",), f"{target}.conv1d.weight", convolution),
        Rule(("ssm_conv1d.bias",), f"{target}.conv1d.bias"),
        Rule(("ssm_a",), f"{target}.A_log", flat_log_of_decay),
        Rule(("ssm_d",), f"{target}.D", flat),
        Rule(("ssm_dt.bias",), f"{target}.dt_bias"),
    ]


@dataclass(frozen=True)
class GgufArchitecture:
    """Conversion of one architecture: transformers configuration, and rules for the checkpoint's tensors."""

    model_type: str
    """transformers' `model_type` for the architecture."""
    config: Callable[[Header], dict[str, Any]]
    """Function that returns the configuration entries of this architecture, in addition to the common ones."""
    rules: Callable[[Header], list[Rule]]
    norm: str = "output_norm"
    make_norm: Callable[[Tensor], Tensor] = as_it_is
    scoring: int = 1
    """Scoring function of the router, as in `expert_gating_func`: 1 means softmax, 2 means sigmoid."""


_GRANITE = GgufArchitecture("granitemoehybrid", granite_config, granite_rules)
_BAMBA = GgufArchitecture("bamba", bamba_config, bamba_rules)
_NEMOTRON = GgufArchitecture("nemotron_h", nemotron_h_config, nemotron_h_rules, scoring=2)
_SCALES = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")  # Keys of every Granite and of no Bamba

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "falcon-h1": GgufArchitecture("falcon_h1", falcon_h1_config, falcon_h1_rules),
    "granitehybrid": _GRANITE,
    "jamba": GgufArchitecture("jamba", jamba_config, jamba_rules),
    "kimi-linear": GgufArchitecture("kimi_linear", kimi_config, kimi_rules, scoring=2),
    "lfm2": GgufArchitecture("lfm2", lfm2_config, lfm2_rules, norm="token_embd_norm"),
    "lfm2moe": GgufArchitecture("lfm2_moe", lfm2_moe_config, lfm2_rules, norm="token_embd_norm", scoring=2),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen35": GgufArchitecture("qwen3_5_text", qwen3_5_config, qwen3_5_rules, make_norm=without_one),
    "qwen35moe": GgufArchitecture("qwen3_5_moe_text", qwen3_5_moe_config, qwen3_5_rules, make_norm=without_one),
    "qwen3next": GgufArchitecture("qwen3_next", qwen3_next_config, qwen3_next_rules, make_norm=without_one),
}
"""Conversions keyed by the value of `general.architecture`."""


def architecture_of(header: Header) -> GgufArchitecture | None:
    """Return the conversion of the file's architecture, or None if transformers reads files of this architecture."""
    found = ARCHITECTURES.get(header.architecture)
    if found is _GRANITE and all(header.get(key) is None for key in _SCALES):
        return _BAMBA
    return found
