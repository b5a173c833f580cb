"""Compiling Triton's kernels before anything runs, many at a time: what launches would wait for, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import triton

from headway.core.contract import compiled


@contextmanager
def compile_ahead() -> Iterator[None]:
    """As `core.contract.compiled.compile_ahead`, for launches of Triton's kernels (`Launcher`), too."""
    with compiled.compile_ahead() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        yield
