"""The Triton kernels on a GPU against float64: the whole grid of shapes, types, layouts and features; captured graphs too."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from grid import LAYOUTS, spec
from headway.backends import layouts
from headway.bench.cases import make_case, parse_case
from headway.bench.reference import reference, relative_error, run_backend
from headway.core.layout import NHD, VLLM_5D, CacheGeometry, CacheLayout
from headway.core.metadata import AttentionMetadata
from headway.core.spec import AttentionSpec

pytest.importorskip("triton")
try:
    from headway.backends.triton.backend import TritonAttention
    from headway.backends.triton.writer import write_rows
except RuntimeError as error:  # pragma: no cover - an old GPU driver
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
CASES = {
    "prefill": "1q130_1q513_1q64_1q1_1q33",
    "extend": "1q7s20_1q100s1000_1q257s300_1q64s128",
    "decode": "3q1s1000_1q1s2_1q1s15_1q1s16_1q1s17_1q1s4097_5q1s63",
    "verify": "2q4s200_1q8s1030_1q3s5",
}
SLOPES = tuple(2.0 ** -(1 + head) for head in range(8))
SINKS = (0.3, -1.0, 2.0, 0.0, 1.0, 0.5, -3.0, 4.0)
FEATURES: dict[str, dict[str, object]] = {
    "window": {"sliding_window": 70},
    "window 1": {"sliding_window": 1},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "all": {"sliding_window": 200, "softcap": 2.0, "alibi_slopes": SLOPES, "sinks": SINKS},
}


def layer_of(**changes: object) -> AttentionSpec:
    base = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16, "device": torch.device("cuda")}
    return spec(**{**base, "scale": 0.11, **changes})


def check(case_name: str, layer: AttentionSpec, layout: CacheLayout = NHD, block_size: int = 16, **options: object) -> None:
    most = 8 if case_name == "verify" else 1
    lens = parse_case(CASES.get(case_name, case_name), most)
    case = make_case(lens, layer, layout, block_size, layouts.write_rows, decode_query_len=most, poison=math.nan, **options)
    for view in (case.metadata.prefill, case.metadata.decode):
        if view is not None:
            support = TritonAttention.supports(layer, layout, block_size, view.phase)
            assert support, str(support)
    backend = TritonAttention(layer, layout, block_size)
    assert relative_error(run_backend(backend, case), reference(case), case) < backend.tolerance[layer.dtype]


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_grid(dtype: torch.dtype, head_dim: int, layout: CacheLayout, case_name: str) -> None:
    check(case_name, layer_of(dtype=dtype, head_dim=head_dim), layout)


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_features(dtype: torch.dtype, feature: str, case_name: str) -> None:
    check(case_name, layer_of(dtype=dtype, head_dim=64, **FEATURES[feature]))


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_group_sizes(group: int, case_name: str) -> None:
    check(case_name, layer_of(num_heads=2 * group))


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("block_size", [32, 48, 64, 256])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_block_sizes(layout: CacheLayout, block_size: int, case_name: str) -> None:
    check(case_name, layer_of(), layout, block_size)


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_fp8_cache(layout: CacheLayout, head_dim: int, case_name: str) -> None:
    check(case_name, layer_of(head_dim=head_dim, kv_dtype=FP8, k_scale=0.02, v_scale=0.05), layout)


@pytest.mark.parametrize("case_name", ["1q1s9000", "40q1s777", "1q3000_1q2000", "3q700s5000", "2q100_3q50s170_4q1s99"])
@pytest.mark.parametrize("block_size", [16, 256])
def test_longer(block_size: int, case_name: str) -> None:
    check(case_name, layer_of(), NHD, block_size)


def test_padding_rows() -> None:
    check("decode", layer_of(), padding_rows=5)


def test_non_contiguous_queries() -> None:
    layer = layer_of()
    case = make_case(parse_case("2q100_3q50s170_4q1s99"), layer, NHD, 16, layouts.write_rows, poison=math.nan)
    wide = torch.cat([case.q, case.k, case.v], dim=1)
    q, k, v = wide.split([case.q.shape[1], case.k.shape[1], case.v.shape[1]], dim=1)
    sliced = dataclasses.replace(case, q=q, k=k, v=v)
    backend = TritonAttention(layer, NHD, 16)
    assert relative_error(run_backend(backend, sliced), reference(case), case) < backend.tolerance[layer.dtype]


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("layout", [NHD, VLLM_5D], ids=lambda layout: layout.name)
def test_a_graph_captured_at_the_longest_is_right_at_any_length(layout: CacheLayout, query_len: int) -> None:
    layer, rows, longest = layer_of(), 6, 4096
    lens = [(query_len, longest)] * rows
    case = make_case(lens, layer, layout, 16, layouts.write_rows, decode_query_len=query_len)
    static = case.metadata
    backend = TritonAttention(layer, layout, 16)
    out = torch.empty_like(case.q)
    plan = backend.plan(static)
    backend.decode(case.q, case.cache, plan, out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.decode(case.q, case.cache, plan, out)
    q = query_len
    for kv_lens in ([longest] * 6, [q + 1, 17, 64, 65, 129, 4095], [0, 100, 0, 2000, 33, 0], [longest] + [q + 1] * 5):
        contexts = [kv_len - q for kv_len in kv_lens]
        blocks = static.block_table_cpu.tolist()
        smaller = AttentionMetadata.build([q] * rows, contexts, blocks, 16, layer.device, q)
        static.seq_lens.copy_(smaller.seq_lens)
        out.fill_(math.nan)
        graph.replay()
        now = dataclasses.replace(case, metadata=smaller)
        assert relative_error(out, reference(now), now) < backend.tolerance[layer.dtype], kv_lens


@pytest.mark.parametrize("tokens", [1, 7, 64, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8], ids=str)
@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_writer(layout: CacheLayout, head_dim: int, dtype: torch.dtype, tokens: int) -> None:
    device = torch.device("cuda")
    geometry = CacheGeometry(400, 16, 8, head_dim, dtype, device)
    scales = (0.02, 0.05) if dtype == FP8 else (1.0, 1.0)
    source = torch.bfloat16 if dtype == FP8 else dtype
    k, v = (torch.randn(tokens, 8, head_dim, device=device).mul(3).to(source) for _ in range(2))
    slots = torch.randperm(400 * 16, device=device)[:tokens]
    slots[tokens // 2] = -1
    caches = [layout.allocate(geometry, *scales) for _ in range(2)]
    write_rows(k, v, caches[0], slots)
    layouts.write_rows(k, v, caches[1], slots)
    for ours, theirs in ((caches[0].key, caches[1].key), (caches[0].value, caches[1].value)):
        assert torch.equal(ours.float(), theirs.float())
    assert tokens == 1 or caches[0].key.float().abs().sum() > 0
