"""Finding vLLM's library of products: where it is looked for, the child that tries it, and what its answers become."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fake_vllm_library import RELEASES, FakeVllmLibrary
from headway.core.contract.support import YES
from headway.kernels.runtime import compiled_library, vllm_library
from headway.kernels.runtime.vllm_library import INT4, SEARCH, bind, find_library


@pytest.fixture(autouse=True)
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is remembered, and torch has none of the operators; there seems to be a GPU."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(SEARCH.variable, raising=False)
    monkeypatch.setattr(vllm_library, "NAMESPACE", "nowhere")
    monkeypatch.setattr(vllm_library, "has_gpu", lambda: YES)
    find_library.cache_clear()
    yield
    find_library.cache_clear()


def place(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A vLLM of nothing but its library, whose import would fail."""
    path = folder / "vllm" / "_C_stable_libtorch.abi3.so"
    path.parent.mkdir()
    path.write_bytes(b"no library")
    (path.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(folder))
    return path


def test_it_is_found_without_an_import_tried_elsewhere_and_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, fake, loaded = place(monkeypatch, tmp_path), FakeVllmLibrary("0.33"), []
    commands: list[list[str]] = []

    def answer(command: list[str]) -> dict[str, str]:
        commands.append(command)
        return {"namespace": "_C"}

    def load(name: str) -> None:
        loaded.append(name)
        monkeypatch.setattr(vllm_library, "NAMESPACE", fake.namespace)

    monkeypatch.setattr(compiled_library, "ask", answer)
    monkeypatch.setattr(torch.ops, "load_library", load)
    assert find_library() == YES
    assert loaded == [str(path)]
    assert commands[0][-2:] == ["headway.kernels.runtime.vllm_library", str(path)]
    operators, support = bind("marlin_gemm", "gptq_marlin_repack")
    assert support
    assert operators["marlin_gemm"].place["b_zeros"] == 7
    assert "perm" not in operators["gptq_marlin_repack"].place
    find_library.cache_clear()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded twice"))
    assert find_library() == YES, "what torch has is used as it is, whoever loaded it"


def test_a_library_that_does_not_work_and_none_at_all_are_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled_library.LibrarySearch, "candidates", lambda search: iter(()))
    assert str(find_library()) == (
        "no: vLLM's library: needs a compiled library that holds it, got none "
        "(install vllm, or set HEADWAY_VLLM_LIBRARY to a compiled library)"
    )
    monkeypatch.undo()
    monkeypatch.setattr(vllm_library, "NAMESPACE", "nowhere")
    monkeypatch.setattr(vllm_library, "has_gpu", lambda: YES)
    monkeypatch.setattr(compiled_library, "ask", lambda command: {"error": "crashes the process that loads it"})
    path = place(monkeypatch, tmp_path)
    find_library.cache_clear()
    (reason,) = bind("marlin_gemm")[1].reasons
    assert reason.what == "vLLM's library of vllm"
    assert reason.got == f"crashes the process that loads it ({path})"


def test_the_child_says_what_is_wrong_with_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "own.so"
    path.write_bytes(b"no library")
    assert vllm_library.examine(str(path))["error"].startswith("does not load: ")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    assert "registers no operator" in vllm_library.examine(str(path))["error"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_child_calls_what_it_loads(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    fake, trial = FakeVllmLibrary(release), vllm_library.trial
    monkeypatch.setattr(vllm_library, "NAMESPACE", fake.namespace)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(vllm_library, "trial", lambda device: trial(torch.device("cpu")))
    assert vllm_library.examine("/opt/own.so") == {"namespace": fake.namespace}
    monkeypatch.setattr(vllm_library, "INT4_LESS_8", INT4)
    assert vllm_library.examine("/opt/own.so")["error"].startswith("computes something else")
