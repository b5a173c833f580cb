"""Threads that compile kernels ahead build what launches them, too."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from triton import knobs
from triton.runtime import driver, jit
from triton.runtime.cache import get_cache_manager

from headway.backends.triton import decode as module
from headway.backends.triton.configs import architecture
from headway.backends.triton.decode import Decode
from headway.backends.triton.layer import KernelSetup, Layer
from headway.core.contract.kernel import AHEAD
from headway.core.contract.layout import NHD, LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec
from headway.core.system import files
from headway.kernels.runtime.compile_ahead import compile_and_build, compile_with_triton
from headway.kernels.runtime.triton_cache import KernelCache, use_kernel_cache
from headway.kernels.runtime.triton_launch import Compiled, Launcher, Workspace, specialised

pytest.importorskip("triton")


def test_a_kernel_and_its_launcher_are_built_together(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    kernel = SimpleNamespace(src="source", metadata="metadata")
    monkeypatch.setattr(driver, "_active", SimpleNamespace(launcher_cls=lambda *parts: built.append(parts)), raising=False)
    assert compile_and_build("key", lambda: kernel) is kernel
    assert built == [("source", "metadata")]


def test_a_launcher_that_cannot_be_built_is_left_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*parts: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(driver, "_active", SimpleNamespace(launcher_cls=fail), raising=False)
    assert compile_and_build("key", lambda: SimpleNamespace(src=1, metadata=2)).src == 1


def test_a_kernel_that_does_not_compile_fails_as_it_would_alone() -> None:
    def fail() -> None:
        raise ValueError("does not compile")

    with pytest.raises(ValueError, match="does not compile"):
        compile_and_build("key", fail)


def test_inside_launches_start_nothing_and_each_key_is_compiled_once() -> None:
    compiled: list[dict[str, Any]] = []

    class Kernel:
        arg_names = ("x", "PDL")

        def warmup(self, *arguments: Any, grid: Any, **options: Any) -> None:
            compiled.append({"arguments": arguments, **options})

        def __getitem__(self, grid: Any) -> Any:
            raise AssertionError("launched")

    launch = Launcher(Kernel())
    with compile_with_triton():
        assert AHEAD.get() is not None
        for key in ("a", "a", "b"):
            launch(key, (1, 1, 1), (5,), {"PDL": True}, num_warps=4)
        assert launch.bind("b", (1, 1, 1), (5,), (5,), (), {"PDL": True}, num_warps=4) is None
    assert AHEAD.get() is None
    options = {"num_warps": 4, "launch_pdl": True, "enable_fp_fusion": True}
    assert compiled == [{"arguments": (5,), "PDL": True, **options}] * 2
    with pytest.raises(AssertionError, match="launched"):
        launch("a", (1, 1, 1), (5,), {"PDL": True}, num_warps=4)


SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, dtype=torch.bfloat16)


class Kernel:
    """In place of a kernel of Triton's: notes with what it would be compiled."""

    arg_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.compiled.append(arguments)


def test_a_decode_over_keys_that_grow_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Compiled, "__init__", lambda *_: None)
    monkeypatch.setattr(Compiled, "__call__", lambda _, grid, *arguments: launched.append(arguments))
    monkeypatch.setattr(module, "launches_early", lambda _: True)
    decode = Decode(
        KernelSetup(
            spec=SPEC,
            layer=Layer.of(SPEC),
            layout=NHD,
            block_size=16,
            arch=architecture((9, 0)),
            multiprocessors=132,
            workspace=Workspace(SPEC.device),
        ),
        None,
    )
    kernel, cut = Kernel(), Kernel()
    decode.launch, decode.launch_split = Launcher(kernel), Launcher(cut)
    q = torch.empty(1, 4, 64, dtype=SPEC.dtype)
    for length in range(1024, 1064):
        row = torch.empty(1, 2, length, 64, dtype=SPEC.dtype)
        blocks = row.as_strided((length - 15, 16, 2, 64), (64, 64, length * 64, 1))
        cache = LayerCache.wrap({"key": blocks, "value": blocks}, NHD, SPEC)
        tables = numpy.arange(0, length, 16, dtype=numpy.int32)[None]
        steps = AttentionMetadata.build_groups([1], [length - 1], [tables], 16, "cpu", 1, [length - 15])  # the last block is open
        plan = decode.plan(steps[0])
        for _ in range(2):
            decode.run(q, cache, plan, torch.empty_like(q))
        if launched:
            assert length * 64 in launched[-1], "the strides of this step"
    assert len(kernel.compiled) == 1
    assert len(launched) > 2 * 39


def test_integers_of_one_kind_are_compiled_for_alike() -> None:
    backend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend
    kinds: dict[object, set[object]] = {}
    for number in (0, 1, 2, 8, 15, 16, 17, 64, 131840, 131841, 2**31 - 1, 2**31, 2**31 + 1, 2**35, -16, -1):
        kinds.setdefault(specialised(number), set()).add(jit.native_specialize_impl(backend, number, False, True, True))
    assert all(len(found) == 1 for found in kinds.values()), kinds


KEY = "ab" * 32
FILES = {"kernel.cubin": b"\x7fELF code", "kernel.json": b"{}"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(KernelCache, "spare_folders", ())
    files.warn_unwritable.cache_clear()
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
    assert files.kernel_folders()[1] == Path("/somewhere/else")


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


def test_an_unwritable_folder_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "file"))
    paths = compiled()
    assert found() == FILES
    assert not any(Path(path).is_relative_to(tmp_path) for path in paths.values())
    assert caplog.text.count("cannot be written (Not a directory): every process recompiles its kernels") == 1


def test_a_read_only_folder_is_read(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()

    def refuse(path: Path, content: bytes) -> None:
        if path.is_relative_to(own_folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        files.write_whole(path, content)

    monkeypatch.setattr("headway.kernels.runtime.triton_cache.write_whole", refuse)
    assert found() == FILES
    assert Path(get_cache_manager("cd" * 32).put(b"more", "kernel.cubin")).read_bytes() == b"more"


def test_a_full_disk_is_worked_around(
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
