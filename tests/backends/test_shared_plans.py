"""Layers of a kind over one plan, by backends that say `shares_plans`; Triton's under its interpreter elsewhere."""

from __future__ import annotations

import pytest
import torch

from backend_cases import CASES, spec
from headway.backends.sdpa import SDPA, SDPAMath
from headway.core.contract import layout as layouts
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.metadata import Phase
from headway.registry import create_registry
from shared_plans import errors_over_shared_plans


@pytest.mark.parametrize("backend", [SDPA, SDPAMath])
@pytest.mark.parametrize("name", CASES)
def test_sdpa(name: str, backend: type[AttentionBackend]) -> None:
    layer = spec(kv_dtype=torch.float8_e4m3fn, sinks=(0.0,) * 4)
    assert max(errors_over_shared_plans(backend, layer, name, layouts.write_rows)) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper", "flash_attn_3", "flash_attn_4"])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, backend: str) -> None:
    registry = create_registry(load_entry_points=False)
    if not (support := registry.availability(backend)):
        pytest.skip(support.brief)
    if Phase.DECODE not in registry.backend(backend).capabilities.phases and name not in ("prefill", "extend"):
        pytest.skip(f"{backend} serves no decode")
    layer = spec(num_heads=8, head_dim=128, dtype=torch.bfloat16, device=torch.device("cuda", 0), sinks=(0.0,) * 8)
    assert max(errors_over_shared_plans(registry.backend(backend), layer, name, layouts.write_rows)) < 1.2e-2
