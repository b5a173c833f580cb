"""MiniMax-01: lightning attention beside attention, each added to the normed stream, and Mixtral's experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.core.contract.state import LIGHTNING, StateSpec
from headway.models.config import LayerConfig, Multipliers, StateConfig
from headway.models.families.experts import MIXTRAL_NAMES, mixtral
from headway.models.families.hybrid import STATE, parts_of, state_dtype
from headway.models.families.names import StateNames

MINIMAX_NAMES = replace(
    MIXTRAL_NAMES,
    attention_norm=None,
    state=StateNames(
        norm=None,
        inputs=(("self_attn.qkv_proj", ("q", "k", "v")), ("self_attn.output_gate", ("z",))),
        by_key_head=True,
        out_norm="self_attn.norm",
        out="self_attn.out_proj",
    ),
    ignored=(".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay"),
)


def minimax(config: Any) -> dict[str, Any]:
    """Slopes fall from layer to layer; the factors of what parts add go into their last products."""
    heads, count = config.num_attention_heads, config.num_hidden_layers
    dim = config.head_dim or config.hidden_size // heads
    spec = StateSpec(LIGHTNING, heads, heads, dim, dim, state_dtype=state_dtype(config))
    mlp = float(config.mlp_alpha_factor)
    known = {
        "linear_attention": replace(STATE, kept=(float(config.linear_attn_alpha_factor), mlp)),
        "full_attention": LayerConfig(kept=(float(config.full_attn_alpha_factor), mlp)),
    }
    layers = parts_of(config.layer_types, known)
    falling = [1 - index / (count - 1 + 1e-5) + 1e-5 for index in range(count)]
    slopes = [tuple(2.0 ** (-8 * (head + 1) / heads) * factor for head in range(heads)) for factor in falling]
    return {
        **mixtral(config),
        "multipliers": Multipliers(
            attention=float(config.full_attn_beta_factor),
            state=float(config.linear_attn_beta_factor),
            mlp=float(config.mlp_beta_factor),
        ),
        "state": StateConfig(spec, gate="sigmoid", norm_size=heads * dim, norm_eps=1e-6),
        "layers": [replace(layer, slopes=of_layer) for layer, of_layer in zip(layers, slopes, strict=True)],
    }
