"""Triton's files in Headway's folder: moved, damaged, read-only, full."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.cache import get_cache_manager

from headway.core.system import files
from headway.core.system import files as folders
from headway.kernels.runtime.triton_cache import KernelCache, use_kernel_cache

KEY = "ab" * 32
FILES = {"kernel.cubin": b"\x7fELF code", "kernel.json": b"{}"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(KernelCache, "spare_folders", ())
    folders.warn_unwritable.cache_clear()
    caplog.set_level(logging.WARNING, "headway")
    yield tmp_path / "cache" / "triton"
    for spare in KernelCache.spare_folders:
        shutil.rmtree(spare, ignore_errors=True)


def compiled() -> dict[str, str]:
    """As triton.compile leaves a kernel."""
    cache = get_cache_manager(KEY)
    group = {name: cache.put(content, name) for name, content in FILES.items()}
    cache.put_group("kernel.json", group)
    return group


def found() -> dict[str, bytes] | None:
    """As triton.compile looks for it."""
    group = get_cache_manager(KEY).get_group("kernel.json")
    return None if group is None else {name: Path(path).read_bytes() for name, path in group.items()}


def test_triton_uses_it_and_a_folder_that_the_user_names_counts(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(get_cache_manager(KEY)) is KernelCache
    assert found() is None
    paths = compiled()
    assert all(Path(path).is_relative_to(own_folder) for path in paths.values())
    assert found() == FILES
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/else")
    assert folders.kernel_folders()[1] == Path("/somewhere/else")


def test_somebody_elses_manager_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(KernelCache):
        pass

    monkeypatch.setattr(knobs.cache, "manager_class", Mine)
    use_kernel_cache()
    assert knobs.cache.manager_class is Mine


def test_a_copy_of_the_folder_serves_elsewhere(own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    shutil.copytree(own_folder, tmp_path / "other" / "triton")
    shutil.rmtree(own_folder)
    assert found() is None
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "other"))
    assert found() == FILES


@pytest.mark.parametrize("name", [*FILES, "__grp__kernel.json"])
@pytest.mark.parametrize("content", [b"", b"{}x", None], ids=["empty", "other", "gone"])
def test_what_is_damaged_counts_as_missing(name: str, content: bytes | None) -> None:
    path = Path(compiled()["kernel.json"]).with_name(name)
    path.unlink() if content is None else path.write_bytes(content)
    assert found() is None
    compiled()
    assert found() == FILES


def test_a_list_of_tritons_own_making_counts_as_missing() -> None:
    path = Path(compiled()["kernel.json"])
    path.with_name("__grp__kernel.json").write_text(json.dumps({"child_paths": {"kernel.json": str(path)}}))
    assert found() is None


def test_a_folder_that_cannot_be_written_is_replaced_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "file"))
    paths = compiled()
    assert found() == FILES
    assert not any(Path(path).is_relative_to(tmp_path) for path in paths.values())
    assert caplog.text.count("cannot be written (Not a directory): every process compiles its kernels again") == 1


def test_a_read_only_folder_is_read(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()

    def refuse(path: Path, content: bytes) -> None:
        if path.is_relative_to(own_folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        files.write_whole(path, content)

    monkeypatch.setattr("headway.kernels.runtime.triton_cache.write_whole", refuse)
    assert found() == FILES
    other = get_cache_manager("cd" * 32)
    assert Path(other.put(b"more", "kernel.cubin")).read_bytes() == b"more"


def test_a_full_disk_is_worked_around_and_leaves_nothing(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace = os.replace

    def full(path: Path, target: Path) -> None:
        if path.is_relative_to(own_folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(path, target)

    monkeypatch.setattr(os, "replace", full)
    compiled()
    assert found() == FILES
    assert "No space left on device" in caplog.text
    assert [path for path in own_folder.rglob("*") if path.is_file()] == []


def test_without_any_place_to_write_the_error_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, f"no room for {path.name}")

    monkeypatch.setattr("headway.kernels.runtime.triton_cache.write_whole", full)
    with pytest.raises(OSError, match=r"no room for kernel\.cubin"):
        compiled()
