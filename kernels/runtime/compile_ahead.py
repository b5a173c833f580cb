"""Compilation of all kernels before an engine is ready, many at a time; launches would compile them one after the other."""

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
    """Return the context in which the kernels of a device are compiled together; None where nothing is compiled."""
    if device.type != "cuda":
        return None
    try:
        from triton.runtime import cache
    except ImportError:
        return compiled.compile_ahead
    # The first compilation, and the first look into the cache, wait for a hash of Triton's own library: it is begun here.
    key = getattr(cache, "triton_key", None)  # no part of Triton's interface
    if key is not None:
        Thread(target=key, name="triton-key", daemon=True).start()
    return compile_with_triton


@contextmanager
def compile_with_triton() -> Iterator[None]:
    """Compile as `core.contract.compiled.compile_ahead` does, and Triton's kernels (`Launcher`), too."""
    import triton

    with compiled.compile_ahead() as pool, triton.AsyncCompileMode(BuildLaunchers(pool), ignore_errors=True):
        yield


class BuildLaunchers(Executor):
    """Threads that compile a kernel and the launcher for it, which some releases of Triton leave to a C compiler at first launch.

    That takes a third of a second each. The launcher is kept on disk beside the kernel, where the first launch finds it.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    def submit(self, task: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Run a task in the pool, as `Executor.submit` does. task: returns a compiled kernel."""
        from triton.runtime import driver

        def compile_and_build() -> Any:
            kernel = task(*arguments, **options)
            with suppress(Exception):  # the launch will raise it
                driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return self._pool.submit(compile_and_build)
