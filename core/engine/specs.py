"""What the engine's options make of a model's attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headway.core.contract.spec import KV_DTYPES, AttentionSpec


def cache_specs(
    specs: Sequence[AttentionSpec], kv_cache_dtype: str, kv_scales: Sequence[tuple[float, float]] | None = None
) -> list[AttentionSpec]:
    """The layers with the cache's element type that was asked for.

    kv_cache_dtype: auto, which leaves what the model asks for, or a name in KV_DTYPES. kv_scales: k_scale and v_scale of each
    layer's cache of such a type, as the checkpoint has them; None: 1, or what a layer brings that has such a type by itself.
    """
    if kv_cache_dtype == "auto":
        return list(specs)
    stored = [replace(spec, kv_dtype=KV_DTYPES[kv_cache_dtype]) for spec in specs]
    if kv_scales is None:
        return stored
    return [replace(spec, k_scale=k, v_scale=v) for spec, (k, v) in zip(stored, kv_scales, strict=True)]
