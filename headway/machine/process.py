"""Threads, memory and Ctrl-C of this process: a thread per free core, no garbage collection in a generation."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import current_thread, main_thread
from types import FrameType
from typing import Final

from headway.core.contract.errors import ConfigError

log = logging.getLogger("headway")

SWITCH_INTERVAL: Final = 0.0005
"""Seconds of sys.setswitchinterval where a thread steps an engine; Python's own 5 ms are longer than a step."""
_SAMPLE_SECONDS = 0.1
_BUSY_PERCENT = 50.0  # Load of a core above which it is not free: two torch threads on one core are several times slower


def free_cores() -> int:
    """Count the cores that this process may use and no other keeps busy, measured over a tenth of a second; at least 1."""
    import psutil

    allowed: Iterable[int] = (
        psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else range(psutil.cpu_count() or 1)
    )
    loads: list[float] = psutil.cpu_percent(interval=_SAMPLE_SECONDS, percpu=True)
    return max(1, sum(loads[core] < _BUSY_PERCENT for core in allowed if core < len(loads)))


def set_threads(num_threads: int | None = None, num_ranks: int = 1) -> int:
    """Set and return torch's thread count: `num_threads`, else $OMP_NUM_THREADS, else free cores. num_ranks: share it evenly."""
    import torch  # here: the process of a rank imports this module before torch

    if num_threads is None and os.environ.get("OMP_NUM_THREADS"):
        num_threads = int(torch.get_num_threads())
    if num_threads is not None and num_threads < 1:
        raise ConfigError("num_threads", "a whole number of at least 1", num_threads)
    count = num_threads if num_threads is not None else min(free_cores(), int(torch.get_num_threads()))
    count = max(1, count // num_ranks)
    torch.set_num_threads(count)
    return count


KEEP: Final = "HEADWAY_KEEP_FREED_MEMORY"
"""Environment variable; 1: freed memory is left to the C library."""

GIVE_BACK_INTERVAL: Final = 10.0
"""Seconds between two calls of `give_back` while an engine works on a CPU."""


def freeze_heap() -> None:
    """Exclude every object that is alive now from later garbage collections.

    A full collection walks all objects that imports have made, for 60 to 100 ms in the middle of a generation (vLLM's engine
    freezes its heap for the same reason). Objects are still freed with their last reference. Only cycles among those alive now
    stay until the next call, which collects first: a program that loads one model after the other keeps the remains of one.
    """
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
    give_back()
    gc.freeze()
    _thaw_at_exit()


def give_back() -> None:
    """Have the C library return freed memory to the system, on Linux with glibc; elsewhere nothing happens.

    glibc keeps freed pieces that lie between others: activations and compiled products of many sizes leave hundreds of MiB
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
    """Unfreeze at exit where Triton was imported: nanobind counts its objects then, and reports frozen ones as leaks."""

    def thaw() -> None:
        if "triton" in sys.modules:
            gc.unfreeze()

    atexit.register(thaw)


def collect_seldom() -> None:
    """Have young objects collected after each 100,000 new ones, not after each 700: a start makes a million that stay."""
    gc.set_threshold(100_000, 20, 50)


VARIABLES: Final = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Environment variables for the size of torch's cache before oneDNN, one for each thread, and of oneDNN's own; default: 1,024."""

CAPACITY: Final = 256
"""Compiled products of matrices that each cache keeps. One is some 200 KiB of code, for one number of rows and one weight's
shape: 256 serve a decoder's four or five shapes at 50 numbers of rows."""


def bound_kernel_caches() -> None:
    """Have torch and oneDNN keep at most CAPACITY compiled products, unless the environment says how many.

    One is compiled for each number of rows that a step has, so with 1,024 in each of two caches resident memory grows by
    hundreds of MiB in the first minutes (docs/reliability.md has figures). A product that was dropped is compiled again in less
    than a millisecond. Both libraries read their variable at their first product: in a process that has multiplied
    before, this changes nothing.
    """
    for name in VARIABLES:
        os.environ.setdefault(name, str(CAPACITY))
    log.info("compiled products kept: %s", ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES))


def interrupt_command(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT as Python does, but end the process by the signal where modules are being loaded.

    A KeyboardInterrupt in the middle of an import becomes another error in C extensions, aborts the process, or is dropped; and
    nothing is to be saved yet. Shells show both ends as exit code 130.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        frame = frame.f_back
    signal.default_int_handler(number, None)


@contextmanager
def handle_sigint(by: Callable[[int, FrameType | None], object], instead_of: object) -> Iterator[None]:
    """Handle SIGINT by one handler where another one does so now. Any third one stays, such as a shell's "ignore"."""
    replaces = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is instead_of
    before = signal.signal(signal.SIGINT, by) if replaces else None
    try:
        yield
    finally:
        if replaces:
            signal.signal(signal.SIGINT, before)
