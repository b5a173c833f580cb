"""From vLLM's attention layers to Headway's specs, and to the selector that serves them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.contract import NHD, AttentionSpec, ConfigError, UnsupportedError
from headway.core.select.request import BackendRequest, LayerSpecs
from headway.core.select.selector import Selector
from headway.registry import Registry
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.isolated.trial import create_registry
from headway.tuning.measure.self_test import check_named

log = logging.getLogger("headway")

TABLE = "HEADWAY_CROSSOVER_TABLE"
"""The crossover table that `auto` obeys; without it the one that is kept for this machine."""


@cache
def registry() -> Registry:
    """Headway's backends and those of its plugins; one for the process, as vLLM's own registry is."""
    return create_registry()


@dataclass(frozen=True)
class LayerOptions:
    """The arguments with which vLLM constructs an attention layer."""

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    alibi_slopes: tuple[float, ...] | None
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None
    """[num_heads], filled when the weights are loaded."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> LayerOptions:
        """Read the arguments of vLLM's AttentionImpl, by name.

        :raises ConfigError: a layer that Headway does not compute.
        """
        given = dict(given)
        attn_type = given.pop("attn_type", "decoder")
        if getattr(attn_type, "value", attn_type) != "decoder":
            raise ConfigError("attention layer", "decoder self-attention", attn_type, "name one of vLLM's own backends")
        kv_cache_dtype = given.pop("kv_cache_dtype", "auto")
        if kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
            raise ConfigError("kv_cache_dtype", "auto, float16 or bfloat16", kv_cache_dtype, "name one of vLLM's own backends")
        given.pop("kv_sharing_target_layer_name", None)
        num_heads, slopes, window = given.pop("num_heads"), given.pop("alibi_slopes", None), given.pop("sliding_window", None)
        options = cls(
            num_heads=num_heads,
            head_size=given.pop("head_size"),
            scale=float(given.pop("scale")),
            num_kv_heads=given.pop("num_kv_heads", None) or num_heads,
            alibi_slopes=None if slopes is None else tuple(map(float, slopes)),
            sliding_window=window if window is not None and window > 0 else None,
            softcap=given.pop("logits_soft_cap", None) or None,
            sinks=given.pop("sinks", None),
        )
        unknown = [name for name, value in given.items() if value not in (None, False, -1)]
        if unknown:
            raise ConfigError(
                "attention layer", "options that Headway knows", ", ".join(unknown), "name one of vLLM's own backends"
            )
        return options

    def spec(self, dtype: torch.dtype, device: torch.device) -> AttentionSpec:
        """The layer's spec; ask when its weights are there."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            scale=self.scale,
            dtype=dtype,
            device=device,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            sinks=None if self.sinks is None else tuple(self.sinks.float().tolist()),
        )


def make_selector(specs: Sequence[AttentionSpec], request: BackendRequest, block_size: int) -> Selector:
    """Make the selector of these layers; `auto` measures first where there is no table, as in Headway.

    :raises HeadwayError: a request that names an unknown backend, or that cannot be served, with the reasons.
    """
    known = registry()
    layers = LayerSpecs(specs)
    check_named(known, request.names, specs)
    path = os.environ.get(TABLE, "").strip()
    costs = costs_for(layers, known, request, TableRequest([Path(path)] if path else []))
    selector = Selector(known, layers, request, kv_layout=NHD.name, block_size=block_size, costs=costs)
    log.info("headway-vllm: %s", selector.selection)
    return selector


def check_exact_lengths(selector: Selector) -> None:
    """Refuse backends that plan a decode by lengths which vLLM does not know while drafts are verified.

    :raises UnsupportedError: one may be called.
    """
    for backends in selector.instances.values():
        for backend in backends.values():
            if backend.capabilities.exact_host_lengths:
                reason = backend.captures(1).reasons[:1]
                raise UnsupportedError(f"attention backend {backend.name} beside speculative decoding in vLLM", reason)
