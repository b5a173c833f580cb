"""Compiling kernels before anything runs, many at a time: what a later launch would wait for, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import triton

COMPILES_ONLY: ContextVar[bool] = ContextVar("headway_compiles_only", default=False)
"""Whether launches of this thread start no kernel and only see to it that it is compiled."""
_WORKERS = 16
"""Threads at most: the passes and the assembler run outside Python's lock, the frontend within it."""


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Inside, every launch of our kernels (`Launcher`) starts nothing and hands what is not compiled yet to threads.

    At the end all is compiled, or loaded from Triton's cache on disk. Whatever runs inside computes with memory that no kernel
    has filled: its results are to be thrown away. A kernel that does not compile is left to the launch that needs it.
    """
    token = COMPILES_ONLY.set(True)
    try:
        with (
            ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1), "compile") as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True),
        ):
            yield
    finally:
        COMPILES_ONLY.reset(token)
