"""Which compiler is found, and why none is."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest
import torch

from headway.backends.vllm_paged.backend import VllmPagedAttention
from headway.kernels.runtime.nvrtc.compiler import Compiler, find_compiler


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
