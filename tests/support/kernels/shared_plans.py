"""Layers that differ only in sinks and cache scales: each must be right with plans that the first layer made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from backend_cases import case_of
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import NHD, CacheLayout
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import reference, relative_error


def of_a_kind(spec: AttentionSpec) -> list[AttentionSpec]:
    """Three layers with a spec's sizes and different sinks, and different scales if the cache's dtype has them."""
    draw, layers = torch.Generator().manual_seed(8), []
    for number in range(3):
        layer = replace(spec, sinks=tuple((3 * torch.rand(spec.num_heads, generator=draw)).tolist()))
        if spec.kv_dtype == torch.float8_e4m3fn:
            layer = replace(layer, k_scale=0.5 + number, v_scale=2.0 - number / 2)
        layers.append(layer)
    return layers


def errors_over_shared_plans(
    make: Callable[[AttentionSpec, CacheLayout, int], AttentionBackend], spec: AttentionSpec, name: str
) -> Sequence[float]:
    """The relative error of each of three layers, the first once more at the end. name: of CASES."""
    layers = of_a_kind(spec)
    cases = [case_of(name, each) for each in layers]
    backends = [make(each, NHD, 16) for each in layers]
    assert all(each.capabilities.shares_plans for each in backends)
    views = cases[0].metadata.prefill, cases[0].metadata.decode
    plans = [None if view is None else backends[0].plan(view) for view in views]
    errors = []
    for number in (0, 1, 2, 0):
        case, backend, n = cases[number], backends[number], cases[number].metadata.num_prefill_tokens
        assert torch.equal(case.metadata.block_table, cases[0].metadata.block_table)  # drawn from one seed
        out = case.q.new_full((*case.q.shape[:2], spec.v_head_dim), torch.nan)
        if plans[0] is not None:
            backend.prefill(case.q[:n], case.k[:n], case.v[:n], case.cache, plans[0], out[:n])
        if plans[1] is not None:
            backend.decode(case.q[n:], case.cache, plans[1], out[n:])
        errors.append(relative_error(out, reference(case), case))
    return errors
