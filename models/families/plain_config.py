"""Reader of config.json files that avoids importing transformers, the slowest step of a start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headway.core.contract.spec import DTYPES
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json

DEFAULTS = Path(__file__).with_name("config_defaults.json")
"""Fields of transformers' classes: types, defaults, aliases, derived values. docs/_tools/config_defaults.py writes the file."""
_PASSED_ON = {
    *("_model_name_or_path", "compression_config", "quantization_config", "task_specific_params", "transformers_version"),
    *("_name_or_path", "attention_dropout", "experts_per_token", "initializer_range", "interpolate_factor", "use_sliding_window"),
    *("_sliding_window_pattern", "initial_context_length", "mtp_use_dedicated_embeddings", "vision_soft_tokens_per_image"),
    *("architectures", "attention_bias", "aux_loss_alpha", "full_attn_mod", "moe_layer_freq", "pretraining_tp", "unsloth_fixed"),
    *("attn_output_gate", "is_llama_config", "mamba_ssm_dtype", "max_window_layers", "rope_interleaved", "unsloth_version"),
    *("bos_token_id", "eoa_token_id", "eos_token_id", "lm_head_bias", "mlp_bias", "pad_token_id", "scoring_func", "unk_token_id"),
    *("cache_implementation", "mtp_num_hidden_layers", "output_router_logits", "router_aux_loss_coef", "transformers.js_config"),
    *("dtype", "ep_size", "hidden_act", "model_type", "qk_head_dim", "seq_aux", "topk_method", "torch_dtype", "use_cache"),
    "n_ctx",
}
"""Keys read below or elsewhere, and keys that transformers keeps unchecked in classes without such a field."""
_FULL, _SLIDING, _LENGTH = "full_attention", "sliding_attention", "original_max_position_embeddings"
_INTERVALS = ("sliding_window_pattern", "full_attention_interval", "no_rope_layer_interval")
"""Keys for the period of layers, whose last layer differs from the others."""
_ROPE_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "proportional"), ()),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": ("factor", _LENGTH),
}
_PHI3_TYPES: dict[str, tuple[str, ...]] = {"default": (), "longrope": ("short_factor", "long_factor", _LENGTH)}
"""Required parameters of each RoPE type, besides `rope_theta`, in most classes and in Phi-3's."""
_ROPE_VALUES = {
    **dict.fromkeys(("rope_type", "type"), "str"),
    **dict.fromkeys(("truncate", "mrope_interleaved"), "bool"),
    **dict.fromkeys(("short_factor", "long_factor", "mrope_section"), "list[float] | list[int]"),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow"), "float | int"),
    **dict.fromkeys(("mscale", "mscale_all_dim", *_ROPE_TYPES["llama3"]), "float | int"),
}


def plain_config(config: Mapping[str, Any]) -> SimpleNamespace | None:
    """Return a config.json as transformers would read it; None if transformers must read it."""
    known = parse_json(read_text(DEFAULTS), DEFAULTS.name).get(str(config.get("model_type")), {"types": {}, "aliases": {}})
    types, aliases = known["types"], known["aliases"]
    stated = {aliases.get(name, name): value for name, value in config.items()}
    dtype = stated.get("torch_dtype") if stated.get("dtype") is None else stated["dtype"]
    if not types or len(stated) < len(config) or not set(stated) <= {*types, *_PASSED_ON} or dtype not in (None, *DTYPES):
        return None
    if not all(_fits(value, types[name]) for name, value in stated.items() if name in types):
        return None
    read = {"num_labels": 2, "architectures": None, **known["defaults"], **stated, "dtype": DTYPES.get(dtype or "")}
    if "text_config" in read:
        kind, text = f"{read['model_type']}_text", read["text_config"] or {}
        read["text_config"] = plain_config({"model_type": kind, **text}) if text.get("model_type", kind) == kind else None
        return SimpleNamespace(**read) if read["text_config"] else None
    read |= {alias: read[name] for alias, name in aliases.items() if name in read}
    if "use_sliding_window" in types:
        read["sliding_window"] = None  # a true use_sliding_window is refused below
    return SimpleNamespace(**read) if _derive(read, known["derived"]) else None


def _fits(value: object, types: str) -> bool:
    """Return whether a value has one of the types in an annotation, such as `int | list[int] | None`."""
    if type(value) is list:
        return "list[" in types and {f"list[{type(each).__name__}]" for each in value} <= set(types.split(" | "))
    return ("None" if value is None else type(value).__name__) in types.split(" | ")


def _derive(read: dict[str, Any], derived: Mapping[str, Any]) -> bool:
    """Set the fields that transformers derives from others; `derived` has the defaults. Return False if it must derive them."""
    heads, hidden, count = read["num_attention_heads"], read["hidden_size"], read["num_hidden_layers"]
    interval = next((read[key] for key in _INTERVALS if key in read), None)
    if min(heads, count, interval or 1) < 1 or hidden % heads:
        return False
    for name in (name for name, value in derived.items() if type(value) is list):
        period = derived[name] if interval is None else derived[name][:1] * (interval - 1) + derived[name][-1:]
        read[name] = (period * count)[:count] if read[name] is None else read[name]
        if len(read[name]) != count:
            return False
    own, kinds = read.get("head_dim"), read.get("layer_types", [])
    read["head_dim"] = read.get("qk_rope_head_dim") or own or hidden // heads
    if own not in (None, read["head_dim"]) or not set(kinds) <= {_FULL, _SLIDING, "linear_attention"}:
        return False
    if read.get("use_sliding_window") or read.get("use_bidirectional_attention") not in (None, False, "vision"):
        return False
    if "rope_parameters" in derived and not _set_ropes(read, derived["rope_parameters"]):
        return False
    return "per_layer_config" not in derived or _set_layers(read, kinds, derived["per_layer_config"])


def _set_layers(read: dict[str, Any], kinds: list[str], sizes: dict[str, int]) -> bool:
    """Set `per_layer_config` (Gemma 4). Return False if transformers must set it. sizes: default sizes of full attention."""
    names = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
    own = sizes | {name: read[key] for key, name in names.items() if read.get(key) is not None}
    if not read.get("attention_k_eq_v", True):
        own.pop("num_key_value_heads", None)
    others = read.get("per_layer_config", {str(index): own for index, kind in enumerate(kinds) if kind == _FULL})
    others = {int(index) if index.isdecimal() else -1: each for index, each in others.items()}
    usual = all(type(each) is dict and set(each) <= set(names.values()) for each in others.values())
    if not usual or kinds[-1] != _FULL or not set(others) <= set(range(len(kinds))):
        return False
    layers = [SimpleNamespace(**{**read, **others.get(index, {})}) for index in range(len(kinds))]
    read |= {"is_heterogeneous": True, "per_layer_config": layers}
    return True


def _set_ropes(read: dict[str, Any], default: dict[str, Any]) -> bool:
    """Set `rope_parameters` from the keys of transformers 4 or 5. Return False if transformers must read these keys."""
    scaling, ropes, nested = read.get("rope_scaling"), read["rope_parameters"], _FULL in default
    stated = {key: read[key] for key in ("rope_theta", "partial_rotary_factor") if key in read}
    if not nested:
        given = scaling or ropes
        always = {key: default[key] for key in ("rope_theta", "partial_rotary_factor") if key in default}
        ropes = {_FULL: {**(default if given is None else always), **stated, **(given or {})}}
    elif ropes is None:
        local = {"rope_theta": read["rope_local_base_freq"]} if "rope_local_base_freq" in read else {}
        ropes = {_FULL: {**default[_FULL], **stated, **(scaling or {})}, _SLIDING: {**default[_SLIDING], **local}}
    elif stated or scaling or set(ropes) != set(default) or not all(type(rope) is dict for rope in ropes.values()):
        return False
    ropes = {name: {"rope_type": rope.get("type", "default"), **rope} for name, rope in ropes.items()}
    for rope in ropes.values():
        needed = (_PHI3_TYPES if _LENGTH in read else _ROPE_TYPES).get(str(rope["rope_type"]))
        if needed is None or not all(_fits(rope[key], _ROPE_VALUES.get(key, "")) for key in rope):
            return False
        if _LENGTH in needed:
            rope[_LENGTH] = read.get(_LENGTH, rope.get(_LENGTH, read["max_position_embeddings"]))
        rotated = int(read["hidden_size"] // read["num_attention_heads"] * rope.get("partial_rotary_factor", 1.0)) // 2
        factors = [rope[key] for key in ("short_factor", "long_factor") if key in rope]
        if not {"rope_theta", *needed} <= set(rope) or any(len(each) != rotated for each in factors):
            return False
    read["rope_parameters"] = ropes if nested else ropes[_FULL]
    return True
