"""What the engine's options make of a model's attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headway.core.contract.spec import KV_DTYPES, AttentionSpec


def cache_specs(specs: Sequence[AttentionSpec], kv_cache_dtype: str) -> list[AttentionSpec]:
    """The layers with the cache's element type that was asked for.

    kv_cache_dtype: auto, which leaves what the model asks for, or a name in KV_DTYPES. A layer that brings a type of its own
    keeps its scales (those of the checkpoint); for any other they are 1.
    """
    if kv_cache_dtype == "auto":
        return list(specs)
    return [replace(spec, kv_dtype=KV_DTYPES[kv_cache_dtype]) for spec in specs]
