"""What of the Triton kernels tests/gpu/test_grid.py has not: fp8 caches, splits, long cases, odd block sizes, written tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backend_cases import LAYOUTS, spec
from decode_writes import LENGTHS, error_after_writing, new_token_case, write_and_decode
from headway.core.contract import layout as layouts
from headway.core.contract.layout import NHD, VLLM_5D, CacheLayout, LayerCache
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import make_case, parse_case, reference, relative_error, run_backend
from headway.registry import Registry
from headway.tuning.measure.contender import captures, graph_contender

pytest.importorskip("triton")
try:
    from headway.backends.triton.backend import TritonAttention
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


def layer_of(**changes: object) -> AttentionSpec:
    base = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16, "device": torch.device("cuda")}
    return spec(**{**base, "scale": 0.11, **changes})


def check(
    case_name: str, layer: AttentionSpec, layout: CacheLayout = NHD, block_size: int = 16, options: dict[str, str] | None = None
) -> None:
    most = 8 if case_name == "verify" else 1
    lens = parse_case(CASES.get(case_name, case_name), most)
    case = make_case(lens, layer, layout, block_size, layouts.write_rows, decode_query_len=most, poison=math.nan)
    for view in (case.metadata.prefill, case.metadata.decode):
        if view is not None:
            support = TritonAttention.supports(layer, layout, block_size, view.phase)
            assert support, str(support)
    backend = TritonAttention(layer, layout, block_size, options)
    assert relative_error(run_backend(backend, case), reference(case), case) < backend.tolerance[layer.dtype]


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("block_size", [32, 48])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_block_sizes_that_the_grid_has_not(layout: CacheLayout, block_size: int, case_name: str) -> None:
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


@pytest.mark.parametrize("num_splits", [1, 3, 17])
@pytest.mark.parametrize("case_name", ["decode", "verify"])
def test_any_number_of_splits(case_name: str, num_splits: int) -> None:
    check(case_name, layer_of(), NHD, 16, {"num_splits": str(num_splits)})


SPLIT = {
    "plain": {},
    "head_dim 64": {"head_dim": 64},
    "head_dim 256": {"head_dim": 256},
    "features": {"sliding_window": 300, "softcap": 2.0, "alibi_slopes": (0.5, 0.25) * 4, "sinks": (0.3, -1.0) * 4},
    "fp8": {"kv_dtype": FP8, "k_scale": 0.02, "v_scale": 0.05},
    "float16": {"dtype": torch.float16},
    "192/128": {"head_dim": 192, "v_head_dim": 128},
}


@pytest.mark.parametrize("extend_splits", [1, 3, 40])
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_keys_shared_by_programs(layout: CacheLayout, block_size: int, name: str, extend_splits: int) -> None:
    check("1q200s1500_1q33s700_1q9s9_1q1s1", layer_of(**SPLIT[name]), layout, block_size, {"extend_splits": str(extend_splits)})


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("lengths", ["1q1_1q127_1q128_1q129_1q700", "1q3000_1q2049", "1q600s9000"])
def test_prompts_of_many_tiles(lengths: str, name: str) -> None:
    check(lengths, layer_of(**SPLIT[name]), NHD, 256)


WRITING = {
    "gqa 4": {},
    "float32": {"dtype": torch.float32},
    "mha": {"num_heads": 2},
    "head_dim 80": {"head_dim": 80},
    "features": {"sliding_window": 40, "softcap": 2.0, "alibi_slopes": (0.5, 0.25) * 4, "sinks": (0.3, -1.0) * 4},
    "two query tiles": {"num_heads": 80, "num_kv_heads": 1},
}


FEW = "1q1_1q1s2_1q1s16_1q1s17_1q1s256_1q1s4097"
MANY = f"{LENGTHS}_1q1s257_120q1s600"


class TwoLayers(TritonAttention):
    """Does the work of the layer before first: the same over a copy of the cache, in the same buffers for partial results."""

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: object, out: Tensor) -> None:
        super().write_and_decode(q, k, v, self.copy, plan, torch.empty_like(out))
        super().write_and_decode(q, k, v, cache, plan, out)


@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_decode_writes_the_new_token(registry: Registry, layout: CacheLayout, block_size: int, name: str, lengths: str) -> None:
    """Launched, and in a graph, where it is a programmatic dependent of the layer before and cut for far longer sequences."""
    layer = layer_of(**WRITING[name])
    case = new_token_case(lengths, layer, layout, block_size)
    backend = TwoLayers(layer, layout, block_size)
    backend.copy = replace(case.cache, tensors={name: tensor.clone() for name, tensor in case.cache.tensors.items()})
    tolerance = backend.tolerance[layer.dtype]
    assert error_after_writing(case, lambda: write_and_decode(backend, case)) < tolerance
    assert captures(backend, case)
    writer = registry.layout(layout.name).load_writer(layer.device)
    contender = graph_contender(backend, case, lambda out: relative_error(out, reference(case), case), 8192, writer)
    for spoiled in (math.nan, 3e4):
        contender.poison()
        assert error_after_writing(case, contender.call, spoiled) < tolerance


KINDS = {
    "plain": {},
    "fp8": {"kv_dtype": FP8, "k_scale": 0.02, "v_scale": 0.05},
    "features": {"sliding_window": 300, "softcap": 2.0, "alibi_slopes": (0.5, 0.25) * 4, "sinks": (0.3, -1.0) * 4},
    "float16, vllm_5d": {"dtype": torch.float16},
}


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("head_dim", range(8, 513, 8))
@pytest.mark.parametrize("kind", range(2))
def test_every_head_size(head_dim: int, kind: int, case_name: str) -> None:
    """Each size as a plain layer, and as one of the other kinds, by turns."""
    name = [*KINDS][kind and 1 + head_dim // 8 % (len(KINDS) - 1)]
    layer = layer_of(head_dim=head_dim, scale=head_dim**-0.5, **KINDS[name])
    check(case_name, layer, VLLM_5D if "vllm_5d" in name else NHD, 16)


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(512, 128), (64, 512), (72, 40), (320, 256), (264, 512)])
def test_values_of_another_length(head_dim: int, v_head_dim: int, case_name: str) -> None:
    check(case_name, layer_of(head_dim=head_dim, v_head_dim=v_head_dim, scale=head_dim**-0.5), NHD, 16)
