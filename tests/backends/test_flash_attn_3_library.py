"""Finding FlashAttention 3: where it is looked for, the child that tries it, and what its answers become."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fake_flash_attn_3 import FlashAttn3
from headway.backends import flash_attn_3 as child
from headway.backends import flash_attn_3 as library
from headway.backends.flash_attn_3 import SEARCH, Operators, registered
from headway.core.contract.support import YES, Support
from headway.kernels.runtime import compiled_library
from headway.kernels.runtime.compiled_library import LibraryCandidate, LibrarySearch, ask
from headway.registry import Registry

VARIABLE = SEARCH.variable


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    library.find_library.cache_clear()
    yield
    library.find_library.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "has_gpu", lambda: YES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def answers(monkeypatch: pytest.MonkeyPatch, *found: dict[str, str]) -> list[list[str]]:
    """Let the child say these, one after another; returns the commands it was started with."""
    commands: list[list[str]] = []
    rest = list(found)

    def answer(command: list[str]) -> dict[str, str]:
        commands.append(command)
        return rest.pop(0)

    monkeypatch.setattr(compiled_library, "ask", answer)
    return commands


def place(monkeypatch: pytest.MonkeyPatch, folder: Path, *files: str) -> list[Path]:
    """Packages that hold nothing but a compiled library each, installed before all others."""
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no library")
        (folder / file.split("/")[0] / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(folder))
    return [folder / file for file in files]


def test_homes_are_found_without_an_import_the_preferred_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = (
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
        "flash_attn_3/_C.abi3.so",
        "sgl_kernel/sm90/flash_ops.abi3.so",
        "sgl_kernel/sm90/common_ops.abi3.so",
    )
    vllm, upstream, sgl, _ = place(monkeypatch, tmp_path, *files)
    assert list(SEARCH.candidates()) == [
        LibraryCandidate("flash-attn-3", upstream),
        LibraryCandidate("vllm", vllm),
        LibraryCandidate("sgl-kernel", sgl),
    ]
    monkeypatch.setenv(VARIABLE, "/opt/own.so")
    assert list(SEARCH.candidates()) == [LibraryCandidate(VARIABLE, Path("/opt/own.so"))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_no_process_is_started(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:
    monkeypatch.setenv(VARIABLE, __file__)
    commands = answers(monkeypatch)
    assert [reason.what for reason in registry.backend("flash_attn_3").available().reasons] == ["device"]
    assert commands == []


def test_another_generation_of_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert str(library.find_library()[1]) == "no: compute capability: needs 9.x (Hopper), got 10.0"


def test_where_nothing_is_found_the_places_are_named(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    monkeypatch.setattr(LibrarySearch, "candidates", lambda search: [])
    found, support = library.find_library()
    assert found is None
    assert str(support) == (
        "no: FlashAttention 3: needs a library that holds it, got none "
        f"(install flash-attn-3, vllm, sgl-kernel, or set {VARIABLE} to a compiled library)"
    )


def test_the_first_that_works_serves_and_is_kept(monkeypatch: pytest.MonkeyPatch, hopper: None, tmp_path: Path) -> None:
    fake = FlashAttn3()
    broken, works = place(monkeypatch, tmp_path, "flash_attn_3/_C.so", "vllm/vllm_flash_attn/_vllm_fa3_C.so")
    commands = answers(monkeypatch, {"error": "does not load"}, {"namespace": fake.namespace}, {"error": "does not load"})
    found, support = library.find_library()
    assert support == YES
    assert (found.home, found.path, found.operators.forward.call.namespace) == ("vllm", works, fake.namespace)
    assert [command[-1] for command in commands] == [str(broken), str(works)]
    library.find_library.cache_clear()  # as another process would
    assert library.find_library()[0] is not None
    assert [command[-1] for command in commands] == [str(broken), str(works), str(broken)]
    works.write_bytes(b"another build")
    library.find_library.cache_clear()
    answers(monkeypatch, {"error": "does not load"}, {"error": "crashes"})
    refused = library.find_library()[1]
    assert [reason.what for reason in refused.reasons] == ["FlashAttention 3 of flash-attn-3", "FlashAttention 3 of vllm"]
    assert f"crashes ({works})" in refused.reasons[1].got


def test_an_unwritable_folder_costs_time(
    monkeypatch: pytest.MonkeyPatch, hopper: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv(VARIABLE, __file__)
    fake = FlashAttn3()
    commands = answers(monkeypatch, {"namespace": fake.namespace}, {"namespace": fake.namespace})
    for _ in range(2):
        library.find_library.cache_clear()
        assert library.find_library()[0] is not None
    assert len(commands) == 2
    assert "tested at every start" in caplog.text


def test_a_broken_file_of_answers_is_no_answer(monkeypatch: pytest.MonkeyPatch, hopper: None, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "flash_attn_3.json").write_text("[1, 2")
    monkeypatch.setenv(VARIABLE, __file__)
    fake = FlashAttn3()
    assert len(answers(monkeypatch, {"namespace": fake.namespace})) == 0
    assert library.find_library()[0] is not None
    assert list(json.loads((tmp_path / "cache" / "flash_attn_3.json").read_text()).values()) == [fake.namespace]


def test_a_path_that_is_not_there(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere/own.so")
    (reason,) = library.find_library()[1].reasons
    assert reason.got == "No such file or directory (/nowhere/own.so)"


def test_a_library_that_loads_in_the_child_alone_is_refused(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    monkeypatch.setenv(VARIABLE, __file__)
    answers(monkeypatch, {"namespace": "never_registered"})
    refused: Support = library.find_library()[1]
    assert "to load" in str(refused)


# The child.


def test_a_child_that_crashes_is_a_reason() -> None:
    found = ask([sys.executable, "-c", "import os, sys; print('undefined symbol', file=sys.stderr); os.abort()"])
    assert found == {
        "error": "crashes the process that loads it (was killed by SIGABRT: undefined symbol); it was built for another torch?"
    }
    assert "exited with code 3" in ask([sys.executable, "-c", "raise SystemExit(3)"])["error"]
    assert "cannot be tried" in ask(["/nowhere/python"])["error"]


def test_a_child_that_does_not_answer_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_library, "SECONDS", 0.2)
    assert ask([sys.executable, "-c", "import time; time.sleep(60)"]) == {"error": "did not answer within 0.2 s"}


@pytest.mark.slow
def test_the_child_says_why_a_file_does_not_load(tmp_path: Path) -> None:
    path = tmp_path / "own.so"
    path.write_bytes(b"no library")
    found = ask([sys.executable, "-P", "-m", SEARCH.child, str(path)])
    assert list(found) == ["error"]
    assert found["error"].startswith("does not load: ")
    assert "file too short" in found["error"] or "invalid ELF header" in found["error"]


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> list[FlashAttn3]:
    """Loading a library registers a stand-in's operators, and the trial runs on the CPU."""
    made: list[FlashAttn3] = []
    monkeypatch.setattr(torch.ops, "load_library", lambda path: made.append(FlashAttn3(os.path.basename(path))))
    trial = child.trial
    monkeypatch.setattr(child, "trial", lambda operators, device: trial(operators, torch.device("cpu")))
    return made


@pytest.mark.parametrize("home", ["vllm", "upstream", "sgl"])
def test_the_child_calls_what_it_loads(loading: list[FlashAttn3], home: str) -> None:
    assert child.examine(f"/opt/{home}") == {"namespace": loading[0].namespace}
    assert loading[0].names == ["fwd"]


def test_the_child_refuses_wrong_numbers_and_errors(loading: list[FlashAttn3], monkeypatch: pytest.MonkeyPatch) -> None:
    right = FlashAttn3._fwd

    def wrong(self: FlashAttn3, given: dict[str, object]) -> list[torch.Tensor]:
        result = right(self, given)
        result[0].mul_(1.1)
        return result

    monkeypatch.setattr(FlashAttn3, "_fwd", wrong)
    assert child.examine("/opt/vllm")["error"].startswith("computes something else: relative error 0.1")

    def failing(self: FlashAttn3, given: dict[str, object]) -> list[torch.Tensor]:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(FlashAttn3, "_fwd", failing)
    assert child.examine("/opt/vllm") == {"error": "no kernel image is available"}


def test_the_child_refuses_a_library_of_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    assert "reads a page table" in child.examine("/opt/other.so")["error"]


def test_namespaces_are_told_by_their_operator() -> None:
    before = frozenset(registered())
    fake = FlashAttn3()
    assert registered(before) == [fake.namespace]
    assert Operators.of(fake.namespace).sinks
