"""Threads whose stacks have a size that this program chooses, not the system's limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stack_size(num_bytes: int) -> Iterator[None]:
    """Give the threads that are started inside of the block stacks of this many bytes, of which they occupy what they touch.

    Python keeps the size for the whole process: a thread that another thread starts meanwhile gets such a stack, too.
    """
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)
