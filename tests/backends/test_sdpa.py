"""What `sdpa` asks torch for on a GPU, as far as a CPU can tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.backends.sdpa import SDPA, SDPAMath
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import HND, NHD, CacheGeometry, LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import reference, relative_error
from headway.core.oracle.oracle import attend as exact
from headway.tuning.measure.workloads import Geometry, build_case, make_spec, make_work

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
