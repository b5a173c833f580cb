"""The backends that serve each kind of layer of another program's model."""

from __future__ import annotations

import threading
from functools import cache
from typing import NamedTuple

import torch

from headway.core.contract.layout import NHD
from headway.core.contract.spec import AttentionSpec
from headway.core.select.backend_request import BackendRequest
from headway.core.select.layer_specs import LayerSpecs
from headway.core.select.selector import Selector
from headway.registry import Registry
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.isolated.trial import create_registry
from headway.tuning.measure.self_test import check_named

GPU_BLOCK = 16
"""Slots of a block on a GPU, unless a backend needs more; most backends read this size."""


@cache
def registry() -> Registry:
    """The registry of Headway's backends and those of its plugins."""
    return create_registry()


class LayerKind(NamedTuple):
    """A kind of layer, described by transformers, and the backends that were requested."""

    request: BackendRequest
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float | None
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None
    softcap: float | None
    sinks: tuple[float, ...] | None


class _Served(threading.local):
    """Selectors of one thread: a backend's instances keep buffers, and arguments of a launch, for one thread at a time."""

    def __init__(self) -> None:
        self.kinds: dict[LayerKind, tuple[AttentionSpec, Selector]] = {}
        self.selectors: dict[tuple[AttentionSpec, BackendRequest], Selector] = {}


_SERVED = _Served()


def serving(kind: LayerKind) -> tuple[AttentionSpec, Selector]:
    """The spec and the selector of a kind of layer. `auto` obeys the crossover table that was kept for it, and measures nothing.

    :raises HeadwayError: the request cannot be served, with the reasons.
    """
    known = _SERVED.kinds.get(kind)
    if known is None:
        own = kind._asdict()
        request, scale = own.pop("request"), own.pop("scale")
        spec = AttentionSpec(**own, scale=kind.head_dim**-0.5 if scale is None else scale)
        known = _SERVED.kinds[kind] = spec, _selector(spec, request)
    return known


def _selector(spec: AttentionSpec, request: BackendRequest) -> Selector:
    known = _SERVED.selectors.get((spec, request))
    if known is None:
        multiples = [registry().backend(name).capabilities.block_multiple for name in request.names]
        layers = LayerSpecs([spec])
        check_named(registry(), request.names, layers.cached)
        costs = costs_for(layers, registry(), request, TableRequest(budget=0.0))
        block_size = max(1 if spec.device.type == "cpu" else GPU_BLOCK, *multiples, 1)
        known = Selector(registry(), layers, request, kv_layout=NHD.name, block_size=block_size, costs=costs)
        _SERVED.selectors[spec, request] = known
    return known
