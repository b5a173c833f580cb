"""`headway build`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.kernels.runtime.nvrtc.compiler import find_compiler
from sandbox import Result

Headway = Callable[..., Result]


@pytest.mark.slow
def test_build_compiles_ahead_of_time_once(headway: Headway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not find_compiler()[1]:
        pytest.skip("needs cuda-core with NVRTC")
    monkeypatch.delenv("HEADWAY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("build", "vllm_paged", "--arch", "sm_90", "--dtype", "bfloat16", "--head-dim", "64", "--block-size", "32")
    first = headway(*arguments)
    assert first.code == 0, first
    assert "vllm_paged: 3 kernels for sm_90" in first.out
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "headway" / "kernels").iterdir()}
    assert len(kept) == 3
    assert headway(*arguments).code == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sdpa",), "backend: needs one with kernels to compile ahead of time: vllm_paged, got 'sdpa'"),
        (("vllm_paged", "--dtype", "int8"), "--dtype: needs one of float32"),
        (("vllm_paged", "--kv-dtype", "fp4"), "--kv-dtype: needs auto or one of fp8_e4m3, got 'fp4'"),
        (("vllm_paged", "--arch", "90"), "--arch: needs an architecture such as sm_90, got '90'"),
    ],
    ids=str,
)
def test_build_rejects_bad_arguments(headway: Headway, arguments: tuple[str, ...], message: str) -> None:
    answer = headway("build", *arguments)
    assert answer.code == 2
    assert message in re.sub(r"\s+", " ", answer.err)


def test_without_a_compiler_it_says_what_to_install(headway: Headway, monkeypatch: pytest.MonkeyPatch) -> None:
    find_compiler.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    answer = headway("build", "vllm_paged", "--arch", "sm_90")
    find_compiler.cache_clear()
    assert answer.code == 2
    text = re.sub(r"\s+", " ", answer.err)
    assert "cuda.core.LaunchConfig: needs to be importable, got ModuleNotFoundError" in text
    assert 'pip install "cuda-core[cu13]>=1.2"' in text or 'pip install "cuda-core[cu12]>=1.2"' in text
