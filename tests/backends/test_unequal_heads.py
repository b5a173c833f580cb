"""Keys and values of unlike lengths, values inside keys, foreign memory, fp8 and the log-sum-exp, through the torch backends."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from backend_cases import CASES, case_of, spec
from headway.backends.sdpa import SDPA, SDPAMath
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import HND, LATENT, NHD, VLLM_5D, CacheGeometry, CacheLayout, LayerCache, write_rows
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import make_case, parse_case, reference, relative_error
from headway.core.oracle.oracle import attend as exact
from headway.registry import create_registry
from headway.tuning.measure.workloads import Geometry, build_case, make_spec, make_work
from latent_layers import IN_KEY, UNEQUAL, assert_small, dense_errors, errors_of, strided
from shared_plans import errors_over_shared_plans

BACKENDS = pytest.mark.parametrize("backend", [SDPA, SDPAMath], ids=lambda backend: backend.name)


@pytest.mark.sampled(4)
@BACKENDS
@pytest.mark.parametrize("case_name", ["prefill", "mixed", "verify"])
@pytest.mark.parametrize("layout", [NHD, HND, VLLM_5D], ids=lambda layout: layout.name)
@pytest.mark.parametrize("layer", UNEQUAL)
def test_unequal_heads(backend: type[AttentionBackend], layer: str, layout: CacheLayout, case_name: str) -> None:
    assert_small(errors_of(backend, case_of(case_name, UNEQUAL[layer], layout)))


@BACKENDS
@pytest.mark.parametrize("case_name", ["prefill", "mixed", "verify"])
@pytest.mark.parametrize("layer", IN_KEY)
def test_values_inside_keys(backend: type[AttentionBackend], layer: str, case_name: str) -> None:
    assert_small(errors_of(backend, case_of(case_name, IN_KEY[layer], LATENT)))


@BACKENDS
def test_a_layer_without_a_cache(backend: type[AttentionBackend]) -> None:
    assert_small(dense_errors(backend, NHD))


@BACKENDS
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("features", [{}, {"softcap": 1.5}, {"sinks": (0.25, -1.0, 2.0, 0.0)}], ids=str)
def test_queries_that_see_later_keys(backend: type[AttentionBackend], features: dict[str, object], window: int | None) -> None:
    assert_small(dense_errors(backend, NHD, causal=False, sliding_window=window, **features))


@BACKENDS
@pytest.mark.parametrize("case_name", CASES)
def test_a_cache_in_foreign_memory(backend: type[AttentionBackend], case_name: str) -> None:
    assert_small(errors_of(backend, strided(case_of(case_name, spec(v_head_dim=48), NHD))))


@BACKENDS
@pytest.mark.parametrize("layout", [NHD, VLLM_5D], ids=lambda layout: layout.name)
@pytest.mark.parametrize("case_name", ["prefill", "mixed"])
def test_an_fp8_cache_is_read_with_its_scales(backend: type[AttentionBackend], layout: CacheLayout, case_name: str) -> None:
    layer = spec(kv_dtype=torch.float8_e4m3fn, k_scale=0.02, v_scale=0.05)
    case = make_case(parse_case(CASES[case_name]), layer, layout, 16, write_rows, poison=400.0)
    assert_small(errors_of(backend, case))


@BACKENDS
def test_the_wrong_layout_is_refused_with_the_right_one(backend: type[AttentionBackend]) -> None:
    assert "--kv-layout latent" in str(backend.supports(IN_KEY["absorbed"], NHD, 16, Phase.DECODE))


def test_a_backend_that_needs_whole_blocks_refuses_foreign_memory() -> None:
    class Whole(SDPA):
        capabilities = dataclasses.replace(SDPA.capabilities, contiguous_blocks=True)

    cache = strided(case_of("decode", spec(), NHD)).cache
    assert SDPA.accepts(cache)
    assert "one piece of memory" in str(Whole.accepts(cache))


@pytest.mark.parametrize("backend", [SDPA, SDPAMath])
@pytest.mark.parametrize("name", CASES)
def test_sdpa(name: str, backend: type[AttentionBackend]) -> None:
    layer = spec(kv_dtype=torch.float8_e4m3fn, sinks=(0.0,) * 4)
    assert max(errors_over_shared_plans(backend, layer, name)) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper", "flash_attn_3", "flash_attn_4"])
@pytest.mark.parametrize("name", CASES)
def test_shared_plans_on_a_gpu(name: str, backend: str) -> None:
    registry = create_registry(load_entry_points=False)
    if not (support := registry.availability(backend)):
        pytest.skip(support.brief)
    if Phase.DECODE not in registry.backend(backend).capabilities.phases and name not in ("prefill", "extend"):
        pytest.skip(f"{backend} serves no decode")
    layer = spec(num_heads=8, head_dim=128, dtype=torch.bfloat16, device=torch.device("cuda", 0), sinks=(0.0,) * 8)
    assert max(errors_over_shared_plans(registry.backend(backend), layer, name)) < 1.2e-2


GEOMETRY = Geometry(4, 2, 32)
CPU = torch.device("cpu")


def layer(device: str, **options: str) -> SDPA:
    return SDPA(make_spec(GEOMETRY, torch.float32, None, torch.device(device)), NHD, 16, options)


def takes_cudnn(backend: SDPA) -> bool:
    with backend.allowed_kernels():
        return bool(torch.backends.cuda.cudnn_sdp_enabled())


def test_cudnn_which_plans_for_every_shape_must_be_asked_for() -> None:
    assert not takes_cudnn(layer("cuda"))
    assert takes_cudnn(layer("cuda", cudnn="1"))
    with pytest.raises(ConfigError, match=r"sdpa\.cudnn: needs 0 or 1, got '2'"):
        layer("cuda", cudnn="2")
    with pytest.raises(ConfigError, match=r"sdpa\.math"):
        SDPAMath(make_spec(GEOMETRY, torch.float32, None, CPU), NHD, 16, {"cudnn": "1"})


@pytest.mark.parametrize(("phase", "case"), [("prefill", "2q20"), ("prefill", "2q8s40_1q5s5"), ("decode", "3q1s17_2q3s30")])
def test_the_way_taken_on_a_gpu_gives_the_same_answers(phase: str, case: str) -> None:
    step = build_case(make_work(phase, case, GEOMETRY, make_spec(GEOMETRY, torch.float32, None, CPU)), NHD, 16, 0)
    backend = layer("cpu")
    backend.on_gpu = True
    out, plan = torch.full_like(step.q, torch.nan), backend.plan(step.metadata)
    if phase == "decode":
        backend.decode(step.q, step.cache, plan, out)
    else:
        backend.prefill(step.q, step.k, step.v, step.cache, plan, out)
    assert relative_error(out, reference(step), step) < 1e-5


@pytest.mark.parametrize(
    ("tables", "in_place"),
    [
        ([[3, 4, 5]], True),
        ([[1, 2, 3], [5, 6, 7]], True),
        ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], True),
        ([[3, 5, 4]], False),
        ([[5, 6, 7], [1, 2, 3]], False),
        ([[1, 2, 3], [3, 4, 5], [6, 7, 8]], False),
        ([[1, 3, 5]], False),
    ],
    ids=str,
)
def test_contiguous_rows_are_read_where_they_lie(
    tables: list[list[int]], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
    gathered: list[Tensor] = []
    gather = LayerCache.gather

    def noted(cache: LayerCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        gathered.append(slots)
        return gather(cache, slots)

    monkeypatch.setattr(LayerCache, "gather", noted)
    for layout in (NHD, HND):
        cache = layout.allocate(CacheGeometry.of(spec, 10, 4))
        for tensor in cache.tensors.values():
            tensor.normal_(generator=generator)
        kv_lens = [11] * len(tables)
        metadata = AttentionMetadata.build([1] * len(tables), [10] * len(tables), tables, 4)
        backend = SDPA(spec, layout, 4)
        q = torch.randn(len(tables), 4, 8, generator=generator)
        out = torch.empty_like(q)
        gathered.clear()
        backend.decode(q, cache, backend.plan(metadata), out)
        assert bool(gathered) == (not in_place or layout is HND)
        for row, (table, kv_len) in enumerate(zip(tables, kv_lens, strict=True)):
            slots = torch.tensor([table[at // 4] * 4 + at % 4 for at in range(kv_len)])
            k, v = (t.double() for t in gather(cache, slots))
            expected = exact(spec, q[row : row + 1], k, v, kv_len - 1)[0]
            torch.testing.assert_close(out[row : row + 1].double(), expected, rtol=1e-5, atol=1e-6)
