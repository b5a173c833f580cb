"""Compiling, and keeping what was compiled."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from headway.backends.vllm_paged.decode import CSRC
from headway.core.contract.errors import BackendError
from headway.core.system import files as folders
from headway.kernels.runtime.nvrtc.compiler import Compiler, Variant
from headway.kernels.runtime.nvrtc.store import build, build_all, compiled_path


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
        answers.put((len(built.cubin), built.path is not None))


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
def test_processes_that_build_the_same_at_once_read_whole_files(own_cache: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_build_often, args=(str(tmp_path), answers)) for _ in range(2)]
    for process in processes:
        process.start()
    sizes = [answers.get(timeout=120) for _ in range(40)]
    for process in processes:
        process.join()
    assert set(sizes) == {(1 << 20, True)}
    assert len(list(own_cache.iterdir())) == 20, "nothing half-written stays behind"


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-100], lambda data: b"", lambda data: b"x" + data[1:]], ids=["cut", "empty", "bits"]
)
def test_a_damaged_file_is_compiled_again(kept_log: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]) -> None:
    compiler = Slow()
    first = build(BLOCKS, "sm_90", compiler)
    assert first.path is not None
    first.path.write_bytes(damage(first.path.read_bytes()))
    assert build(BLOCKS, "sm_90", compiler).cubin == first.cubin
    assert "is damaged and is compiled again" in kept_log.text
    assert build(BLOCKS, "sm_90", compiler).seconds == 0
    assert compiler.calls == 2


def test_a_folder_that_cannot_be_written_costs_a_compilation_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_log: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "file"))
    compiler = Slow()
    built = build(BLOCKS, "sm_90", compiler)
    again = build(BLOCKS, "sm_90", compiler)
    assert (len(built.cubin), built.path, again.path) == (1 << 20, None, None)
    assert compiler.calls == 2
    assert kept_log.text.count("cannot be written (Not a directory): every process compiles its kernels again") == 1


def test_a_full_disk_leaves_nothing_half_written(
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
