"""What is handed to the kernels: number, order and types of the arguments as the sources declare them, with no GPU in sight."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_cases import spec
from headway.backends.vllm_paged import backend
from headway.backends.vllm_paged.backend import (
    CSRC,
    MAX_WARPS,
    PARTITIONS,
    TILE,
    GPUResources,
    PagedDecode,
    VllmPagedAttention,
    cache_variant,
    choose,
    shared_bytes,
    stages_of,
    variant_of,
)
from headway.core.contract.errors import BackendError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import NHD, VLLM_5D, CacheGeometry, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.nvrtc.compiler import Compiler, Variant
from headway.kernels.runtime.nvrtc.launch import Arguments, Launch

pytest.importorskip("cuda.bindings")

CPU = torch.device("cpu")
BLOCK_SIZE, HEAD_DIM, KV_HEADS = 16, 64, 2


@dataclass
class Launched:
    """One launch: what the source declares, and what was handed in under those names."""

    function: str
    declared: list[tuple[str, str]]
    config: Launch
    arguments: dict[str, Any]


class Recorder:
    """In place of a loaded kernel."""

    def __init__(self, launches: list[Launched], variant: Variant, function: str) -> None:
        self.launches, self.function = launches, function
        self.declared = declared(variant.source, function)
        self.most_shared = 0

    def allow_shared(self, shared_bytes: int) -> None:
        self.most_shared = max(self.most_shared, shared_bytes)

    def __call__(self, launch: Launch, arguments: Arguments) -> None:
        assert launch.shared_bytes <= self.most_shared
        names = [name for _, name in self.declared]
        self.launches.append(Launched(self.function, self.declared, launch, dict(zip(names, arguments.values, strict=True))))


def declared(source: str, function: str) -> list[tuple[str, str]]:
    """(type, name) of each parameter of a kernel in the sources."""
    text = re.sub(r"//.*", "", (CSRC / source).read_text())
    found = re.search(rf"{function}\(([^)]*)\) \{{", text)
    pairs = [parameter.rpartition(" ") for parameter in " ".join(found[1].split()).split(", ")]
    return [(kind, name) for kind, _, name in pairs]


def agrees(kind: str, value: object) -> bool:
    """Whether `Arguments` packs `value` with the size that the kernel reads."""
    if kind.endswith("*") or kind == "long long":
        return type(value) is int
    return type(value) is {"int": numpy.int32, "float": numpy.float32}[kind]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    made: list[Launched] = []

    def load(variant: Variant, function: str, device: torch.device) -> Recorder:
        return Recorder(made, variant, function)

    machine = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(backend, "load", load)
    monkeypatch.setattr(backend, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: machine)
    return made


def cache_of(num_blocks: int) -> LayerCache:
    return VLLM_5D.allocate(CacheGeometry(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, torch.bfloat16, CPU))


def decoded(
    lens: list[int], partitions: int, **changes: Any
) -> tuple[PagedDecode, Callable[[], None], torch.Tensor, torch.Tensor]:
    """A decode of sequences with these contexts: its kernels' owner, what runs it, q and out."""
    spec = AttentionSpec(8, KV_HEADS, HEAD_DIM, 0.125, torch.bfloat16, CPU, **changes)
    tables = [[number % 4] * -(-(length + 1) // BLOCK_SIZE) for number, length in enumerate(lens)]
    step = AttentionMetadata.build([1] * len(lens), lens, tables, BLOCK_SIZE, CPU, decode_query_len=1).decode
    assert step is not None
    owner = PagedDecode(spec, BLOCK_SIZE, (2, partitions))
    q, out = (torch.zeros(len(lens), 12, HEAD_DIM, dtype=torch.bfloat16)[:, 2:10] for _ in range(2))
    plan = owner.plan(step)
    return owner, lambda: owner.run(q, cache_of(4), plan, out), q, out


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 70, "softcap": 30.0}, {"alibi_slopes": (0.5,) * 8, "sinks": (1.0,) * 8}],
    ids=["plain", "window and cap", "slopes and sinks"],
)
def test_decode_hands_in_what_the_kernels_declare(launches: list[Launched], changes: dict[str, Any], partitions: int) -> None:
    _, run, q, out = decoded([5, 300, 40], partitions, **changes)
    run()
    assert [launch.function for launch in launches] == ["paged_attention", "reduce_partitions"][: 1 if partitions == 1 else 2]
    for launch in launches:
        for kind, name in launch.declared:
            assert agrees(kind, launch.arguments[name]), (kind, name, launch.arguments[name])
        given = launch.arguments
        assert (given["kv_heads"], given["group"], given["partitions"]) == (KV_HEADS, 4, partitions)
        assert (given["out"], given["out_stride_token"], given["out_stride_head"]) == (out.data_ptr(), 12 * 64, 64)
        assert given["window"] == changes.get("sliding_window", 0)
        assert (given["sinks"] != 0) == ("sinks" in changes)
    first = launches[0]
    assert (first.arguments["q"], first.arguments["q_stride_token"]) == (q.data_ptr(), 12 * 64)
    assert first.arguments["cap"] == pytest.approx(changes.get("softcap", 0.0) * 1.442695)
    assert (first.arguments["slopes"] != 0) == ("alibi_slopes" in changes)
    assert first.config.grid == (KV_HEADS, partitions, 3)
    assert first.config.block == (64, 1, 1)
    assert not first.config.overlaps
    if partitions > 1:
        assert launches[1].config.grid == (KV_HEADS, 4, 3)
        assert launches[1].config.overlaps, "the second kernel starts while the first still runs"
        assert launches[1].arguments["partials"] == first.arguments["partial"]
        assert launches[1].arguments["states"] == first.arguments["state"]


def test_layers_share_what_a_plan_prepared(launches: list[Launched]) -> None:
    _, run, _, _ = decoded([5, 300], 3)
    run()
    run()
    assert launches[0].config is launches[2].config
    assert launches[1].config is launches[3].config


def test_no_sequence_launches_nothing(launches: list[Launched]) -> None:
    empty = AttentionMetadata.build([], [], [], BLOCK_SIZE, CPU, decode_query_len=1)
    owner, _, q, out = decoded([5], 1)
    if empty.decode is not None:
        owner.run(q[:0], cache_of(4), owner.plan(empty.decode), out[:0])
    assert launches == []


def test_the_writer_and_the_copies_hand_in_what_the_kernels_declare(launches: list[Launched]) -> None:
    cache, other = cache_of(4), cache_of(4)
    _, k, v = torch.zeros(40, 3 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16).split(KV_HEADS, dim=1)
    backend.write_rows(k, v, cache, torch.arange(40))
    pairs = torch.tensor([[0, 1], [2, 3]])
    backend.swap_blocks(cache.key, cache.value, other.key, other.value, pairs)
    for launch in launches:
        for kind, name in launch.declared:
            assert agrees(kind, launch.arguments[name]), (kind, name, launch.arguments[name])
    write, copy = launches
    assert write.config.grid == (KV_HEADS, 3, 1)
    assert (write.arguments["new_k"], write.arguments["new_v"]) == (k.data_ptr(), v.data_ptr())
    assert (write.arguments["k_stride_token"], write.arguments["v_stride_head"]) == (3 * KV_HEADS * HEAD_DIM, HEAD_DIM)
    assert (write.arguments["num_tokens"], write.arguments["k_scale"]) == (40, 1.0)
    assert copy.arguments == {
        "from_key": cache.key.data_ptr(),
        "from_value": cache.value.data_ptr(),
        "to_key": other.key.data_ptr(),
        "to_value": other.value.data_ptr(),
        "pairs": pairs.data_ptr(),
        "vectors": BLOCK_SIZE * KV_HEADS * HEAD_DIM * 2 // 16,
    }


H200 = GPUResources(multiprocessors=132, bytes_per_us=4.2e6)
TILE_BYTES = 8192


@given(st.integers(1, 5000), st.integers(1, 10000), st.floats(0.01, 1.0))
def test_a_cut_is_one_that_can_be_launched(items: int, longest: int, filled: float) -> None:
    cut = choose(items, max(longest, int(items * longest * filled)), longest, TILE_BYTES, H200)
    assert 1 <= cut.warps <= MAX_WARPS
    assert cut.partitions in PARTITIONS
    assert cut.partitions <= longest


@pytest.mark.parametrize(
    ("sequences", "context", "single"), [(8, 512, True), (1, 8192, False), (64, 2048, True), (256, 8192, True)]
)
def test_short_contexts_and_many_sequences_take_the_single_pass(sequences: int, context: int, single: bool) -> None:
    items, longest = sequences * 8, context // 16
    assert (choose(items, items * longest, longest, TILE_BYTES, H200).partitions == 1) is single


def test_few_long_contexts_occupy_the_machine() -> None:
    assert 8 * choose(8, 8 * 2048, 2048, TILE_BYTES, H200).partitions >= 100


def test_one_long_sequence_among_short_ones_is_partitioned() -> None:
    long, short = 2048, 4
    ragged = choose(64 * 8, 8 * long + 63 * 8 * short, long, TILE_BYTES, H200)
    assert ragged.partitions > choose(64 * 8, 64 * 8 * long, long, TILE_BYTES, H200).partitions


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("tile_bytes", [2048, 8192, 32768])
def test_at_least_one_warp_fits(arch: str, tile_bytes: int) -> None:
    assert 2 <= stages_of(tile_bytes, arch) * tile_bytes <= shared_bytes(arch)


def layer(**changes: object):
    return spec(**{"head_dim": 128, "dtype": torch.bfloat16, "device": torch.device("cuda"), **changes})


@pytest.mark.parametrize(
    ("changes", "block_size", "reason"),
    [
        ({"head_dim": 72}, 16, "head_dim: needs 64 or 80 or 96"),
        ({}, 24, "block_size: needs 8 or a multiple of 16, got 24"),
        ({}, 12, "block_size: needs a multiple of 8, got 12"),
        ({"kv_dtype": torch.float8_e4m3fn}, 8, "block_size: needs a multiple of 16 for an fp8 cache, got 8"),
        ({"dtype": torch.float32, "kv_dtype": torch.float8_e4m3fn}, 16, "dtype: needs bfloat16 or float16 with an fp8 cache"),
        ({"device": torch.device("cpu")}, 16, "device: needs cuda, got cpu"),
    ],
    ids=str,
)
def test_what_it_cannot_do_it_refuses(changes: dict[str, object], block_size: int, reason: str) -> None:
    assert reason in str(VllmPagedAttention.supports(layer(**changes), VLLM_5D, block_size, Phase.DECODE))


def test_it_decodes_on_its_layout_only() -> None:
    assert VllmPagedAttention.supports(layer(), VLLM_5D, 16, Phase.DECODE)
    assert "kv_layout: needs vllm_5d, got nhd" in str(VllmPagedAttention.supports(layer(), NHD, 16, Phase.DECODE))
    for phase in (Phase.PREFILL, Phase.EXTEND):
        assert "phase: needs decode" in str(VllmPagedAttention.supports(layer(), VLLM_5D, 16, phase))
    assert VllmPagedAttention.graph_level is GraphLevel.UNIFORM


COMPILER = shutil.which("g++") or shutil.which("clang++")
BY_THE_HOST = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the host")

EXPORTS = """
#include "layout.cuh"
using namespace headway;
extern "C" long long run(long long block, int h, int heads, int dim, int size) { return run_offset(block, h, heads, dim, size); }
extern "C" int key(int slot, int dim, int size, int x) { return key_offset(slot, dim, size, x); }
extern "C" int value(int slot, int dim, int size) { return value_offset(slot, dim, size); }
extern "C" int staged_k(int piece, int slot) { return staged_key(piece, slot); }
extern "C" int staged_v(int dim, int chunk, int x) { return staged_value(dim, chunk, x); }
extern "C" int tile() { return TILE; }
"""


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("layout")
    source, library = folder / "layout.cpp", folder / "layout.so"
    source.write_text(EXPORTS)
    subprocess.run([str(COMPILER), "-std=c++17", "-shared", "-fPIC", f"-I{CSRC}", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.run.restype = ctypes.c_longlong
    loaded.run.argtypes = [ctypes.c_longlong, *[ctypes.c_int] * 4]
    return loaded


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(1, 5),
    block_size=st.sampled_from([8, 16, 24, 32, 48, 64, 256]),
    heads=st.integers(1, 5),
    head_dim=st.sampled_from([16, 64, 80, 112]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
    data=st.data(),
)
@BY_THE_HOST
def test_offsets_are_where_gather_reads(
    arithmetic: ctypes.CDLL, num_blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    cache = VLLM_5D.allocate(CacheGeometry(num_blocks, block_size, heads, head_dim, dtype, torch.device("cpu")))
    block, slot = data.draw(st.integers(0, num_blocks - 1)), data.draw(st.integers(0, block_size - 1))
    head, dim = data.draw(st.integers(0, heads - 1)), data.draw(st.integers(0, head_dim - 1))
    run = arithmetic.run(block, head, heads, head_dim, block_size)
    key, value = (tensor.view(torch.uint8 if dtype.itemsize == 1 else dtype).view(-1) for tensor in (cache.key, cache.value))
    key[run + arithmetic.key(slot, dim, block_size, VLLM_5D.x(dtype))] = 1
    value[run + arithmetic.value(slot, dim, block_size)] = 1
    for read in cache.gather(torch.tensor([block * block_size + slot])):
        assert read[0].float().nonzero().tolist() == [[head, dim]]


@BY_THE_HOST
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_staged_tile_fills_its_memory_and_meets_eight_banks(arithmetic: ctypes.CDLL, head_dim: int, itemsize: int) -> None:
    x = 16 // itemsize
    whole = list(range(0, TILE * head_dim * itemsize, 16))
    assert sorted(arithmetic.staged_k(piece, slot) for piece in range(head_dim // x) for slot in range(TILE)) == whole
    assert sorted(arithmetic.staged_v(dim, chunk, x) for dim in range(head_dim) for chunk in range(TILE // x)) == whole
    for first in range(0, head_dim, 8):
        for chunk in range(TILE // x):
            banks = {arithmetic.staged_v(dim, chunk, x) % 128 for dim in range(first, first + 8)}
            assert len(banks) == 8, "eight rows of a chunk are read together"


@BY_THE_HOST
def test_both_sides_mean_the_same_tile(arithmetic: ctypes.CDLL) -> None:
    assert arithmetic.tile() == TILE


@BY_THE_HOST
def test_the_header_alone_is_enough() -> None:
    included = [path.name for path in Path(CSRC).iterdir() if "#include <" in path.read_text()]
    assert not included, "NVRTC compiles the kernels without the toolkit's headers"


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EVERYDAY = [(BF16, BF16, 128, 16), (torch.float16, FP8, 80, 64)]
SHAPES = [
    *EVERYDAY,
    (torch.float32, torch.float32, 256, 8),
    (torch.float32, torch.float32, 80, 64),
    (BF16, BF16, 64, 8),
    (BF16, BF16, 112, 256),
    (BF16, BF16, 192, 128),
    (torch.float16, torch.float16, 96, 32),
    (torch.float16, torch.float16, 256, 16),
    (BF16, FP8, 128, 16),
]


@pytest.mark.slow
@pytest.mark.sampled(5, then="soak")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(str(part).removeprefix("torch.") for part in shape))
def test_every_kind_compiles(compiler: Compiler, shape: tuple[torch.dtype, torch.dtype, int, int], arch: str) -> None:
    arch = "sm_89" if (arch, shape[1]) == ("sm_80", FP8) else arch  # the first that converts e4m3
    for variant in (variant_of(*shape, arch), cache_variant(*shape)):
        assert variant.compile(arch, compiler).startswith(b"\x7fELF")


def test_what_moves_blocks_compiles(compiler: Compiler) -> None:
    assert Variant(CSRC, "blocks.cu").compile("sm_80", compiler).startswith(b"\x7fELF")


def test_what_does_not_compile_says_why(compiler: Compiler) -> None:
    constants = dict(Variant.of(CSRC, "cache.cu", BF16, BF16, 128, 16).constants)
    broken = Variant(CSRC, "cache.cu", tuple({**constants, "TYPE": "NOT_A_TYPE"}.items()))
    with pytest.raises(BackendError, match=r"NVRTC \d+\.\d+ does not compile cache\.cu:(.|\n)*NOT_A_TYPE"):
        broken.compile("sm_90", compiler)
