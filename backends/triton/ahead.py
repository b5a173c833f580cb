"""Compiling Triton's kernels before anything runs, many at a time: what launches would wait for, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import triton
from triton.runtime import cache, driver

from headway.core.contract import compiled


def prepare() -> None:
    """Begin what the first compilation, or the first look into the cache, would wait for: Triton hashes its own library once."""
    key = getattr(cache, "triton_key", None)  # no part of Triton's interface
    if key is not None:
        Thread(target=key, name="triton-key", daemon=True).start()


@contextmanager
def compile_ahead() -> Iterator[None]:
    """As `core.contract.compiled.compile_ahead`, for launches of Triton's kernels (`Launcher`), too."""
    with compiled.compile_ahead() as pool, triton.AsyncCompileMode(_WithLaunchers(pool), ignore_errors=True):
        yield


class _WithLaunchers(Executor):
    """Threads that compile a kernel and what launches it: some releases of Triton leave that to a C compiler at the first launch.

    That takes a third of a second each. What it makes is kept on disk beside the kernels, where the launch finds it.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    def submit(self, task: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """See Executor. task: gives a compiled kernel."""

        def whole() -> Any:
            kernel = task(*arguments, **options)
            with suppress(Exception):  # the launch will raise it
                driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return self._pool.submit(whole)
