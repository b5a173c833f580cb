"""Kernels that the compile process has compiled are found in the cache on disk, and its failures only cost time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import _async_compile

from absent_gpu import absent_gpu
from headway.kernels.runtime.compile_process import compile_elsewhere, compile_process
from headway.kernels.runtime.triton_cache import use_kernel_cache
from headway.kernels.runtime.triton_launch import INTERPRETED, hash_helpers_first
from launched_kernels import ATTENTION, attend

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

HALF = tl.constexpr(0.5)


@triton.jit
def halved(x):
    return x * HALF


@triton.jit
def store_half(out_ptr, x):
    tl.store(out_ptr, halved(x))


def tasks_of(launch: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Functions with which Triton would compile the kernels of a launch."""
    tasks: list[Callable[[], Any]] = []
    nothing = SimpleNamespace(metadata=SimpleNamespace(shared=0))

    def submit(task: Callable[[], Any], *_: object) -> Future[Any]:
        tasks.append(task)
        done: Future[Any] = Future()
        done.set_result(nothing)
        return done

    monkeypatch.setattr(_async_compile.FutureKernel, "metadata", nothing.metadata, raising=False)
    with triton.AsyncCompileMode(SimpleNamespace(submit=submit), ignore_errors=True):
        launch()
    return tasks


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """A running compile process. "cuda" is a Hopper GPU that is not there, and the cache on disk is empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    use_kernel_cache()
    before = set(psutil.Process().children())
    with absent_gpu((9, 0)), compile_process("cuda"):
        (child,) = set(psutil.Process().children()) - before
        yield child
    assert not child.is_running()


def hits(tasks: list[Callable[[], Any]], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether each task finds its kernel in the cache."""
    found: list[bool] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda cache_hit, **_: found.append(cache_hit))
    for task in tasks:
        task()
    return found


@pytest.mark.slow
def test_its_kernels_are_found_in_the_cache(
    process: psutil.Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = tasks_of(lambda: attend(*ATTENTION["head 128"]), monkeypatch)[:2]
    tasks += tasks_of(lambda: attend(*ATTENTION["head 128, rule"]), monkeypatch)[:2]
    until = time.monotonic() + 60
    while not list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")) and time.monotonic() < until:
        compile_elsewhere(tasks[0])  # does nothing until the process is ready
        time.sleep(0.1)
    for task in tasks[1:]:
        compile_elsewhere(task)
    assert hits(tasks, monkeypatch) == [True] * len(tasks)
    compile_elsewhere(lambda: None)  # has none of the parts that Triton's tasks have
    process.send_signal(signal.SIGKILL)
    while "the process was killed by SIGKILL" not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    (late,) = tasks_of(lambda: store_half.warmup(torch.empty(1, device="cuda"), 1.0, grid=(1,)), monkeypatch)
    compile_elsewhere(late)
    assert hits([late], monkeypatch) == [False]
    assert "the compile process ended: the process was killed by SIGKILL; this process compiles instead" in caplog.text


def test_a_hash_covers_the_constants_of_called_functions() -> None:
    again = triton.jit(store_half.fn)
    hash_helpers_first(again)
    assert [value for value, _ in again.used_global_vals.values()] == [HALF]
    assert again.cache_key == again.hash
