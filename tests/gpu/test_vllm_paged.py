"""What of the CUDA kernels tests/gpu/test_grid.py has not: options, odd shapes, writers, block copies, operators."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from backend_cases import spec
from headway.backends.vllm_paged import backend as writer
from headway.backends.vllm_paged.backend import CSRC, VllmPagedAttention
from headway.core.contract import layout as layouts
from headway.core.contract.errors import BackendError, ConfigError
from headway.core.contract.layout import NHD, VLLM_5D, CacheGeometry, LayerCache
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import make_case, parse_case, reference, relative_error, run_backend
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.runtime.nvrtc.launch import Arguments, Launch
from headway.kernels.runtime.nvrtc.store import load

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
FINITE = 3e4
CASES = {
    "decode": "3q1s1000_1q1s2_1q1s15_1q1s16_1q1s17_1q1s4097_5q1s63",
    "verify": "2q4s200_1q8s1030_1q3s5",
}


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def layer_of(**changes: object) -> AttentionSpec:
    base = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16, "device": torch.device("cuda", 0)}
    return spec(**{**base, "scale": 0.11, **changes})


def check(case_name: str, layer: AttentionSpec, block_size: int = 16, options: dict[str, str] | None = None) -> None:
    most = 8 if case_name == "verify" else 1
    poison = min(FINITE, torch.finfo(layer.cache_dtype).max)
    lens = parse_case(CASES.get(case_name, case_name), most)
    case = make_case(lens, layer, VLLM_5D, block_size, layouts.write_rows, decode_query_len=most, poison=poison)
    support = VllmPagedAttention.supports(layer, VLLM_5D, block_size, case.metadata.phase)
    assert support, str(support)
    backend = VllmPagedAttention(layer, VLLM_5D, block_size, options)
    assert relative_error(run_backend(backend, case), reference(case), case) < backend.tolerance[layer.dtype]


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("block_size", [32, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_block_sizes_that_the_grid_has_not(dtype: torch.dtype, block_size: int, case_name: str) -> None:
    check(case_name, layer_of(dtype=dtype), block_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [112, 192])
def test_head_dims_that_the_grid_has_not(head_dim: int, dtype: torch.dtype) -> None:
    check("decode", layer_of(head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("group", [3, 5, 16, 20])
@pytest.mark.parametrize("case_name", CASES)
def test_any_group(case_name: str, group: int) -> None:
    check(case_name, layer_of(num_heads=2 * group))


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_fp8_cache(head_dim: int, case_name: str) -> None:
    check(case_name, layer_of(head_dim=head_dim, kv_dtype=FP8, k_scale=0.02, v_scale=0.05))


@pytest.mark.parametrize("partitions", ["1", "3", "17"])
@pytest.mark.parametrize("warps", ["1", "3", "8"])
@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 70, "sinks": tuple(0.5 * head for head in range(8))}], ids=str)
def test_any_cut(changes: dict[str, object], case_name: str, warps: str, partitions: str) -> None:
    check(case_name, layer_of(**changes), 16, {"num_warps": warps, "num_partitions": partitions})


@pytest.mark.parametrize("option", ["num_warps=9", "num_warps=0", "num_partitions=x"])
def test_an_option_out_of_range_is_refused(option: str) -> None:
    key, value = option.split("=")
    with pytest.raises(ConfigError, match=f"vllm_paged.{key}: needs a number"):
        VllmPagedAttention(layer_of(), VLLM_5D, 16, {key: value})


@pytest.mark.parametrize("tokens", [1, 16, 300, 5000])
@pytest.mark.parametrize("order", ["consecutive", "shifted", "shuffled"])
@pytest.mark.parametrize("block_size", [8, 16, 256])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.bfloat16, FP8)], ids=str)
def test_the_writer_writes_what_the_plain_one_does(
    dtypes: tuple[torch.dtype, torch.dtype], block_size: int, order: str, tokens: int, gpu: torch.device
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    num_blocks = 6400 // block_size
    first = 5 if order == "shifted" else 0
    shuffled = order == "shuffled"
    slots = torch.randperm(6400, generator=generator)[:tokens] if shuffled else torch.arange(first, first + tokens)
    slots = slots.to(gpu)
    slots[tokens // 2] = -1
    rows = torch.randn(tokens, 3 * 3, 80, generator=generator).to(gpu, dtypes[0])
    _, k, v = rows.split(3, dim=1)  # slices of a merged projection
    scales = (0.5, 2.0) if dtypes[1] == FP8 else (1.0, 1.0)
    caches = [VLLM_5D.allocate(CacheGeometry(num_blocks, block_size, 3, 80, dtypes[1], gpu), *scales) for _ in range(2)]
    writer.write_rows(k, v, caches[0], slots)
    layouts.write_rows(k, v, caches[1], slots)
    for name in ("key", "value"):
        ours, plain = (getattr(cache, name).view(torch.uint8) for cache in caches)
        assert torch.equal(ours, plain), name


def filled(layout: object, num_blocks: int, gpu: torch.device) -> LayerCache:
    cache = layout.allocate(CacheGeometry(num_blocks, 16, 2, 80, torch.bfloat16, gpu))
    cache.key.normal_()
    cache.value.normal_()
    return cache


@pytest.mark.parametrize("layout", [VLLM_5D, NHD], ids=lambda layout: layout.name)
def test_copied_blocks_are_those_that_torch_copies(layout: object, gpu: torch.device) -> None:
    cache = filled(layout, 40, gpu)
    blocks = torch.randperm(40, device=gpu)
    pairs = torch.stack([blocks[:15], blocks[15:30]], dim=1).contiguous()
    expected = [tensor.index_copy(0, pairs[:, 1], tensor[pairs[:, 0]]) for tensor in (cache.key, cache.value)]
    writer.copy_blocks(cache.key, cache.value, pairs)
    assert torch.equal(cache.key, expected[0])
    assert torch.equal(cache.value, expected[1])


def test_swapped_blocks_come_back(gpu: torch.device) -> None:
    cache = filled(VLLM_5D, 40, gpu)
    before = cache.key.clone(), cache.value.clone()
    host = [torch.zeros((8, *tensor.shape[1:]), dtype=tensor.dtype).pin_memory() for tensor in before]
    there = torch.tensor([[3, 0], [17, 5], [39, 7]], device=gpu)
    writer.swap_blocks(cache.key, cache.value, *host, there)
    torch.cuda.synchronize()
    for stored, tensor in zip(host, before, strict=True):
        assert torch.equal(stored[[0, 5, 7]], tensor[[3, 17, 39]].cpu())
        assert not stored[[1, 2, 3, 4, 6]].any()
    cache.key.zero_()
    cache.value.zero_()
    writer.swap_blocks(*host, cache.key, cache.value, there.flip(1).contiguous())
    for tensor, kept in zip((cache.key, cache.value), before, strict=True):
        assert torch.equal(tensor[[3, 17, 39]], kept[[3, 17, 39]])
        assert tensor.flatten(1).any(1).sum() == 3


def test_the_operators_are_traced_and_right(gpu: torch.device) -> None:
    from headway.backends.vllm_paged import ops

    layer = layer_of()
    case = make_case(parse_case("3q1s100_1q1s700"), layer, VLLM_5D, 16, layouts.write_rows, poison=FINITE)
    cache, step = case.cache, case.metadata
    q, k, v = (tensor.contiguous() for tensor in (case.q, case.k, case.v))
    out = torch.full_like(q, math.nan)
    write = (k, v, cache.key, cache.value, step.slot_mapping)
    attend = (out, q, cache.key, cache.value, step.block_table, step.seq_lens, step.max_seq_len, layer.scale)
    pairs = torch.tensor([[0, 1]], device=gpu)
    spare = torch.empty_like(cache.key), torch.empty_like(cache.value)
    torch.library.opcheck(ops.reshape_and_cache, write)
    torch.library.opcheck(ops.paged_attention, attend)
    torch.library.opcheck(ops.copy_blocks, (*spare, pairs))
    torch.library.opcheck(ops.swap_blocks, (cache.key, cache.value, *spare, pairs))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both() -> None:
        torch.ops.headway.reshape_and_cache(*write)
        torch.ops.headway.paged_attention(*attend)

    out.fill_(math.nan)
    both()
    assert relative_error(out, reference(case), case) < VllmPagedAttention.tolerance[torch.bfloat16]


def test_a_launch_names_what_the_driver_refuses(gpu: torch.device) -> None:
    kernel = load(Variant(CSRC, "blocks.cu"), "copy_blocks", gpu)
    with pytest.raises(BackendError, match="CUDA driver: launch of copy_blocks with grid"):
        kernel(Launch((1, 1, 2), 2048), Arguments(*[0] * 6))  # more threads than any GPU has in a block


def test_a_launch_costs_the_host_a_few_microseconds(gpu: torch.device) -> None:
    """Decode is launched once per layer and step; what the driver itself takes is in the figure."""
    layer = layer_of()
    case = make_case(parse_case("2q1s300"), layer, VLLM_5D, 16, layouts.write_rows, poison=FINITE)
    backend = VllmPagedAttention(layer, VLLM_5D, 16, {"num_partitions": "1"})
    view = case.metadata.decode
    assert view is not None
    plan, out = backend.plan(view), torch.empty_like(case.q)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            backend.decode(case.q, case.cache, plan, out)
        times.append((time.perf_counter() - began) / 50)
    torch.cuda.synchronize()
    assert min(times) < 20e-6, f"{min(times) * 1e6:.1f} us"


def test_launches_follow_torchs_current_stream_into_a_graph(gpu: torch.device) -> None:
    cache = filled(VLLM_5D, 4, gpu)
    pairs = torch.tensor([[0, 1]], device=gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        writer.copy_blocks(cache.key, cache.value, pairs)
    assert not torch.equal(cache.key[0], cache.key[1]), "a capture runs nothing"
    graph.replay()
    assert torch.equal(cache.key[0], cache.key[1])


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    script = Path(__file__).with_name("sanitized_vllm_paged.py")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    if tool == "memcheck":  # cuda.core asks the driver for functions that an older one does not have, no fault of a kernel
        command += ["--report-api-errors", "no"]
    command += [sys.executable, "-P", str(script)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if "Device not supported" in answer.stdout:
        pytest.skip("compute-sanitizer does not support this machine")
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    assert "ERROR SUMMARY: 0 errors" in answer.stdout or "0 hazards displayed" in answer.stdout, answer.stdout[-3000:]
