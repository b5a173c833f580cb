"""Rotary embeddings as a configuration tells them: frequencies, scaling included, and the factor of cos and sin."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from headway.core.contract.errors import ModelError
from headway.models.config import RopeConfig
from headway.models.errors import BeyondDecoderError


def read_rope(config: Any, head_dim: int, layer_type: str | None = None) -> RopeConfig:
    """The rotary embedding of a transformers configuration; rare scaled types are computed by transformers.

    layer_type: of the layers that it is for, where `rope_parameters` has an entry for each type.

    :raises ModelError: an impossible base.
    :raises BeyondDecoderError: a type that changes with the length of the sequence.
    """
    parameters = config.rope_parameters or {}
    parameters = parameters if layer_type is None else parameters[layer_type]
    theta = parameters.get("rope_theta", 1.0)
    if not isinstance(theta, (int, float)) or not math.isfinite(theta) or theta <= 0:
        raise ModelError(f"rope_theta: needs a number above 0, got {theta!r}")
    kind = parameters.get("rope_type", "default")
    rotary_dim = int(head_dim * float(parameters.get("partial_rotary_factor") or 1.0))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(
            f"partial_rotary_factor: needs an even part of head_dim={head_dim}, got {parameters['partial_rotary_factor']}"
        )
    factor = 1.0
    if kind in ("default", "linear", "llama3"):
        inv_freq = 1.0 / theta ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
        if kind == "linear":
            inv_freq = inv_freq / parameters["factor"]
        if kind == "llama3":
            inv_freq = _llama3(inv_freq, parameters)
    elif kind == "yarn":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        compute: Callable[..., tuple[torch.Tensor, float]] = ROPE_INIT_FUNCTIONS[kind]
        nested = {} if layer_type is None else {"layer_type": layer_type}
        inv_freq, factor = compute(config, torch.device("cpu"), **nested)
    else:  # the others change with the length of the sequence
        raise BeyondDecoderError(f"rope_type: needs default, linear, llama3 or yarn, got {kind}")
    still = (head_dim - rotary_dim) // 2
    return RopeConfig((*inv_freq.tolist(), *[0.0] * still), (*[factor] * (rotary_dim // 2), *[1.0] * still), rotary_dim)


def _llama3(inv_freq: torch.Tensor, parameters: Mapping[str, float]) -> torch.Tensor:
    """Llama 3.1's scaling: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    context = parameters["original_max_position_embeddings"]
    wavelen = 2 * math.pi / inv_freq
    stretched = torch.where(wavelen > context / low, inv_freq / factor, inv_freq)
    smooth = (context / wavelen - low) / (high - low)
    between = (wavelen >= context / high) & (wavelen <= context / low)
    return torch.where(between, (1 - smooth) * stretched / factor + smooth * stretched, stretched)


def rope_tables(ropes: tuple[RopeConfig, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies and factors of all of them, each float32 [ropes, head_dim / 2]."""
    rows = [[rope.inv_freq for rope in ropes], [rope.factors for rope in ropes]]
    inv_freq, factors = torch.tensor(rows, dtype=torch.float32, device=device).reshape(2, len(ropes), -1 if ropes else 0)
    return inv_freq, factors


def rotary_order(head_dim: int, rotary_dim: int) -> list[int]:
    """The order of a head's elements in which a rotation of halves of the head rotates halves of its first `rotary_dim` ones.

    Queries and keys that are both put in one order have the same products, so that a head that is rotated in part runs on the
    kernels of a whole one: what is not rotated lies behind each half, where the frequency is 0.
    """
    half, still = rotary_dim // 2, (head_dim - rotary_dim) // 2
    first, second = range(half), range(half, rotary_dim)
    return [*first, *range(rotary_dim, rotary_dim + still), *second, *range(rotary_dim + still, head_dim)]
