"""Which backends serve a kind of layer in somebody else's model."""

from __future__ import annotations

import threading
from functools import cache
from typing import NamedTuple

import torch

from headway.core.contract.layout import NHD
from headway.core.contract.spec import AttentionSpec
from headway.core.select.request import parse_backend_request
from headway.core.select.selector import Selector
from headway.registry import Registry, create_registry
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.named import check_named

GPU_BLOCK = 16
"""Slots of a block on a GPU, unless a backend wants more: what most of them read."""


@cache
def registry() -> Registry:
    """Headway's backends and those of its plugins."""
    return create_registry()


class Kind(NamedTuple):
    """A layer as transformers tells of it, and what is asked for it."""

    request: str
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
    """Each thread has its own: a backend's instances keep buffers, and arguments of a launch, for one thread at a time."""

    def __init__(self) -> None:
        self.kinds: dict[Kind, tuple[AttentionSpec, Selector]] = {}
        self.selectors: dict[tuple[AttentionSpec, str], Selector] = {}


_SERVED = _Served()


def serving(kind: Kind) -> tuple[AttentionSpec, Selector]:
    """What serves a kind of layer. `auto` obeys the crossover table that is kept for it, and measures none itself.

    :raises HeadwayError: the request cannot be served, with the reasons.
    """
    known = _SERVED.kinds.get(kind)
    if known is None:
        own = kind._asdict()
        request, scale = own.pop("request"), own.pop("scale")
        spec = AttentionSpec(**own, scale=kind.head_dim**-0.5 if scale is None else scale)
        known = _SERVED.kinds[kind] = spec, _selector(spec, request)
    return known


def _selector(spec: AttentionSpec, request: str) -> Selector:
    known = _SERVED.selectors.get((spec, request))
    if known is None:
        names = [name for name in dict.fromkeys(parse_backend_request(request).values()) if name != "auto"]
        multiples = [registry().backend(name).capabilities.block_multiple for name in names]
        check_named(registry(), names, [spec])
        costs = costs_for([spec], registry(), request, TableRequest(budget=0.0))
        block_size = max(1 if spec.device.type == "cpu" else GPU_BLOCK, *multiples, 1)
        known = _SERVED.selectors[spec, request] = Selector(registry(), [spec], request, NHD.name, block_size, costs=costs)
    return known
