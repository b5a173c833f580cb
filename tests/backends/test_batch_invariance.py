"""What declares batch invariance keeps it bit for bit; what does not is refused where it is asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from backend_cases import LAYOUTS, SPECS, spec
from headway.backends.sdpa import SDPA
from headway.core.contract.layout import HND, NHD, VLLM_5D, CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.registry import Registry, create_registry
from headway.testing.kit.checks.answers import dependent, invariance_case

NAMES = list(create_registry(load_entry_points=False).backends)


def check(registry: Registry, name: str, layer: AttentionSpec, layout: CacheLayout, block_size: int) -> None:
    asked = dataclasses.replace(layer, batch_invariant=True)
    for phase in Phase:
        support = registry.supports(name, asked, layout, block_size, phase)
        if not support and name not in registry.able(layer.device):
            pytest.skip(str(support))
        claims = registry.backend(name).capabilities.batch_invariant
        assert ("batch_invariant" in {reason.what for reason in support.reasons}) != claims, str(support)
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
