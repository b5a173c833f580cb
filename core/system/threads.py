"""Threads whose stacks have a size that this program chooses, not the system's limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stack_size(num_bytes: int) -> Iterator[None]:
    """Give threads started in this block stacks of this many bytes; the size is process-wide meanwhile."""
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)
