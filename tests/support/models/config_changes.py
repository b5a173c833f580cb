"""Other values for each configuration field that transformers' code of a model reads."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

from transformers import PretrainedConfig

_OF_MODULES = {"config", "text_config", "decoder_config", "encoder_config"}
"""Names under which transformers' modules keep their configuration."""
_WITHOUT_LOGITS = {
    *("_attn_implementation", "architectures", "attention_dropout", "gradient_checkpointing", "initializer_range", "dtype"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "router_aux_loss_coef", "use_cache"),
    *("problem_type", "num_labels", "chunk_size_feed_forward", "pretraining_tp", "torch_dtype", "is_encoder_decoder"),
}
"""Fields that say nothing of the logits of a prompt."""
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu", "tanh")
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_theta": 321.0},
    {"partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "attention_factor": 1.7},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "mscale": 0.6, "mscale_all_dim": 1.2},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)
_WHERE_NONE: dict[str, tuple[Any, ...]] = {
    "sliding_window": (5,),
    "layer_types": (),
    "head_dim": (24,),
    "n_inner": (56,),
    "q_lora_rank": (20,),
    "time_step_limit": ([0.01, 0.2],),
}


def _is_config(node: ast.expr) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) in _OF_MODULES


@cache
def fields_read(config_class: type[PretrainedConfig], model_class: type) -> tuple[str, ...]:
    """Names of the fields that the module of a class of transformers reads, by its source."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(model_class)))):  # type: ignore[arg-type]
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and _is_config(node.args[0]):
            found |= {name.value for name in node.args[1:2] if isinstance(name, ast.Constant)}  # else a name of a layer's own
    renamed = getattr(config_class, "attribute_map", {})
    return tuple(sorted({renamed.get(name, name) for name in found} - _WITHOUT_LOGITS))


def changes(config: PretrainedConfig, field: str) -> Iterator[Any]:
    """Yield other values of a field, by the kind of the value that it has. Not every one makes a model."""
    try:
        value = getattr(config, field, None)
    except RuntimeError:  # transformers reads no single value of a field that may differ between layers
        value = config.to_dict().get(field)
    if callable(value):
        return
    if isinstance(value, bool):
        yield not value
    elif value is None:
        yield from _WHERE_NONE.get(field, ())
    elif isinstance(value, str):
        yield from (name for name in _ACTIVATIONS if "act" in field and name != value)
    elif isinstance(value, int):
        yield from dict.fromkeys((value * 2, value + 1, max(value // 2, 1), 0))
        yield from (None,) * (field == "sliding_window")
    elif isinstance(value, float):
        yield from (value * 1.5 + 0.25, value * 0.5)
    elif isinstance(value, list) and value:
        yield value[::-1]
        yield [value[-1]] * len(value)
        yield [value[0]] * len(value)
    elif field == "rope_parameters" and isinstance(value, dict):
        nested = [key for key, each in value.items() if isinstance(each, dict)]
        for other in _ROPES:
            yield {**value, **{key: {**value[key], **other} for key in nested}} if nested else {**value, **other}
