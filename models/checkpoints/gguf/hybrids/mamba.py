"""Granite 4 H, Bamba, Falcon-H1, Nemotron-H and Jamba as .gguf files have them."""

from __future__ import annotations

from functools import partial
from typing import Any

from headway.models.checkpoints.gguf.hybrids.header import Header
from headway.models.checkpoints.gguf.hybrids.rules import (
    Rule,
    attention,
    convolution,
    experts,
    flat,
    flat_log_of_decay,
    from_pairs,
    log_of_decay,
    renamed,
    stacked,
)

_MLP = {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}


def granite_config(header: Header) -> dict[str, Any]:
    """Granite 4 H: without positions where the file turns RoPE off (`rope.scaling.finetuned`)."""
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
        "layer_types": _mamba_or_attention(header),
    }


def bamba_config(header: Header) -> dict[str, Any]:
    """Bamba shares Granite's name in .gguf files; heads are rotated in part."""
    head_dim = header.size("embedding_length") // header.size("attention.head_count")
    values = _mamba2_sizes(header)
    values["rope_parameters"]["partial_rotary_factor"] = header.size("rope.dimension_count", head_dim) / head_dim
    attending = [layer for layer, kind in enumerate(_mamba_or_attention(header)) if kind == "full_attention"]
    return {**values, "intermediate_size": header.size("feed_forward_length"), "attn_layer_indices": attending}


def granite_rules(header: Header) -> list[Rule]:
    """Gate and up are cut apart, queries and keys lie as Llama's do."""
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
    """The same with an MLP of the usual products."""
    return [
        *renamed({"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}),
        *renamed(_MLP, kinds=("weight", "bias")),
        *_rotated_attention(header),
        *_mamba2("mamba"),
    ]


def falcon_h1_config(header: Header) -> dict[str, Any]:
    """All factors are in the file's weights; so an embedding that serves as the head too would give other logits.

    :raises ModelError: no head of its own.
    """
    if "output.weight" not in header:
        raise header.refuse("falcon-h1", "a tensor output.weight (token_embd.weight has the embedding's factor in it)", "none")
    return {
        **_mamba2_sizes(header),
        "head_dim": header.size("attention.key_length", header.size("embedding_length") // header.size("attention.head_count")),
        "intermediate_size": header.size("feed_forward_length"),
        "mamba_d_ssm": header.size("ssm.inner_size"),
        "mamba_rms_norm": header.has_in_a_layer("ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # llama.cpp knows no other order
        "projectors_bias": header.has_in_a_layer("ssm_out.bias"),
    }


def falcon_h1_rules(header: Header) -> list[Rule]:
    """Plain names."""
    del header
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
    return [*renamed({**norms, **_MLP}), *_plain_attention(), *_mamba2("mamba")]


def nemotron_h_config(header: Header) -> dict[str, Any]:
    """Kinds of layers by what each has heads of keys and rows of an MLP for; experts where the file has a router."""
    kv, inner = header.per_layer("attention.head_count_kv"), header.per_layer("feed_forward_length")
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in header for layer in range(header.num_layers)]
    ups = [f"blk.{layer}.ffn_up.weight" for layer in range(header.num_layers)]
    kinds = [
        "full_attention" if heads else "moe" if moe else "mlp" if rows or up in header else "linear_attention"
        for heads, rows, moe, up in zip(kv, inner, routed, ups, strict=True)
    ]
    of_mlp = [header.shape(up)[0] for up in ups if up in header]  # beside experts the keys tell their size alone
    heads = max(header.size("ssm.time_step_rank"), 1)
    values = {
        "num_key_value_heads": header.size("attention.head_count_kv"),
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
        "n_routed_experts": header.size("expert_count"),
        "num_experts_per_tok": header.size("expert_used_count"),
        "moe_intermediate_size": header.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": header.size("expert_shared_feed_forward_length"),
        "n_shared_experts": header.size("expert_shared_count"),
        "norm_topk_prob": bool(header.get("expert_weights_norm", False)),
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0),
        "n_group": header.size("expert_group_count", 1),
        "topk_group": header.size("expert_group_used_count", 1),
        "moe_latent_size": header.size("moe_latent_size", 0) or None,
    }


def nemotron_h_rules(header: Header) -> list[Rule]:
    """Every layer's part is its `mixer`."""
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
    """The first Mamba beside attention without positions; experts in every few layers."""
    attending = [bool(kv) for kv in header.per_layer("attention.head_count_kv")]
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in header for layer in range(header.num_layers)]
    period, offset = _every(header, "attention.head_count_kv", attending)
    expert_period, expert_offset = _every(header, "ffn_gate_inp", routed)
    hidden = header.size("embedding_length")
    return {
        "num_key_value_heads": header.size("attention.head_count_kv"),
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
    """The period and the offset of the layers of a kind.

    :raises ModelError: they do not follow one another at one distance, as transformers' JambaConfig would have it.
    """
    places = [layer for layer, kind in enumerate(kinds) if kind]
    period = places[1] - places[0] if len(places) > 1 else len(kinds) + 1
    offset = places[0] if places else len(kinds)
    if offset >= period or [layer % period == offset for layer in range(len(kinds))] != kinds:
        raise header.refuse(f"jamba: layers with {what}", "one distance from each to the next", f"layers {places}")
    return period, offset


def jamba_rules(header: Header) -> list[Rule]:
    """A matrix of decays, and norms of what the convolution's output gives."""
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
    """Sizes and biases of Mamba 2 as Bamba, Granite 4 and Falcon-H1 spell them."""
    heads, inner = max(header.size("ssm.time_step_rank"), 1), header.size("ssm.inner_size")
    return {
        "num_key_value_heads": header.size("attention.head_count_kv"),
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


def _mamba_or_attention(header: Header) -> list[str]:
    return ["full_attention" if kv else "linear_attention" for kv in header.per_layer("attention.head_count_kv")]


def _plain_attention() -> list[Rule]:
    return [rule for rule in attention() if rule.target.endswith(".weight")]


def _rotated_attention(header: Header, target: str = "self_attn") -> list[Rule]:
    """The converter puts the elements of queries and keys in Llama's order, whether they are rotated or not."""
    heads = {"q": header.size("attention.head_count"), "k": header.size("attention.head_count_kv")}
    turned = {f"{target}.{part}_proj": partial(from_pairs, count) for part, count in heads.items()}
    return [Rule(rule.sources, rule.target, turned.get(rule.target.rpartition(".")[0], rule.make)) for rule in attention(target)]


def _mamba2(target: str) -> list[Rule]:
    """Numbers for each head have a second axis in the file, norms lie by group."""
    return [
        *renamed({"ssm_in": f"{target}.in_proj", "ssm_out": f"{target}.out_proj"}, kinds=("weight", "bias")),
        *renamed({"ssm_norm": f"{target}.norm"}, flat),
        Rule(("ssm_conv1d.weight",), f"{target}.conv1d.weight", convolution),
        Rule(("ssm_conv1d.bias",), f"{target}.conv1d.bias"),
        Rule(("ssm_a",), f"{target}.A_log", flat_log_of_decay),
        Rule(("ssm_d",), f"{target}.D", flat),
        Rule(("ssm_dt.bias",), f"{target}.dt_bias"),
    ]
