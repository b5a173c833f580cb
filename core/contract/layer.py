"""Validity rules of attention layers, and a one-line description of a layer.

A layer is given as an `AttentionSpec` or as its record in a crossover table. The record has fields of the same names, and gives
element types by name. This module does not import torch, so that a table is displayed without waiting for torch's import.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

BLOCK_MULTIPLE: Final = 8
"""Common divisor of all block sizes that an engine accepts."""
OPTIONAL = ("sliding_window", "softcap", "alibi_slopes", "sinks", "rule")
"""Optional features of a layer: fields that are None in plain causal attention."""


class Invariance(IntEnum):
    """Level of changes that leave the bits of a token's output as they are. A backend promises a level, and a layer requires one.
    Each level includes the lower levels."""

    NONE = 0
    """Nothing is promised."""
    BATCH = 1
    """The other sequences of the step."""
    CHUNK = 2
    """The chunks in which a prompt is computed, and how much of it was found in the prefix cache."""
    PHASE = 3
    """The phase: a token computed in a prompt, in decode or in verification has the same bits."""


INVARIANCES = {"batch": Invariance.BATCH, "full": Invariance.PHASE}
"""Name of a level of deterministic mode -> level."""


def fault_of(layer: Any, v_head_dim: int, own_kv_dtype: bool) -> str:
    """Return the first rule that a layer breaks, or "" if it breaks none.

    own_kv_dtype: True if the cache's element type is set separately.
    """
    sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim, v_head_dim)
    rules = {
        "numbers of heads and their elements must be positive": min(sizes) > 0,
        "a value inside the key cannot be longer than the key": v_head_dim <= layer.head_dim or not layer.value_in_key,
        "a value inside the key has the key's scale": layer.k_scale == layer.v_scale or not layer.value_in_key,
        "attention that is not causal reads no cache: it is dense": layer.causal or layer.dense,
        "ALiBi slopes count back from the query: they need a causal layer": layer.causal or layer.alibi_slopes is None,
        "an attention rule needs a causal layer": layer.causal or layer.rule is None,
        "without a cache it has no element type": not (own_kv_dtype and layer.dense),
        "a sliding window must be positive": layer.sliding_window is None or layer.sliding_window > 0,
        "a soft-cap must be positive": layer.softcap is None or layer.softcap > 0,
        "one ALiBi slope a query head": layer.alibi_slopes is None or len(layer.alibi_slopes) == layer.num_heads,
        "only a cache with its own kv_dtype is scaled": own_kv_dtype or layer.k_scale == layer.v_scale == 1.0,
        "one sink a query head": layer.sinks is None or len(layer.sinks) == layer.num_heads,
    }
    broken = next((rule for rule, kept in rules.items() if not kept), "")
    if not broken and layer.num_heads % layer.num_kv_heads:
        return f"num_heads must be a multiple of num_kv_heads: {layer.num_heads}, {layer.num_kv_heads}"
    return broken


def describe(layer: Any, v_head_dim: int, dtype: str, kv_dtype: str, where: str = "", more: str = "") -> str:
    """Return a description of a layer, such as `32/8 heads x 128 bfloat16`. where: text after the element type. more: text at
    the end."""
    used = {name: f" {name}" for name in sorted(OPTIONAL) if getattr(layer, name) is not None}
    extra = "".join(used.values() if layer.rule is None else (used | {"rule": f" rule {layer.rule}"}).values()) + more
    if kv_dtype != dtype:
        extra = f", {kv_dtype} cache{extra}"
    dim = str(layer.head_dim) if v_head_dim == layer.head_dim else f"{layer.head_dim}/{v_head_dim}"
    extra = f" value_in_key{extra}" if layer.value_in_key else extra
    kind = " dense" if layer.causal else " bidirectional"
    extra = f"{kind}{extra}" if layer.dense else extra
    return f"{layer.num_heads}/{layer.num_kv_heads} heads x {dim} {dtype}{where}{extra}"
