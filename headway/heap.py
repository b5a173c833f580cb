"""Keeping Python's garbage collector out of a generation."""

from __future__ import annotations

import atexit
import gc
from functools import cache


def freeze_heap() -> None:
    """Leave everything that is alive now out of later collections.

    A full collection walks all that imports have left, for 60 to 100 ms in the middle of a generation (vLLM's engine freezes its
    heap for the same reason). Objects are freed with their last holder as before; only cycles among those alive now stay, and an
    LLM holds none.
    """
    gc.collect()
    gc.freeze()
    _thaw_at_exit()


@cache
def _thaw_at_exit() -> None:
    """Libraries that count their objects at exit report frozen ones as leaks."""
    atexit.register(gc.unfreeze)
