"""Writer of .gguf files of tiny models in the layouts of llama.cpp's converter, after its published source (`conversion/`).

Changes to a checkpoint, apart from names:

- A_log is written as -exp(A_log); Mamba-2's A_log and D have a trailing axis of size 1; Mamba-2's norm is by group.
- Convolution kernels lose their middle axis; Kimi's get a leading one.
- Qwen3-Next and Qwen3.5: norm weights include the added 1, except the linear attention's norm. Qwen3-Next's projection for q, k,
v
  and z is split into q, k, v of all heads and z; Qwen3.5's value heads are interleaved over the key heads.
- Granite, Bamba, Nemotron-H: rows of queries and keys in Llama's order, the halves of a head interleaved.
- Granite's gate and up are split. Experts are stacked. Falcon-H1's factors are multiplied into the weights.
- Kimi's up-projection from the latent is split into keys, transposed, and values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

_TOP = {
    r"(model\.embed_tokens|(backbone|model)\.embeddings)": "token_embd",
    r"lm_head": "output",
    r"model\.embedding_norm": "token_embd_norm",
    r"(model|backbone)\.(norm|norm_f|final_layernorm)": "output_norm",
}
_BELOW = {
    r"(input_layernorm|operator_norm|norm)": "attn_norm",
    r"(post_attention_layernorm|ffn_norm|pre_ff_layernorm)": "ffn_norm",
    r"(self_attn|mixer)\.([qkv])_proj": r"attn_\2",
    r"(self_attn\.(o|out)_proj|mixer\.o_proj)": "attn_output",
    r"self_attn\.([qk])_(norm|layernorm)": r"attn_\1_norm",
    r"(mlp|feed_forward|mixer)\.(gate|up|down)_proj": r"ffn_\2",
    r"feed_forward\.w1": "ffn_gate",
    r"feed_forward\.w2": "ffn_down",
    r"feed_forward\.w3": "ffn_up",
    r"(mlp\.gate|feed_forward\.gate|feed_forward\.router|mixer\.gate|block_sparse_moe\.(gate|router\.layer))": "ffn_gate_inp",
    r"mlp\.shared_expert_gate": "ffn_gate_inp_shexp",
    r"(mlp\.shared_expert|mixer\.shared_experts|block_sparse_moe\.shared_experts)\.(gate|up|down)_proj": r"ffn_\2_shexp",
    r"shared_mlp\.output_linear": "ffn_down_shexp",
    r"block_sparse_moe\.output_linear": "ffn_down_exps",
    r"conv\.(in|out)_proj": r"shortconv.\1_proj",
    r"conv\.conv": "shortconv.conv",
    r"(mamba|mixer)\.in_proj": "ssm_in",
    r"(mamba|mixer|linear_attn)\.out_proj": "ssm_out",
    r"(mamba|mixer|linear_attn)\.conv1d": "ssm_conv1d",
    r"(mamba|mixer|linear_attn)\.norm": "ssm_norm",
    r"mamba\.x_proj": "ssm_x",
    r"mamba\.dt_proj": "ssm_dt",
    r"mamba\.(dt|b|c)_layernorm": r"ssm_\1_norm",
    r"linear_attn\.in_proj_ba": "ssm_ba",
    r"linear_attn\.in_proj_qkv": "attn_qkv",
    r"linear_attn\.in_proj_z": "attn_gate",
    r"linear_attn\.in_proj_b": "ssm_beta",
    r"linear_attn\.in_proj_a": "ssm_alpha",
    r"self_attn\.([qkv])_conv1d": r"ssm_conv1d_\1",
    r"self_attn\.([fg])_([ab])_proj": r"ssm_\1_\2",
    r"self_attn\.b_proj": "ssm_beta",
    r"self_attn\.o_norm": "ssm_norm",
    r"self_attn\.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    r"self_attn\.kv_a_layernorm": "attn_kv_a_norm",
}
_BARE = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "e_score_correction_bias": "exp_probs_b.bias"}
_EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight")
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w2": "down", "w3": "up"}


def save_gguf(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Tensor], **tokenizer: Any) -> None:
    """Write a file. keys: below the architecture; tensors: bytes are taken for Q8_0; tokenizer: below `tokenizer.ggml`."""
    writer = GGUFWriter(path, architecture)
    every = {f"{architecture}.{key}": value for key, value in keys.items()}
    every |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    for key, value in every.items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds[list] = writer.add_array  # type: ignore[index]
        kinds[type(value)](key, value)
    for name, tensor in tensors.items():
        quantised = GGMLQuantizationType.Q8_0 if tensor.dtype == torch.uint8 else None
        writer.add_tensor(name, tensor.contiguous().numpy(), raw_dtype=quantised)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()


def converted(config: PretrainedConfig, folder: Path) -> dict[str, Tensor]:
    """The tensors of a .gguf file, of a checkpoint that transformers wrote."""
    found: dict[str, Tensor] = {}
    for name, tensor in _stacked(load_file(folder / "model.safetensors")).items():
        layer = re.match(r"(model|backbone)\.layers\.(\d+)\.", name)
        if layer is None:
            module = name.removesuffix(".weight")
            found[f"{_renamed(module, _TOP)}.weight"] = _top(config, module, tensor)
            continue
        for below, made in _changed(config, name[layer.end() :], tensor):
            found[f"blk.{layer[2]}.{below}"] = made
    return found


def _stacked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All experts of a kind as one tensor."""
    experts: dict[str, dict[int, Tensor]] = {}
    rest = {}
    for name, tensor in state.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match['before']}.{match['part']}", {})[int(match["number"])] = tensor
        else:
            rest[name] = tensor
    return rest | {name: torch.stack([kind[number] for number in sorted(kind)]) for name, kind in experts.items()}


def _renamed(module: str, names: Mapping[str, str]) -> str:
    for pattern, name in names.items():
        if match := re.fullmatch(pattern, module):
            return match.expand(name)
    raise KeyError(module)


def _top(config: Any, module: str, tensor: Tensor) -> Tensor:
    if config.model_type == "falcon_h1":
        factors = {"lm_head": config.lm_head_multiplier, "model.embed_tokens": config.embedding_multiplier}
        return tensor * factors.get(module, 1.0)
    return tensor + 1 if config.model_type.startswith("qwen3") and module == "model.norm" else tensor


def _changed(config: Any, below: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Return a layer's tensor as the converter writes it."""
    kind, module = config.model_type, below.removesuffix(".weight").removesuffix(".bias")
    suffix = below[len(module) :]
    special = {
        "linear_attn.in_proj_qkvz": _by_section,
        "block_sparse_moe.input_linear": _halves,
        "shared_mlp.input_linear": _halves,
        "self_attn.kv_b_proj": _latent,
    }
    if module in special:
        yield from special[module](config, module, tensor)
    elif ".experts." in module and tensor.dim() == 3:
        yield f"ffn_{_PARTS[module.rpartition('.')[2]]}_exps.weight", tensor
    elif module.rpartition(".")[2] in _BARE or module.endswith("expert_bias"):
        yield _BARE.get(module.rpartition(".")[2], "exp_probs_b.bias"), _numbers(config, module, tensor)
    else:
        if kind == "kimi_linear":  # as transformers writes its dense layers
            module = re.sub(r"^block_sparse_moe\.(?=(gate|up|down)_proj$)", "mlp.", module)
        name = _renamed(module, _BELOW)
        if kind == "granitemoehybrid" and not config.num_local_experts:
            name = name.removesuffix("_shexp")
        if kind.startswith("qwen3") and module == "post_attention_layernorm":
            name = "post_attention_norm"
        if kind == "falcon_h1" and name == "ffn_norm":
            suffix = ""  # the converter's table has the name with its suffix
        yield name + suffix, _product(config, module, name, tensor)


def _numbers(config: Any, module: str, tensor: Tensor) -> Tensor:
    """Numbers for each head, and corrections of experts' scores."""
    if module.endswith("A_log"):
        tensor = -torch.exp(tensor)
    if module.endswith(("A_log", "D")) and config.model_type in ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"):
        return tensor[:, None]
    return _in_turn(config, tensor, 1, 0) if config.model_type.startswith("qwen3_5") else tensor


def _product(config: Any, module: str, name: str, tensor: Tensor) -> Tensor:
    """Return a random weight of a linear layer, a kernel or a norm."""
    kind = config.model_type
    if name.startswith("ssm_conv1d") or name == "shortconv.conv":
        if tensor.dim() == 3:
            tensor = tensor.squeeze(1)[None, :, None] if kind == "kimi_linear" else tensor.squeeze(1)
        keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim if kind.startswith("qwen3_5") else 0
        return _in_turn(config, tensor, config.linear_value_head_dim, keys) if keys else tensor
    if name in ("attn_q", "attn_k") and kind in ("bamba", "granitemoehybrid", "nemotron_h"):
        heads = config.num_attention_heads if name == "attn_q" else config.num_key_value_heads
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    if name == "ssm_norm" and kind in ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"):
        return tensor.reshape(config.n_groups if kind == "nemotron_h" else config.mamba_n_groups, -1)
    if kind.startswith("qwen3"):
        if name.endswith("norm") and name != "ssm_norm":
            return tensor + 1
        return _qwen3_5(config, name, tensor) if kind.startswith("qwen3_5") else tensor
    return _falcon_h1(config, name, tensor) if kind == "falcon_h1" else tensor


def _qwen3_5(config: Any, name: str, tensor: Tensor) -> Tensor:
    dim, keys = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if name == "ssm_out":
        return _in_turn(config, tensor.T, dim, 0).T
    places = {"attn_qkv": (dim, keys), "attn_gate": (dim, 0), "ssm_beta": (1, 0), "ssm_alpha": (1, 0)}
    return _in_turn(config, tensor, *places[name]) if name in places else tensor


def _in_turn(config: Any, tensor: Tensor, rows: int, start: int) -> Tensor:
    """Return value heads of `rows` rows, from row `start` on, interleaved over the key heads."""
    heads = tensor[start:].unflatten(0, (config.linear_num_key_heads, -1, rows))
    return torch.cat([tensor[:start], heads.transpose(0, 1).flatten(0, 2)])


def _by_section(config: Any, module: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim] * 2 + [values] * 2
    q, k, v, z = (part.flatten(0, 1) for part in tensor.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, dim=1))
    yield "attn_qkv.weight", torch.cat([q, k, v])
    yield "attn_gate.weight", z


def _halves(config: Any, module: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    kind = "_exps" if tensor.dim() == 3 else "_shexp" if config.num_local_experts else ""
    for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
        yield f"ffn_{part}{kind}.weight", half


def _latent(config: Any, module: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    keys, values = tensor.unflatten(0, (config.num_attention_heads, -1)).split(sizes, dim=1)
    yield "attn_k_b.weight", keys.transpose(1, 2)
    yield "attn_v_b.weight", values


def _falcon_h1(config: Any, name: str, tensor: Tensor) -> Tensor:
    gate, down = config.mlp_multipliers
    before = config.attention_in_multiplier
    factors = {"ffn_gate": gate, "ffn_down": down, "attn_q": before, "attn_k": before * config.key_multiplier, "attn_v": before}
    factors |= {"attn_output": config.attention_out_multiplier, "ssm_out": config.ssm_out_multiplier}
    if name == "ssm_in":
        groups = config.mamba_n_groups * config.mamba_d_state
        sizes = torch.tensor([config.mamba_d_ssm, config.mamba_d_ssm, groups, groups, config.mamba_n_heads])
        rows = torch.tensor(config.ssm_multipliers).repeat_interleave(sizes) * config.ssm_in_multiplier
        return tensor * rows[:, None]
    return tensor * factors.get(name, 1.0)


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


def _falcon_h1_keys(config: Any) -> Keys:
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
    "falcon_h1": _falcon_h1_keys,
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
