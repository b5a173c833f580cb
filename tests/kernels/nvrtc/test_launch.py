"""What reaches the driver, through a driver that writes down what it is handed."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from headway.core.contract.errors import BackendError
from headway.kernels.runtime.nvrtc.launch import Arguments, tensor_map

pytest.importorskip("cuda.bindings")

STUB = Path(__file__).parents[2] / "support" / "kernels" / "stub_driver.c"
SETUP = """
import contextlib
import torch
from cuda.bindings import driver
from numpy import float32, int32
from headway.kernels.runtime.nvrtc.launch import Arguments
from headway.kernels.runtime.nvrtc.launch import Kernel, Launch
from headway.kernels.runtime.nvrtc.launch import tensor_map
torch._C._cuda_getCurrentRawStream = lambda device: 100 + device
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.current_stream = lambda: None

class Loaded:
    def __init__(self, handle): self.handle = handle
    def from_cubin(self, cubin): return self
    def get_kernel(self, name): return self

def kernel(handle):
    import cuda.core
    cuda.core.ObjectCode = Loaded(handle)
    return Kernel(bytes, "example", torch.device("cuda", 1))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", STUB], check=True)
    return folder


def run(driver: Path, code: str) -> str:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "PYTHONUNBUFFERED": "1"}
    answer = subprocess.run([sys.executable, "-c", SETUP + code], env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.slow
def test_a_launch_hands_over_what_was_set_last(driver: Path) -> None:
    code = """
launch = Launch((3, 4, 5), 96, 70_000, overlaps=True, cluster=(2, 1, 1))
values = Arguments(1 << 40, int32(-7), float32(1.5), bytes(127) + b"A")
kernel(77)(launch, values)
values.set((1 << 40) + 8, int32(-8))
kernel(78)(Launch((1, 1, 1), 32), values)
"""
    first, second = run(driver, code).splitlines()
    assert first == (
        f"function 77 grid 3 4 5 block 96 shared 70000 stream 101 overlaps 1 cluster 2 1 1 values {1 << 40} -7 1.5 65 aligned 0"
    )
    assert second == f"function 78 grid 1 1 1 block 32 shared 0 stream 101 values {(1 << 40) + 8} -8 1.5 65 aligned 0"


@pytest.mark.slow
def test_in_a_context_that_compiles_ahead_nothing_is_launched_and_threads_compile(driver: Path) -> None:
    code = """
from headway.kernels.runtime.nvrtc import store
from headway.kernels.runtime.nvrtc.store import Built
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.core.contract.compiled import compile_ahead
from pathlib import Path
import threading, cuda.core
asked = []
def build(variant, arch, compiler):
    asked.append(threading.current_thread().name.split("_")[0])
    return Built(b"", None, 1.0)
store.build, store.find_compiler = build, lambda: (object(), True)
cuda.core.ObjectCode = Loaded(77)
values, device = Arguments(1, int32(2), float32(3), bytes(128)), torch.device("cuda", 0)
with compile_ahead():
    loaded = store.load(Variant(Path("x"), "k.cu"), "example", device, "sm_90a")
    loaded.allow_shared(100_000)
    loaded(Launch((1, 1, 1), 32), values)
print(asked, flush=True)
loaded(Launch((1, 1, 1), 64), values)
print(store.load(Variant(Path("x"), "k.cu"), "example", device, "sm_90a") is loaded, asked)
"""
    ahead, launched, same = run(driver, code).splitlines()
    assert ahead == "['compile']"
    assert launched.startswith("function 77 grid 1 1 1 block 64")
    assert same == "True ['compile']"


@pytest.mark.slow
def test_a_launch_that_the_driver_refuses_says_what_was_asked(driver: Path) -> None:
    code = """
try:
    kernel(0xbad)(Launch((3, 4, 5), 96, 8), Arguments(1))
except Exception as error:
    print(type(error).__name__, error)
"""
    assert run(driver, code) == (
        "BackendError CUDA driver: launch of example with grid (3, 4, 5), 96 threads, 8 bytes of shared memory: "
        "CUDA_ERROR_INVALID_VALUE\n"
    )


@pytest.mark.slow
def test_a_tensor_map_says_what_the_driver_is_to_encode(driver: Path) -> None:
    code = """
rows = torch.empty(40, 8, 128, dtype=torch.bfloat16)
print(rows.data_ptr(), tensor_map(rows[:, :4], (16, 1, 64)).hex())
print(tensor_map(rows, (16, 1, 64)) is tensor_map(rows, (16, 1, 64)))
try:
    tensor_map(torch.empty(4, 16, dtype=torch.bfloat16)[:, :13], (1, 8))
except Exception as error:
    print(type(error).__name__, error)
"""
    first, again, refused = run(driver, code).splitlines()
    address, encoded = first.split()
    numbers = struct.unpack("=16Q", bytes.fromhex(encoded))
    bfloat16, swizzle_128, promote_256 = 9, 3, 3
    expected = (bfloat16, 3, int(address), 128, 40, 128 * 2, 8 * 128 * 2, 64, 16, 1, swizzle_128, promote_256)
    assert numbers == (*expected, 0, 0, 0, 0)
    assert again == "True"
    assert refused.startswith("BackendError CUDA driver: tensor map of (4, 13), strides (16, 1)")
    assert refused.endswith("CUDA_ERROR_INVALID_VALUE")


@pytest.mark.parametrize(
    ("tensor", "box", "swizzle", "rule"),
    [
        (torch.zeros(4, 64, dtype=torch.float64), (1, 64), 128, "its type is one of bfloat16, float16"),
        (torch.zeros(4, 64), (64,), 128, "the box one extent for each"),
        (torch.zeros(4, 64), (1, 32), 48, "the swizzle is 0, 32, 64 or 128 bytes, not 48"),
        (torch.zeros(64, 4).T, (1, 32), 128, "its last axis is contiguous"),
        (torch.zeros(4, 65), (1, 32), 128, "its address and its strides are multiples of 16 bytes"),
        (torch.zeros(512, 64), (512, 32), 128, "extents of 1 to 256"),
        (torch.zeros(4, 64), (1, 64), 128, "no longer than the swizzle of 128 bytes"),
        (torch.zeros(0, 64), (1, 32), 128, "it is not empty"),
    ],
    ids=str,
)
def test_a_tensor_map_that_cannot_be_names_the_rule(tensor: torch.Tensor, box: tuple[int, ...], swizzle: int, rule: str) -> None:
    with pytest.raises(BackendError, match=rule):
        tensor_map(tensor, box, swizzle)


def test_arguments_of_other_types_are_refused() -> None:
    for value in (1.5, numpy.int64(3), numpy.float64(2.0), None, True):
        with pytest.raises(TypeError, match=r"is an int \(pointer, long long\), numpy\.int32"):
            Arguments(value)  # type: ignore[arg-type]


def test_arguments_keep_their_types() -> None:
    values = Arguments(1, numpy.int32(2))
    with pytest.raises(struct.error):
        values.set(1.5)  # type: ignore[arg-type]
    assert values.values == (1, numpy.int32(2))
