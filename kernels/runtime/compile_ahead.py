"""Parallel compilation of all kernels before an engine is ready, instead of one by one at their first launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import torch

from headway.core.contract import kernel as compiled
from headway.core.contract.kernel import CompileAhead


def compile_ahead(device: torch.device) -> CompileAhead | None:
    """Return a context that compiles a device's kernels in parallel, or None if the device needs no compilation."""
    if device.type != "cuda":
        return None
    try:
        from triton.runtime import cache
    except ImportError:
        return compiled.compile_ahead
    # Triton's first compilation and first cache lookup wait for a hash of Triton's own library: start computing the hash here.
    key = getattr(cache, "triton_key", None)  # not part of Triton's public interface
    if key is not None:
        Thread(target=key, name="triton-key", daemon=True).start()
    return compile_with_triton


@contextmanager
def compile_with_triton() -> Iterator[None]:
    """Compile ahead like `core.contract.kernel.compile_ahead`, including Triton kernels (`Launcher`)."""
    import triton

    with compiled.compile_ahead() as pool, triton.AsyncCompileMode(BuildLaunchers(pool), ignore_errors=True):
        yield


class BuildLaunchers(Executor):
    """Threads that compile a Triton kernel together with its launcher.

    Some releases of Triton compile the launcher with a C compiler at the kernel's first launch, which takes a third of a second
    per kernel. These threads compile it earlier and cache it on disk next to the kernel, where the first launch finds it.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    def submit(self, task: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Run a task in the thread pool. task: function that returns a compiled kernel."""
        from triton.runtime import driver

        def compile_and_build() -> Any:
            kernel = task(*arguments, **options)
            with suppress(Exception):  # the launch will raise the same error
                driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return self._pool.submit(compile_and_build)
