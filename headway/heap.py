"""The heap of this process: Python's garbage collector kept out of a generation, and freed memory given back to the system."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Final

KEEP: Final = "HEADWAY_KEEP_FREED_MEMORY"
"""Environment variable; 1: nothing is given back before the C library does so by itself."""

GIVE_BACK_INTERVAL: Final = 10.0
"""Seconds between two times while an engine works on a CPU."""


def freeze_heap() -> None:
    """Leave everything that is alive now out of later collections.

    A full collection walks all that imports have left, for 60 to 100 ms in the middle of a generation (vLLM's engine freezes its
    heap for the same reason). Objects are freed with their last holder as before. Only cycles among those alive now
    stay, until the next call looks for them: so a program that loads one model after the other keeps the remains of one at most.
    """
    gc.unfreeze()
    gc.collect()
    give_back()
    gc.freeze()
    _thaw_at_exit()


def give_back() -> None:
    """Have the C library return what is freed to the system, on Linux with glibc; elsewhere nothing happens.

    glibc keeps the freed pieces that lie between others: activations and compiled products of many sizes leave hundreds of MiB
    in its arenas, and the thread of the next engine begins another arena. Takes about 0.1 ms for each MiB that is returned.
    """
    trim = _malloc_trim()
    if trim is not None and os.environ.get(KEEP) != "1":
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    return found


@cache
def _thaw_at_exit() -> None:
    """Libraries that count their objects at exit report frozen ones as leaks."""
    atexit.register(gc.unfreeze)
