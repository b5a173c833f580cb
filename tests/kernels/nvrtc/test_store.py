"""Compiling, and keeping what was compiled."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy
import pytest
import torch

from headway.backends.vllm_paged.backend import CSRC, VllmPagedAttention
from headway.core.contract.errors import BackendError
from headway.core.system import files as folders
from headway.kernels.runtime.nvrtc.compiler import Compiler, Variant, find_compiler
from headway.kernels.runtime.nvrtc.launch import Arguments, tensor_map
from headway.kernels.runtime.nvrtc.store import build, build_all, compiled_path

pytest.importorskip("cuda.bindings")


class Slow(Compiler):
    """Writes what a compiler would, and takes its time."""

    name = "slow"

    def __init__(self) -> None:
        self.version, self.calls = "1", 0

    def compile(self, source: Path, include: Path, constants: Mapping[str, str | int], arch: str) -> bytes:
        self.calls += 1
        time.sleep(0.05)
        return bytes(1 << 20)


def _build_often(folder: str, answers: multiprocessing.Queue) -> None:
    os.environ.pop("HEADWAY_CACHE", None)
    os.environ["XDG_CACHE_HOME"] = folder
    for number in range(20):
        built = build(Variant(CSRC, "blocks.cu", (("NUMBER", number),)), "sm_90", Slow())
        answers.put((len(built.cubin), built.path is not None, built.seconds > 0))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HEADWAY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headway" / "kernels"


@pytest.fixture
def kept_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    folders.warn_unwritable.cache_clear()
    caplog.set_level(logging.INFO, "headway")
    return caplog


BLOCKS = Variant(CSRC, "blocks.cu")


def test_a_second_build_reads_the_first(own_cache: Path, kept_log: pytest.LogCaptureFixture) -> None:
    compiler = Slow()
    first = build(BLOCKS, "sm_90", compiler)
    assert first.seconds > 0
    assert "vllm_paged: compiled blocks.cu for sm_90 with slow" in kept_log.text
    kept_log.clear()
    second = build(BLOCKS, "sm_90", compiler)
    assert (second.cubin, second.path, second.seconds) == (first.cubin, first.path, 0.0)
    assert not kept_log.text
    assert compiler.calls == 1
    assert list(own_cache.iterdir()) == [first.path]


def test_the_file_is_another_for_all_that_changes_the_code(tmp_path: Path) -> None:
    compiler, other = Slow(), Slow()
    other.version = "2"
    changed = tmp_path / "vllm_paged" / "csrc"
    changed.mkdir(parents=True)
    (changed / "blocks.cu").write_text("// changed")
    paths = {
        compiled_path(BLOCKS, "sm_90", compiler),
        compiled_path(BLOCKS, "sm_90a", compiler),
        compiled_path(Variant(CSRC, "blocks.cu", (("A", 1),)), "sm_90", compiler),
        compiled_path(BLOCKS, "sm_90", other),
        compiled_path(Variant(changed, "blocks.cu"), "sm_90", compiler),
    }
    assert len(paths) == 5


@pytest.mark.slow
def test_processes_that_need_the_same_share_the_work_and_read_whole_files(own_cache: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_build_often, args=(str(tmp_path), answers)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=120) for _ in range(40)]
    for process in processes:
        process.join()
    assert {each[:2] for each in found} == {(1 << 20, True)}
    assert sum(compiled for *_, compiled in found) == 20, "each once, and read by the other process"
    assert len(list(own_cache.iterdir())) == 20, "nothing half-written stays behind"


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-100], lambda data: b"", lambda data: b"x" + data[1:]], ids=["cut", "empty", "bits"]
)
def test_a_damaged_file_is_compiled_again(kept_log: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]) -> None:
    compiler = Slow()
    first = build(BLOCKS, "sm_90", compiler)
    first.path.write_bytes(damage(first.path.read_bytes()))
    assert build(BLOCKS, "sm_90", compiler).cubin == first.cubin
    assert "is damaged and is compiled again" in kept_log.text
    assert build(BLOCKS, "sm_90", compiler).seconds == 0
    assert compiler.calls == 2


def test_an_unwritable_folder_costs_a_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_log: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "file"))
    compiler = Slow()
    built = build(BLOCKS, "sm_90", compiler)
    again = build(BLOCKS, "sm_90", compiler)
    assert (len(built.cubin), built.path, again.path) == (1 << 20, None, None)
    assert compiler.calls == 2
    assert kept_log.text.count("cannot be written (Not a directory): every process recompiles its kernels") == 1


def test_a_full_disk_leaves_no_half_file(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, kept_log: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    built = build(BLOCKS, "sm_90", Slow())
    assert (len(built.cubin), built.path) == (1 << 20, None)
    assert "No space left on device" in kept_log.text
    assert list(own_cache.iterdir()) == []


class Together(Slow):
    """Ends when eight of its calls are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.eighth = threading.Barrier(8, timeout=30)

    def compile(self, source: Path, include: Path, constants: Mapping[str, str | int], arch: str) -> bytes:
        self.eighth.wait()
        return super().compile(source, include, constants, arch)


def test_many_are_built_at_a_time() -> None:
    compiler = Together()
    variants = [Variant(CSRC, "blocks.cu", (("NUMBER", number),)) for number in range(8)]
    built = dict(build_all(variants, "sm_90", compiler, 8))
    assert set(built) == set(variants)
    assert compiler.calls == 8


def test_one_that_does_not_compile_ends_the_others() -> None:
    class Broken(Slow):
        def compile(self, source: Path, include: Path, constants: Mapping[str, str | int], arch: str) -> bytes:
            raise BackendError("does not compile")

    with pytest.raises(BackendError, match="does not compile"):
        list(build_all([BLOCKS], "sm_90", Broken(), 2))


@pytest.fixture
def searched_anew() -> Iterator[None]:
    """The search for a compiler is made again in the test, and forgotten after it."""
    find_compiler.cache_clear()
    yield
    find_compiler.cache_clear()


@pytest.mark.usefixtures("searched_anew")
def test_without_its_package_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    support = str(VllmPagedAttention.available())
    assert "cuda.core.LaunchConfig: needs to be importable, got ModuleNotFoundError" in support
    assert re.search(r'\(pip install "cuda-core\[cu1\d\]>=1\.2"\)', support)


@pytest.mark.usefixtures("compiler", "searched_anew")
def test_without_the_library_of_nvrtc_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("Failure finding\n libnvrtc.so.13")

    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", missing)
    support = str(VllmPagedAttention.available())
    assert "NVRTC: needs to be loadable, got RuntimeError: Failure finding libnvrtc.so.13 (pip install" in support


@pytest.mark.usefixtures("compiler", "searched_anew")
def test_a_cuda_core_that_cannot_let_kernels_overlap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda.core.LaunchConfig", object)
    assert "LaunchConfig(programmatic_stream_serialization=...), got one without it" in str(find_compiler()[1])


@pytest.mark.usefixtures("searched_anew")
def test_an_nvrtc_of_another_cuda_than_torchs_is_refused(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    find_compiler.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    message = f"NVRTC: needs version 11, as torch's CUDA, got {compiler.version} "
    assert message + '(pip install "cuda-core[cu11]>=1.2")' in str(find_compiler()[1])


@pytest.mark.usefixtures("compiler", "searched_anew")
def test_a_driver_too_old_for_the_compiler_is_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("cuda.bindings.driver.cuDriverGetVersion", lambda: (0, 12040))
    found, support = find_compiler()
    assert found is None
    assert len(support.reasons) == 1
    assert re.search(r"CUDA driver: needs one for CUDA 13 or newer, as NVRTC, got 12\.4 \(update the driver", str(support))


STUB = Path(__file__).parents[2] / "support" / "kernels" / "stub_driver.c"
SETUP = """
import contextlib
import torch
from cuda.bindings import driver
from numpy import float32, int32
from headway.kernels.runtime.nvrtc.launch import Arguments
from headway.kernels.runtime.nvrtc.launch import CompiledKernel, Launch
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
    return CompiledKernel(bytes, "example", torch.device("cuda", 1))
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
from headway.core.contract.kernel import compile_ahead
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
