"""The kit's quick cells on a CPU, what they rest on, and backends that keep a row's bits in every batch."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from backend_cases import LAYOUTS, SPECS, case_of, spec
from headway.backends.sdpa import SDPA
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import HND, NHD, VLLM_5D, CacheGeometry, CacheLayout, write_rows
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import reference, relative_error, run_backend
from headway.core.oracle.cells import PHASES, CheckCell
from headway.registry import Registry, create_registry
from headway.testing.kit.checks.answers import dependent, invariance_case
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


@pytest.mark.parametrize("spec_name", ["mha", "head_dim 24", "window softcap alibi"])
@pytest.mark.parametrize("case_name", ["one token", "mixed"])
@pytest.mark.parametrize("backend_name", ["sdpa", "sdpa.math"])
def test_odd_shapes_that_the_grid_has_not(registry: Registry, backend_name: str, case_name: str, spec_name: str) -> None:
    case = case_of(case_name, SPECS[spec_name], block_size=8)
    backend: AttentionBackend = registry.backend(backend_name)(case.spec, NHD, 8)
    assert relative_error(run_backend(backend, case), reference(case), case) < 1e-6


def test_a_wrong_answer_would_be_seen(registry: Registry) -> None:
    """The comparison itself: one query shifted by one key is far beyond every tolerance used above."""
    case = case_of("decode", spec(), block_size=8)
    other = case_of("decode", spec(), block_size=8, seed=1)
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
    support = registry.supports("flex", spec(sinks=(0.0,) * spec().num_heads), NHD, 16, Phase.DECODE)
    assert "sinks" in [reason.got for reason in support.reasons]


NAMES = list(create_registry(load_entry_points=False).backends)


def check(registry: Registry, name: str, layer: AttentionSpec, layout: CacheLayout, block_size: int) -> None:
    asked = dataclasses.replace(layer, invariance=Invariance.BATCH)
    for phase in Phase:
        support = registry.supports(name, asked, layout, block_size, phase)
        if not support and name not in registry.able(layer.device):
            pytest.skip(str(support))
        claims = bool(registry.backend(name).capabilities.invariance_level)
        assert ("invariance" in {reason.what for reason in support.reasons}) != claims, str(support)
        if not support:
            return
    writer = registry.layout(layout.name).load_writer(layer.device)
    case = invariance_case(layer, layout, block_size, writer)
    assert not dependent(registry.backend(name)(case.spec, layout, block_size), case)


@pytest.mark.sampled(5, 1)
@pytest.mark.parametrize("spec_name", ["gqa 2", "mha", "gqa 8, head_dim 80", "head_dim 24", "window softcap alibi", "alibi"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu(registry: Registry, name: str, layout: CacheLayout, spec_name: str) -> None:
    check(registry, name, SPECS[spec_name], layout, 16)


GPU_CELLS = {
    "nhd 256, 16/8, bf16": (NHD, 256, 16, 8, torch.bfloat16),
    "nhd 16, 32/8, bf16": (NHD, 16, 32, 8, torch.bfloat16),
    "vllm_5d 16, 8/1, fp16": (VLLM_5D, 16, 8, 1, torch.float16),
    "hnd 64, 16/8, fp32": (HND, 64, 16, 8, torch.float32),
}


@pytest.mark.gpu
@pytest.mark.parametrize("cell", GPU_CELLS)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(registry: Registry, name: str, cell: str) -> None:
    layout, block_size, num_heads, num_kv_heads, dtype = GPU_CELLS[cell]
    layer = spec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128, dtype=dtype, device=torch.device("cuda"))
    check(registry, name, layer, layout, block_size)


class Dependent(SDPA):
    """Off by a rounding where it is not alone."""

    name = "dependent"

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, group: Any, out: Tensor, lse: Tensor | None) -> None:
        super()._attend(q, keys, values, group, out, lse)
        if len(q) > group.count * group.query_len:
            out[group.tokens] *= 1 + 2**-23


def test_a_dependence_of_one_bit_would_be_seen(registry: Registry) -> None:
    case = invariance_case(spec(), NHD, 16, registry.layout("nhd").load_writer(spec().device))
    assert len(dependent(Dependent(case.spec, NHD, 16), case)) > 20
