"""Every available backend, and the readable reference, against float64: same answers on every layout, phase and feature."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from grid import CASES, DTYPES, LAYOUTS, SPECS, VERIFY, spec
from headway.backends.layouts import write_rows
from headway.backends.online_softmax import paged_attention
from headway.bench.cases import Case, make_case, parse_case
from headway.bench.reference import reference, relative_error, run_backend
from headway.core.backend import AttentionBackend
from headway.core.layout import NHD, CacheGeometry, CacheLayout
from headway.core.metadata import Phase
from headway.core.spec import AttentionSpec
from headway.registry import Registry

BACKENDS = ("sdpa", "sdpa.math")


def case_of(name: str, layer: AttentionSpec, layout: CacheLayout, block_size: int = 8, **options: object) -> Case:
    verify = VERIFY.get(name, 1)
    lens = parse_case(CASES[name], verify)
    return make_case(lens, layer, layout, block_size, write_rows, decode_query_len=verify, poison=math.nan, **options)


def backend_of(registry: Registry, name: str, case: Case) -> AttentionBackend:
    phases = [view.phase for view in (case.metadata.prefill, case.metadata.decode) if view]
    for phase in phases:
        support = registry.supports(name, case.spec, case.cache.layout, case.cache.block_size, phase)
        assert support, str(support)
    return registry.backend(name)(case.spec, case.cache.layout, case.cache.block_size)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("spec_name", SPECS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_matches_float64(registry: Registry, name: str, case_name: str, spec_name: str, layout: CacheLayout) -> None:
    case = case_of(case_name, SPECS[spec_name], layout)
    out = run_backend(backend_of(registry, name, case), case)
    assert relative_error(out, reference(case), case) < 1e-6


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("spec_name", SPECS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_online_softmax_walk_matches_float64(case_name: str, spec_name: str, layout: CacheLayout) -> None:
    case = case_of(case_name, SPECS[spec_name], layout)
    out = paged_attention(case.q, case.cache, case.metadata, case.spec)
    assert relative_error(out, reference(case), case) < 1e-6


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec_name", ["gqa 2", "alibi", "softcap", "window"])
@pytest.mark.parametrize("case_name", ["mixed", "extend"])
def test_every_dtype_stays_in_its_tolerance(
    registry: Registry, name: str, dtype: torch.dtype, spec_name: str, case_name: str
) -> None:
    layer = dataclasses.replace(SPECS[spec_name], dtype=dtype)
    case = case_of(case_name, layer, NHD)
    backend = backend_of(registry, name, case)
    assert relative_error(run_backend(backend, case), reference(case), case) < backend.tolerance[dtype]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block_size", [8, 16, 256])
def test_block_sizes(registry: Registry, name: str, block_size: int) -> None:
    case = case_of("mixed", spec(), NHD, block_size)
    assert relative_error(run_backend(backend_of(registry, name, case), case), reference(case), case) < 1e-6


@pytest.mark.parametrize("name", BACKENDS)
def test_padding_rows_are_skipped_and_disturb_nobody(registry: Registry, name: str) -> None:
    case = case_of("decode ragged", spec(), NHD, padding_rows=3)
    out = run_backend(backend_of(registry, name, case), case)
    assert relative_error(out, reference(case), case) < 1e-6


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.5},
        {"sliding_window": 3},
        {"softcap": 0.7},
        {"alibi_slopes": (0.9, 0.5, 0.3, 0.1)},
        {"sinks": (1.0, 2.0, 0.5, 3.0)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_accepted_option_changes_the_output(registry: Registry, name: str, change: dict[str, object]) -> None:
    plain, changed = (case_of("mixed", layer, NHD) for layer in (spec(), spec(**change)))
    first, second = (run_backend(backend_of(registry, name, case), case) for case in (plain, changed))
    assert relative_error(second, first.double(), changed) > 1e-3


def test_two_backends_alternate_on_one_cache(registry: Registry) -> None:
    case = case_of("mixed", spec(), NHD)
    outs = [run_backend(backend_of(registry, name, case), case) for name in (*BACKENDS, *BACKENDS)]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_non_contiguous_queries(registry: Registry, name: str) -> None:
    case = case_of("mixed", spec(), NHD)
    wide = torch.cat([case.q, case.k, case.v], dim=1)  # as a merged QKV projection leaves them
    q, k, v = wide.split([case.q.shape[1], case.k.shape[1], case.v.shape[1]], dim=1)
    sliced = dataclasses.replace(case, q=q, k=k, v=v)
    assert relative_error(run_backend(backend_of(registry, name, sliced), sliced), reference(case), case) < 1e-6


def test_a_wrong_answer_would_be_seen(registry: Registry) -> None:
    """The comparison itself: one query shifted by one key is far beyond every tolerance used above."""
    case = case_of("decode", spec(), NHD)
    other = case_of("decode", spec(), NHD, seed=1)
    assert relative_error(reference(other), reference(case), case) > 0.1
    missed = run_backend(backend_of(registry, "sdpa", case), case)
    missed[0] = math.nan
    assert not relative_error(missed, reference(case), case) < 1e9


def test_a_cache_takes_a_step_of_padding_only() -> None:
    layer = spec()
    cache = NHD.allocate(CacheGeometry(1, 16, layer.num_kv_heads, layer.head_dim, torch.float32, layer.device))
    rows = torch.ones(2, layer.num_kv_heads, layer.head_dim)
    write_rows(rows, rows, cache, torch.tensor([-1, -1]))
    assert not cache.key.any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_fp8_rows_come_back_as_stored(layout: CacheLayout) -> None:
    geometry = CacheGeometry(2, 16, 1, 32, torch.float8_e4m3fn, torch.device("cpu"))
    cache = layout.allocate(geometry, k_scale=0.5, v_scale=2.0)
    rows = torch.tensor([3.0, 1e4]).repeat(16).view(1, 1, 32)
    write_rows(rows, rows, cache, torch.tensor([17]))
    k, v = cache.gather(torch.tensor([17]))
    assert k.dtype == torch.float8_e4m3fn
    assert k.float().flatten()[:2].tolist() == [6.0, 448.0]
    assert v.float().flatten()[:2].tolist() == [1.5, 448.0]


def test_sdpa_refuses_an_fp8_cache(registry: Registry) -> None:
    support = registry.supports("sdpa", spec(kv_dtype=torch.float8_e4m3fn, k_scale=0.5), NHD, 16, Phase.DECODE)
    assert str(support) == "no: kv_cache_dtype: needs the layer's dtype, got fp8_e4m3"


def test_refusals_carry_what_need_got(registry: Registry) -> None:
    support = registry.supports("sdpa", spec(dtype=torch.float64), NHD, 8, Phase.DECODE)
    assert not support
    (reason,) = support.reasons
    assert (reason.what, reason.got) == ("dtype", "torch.float64")
    assert "float32" in reason.need
