"""Backends that compile kernels tell of each one here, and ask here whether to compile only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from weakref import WeakMethod

Listener = Callable[[str], None]
CompileAhead = Callable[[], AbstractContextManager[object]]
"""Makes a context such as `compile_ahead`."""

AHEAD: ContextVar[Executor | None] = ContextVar("headway_compiles_ahead", default=None)
"""Threads that compile what the launches of this context need, while the launches themselves start nothing; None: they run."""
_WORKERS = 16
"""Threads at most: compilers do most of their work outside Python's lock."""

_LISTENERS: list[WeakMethod[Listener]] = []
"""Of the process, as kernels are: one that is compiled for one engine serves all."""


@contextmanager
def compile_ahead() -> Iterator[Executor]:
    """Inside, launches of kernels that know of `AHEAD` start nothing; what they need is compiled by many threads, all at the end.

    Whatever runs inside computes with memory that no kernel has filled: its results are to be thrown away. A kernel that does not
    compile is left to the launch that needs it.
    """
    with ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1), "compile") as pool:
        token = AHEAD.set(pool)
        try:
            yield pool
        finally:
            AHEAD.reset(token)


def listen(listener: Listener) -> None:
    """Have a bound method called with the name of every kernel that is compiled from now on, as long as its object lives."""
    _LISTENERS[:] = [each for each in _LISTENERS if each() is not None]
    _LISTENERS.append(WeakMethod(listener))


def announce_compilation(name: str) -> None:
    """Tell that a kernel has been compiled or loaded, outside what Triton tells of itself. From any thread."""
    for each in list(_LISTENERS):
        listener = each()
        if listener is not None:
            listener(name)
