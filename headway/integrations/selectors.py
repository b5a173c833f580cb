"""Which backends serve a kind of layer in somebody else's model."""

from __future__ import annotations

import threading
from functools import cache

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


class _Selectors(threading.local):
    """Each thread has its own: a backend's instances keep buffers, and arguments of a launch, for one thread at a time."""

    def __init__(self) -> None:
        self.known: dict[tuple[AttentionSpec, str], Selector] = {}


_SELECTORS = _Selectors()


def selector_of(spec: AttentionSpec, request: str) -> Selector:
    """What serves a kind of layer. `auto` obeys the crossover table that is kept for it, and measures none itself.

    :raises HeadwayError: the request cannot be served, with the reasons.
    """
    known = _SELECTORS.known.get((spec, request))
    if known is None:
        names = [name for name in dict.fromkeys(parse_backend_request(request).values()) if name != "auto"]
        multiples = [registry().backend(name).capabilities.block_multiple for name in names]
        check_named(registry(), names, [spec])
        costs = costs_for([spec], registry(), request, TableRequest(budget=0.0))
        block_size = max(1 if spec.device.type == "cpu" else GPU_BLOCK, *multiples, 1)
        known = Selector(registry(), [spec], request, NHD.name, block_size, costs=costs)
        _SELECTORS.known[spec, request] = known
    return known
