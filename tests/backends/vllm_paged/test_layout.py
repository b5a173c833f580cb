"""The kernels' index arithmetic, compiled for the host, against `CacheLayout.gather`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.backends.vllm_paged.decode import CSRC, TILE
from headway.core.contract.layout import VLLM_5D, CacheGeometry

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the host")

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


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_staged_tile_fills_its_memory_and_eight_chunks_meet_eight_banks(
    arithmetic: ctypes.CDLL, head_dim: int, itemsize: int
) -> None:
    x = 16 // itemsize
    whole = list(range(0, TILE * head_dim * itemsize, 16))
    assert sorted(arithmetic.staged_k(piece, slot) for piece in range(head_dim // x) for slot in range(TILE)) == whole
    assert sorted(arithmetic.staged_v(dim, chunk, x) for dim in range(head_dim) for chunk in range(TILE // x)) == whole
    for first in range(0, head_dim, 8):
        for chunk in range(TILE // x):
            banks = {arithmetic.staged_v(dim, chunk, x) % 128 for dim in range(first, first + 8)}
            assert len(banks) == 8, "eight rows of a chunk are read together"


def test_both_sides_mean_the_same_tile(arithmetic: ctypes.CDLL) -> None:
    assert arithmetic.tile() == TILE


def test_the_header_alone_is_enough() -> None:
    included = [path.name for path in Path(CSRC).iterdir() if "#include <" in path.read_text()]
    assert not included, "NVRTC compiles the kernels without the toolkit's headers"
