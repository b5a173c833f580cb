"""The kit's quick cells on a CPU, and what they rest on: the readable reference, the comparison itself, the writers' edges."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from backend_cases import CASES, LAYOUTS, SPECS, VERIFY, spec
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import NHD, CacheGeometry, CacheLayout, write_rows
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, make_case, parse_case, reference, relative_error, run_backend
from headway.core.oracle.cells import PHASES, CheckCell
from headway.registry import Registry, create_registry
from headway.testing.kit.kit import Kit
from headway.testing.kit.subject import load_subject

CPU_BACKENDS = ("native", "sdpa", "sdpa.math")


def by_kit(*values: object) -> object:
    """Values of a test's parameters, a backend's name first; its cells are listed once for all such tests."""
    return pytest.param(*values, marks=pytest.mark.xdist_group(f"kit of {values[0]}"))


@cache
def kit(name: str) -> Kit:
    return Kit(load_subject(name, torch.device("cpu"), create_registry(load_entry_points=False)))


@cache
def quick_cells(name: str) -> list[CheckCell]:
    return kit(name).cells(quick=True)


@pytest.mark.sampled(27, 14)
@pytest.mark.parametrize("check", ["claims", "refuse", "options", "tolerance", "lse", "turns", "steps", "repeat", "engine"])
@pytest.mark.parametrize("name", [by_kit(name) for name in CPU_BACKENDS])
def test_the_quick_cells_of_a_check_pass(name: str, check: str) -> None:
    results = [kit(name).run(cell) for cell in quick_cells(name) if cell.check == check]
    assert results or (name, check) == ("native", "lse")  # which it does not declare
    assert not [result for result in results if result.status == "failed"]


@pytest.mark.sampled(6, 4)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("name", "step"),
    [
        by_kit("sdpa", 4),
        pytest.param("sdpa.math", 3, marks=pytest.mark.slow),
        *(pytest.param(name, 1, marks=[pytest.mark.slow, pytest.mark.soak]) for name in CPU_BACKENDS),
    ],
)
def test_the_quick_answers_of_a_phase_are_right(name: str, step: int, phase: str) -> None:
    """step: one cell of so many is run."""
    cells = [cell for cell in quick_cells(name) if (cell.check, cell.phase) == ("answer", phase)][::step]
    assert len(cells) > 1 or (name == "native" and phase not in ("decode", "verify"))  # which decodes alone
    assert not [result for result in map(kit(name).run, cells) if result.status == "failed"]


def case_of(name: str, layer: AttentionSpec, layout: CacheLayout, block_size: int = 8, **options: object) -> Case:
    verify = VERIFY.get(name, 1)
    lens = parse_case(CASES[name], verify)
    return make_case(lens, layer, layout, block_size, write_rows, decode_query_len=verify, poison=math.nan, **options)


@pytest.mark.parametrize("spec_name", ["mha", "head_dim 24", "window softcap alibi"])
@pytest.mark.parametrize("case_name", ["one token", "mixed"])
@pytest.mark.parametrize("backend_name", ["sdpa", "sdpa.math"])
def test_odd_shapes_that_the_grid_has_not(registry: Registry, backend_name: str, case_name: str, spec_name: str) -> None:
    case = case_of(case_name, SPECS[spec_name], NHD)
    backend: AttentionBackend = registry.backend(backend_name)(case.spec, NHD, 8)
    assert relative_error(run_backend(backend, case), reference(case), case) < 1e-6


def test_a_wrong_answer_would_be_seen(registry: Registry) -> None:
    """The comparison itself: one query shifted by one key is far beyond every tolerance used above."""
    case = case_of("decode", spec(), NHD)
    other = case_of("decode", spec(), NHD, seed=1)
    assert relative_error(reference(other), reference(case), case) > 0.1
    missed = run_backend(registry.backend("sdpa")(case.spec, NHD, 8), case)
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


def test_refusals_carry_what_need_got(registry: Registry) -> None:
    support = registry.supports("sdpa", spec(dtype=torch.float64), NHD, 8, Phase.DECODE)
    assert not support
    (reason,) = support.reasons
    assert (reason.what, reason.got) == ("dtype", "torch.float64")
    assert "float32" in reason.need
