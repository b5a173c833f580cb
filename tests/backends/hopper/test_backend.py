"""What `hopper` claims and refuses, and on a GPU what it answers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headway.backends.hopper import backend as module
from headway.backends.hopper.backend import HopperAttention
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import HND, NHD, VLLM_5D, CacheGeometry, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.oracle import attend

SPEC = AttentionSpec(32, 8, 128, 0.1, torch.bfloat16, torch.device("cuda"))


def _reasons(spec: AttentionSpec = SPEC, layout: CacheLayout = NHD, block_size: int = 16, phase: Phase = Phase.EXTEND) -> str:
    return str(HopperAttention.supports(spec, layout, block_size, phase))


def test_another_generation_is_refused_in_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "capability", lambda device: (10, 0))
    support = HopperAttention.supports(SPEC, NHD, 16, Phase.PREFILL)
    assert len(support.reasons) == 1
    assert "9.0" in str(support)
    assert "10.0" in str(support)
    assert "triton" in str(support)


def test_what_it_does_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    assert HopperAttention.supports(SPEC, NHD, 16, Phase.EXTEND)
    assert HopperAttention.supports(SPEC, VLLM_5D, 8, Phase.PREFILL), "a prompt reads no cache"
    change = dataclasses.replace
    assert "phase" in _reasons(phase=Phase.DECODE)
    assert "kv_layout" in _reasons(layout=VLLM_5D)
    assert "block_size" in _reasons(block_size=8)
    assert "dtype" in _reasons(change(SPEC, dtype=torch.float32))
    assert "kv_cache_dtype" in _reasons(change(SPEC, kv_dtype=torch.float8_e4m3fn))
    assert "head_dim" in _reasons(change(SPEC, head_dim=72, v_head_dim=72))
    assert "scale" in _reasons(change(SPEC, scale=-1.0))
    assert "alibi_slopes" in _reasons(change(SPEC, alibi_slopes=(0.5,) * 32))
    assert "kv head" in _reasons(change(SPEC, num_heads=71, num_kv_heads=1))


def test_a_cache_whose_rows_are_scattered_is_refused() -> None:
    geometry = CacheGeometry.of(dataclasses.replace(SPEC, device=torch.device("cpu")), 4, 16)
    whole = torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
    wide = torch.zeros(4, 16, 8, 132, dtype=torch.bfloat16)[..., :128]
    assert HopperAttention.accepts(LayerCache({"key": whole, "value": whole}, NHD, geometry))
    support = HopperAttention.accepts(LayerCache({"key": whole, "value": wide}, NHD, geometry))
    assert "value" in str(support)
    assert "16 bytes" in str(support)


def test_options_are_numbers() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        module.count_of("hopper", {"num_splits": "none"}, "num_splits")


STEPS = [
    ([1000, 3, 260], [0, 0, 0]),
    ([200, 64, 5], [3000, 0, 700]),
    ([40, 17], [9000, 100]),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "features", [{}, {"sliding_window": 130}, {"softcap": 20.0}, {"sinks": tuple(i / 4 for i in range(14))}], ids=str
)
@pytest.mark.parametrize("layout", [NHD, HND], ids=lambda layout: layout.name)
@pytest.mark.parametrize("num_splits", [None, "5"])
def test_answers_match_the_oracle(features: dict[str, object], layout: CacheLayout, num_splits: str | None) -> None:
    """One instance, several steps: counters that a step leaves behind would spoil the next."""
    spec = AttentionSpec(14, 2, 128, 0.09, torch.bfloat16, torch.device("cuda"), **features)  # type: ignore[arg-type]
    if not (support := HopperAttention.available()):
        pytest.skip(str(support))
    backend = HopperAttention(spec, layout, 32, {"num_splits": num_splits} if num_splits else None)
    for query_lens, contexts in STEPS * 2:
        lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
        tables, used = [], 0
        for length in lens:
            tables.append(list(range(used, used - (-length // 32))))
            used = tables[-1][-1] + 1
        geometry = CacheGeometry.of(spec, used, 32)
        shape = layout.shape("key", geometry)
        cache = LayerCache(
            {name: torch.full(shape, torch.nan, dtype=spec.dtype, device="cuda") for name in ("key", "value")}, layout, geometry
        )
        keys, values = ([torch.randn(n, 2, 128, dtype=spec.dtype, device="cuda") for n in lens] for _ in range(2))
        for table, k, v in zip(tables, keys, values, strict=True):
            for name, rows in (("key", k), ("value", v)):
                logical = cache.logical_key if name == "key" else cache.logical_value
                index = torch.arange(len(rows), device="cuda")
                logical[torch.tensor(table, device="cuda")[index // 32], index % 32] = rows.unsqueeze(-1)
        new_k, new_v = (torch.cat([x[-n:] for x, n in zip(each, query_lens, strict=True)]) for each in (keys, values))
        q = torch.randn(sum(query_lens), 14, 128, dtype=spec.dtype, device="cuda")
        out = torch.full_like(q, torch.nan)
        metadata = AttentionMetadata.build(query_lens, contexts, tables, 32, "cuda")
        backend.prefill(q, new_k, new_v, cache, backend.plan(metadata), out)
        for queries, answer, k, v in zip(q.split(query_lens), out.split(query_lens), keys, values, strict=True):
            expected, _ = attend(spec, queries, k.double(), v.double(), len(k) - len(queries))
            error = (answer.double() - expected).norm() / expected.norm()
            assert error < HopperAttention.tolerance[spec.dtype]
