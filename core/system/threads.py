"""Threads with a chosen stack size instead of the system's default."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stack_size(num_bytes: int) -> Iterator[None]:
    """Give threads started in this block stacks of this many bytes. The size is process-wide during the block."""
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)
