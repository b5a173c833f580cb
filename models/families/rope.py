"""Rotary embeddings (RoPE) of a configuration: frequencies with scaling, and the factors of cos and sin."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from headway.core.contract.errors import ModelError
from headway.core.system.text import shown
from headway.models.config import BeyondDecoderError, RopeConfig

log = logging.getLogger("headway")


def read_rope(config: Any, head_dim: int, layer_type: str | None = None, longest: int | None = None) -> RopeConfig:
    """Return the rotary embedding of a transformers configuration, or of a result of `plain_config`.

    layer_type: layer type to read, if `rope_parameters` has an entry per type. longest: maximum sequence length, which
    selects `longrope`'s short or long factors for all positions; None means max_position_embeddings.

    :raises ModelError: if a parameter is impossible.
    :raises BeyondDecoderError: if the RoPE type depends on the length of each sequence.
    """
    parameters = config.rope_parameters or {}
    parameters = parameters if layer_type is None else parameters[layer_type]
    theta = _above_zero(parameters, "rope_theta", 1.0)
    kind = parameters.get("rope_type", "default")
    partial = parameters.get("partial_rotary_factor")
    rotary_dim = int(head_dim * (1.0 if partial is None else min(_above_zero(parameters, "partial_rotary_factor"), 2.0)))
    if kind == "proportional":
        rotary_dim -= rotary_dim % 2
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(f"partial_rotary_factor: needs an even part of head_dim={head_dim}, got {partial}")
    factor = 1.0
    if kind in ("default", "linear", "llama3"):
        inv_freq = 1.0 / theta ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
        if kind == "linear":
            inv_freq = inv_freq / _above_zero(parameters, "factor")
        if kind == "llama3":
            inv_freq = _llama3(inv_freq, parameters)
    elif kind == "proportional":  # as many pairs of the whole head rotate, and the others have frequency 0 (Gemma 4)
        inv_freq = 1.0 / theta ** (torch.arange(0, rotary_dim, 2).float() / head_dim) / _above_zero(parameters, "factor", 1.0)
        inv_freq = torch.cat([inv_freq, inv_freq.new_zeros((head_dim - rotary_dim) // 2)])
        rotary_dim = head_dim
    elif kind in ("yarn", "longrope"):
        most = config.max_position_embeddings
        context = _above_zero(parameters, "original_max_position_embeddings", most if kind == "yarn" else None)
        if kind == "yarn":  # transformers reads no `truncate` of a layer type
            inv_freq, factor = _yarn(theta, rotary_dim, parameters, context, config.rope_parameters.get("truncate", True))
        else:
            stretch = torch.tensor(parameters["long_factor" if (longest or most) > context else "short_factor"]).float()
            inv_freq = 1.0 / (stretch * theta ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim))
            scale = _above_zero(parameters, "factor", most / context)
            factor = math.sqrt(1 + math.log(scale) / math.log(context)) if scale > 1 else 1.0
        factor = factor if parameters.get("attention_factor") is None else _above_zero(parameters, "attention_factor")
    else:  # `dynamic` depends on the length of the sequence
        raise BeyondDecoderError(f"rope_type: needs default, linear, llama3, yarn, longrope or proportional, got {kind}")
    still = (head_dim - rotary_dim) // 2
    return RopeConfig((*inv_freq.tolist(), *[0.0] * still), (*[factor] * (rotary_dim // 2), *[1.0] * still), rotary_dim)


def original_length(config: Any) -> int | None:
    """Return the maximum sequence length for `longrope`'s short factors (Phi-3, Phi-4); None if no layer uses `longrope`.

    Cached keys must be rotated by one set of factors, so all sequences use the same set. These are the short factors if no
    sequence may exceed this length, else the long factors (as in vLLM).

    :raises ModelError: if the configuration does not state the length.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    listed = [parameters, *(each for each in parameters.values() if isinstance(each, Mapping))]
    found = [_above_zero(each, "original_max_position_embeddings") for each in listed if each.get("rope_type") == "longrope"]
    return int(min(found)) if found else None


def takes_long_factors(config: Any, max_model_len: int | None) -> bool:
    """Return whether RoPE of type `longrope` uses its long factors. The choice is logged, with the max_model_len that would
    change it."""
    original = original_length(config)
    if original is None:
        return False
    longest: int = max_model_len or config.max_position_embeddings
    long = longest > original
    kind, where, other = ("long", "above", f"max_model_len={original}") if long else ("short", "within", "a larger value")
    text = "model: RoPE of type longrope uses its %s factors for all sequences, because max_model_len=%d is %s the %d tokens of "
    text += "the original training; %s selects the other factors"
    log.info(text, kind, longest, where, original, other)
    return long


def _above_zero(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a parameter as a float. :raises ModelError: if it is missing, not above 0, or above 2**64."""
    value = parameters.get(name, default)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 2.0**-64 <= value <= 2.0**64:
        return float(value)
    need = "a number above 0" if not isinstance(value, float | int) or not value > 1 else "a number of at most 2**64"
    raise ModelError(f"{name}: needs {need} in the RoPE parameters, got {shown(value)}")


def _llama3(inv_freq: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Apply Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones unchanged, others interpolated."""
    factor, low, high = (_above_zero(parameters, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    context = _above_zero(parameters, "original_max_position_embeddings")
    if not high > low:
        raise ModelError(f"high_freq_factor: needs a number above low_freq_factor={low:g} in the RoPE parameters, got {high:g}")
    wavelen = 2 * math.pi / inv_freq
    stretched = torch.where(wavelen > context / low, inv_freq / factor, inv_freq)
    smooth = (context / wavelen - low) / (high - low)
    between = (wavelen >= context / high) & (wavelen <= context / low)
    return torch.where(between, (1 - smooth) * stretched / factor + smooth * stretched, stretched)


def _yarn(theta: float, dim: int, parameters: Mapping[str, Any], context: float, truncate: bool) -> tuple[torch.Tensor, float]:
    """Return YaRN's frequencies and attention factor (Peng et al. 2023). context: length of the original training."""
    scale = _above_zero(parameters, "factor")
    turns = [parameters.get(name) or default for name, default in (("beta_fast", 32), ("beta_slow", 1))]
    low, high = ((dim * math.log(context / (each * 2 * math.pi))) / (2 * math.log(theta)) for each in turns)
    low, high = (math.floor(low), math.ceil(high)) if truncate else (low, high)
    low, high = max(low, 0), min(high, dim - 1)
    kept = 1 - ((torch.arange(dim // 2).float() - low) / ((high if high != low else high + 0.001) - low)).clamp(0, 1)
    waves = theta ** (torch.arange(0, dim, 2).float() / dim)
    mscales: list[Any] = [parameters.get(name) for name in ("mscale", "mscale_all_dim")]
    above, below = (0.1 * each * math.log(max(scale, 1.0)) + 1.0 for each in (mscales if all(mscales) else (1, 0)))
    return 1.0 / (scale * waves) * (1 - kept) + 1.0 / waves * kept, above / below


def rope_tables(ropes: tuple[RopeConfig, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the frequencies and the factors of all rotary embeddings, both float32 [ropes, head_dim / 2]. Rows of layers with
    smaller heads are padded with zeros."""
    wide = max((len(rope.inv_freq) for rope in ropes), default=0)
    rows = [
        [(*row, *[0.0] * (wide - len(row))) for row in each]
        for each in ([rope.inv_freq for rope in ropes], [rope.factors for rope in ropes])
    ]
    inv_freq, factors = torch.tensor(rows, dtype=torch.float32, device=device).reshape(2, len(ropes), -1 if ropes else 0)
    return inv_freq, factors


def rotary_order(head_dim: int, rotary_dim: int) -> list[int]:
    """Return an order of a head's elements for which half-split RoPE over the whole head rotates only the checkpoint's first
    `rotary_dim` elements.

    Reordering both q and k does not change their dot products, so kernels for fully rotated heads also support partly rotated
    heads. Unrotated elements, with frequency 0, follow the rotated elements of each half.
    """
    half, still = rotary_dim // 2, (head_dim - rotary_dim) // 2
    first, second = range(half), range(half, rotary_dim)
    return [*first, *range(rotary_dim, rotary_dim + still), *second, *range(rotary_dim + still, head_dim)]
