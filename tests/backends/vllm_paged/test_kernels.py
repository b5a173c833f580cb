"""Compiling, and keeping what was compiled."""

from __future__ import annotations

import logging
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from headway.backends.vllm_paged import kernels
from headway.backends.vllm_paged.backend import VllmPagedAttention
from headway.backends.vllm_paged.compiler import Compiler, find_compiler
from headway.backends.vllm_paged.decode import variant_of
from headway.backends.vllm_paged.kernels import Variant, build, compiled_path
from headway.backends.vllm_paged.writer import variant_of as writer_variant
from headway.core.contract.errors import BackendError

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EVERYDAY = [(BF16, BF16, 128, 16), (torch.float16, FP8, 80, 64)]
RARE = [
    (torch.float32, torch.float32, 256, 8),
    (torch.float32, torch.float32, 80, 64),
    (BF16, BF16, 64, 8),
    (BF16, BF16, 112, 256),
    (BF16, BF16, 192, 128),
    (torch.float16, torch.float16, 96, 32),
    (torch.float16, torch.float16, 256, 16),
    (BF16, FP8, 128, 16),
]
SHAPES = [*EVERYDAY, *(pytest.param(shape, marks=pytest.mark.slow) for shape in RARE)]


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
    import os

    os.environ["XDG_CACHE_HOME"] = folder
    for number in range(20):
        path = build(Variant("blocks.cu", (("NUMBER", number),)), "sm_90", Slow())
        answers.put(path.stat().st_size)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headway" / "kernels"


@pytest.fixture
def compiler() -> Compiler:
    found, support = find_compiler()
    if found is None:
        pytest.skip(str(support))
    return found


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(str(part).removeprefix("torch.") for part in shape))
def test_every_kind_compiles(compiler: Compiler, shape: tuple[torch.dtype, torch.dtype, int, int], arch: str) -> None:
    for variant in (variant_of(*shape, arch), writer_variant(*shape)):
        assert variant.compile(arch, compiler).startswith(b"\x7fELF")


def test_what_moves_blocks_compiles(compiler: Compiler) -> None:
    assert Variant("blocks.cu").compile("sm_80", compiler).startswith(b"\x7fELF")


def test_what_does_not_compile_says_why(compiler: Compiler) -> None:
    constants = dict(Variant.of("cache.cu", BF16, BF16, 128, 16).constants)
    broken = Variant("cache.cu", tuple({**constants, "TYPE": "NOT_A_TYPE"}.items()))
    with pytest.raises(BackendError, match=r"NVRTC \d+\.\d+ does not compile cache\.cu:(.|\n)*NOT_A_TYPE"):
        broken.compile("sm_90", compiler)


def test_a_second_build_reads_the_first(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler, variant = Slow(), Variant("blocks.cu")
    with caplog.at_level(logging.WARNING, "headway"):
        first = build(variant, "sm_90", compiler)
        assert "compiled blocks.cu for sm_90 with slow" in caplog.text
        caplog.clear()
        assert build(variant, "sm_90", compiler) == first
        assert not caplog.text
    assert compiler.calls == 1
    assert list(own_cache.iterdir()) == [first]


def test_the_file_is_another_for_all_that_changes_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, compiler = Variant("blocks.cu"), Slow()
    paths = {compiled_path(variant, "sm_90", compiler), compiled_path(variant, "sm_80", compiler)}
    paths.add(compiled_path(Variant("blocks.cu", (("A", 1),)), "sm_90", compiler))
    other = Slow()
    other.version = "2"
    paths.add(compiled_path(variant, "sm_90", other))
    changed = tmp_path / "csrc"
    changed.mkdir()
    (changed / "blocks.cu").write_text("// changed")
    monkeypatch.setattr(kernels, "SOURCES", changed)
    paths.add(compiled_path(variant, "sm_90", compiler))
    assert len(paths) == 5


def test_processes_that_build_the_same_at_once_read_whole_files(own_cache: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_build_often, args=(str(tmp_path), answers)) for _ in range(2)]
    for process in processes:
        process.start()
    sizes = [answers.get(timeout=120) for _ in range(40)]
    for process in processes:
        process.join()
    assert set(sizes) == {1 << 20}
    assert len(list(own_cache.iterdir())) == 20, "nothing half-written stays behind"


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
