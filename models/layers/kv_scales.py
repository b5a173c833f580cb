"""The scales of an fp8 cache that a checkpoint brings, one pair a layer."""

from __future__ import annotations

import math

from headway.core.contract.errors import ModelError
from headway.models.layers.tensors import LayerTensors

_SUFFIXES = {
    "k": ("self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.kv_scale"),
    "v": ("self_attn.v_scale", "self_attn.v_proj.v_scale", "self_attn.kv_scale"),
}
"""As compressed-tensors, ModelOpt and, both at once, AutoFP8 name them."""


def read_kv_scales(tensors: LayerTensors) -> tuple[float, float]:
    """k_scale and v_scale of a layer: key = cached key * k_scale. 1 where the checkpoint has none.

    :raises ModelError: one without the other, or a scale that is no number above 0.
    """
    k_scale, v_scale = _scale(tensors, "k"), _scale(tensors, "v")
    if (k_scale is None) != (v_scale is None):
        there, missing = ("k", "v") if v_scale is None else ("v", "k")
        raise ModelError(f"weights: {tensors.prefix} has a {there}_scale for its cache, but no {missing}_scale")
    return k_scale or 1.0, v_scale or 1.0


def _scale(tensors: LayerTensors, which: str) -> float | None:
    names = [tensors.prefix + suffix for suffix in _SUFFIXES[which]]
    name = next((name for name in names if name in tensors.weights), None)
    if name is None:
        return None
    scale = tensors.weights.take_number(name)
    if not math.isfinite(scale) or scale <= 0:
        raise ModelError(f"weights: {name} needs a number above 0, got {scale}")
    return scale
