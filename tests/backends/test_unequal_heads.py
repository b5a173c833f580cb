"""Keys and values of unlike lengths, values inside keys, foreign memory, fp8 and the log-sum-exp, through the torch backends."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backend_cases import CASES, spec
from headway.backends.sdpa import SDPA, SDPAMath
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import HND, LATENT, NHD, VLLM_5D, CacheLayout, write_rows
from headway.core.contract.metadata import Phase
from headway.core.oracle.cases import make_case, parse_case
from latent_layers import IN_KEY, UNEQUAL, case_of, dense_errors, errors_of, strided

BACKENDS = pytest.mark.parametrize("backend", [SDPA, SDPAMath], ids=lambda backend: backend.name)


@BACKENDS
@pytest.mark.parametrize("case_name", ["prefill", "mixed", "verify"])
@pytest.mark.parametrize("layout", [NHD, HND, VLLM_5D], ids=lambda layout: layout.name)
@pytest.mark.parametrize("layer", UNEQUAL)
def test_unequal_heads(backend: type[AttentionBackend], layer: str, layout: CacheLayout, case_name: str) -> None:
    error, lse = errors_of(backend, case_of(case_name, UNEQUAL[layer], layout))
    assert error < 2e-6
    assert lse < 2e-5


@BACKENDS
@pytest.mark.parametrize("case_name", ["prefill", "mixed", "verify"])
@pytest.mark.parametrize("layer", IN_KEY)
def test_values_inside_keys(backend: type[AttentionBackend], layer: str, case_name: str) -> None:
    error, lse = errors_of(backend, case_of(case_name, IN_KEY[layer], LATENT))
    assert error < 2e-6
    assert lse < 2e-5


@BACKENDS
def test_a_layer_without_a_cache(backend: type[AttentionBackend]) -> None:
    error, lse = dense_errors(backend, NHD)
    assert error < 2e-6
    assert lse < 2e-5


@BACKENDS
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("features", [{}, {"softcap": 1.5}, {"sinks": (0.25, -1.0, 2.0, 0.0)}], ids=str)
def test_queries_that_see_later_keys(backend: type[AttentionBackend], features: dict[str, object], window: int | None) -> None:
    error, lse = dense_errors(backend, NHD, causal=False, sliding_window=window, **features)
    assert error < 2e-6
    assert lse < 2e-5


@BACKENDS
@pytest.mark.parametrize("case_name", CASES)
def test_a_cache_in_foreign_memory(backend: type[AttentionBackend], case_name: str) -> None:
    error, lse = errors_of(backend, strided(case_of(case_name, spec(v_head_dim=48), NHD)))
    assert error < 2e-6
    assert lse < 2e-5


@BACKENDS
@pytest.mark.parametrize("layout", [NHD, VLLM_5D], ids=lambda layout: layout.name)
@pytest.mark.parametrize("case_name", ["prefill", "mixed"])
def test_an_fp8_cache_is_read_with_its_scales(backend: type[AttentionBackend], layout: CacheLayout, case_name: str) -> None:
    layer = spec(kv_dtype=torch.float8_e4m3fn, k_scale=0.02, v_scale=0.05)
    case = make_case(parse_case(CASES[case_name]), layer, layout, 16, write_rows, poison=400.0)
    error, lse = errors_of(backend, case)
    assert error < 2e-6
    assert lse < 2e-5


@BACKENDS
def test_the_wrong_layout_is_refused_with_the_right_one(backend: type[AttentionBackend]) -> None:
    support = backend.supports(IN_KEY["absorbed"], NHD, 16, Phase.DECODE)
    assert "--kv-layout latent" in str(support)


def test_a_backend_that_needs_whole_blocks_refuses_foreign_memory() -> None:
    class Whole(SDPA):
        capabilities = dataclasses.replace(SDPA.capabilities, contiguous_blocks=True)

    cache = strided(case_of("decode", spec(), NHD)).cache
    assert SDPA.accepts(cache)
    assert "one piece of memory" in str(Whole.accepts(cache))
