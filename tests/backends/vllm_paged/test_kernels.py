"""Compiling, and keeping what was compiled."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from headway.backends.vllm_paged import compiler as compilers
from headway.backends.vllm_paged import kernels
from headway.backends.vllm_paged.backend import VllmPagedAttention
from headway.backends.vllm_paged.compiler import Compiler, find_nvcc, find_nvrtc
from headway.backends.vllm_paged.decode import variant_of
from headway.backends.vllm_paged.kernels import SOURCES, Variant, build, compiled_path
from headway.backends.vllm_paged.writer import variant_of as writer_variant
from headway.core.contract.errors import BackendError

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = [
    (torch.float32, torch.float32, 256, 8),
    (torch.float32, torch.float32, 80, 64),
    (BF16, BF16, 64, 8),
    (BF16, BF16, 112, 256),
    (BF16, BF16, 128, 16),
    (BF16, BF16, 192, 128),
    (torch.float16, torch.float16, 96, 32),
    (torch.float16, torch.float16, 256, 16),
    (BF16, FP8, 128, 16),
    (torch.float16, FP8, 80, 64),
]


class Slow(Compiler):
    """Writes what a compiler would, and takes its time."""

    name, version = "slow", "1"

    def __init__(self, size: int = 1 << 20) -> None:
        self.size, self.calls = size, 0

    def compile(self, source: Path, options: Sequence[str]) -> bytes:
        self.calls += 1
        time.sleep(0.05)
        return bytes(self.size)


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


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(str(part).removeprefix("torch.") for part in shape))
def test_nvcc_compiles_every_kind(shape: tuple[torch.dtype, torch.dtype, int, int], arch: str) -> None:
    if shape[1] == FP8 and arch == "sm_80":
        pytest.skip("e4m3 conversions need compute capability 8.9")
    nvcc = find_nvcc()
    assert nvcc is not None
    for variant in (variant_of(*shape, arch), writer_variant(*shape), Variant("blocks.cu")):
        cubin = nvcc.compile(SOURCES / variant.source, variant.options(arch))
        assert cubin.startswith(b"\x7fELF")


@pytest.mark.skipif(find_nvrtc() is None, reason="needs NVRTC, which comes with a CUDA build of torch")
def test_nvrtc_compiles_them_too() -> None:
    nvrtc = find_nvrtc()
    assert nvrtc is not None
    for shape in SHAPES:
        for variant in (variant_of(*shape, "sm_90"), writer_variant(*shape)):
            assert nvrtc.compile(SOURCES / variant.source, variant.options("sm_90")).startswith(b"\x7fELF")


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_what_does_not_compile_says_why() -> None:
    nvcc = find_nvcc()
    assert nvcc is not None
    variant = Variant.of("cache.cu", BF16, BF16, 128, 16)
    with pytest.raises(BackendError, match=r"nvcc does not compile cache\.cu:(.|\n)*NOT_A_TYPE"):
        nvcc.compile(SOURCES / "cache.cu", [*variant.options("sm_90"), "-UTYPE", "-DTYPE=NOT_A_TYPE"])


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


def test_without_a_compiler_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "find_nvrtc", lambda: None)
    monkeypatch.setattr(compilers, "find_nvcc", lambda: None)
    support = VllmPagedAttention.available()
    assert "compiler: needs nvcc or NVRTC, got none (pip install" in str(support)
