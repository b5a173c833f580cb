"""Families that mix attention with layers that keep a state: what their configurations say of the latter, in our terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headway.core.contract.errors import ModelError
from headway.core.contract.spec import DTYPES
from headway.core.contract.state import GATED_DELTA, StateSpec
from headway.core.system.text import shown
from headway.models.config import BeyondDecoderError, LayerConfig, StateConfig
from headway.models.dense_families import qwen3
from headway.models.expert_families import qwen_experts
from headway.models.names import ExpertNames, StateNames, TensorNames

STATE = LayerConfig(attention=False, state=True)
"""A layer with a state in place of attention."""

QWEN3_NEXT_STATE = StateNames(
    inputs=(("linear_attn.in_proj_qkvz", ("q", "k", "v", "z")), ("linear_attn.in_proj_ba", ("b", "a"))),
    by_key_head=True,
    conv=("linear_attn.conv1d",),
    A_log="linear_attn.A_log",
    dt_bias="linear_attn.dt_bias",
    out_norm="linear_attn.norm",
    out="linear_attn.out_proj",
)
QWEN3_NEXT_NAMES = TensorNames(experts=ExpertNames(shared="mlp.shared_expert"), state=QWEN3_NEXT_STATE, ignored_modules=("mtp.",))


def qwen3_next(config: Any) -> dict[str, Any]:
    """Three gated delta layers for one of attention, whose output is gated; experts with a gated shared one."""
    return {
        **qwen3(config),
        **qwen_experts(config),
        "norm": "rms_plus_one",
        "output_gate": True,
        "state": gated_delta(config),
        "layers": parts_of(config.layer_types, {"linear_attention": STATE, "full_attention": LayerConfig()}),
    }


def gated_delta(config: Any, beta_scale: float = 1.0) -> StateConfig:
    """The gated delta layers of Qwen3-Next and its kin."""
    heads, key_heads = _size(config, "linear_num_value_heads"), _size(config, "linear_num_key_heads")
    if heads % key_heads:
        raise ModelError(f"linear_num_value_heads: needs a multiple of linear_num_key_heads={key_heads}, got {heads}")
    key_dim, value_dim = _size(config, "linear_key_head_dim"), _size(config, "linear_value_head_dim")
    spec = StateSpec(
        kind=GATED_DELTA,
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_channels=2 * key_heads * key_dim + heads * value_dim,
        conv_width=_size(config, "linear_conv_kernel_dim", least=2),
        state_dtype=state_dtype(config),
        scale=key_dim**-0.5,
        qk_norm=True,
        beta_scale=beta_scale,
    )
    return StateConfig(spec, norm_size=value_dim)


def parts_of(kinds: Sequence[object], known: Mapping[str, LayerConfig], key: str = "layer_types") -> list[LayerConfig]:
    """What each layer is made of.

    :raises BeyondDecoderError: a kind of layer that the decoder does not compute, with the first layer of it.
    """
    for index, kind in enumerate(kinds):
        if kind not in known:
            raise BeyondDecoderError(f"{key}: needs {' or '.join(known)}, got {shown(kind)} in layer {index}")
    return [known[str(kind)] for kind in kinds]


def state_dtype(config: Any) -> torch.dtype:
    """The element type of recurrent states: float32 unless the configuration names another; its `auto` is float32 too."""
    for key in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        named = getattr(config, key, None)
        if named in (None, "auto"):
            continue
        name = str(named).removeprefix("torch.")
        if name not in DTYPES:
            raise ModelError(f"{key}: needs auto or {' or '.join(DTYPES)}, got {shown(named)}")
        return DTYPES[name]
    return torch.float32


def _size(config: Any, key: str, least: int = 1) -> int:
    value = getattr(config, key, None)
    if type(value) is not int or value < least:
        raise ModelError(f"{key}: needs a whole number of at least {least}, got {value!r}")
    return value
