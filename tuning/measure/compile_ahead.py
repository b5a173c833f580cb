"""Kernels of the points that are about to be measured, compiled by many threads at once instead of one by one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

import torch

from headway.core.contract.backend import AttentionBackend, make_backend
from headway.core.contract.compiled import CompileAhead
from headway.core.contract.layout import CacheGeometry
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.oracle.cases import Case
from headway.tuning.measure import self_test as selftest
from headway.tuning.measure.contender import run_layer
from headway.tuning.measure.graph_replay import captures, worst_case
from headway.tuning.measure.measure_point import Bench, Pair
from headway.tuning.measure.points import Point
from headway.tuning.measure.workloads import VERIFY_QUERY_LEN
from headway.tuning.table.convert import CORE_PHASE
from headway.tuning.table.schema import PhaseName


def compile_points(
    points: Iterable[Point],
    bench: Bench,
    names: Sequence[str],
    pairs: Sequence[Pair],
    compile_ahead: CompileAhead,
    given_up: Mapping[PhaseName, Collection[str]],
) -> None:
    """Launch every backend's self-test and every point, inside `compile_ahead`, over a cache of one block that all
    sequences share.

    given_up: backends that are not measured in a phase.

    What raises is left to the measurement, which says so. A backend whose launches run all the same has nothing to be
    compiled, and is left after its first.
    """
    listed = list(points)
    with compile_ahead():
        selftest.launch(bench.registry, names, bench.spec, pairs)
        for pair in pairs:
            for name in names:
                _compile([point for point in listed if name not in given_up.get(point.phase, ())], bench, name, pair)


def _compile(points: Sequence[Point], bench: Bench, name: str, pair: Pair) -> None:
    made: AttentionBackend | None = None
    for point in points:
        if not bench.registry.supports(name, bench.spec, *pair, CORE_PHASE[point.phase]):
            continue
        with suppress(Exception):
            made = made if made is not None else make_backend(bench.registry.backend(name), bench.spec, *pair)
            if not _launches_nothing(made, point, bench, pair):
                return


def _launches_nothing(backend: AttentionBackend, point: Point, bench: Bench, pair: Pair) -> bool:
    """Plan and launch a point; whether its output is as it was before."""
    case = _case(point, bench, pair)
    out = case.q.new_full((*case.q.shape[:2], bench.spec.v_head_dim), math.nan)
    if captures(backend, case):
        plan = backend.plan_for_capture(worst_case(case.metadata, max(bench.graph_len, point.kv_len)))
    else:
        plan = backend.plan(case.metadata)
    writer = None if point.phase == "prefill" else bench.registry.layout(pair[0].name).writer(bench.spec.device)
    run_layer(backend, case, plan, out, writer)
    return bool(out[:1].isnan().all())


def _case(point: Point, bench: Bench, pair: Pair) -> Case:
    """The point's step, of numbers that mean nothing."""
    spec, (layout, block_size) = bench.spec, pair
    lens = point.work(spec).lens
    query_lens = [query_len for query_len, _ in lens]
    tables = [[0] * -(-kv_len // block_size) for _, kv_len in lens]
    context_lens = [kv_len - query_len for query_len, kv_len in lens]
    longest = VERIFY_QUERY_LEN if CORE_PHASE[point.phase] is Phase.DECODE else 1
    metadata = AttentionMetadata.build(query_lens, context_lens, tables, block_size, spec.device, longest)
    cache = layout.allocate(CacheGeometry.of(spec, 1, block_size), spec.k_scale, spec.v_scale)
    q = torch.zeros((metadata.num_tokens, spec.num_heads, spec.head_dim), dtype=spec.dtype, device=spec.device)
    k = q.new_zeros((metadata.num_tokens, spec.num_kv_heads, spec.head_dim))
    v = k[..., : spec.v_head_dim] if spec.value_in_key else q.new_zeros((*k.shape[:2], spec.v_head_dim))
    return Case(spec, metadata, cache, q, k, v)
