"""Write transformers' defaults of configurations that `plain_config` reads: `python docs/_tools/config_defaults.py`."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from headway.models.families.families import TEXT_PARTS
from headway.models.families.plain_config import DEFAULTS

KINDS = (
    *("deepseek_v2", "deepseek_v3", "diffllama", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "gpt2"),
    *("gpt_oss", "granite", "llama", "minimax", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3", "starcoder2"),
)
_LAYERS = 12  # a multiple of the period of every kind's layers
_OLD: dict[str, tuple[Any, str]] = {
    "rope_theta": (7.0, "float | int"),
    "rope_local_base_freq": (7.0, "float | int"),
    "partial_rotary_factor": (0.75, "float | int"),
    "sliding_window_pattern": (3, "int"),
    "full_attention_interval": (3, "int"),
    "global_head_dim": (40, "int"),
    "num_global_key_value_heads": (3, "int | None"),
}
"""Keys of config.json that some classes convert into fields, with a value that shows a conversion, and the types."""


def defaults_of(kind: str) -> dict[str, Any]:
    """Return types and defaults of a model type's fields, its aliases, and the fields that are derived from others."""
    made = CONFIG_MAPPING[kind]
    base = {field.name for field in dataclasses.fields(PretrainedConfig)}
    renamed = made.attribute_map
    own = [field for field in dataclasses.fields(made) if field.name not in base]
    defaults = {renamed.get(field.name, field.name): field.default for field in own}
    types = {renamed.get(field.name, field.name): _types(field.type) for field in own}
    types["auto_map"] = "dict"  # names code of the model's own, which is not run
    if kind in TEXT_PARTS:
        return {"types": types, "defaults": defaults, "aliases": renamed, "derived": {}}
    more = {"attention_k_eq_v": True} if "attention_k_eq_v" in types else {}
    plain = _fields(made, more)
    types |= {key: of for key, (value, of) in _OLD.items() if _fields(made, {**more, key: value}) != plain}
    types.setdefault("head_dim", "int")
    if "rope_theta" in types:
        types["rope_scaling"] = "dict | None"
    unset = [name for name, value in defaults.items() if value is None and plain.get(name)]
    derived: dict[str, Any] = {name: _period(plain[name]) for name in unset if type(plain[name]) is list}
    derived |= {name: plain[name] for name in ("per_layer_config", "rope_parameters") if plain.get(name)}
    if "per_layer_config" in derived:
        derived["per_layer_config"] = next(iter(derived["per_layer_config"].values()))
        types["per_layer_config"] = "dict"
    return {"types": types, "defaults": defaults, "aliases": renamed, "derived": derived}


def _fields(made: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration with some values that are not defaults, without the keys in `_OLD`."""
    config = made(num_hidden_layers=_LAYERS, **json.loads(json.dumps(values))).to_dict()
    return {name: value for name, value in config.items() if name not in _OLD and not name.startswith("_")}


def _types(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    text = re.sub(r"typing\.Optional\[(.*)\]$", r"\1 | None", text)
    text = re.sub(r"typing\.Literal\[.*?\]", "str", re.sub(r"[\w.]*(PreTrainedConfig|RopeParameters|Gemma4\w+) \| ", "", text))
    return re.sub(r"dict\[.*?\]", "dict", text)


def _period(values: list[Any]) -> list[Any]:
    """Return the shortest list whose repetition is `values`."""
    return next(values[:n] for n in range(1, len(values) + 1) if values[:n] * (len(values) // n) == values)


def main() -> None:
    """Write the defaults of all model types that `plain_config` reads."""
    read = {kind: defaults_of(kind) for kind in sorted((*KINDS, *TEXT_PARTS))}
    DEFAULTS.write_text(json.dumps(read, indent=1) + "\n")


if __name__ == "__main__":
    main()
