"""The specs of a decoder's layers, of attention and of those with a state, from its configuration."""

from __future__ import annotations

from dataclasses import replace

import torch

from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateSpec
from headway.kernels.step.config import LatentConfig
from headway.models.config import DecoderConfig, LayerConfig, StateConfig


def cached_spec(
    config: DecoderConfig,
    layer: LayerConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sinks: tuple[float, ...] | None = None,
    batch_invariant: bool = False,
) -> AttentionSpec:
    """The spec of a layer's cache. sinks: one logit a query head, out of the checkpoint, where `config.sinks`."""
    if (latent := config.latent) is not None:
        return AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=1,
            head_dim=latent.kv_dim,
            v_head_dim=latent.kv_lora_rank,
            value_in_key=True,
            scale=config.scale,
            dtype=dtype,
            device=device,
        )
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.scale,
        dtype=dtype,
        device=device,
        sliding_window=layer.sliding_window,
        softcap=config.softcap,
        sinks=sinks,
        batch_invariant=batch_invariant,
    )


def expanded_spec(config: DecoderConfig, latent: LatentConfig, cached: AttentionSpec) -> AttentionSpec:
    """The spec to which a latent layer expands its prompts. cached: the spec of its cache."""
    return replace(
        cached,
        num_kv_heads=config.num_heads,
        head_dim=latent.q_dim,
        v_head_dim=latent.v_head_dim,
        value_in_key=False,
        dense=True,
    )


def state_spec(state: StateConfig, dtype: torch.dtype, device: torch.device) -> StateSpec:
    """The spec of a layer with a state, as a model is loaded with it."""
    return replace(state.spec, dtype=dtype, device=device)
