"""Parallel compilation of all kernels before an engine is ready, instead of one by one at their first launches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from threading import Thread
from typing import Any

import torch

from headway.core.contract import kernel as compiled
from headway.core.contract.kernel import CompileAhead
from headway.core.system.files import kernel_folders, one_process
from headway.kernels.runtime.compile_process import compile_elsewhere


def compile_ahead(device: torch.device) -> CompileAhead | None:
    """Return a context that compiles a device's kernels in parallel, or None if the device needs no compilation."""
    if device.type != "cuda":
        return None
    if find_spec("triton") is None:
        return compiled.compile_ahead

    def prepare() -> None:
        from triton.runtime import driver

        from headway.kernels.runtime.triton_cache import hash_triton

        with suppress(Exception):  # the first compilation raises the same error
            _ = driver.active
            hash_triton()

    Thread(target=prepare, name="triton-key", daemon=True).start()
    return compile_with_triton


@contextmanager
def compile_with_triton() -> Iterator[None]:
    """Compile ahead like `core.contract.kernel.compile_ahead`, including Triton kernels (`Launcher`)."""
    import triton

    class SharedMode(triton.AsyncCompileMode):  # type: ignore[misc]
        def submit(self, key: str, task: Callable[[], Any], *rest: Any) -> Any:
            given = (key, partial(compile_and_build, key, task), *rest)
            return super().submit(*given)

    with compiled.compile_ahead() as pool, SharedMode(pool, ignore_errors=True):
        yield


def compile_and_build(key: str, task: Callable[[], Any]) -> Any:
    """Return a compiled Triton kernel from the disk cache, or compile it with its launcher in one process, while others wait.

    Some releases of Triton compile the launcher with a C compiler at the kernel's first launch, which takes a third of a second
    per kernel. It is compiled earlier here and cached on disk next to the kernel, where the first launch finds it.

    key: all that the kernel is compiled from. task: function that returns the kernel from the cache, or compiles it.
    """
    from triton.runtime import driver

    with one_process(kernel_folders()[1] / hashlib.sha256(key.encode()).hexdigest()):
        compile_elsewhere(task)
        kernel = task()
        with suppress(Exception):  # the launch will raise the same error
            driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel
