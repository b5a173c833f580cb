"""Threads, memory and Ctrl-C of this process: one thread per free core, no garbage collection during generation."""

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
"""Thread switch interval in seconds (sys.setswitchinterval) for a process in which a thread steps an engine. Python's default, 5
ms, is longer than a step."""
_SAMPLE_SECONDS = 0.1
_BUSY_PERCENT = 50.0  # Load in percent above which a core is not free: two torch threads on one core are several times slower


def free_cores() -> int:
    """Return the number of allowed cores that are not busy, measured for a tenth of a second; at least 1."""
    import psutil

    allowed: Iterable[int] = (
        psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else range(psutil.cpu_count() or 1)
    )
    loads: list[float] = psutil.cpu_percent(interval=_SAMPLE_SECONDS, percpu=True)
    return max(1, sum(loads[core] < _BUSY_PERCENT for core in allowed if core < len(loads)))


def set_threads(num_threads: int | None = None, num_ranks: int = 1) -> int:
    """Set and return torch's thread count. The count is `num_threads`, else $OMP_NUM_THREADS, else the number of free cores,
    divided by num_ranks."""
    import torch  # imported here: a rank's process imports this module before torch

    if num_threads is None and os.environ.get("OMP_NUM_THREADS"):
        num_threads = int(torch.get_num_threads())
    if num_threads is not None and num_threads < 1:
        raise ConfigError("num_threads", "a whole number of at least 1", num_threads)
    count = num_threads if num_threads is not None else min(free_cores(), int(torch.get_num_threads()))
    count = max(1, count // num_ranks)
    torch.set_num_threads(count)
    return count


KEEP_FREED_MEMORY: Final = "HEADWAY_KEEP_FREED_MEMORY"
"""Environment variable; 1 disables returning freed memory to the system."""

TRIM_INTERVAL: Final = 10.0
"""Seconds between two calls of `trim_memory` while an engine works on a CPU."""


def freeze_heap() -> None:
    """Exclude all objects that are currently alive from later garbage collections.

    A full collection traverses every object that imports created and would pause generation for 60 to 100 ms. vLLM freezes its
    heap for the same reason. Reference counting still frees objects; only cycles among the frozen objects remain until the next
    call. That call collects garbage first, so loading several models in sequence leaves the garbage of at most one model.
    """
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
    trim_memory()
    gc.freeze()
    _thaw_at_exit()


def trim_memory() -> None:
    """Make the C library return freed memory to the system. Do nothing on systems other than Linux with glibc.

    glibc retains freed chunks between used ones: activations and compiled oneDNN kernels of many sizes leave hundreds of MiB in
    its arenas, and the next engine's thread starts a new arena. The call takes about 0.1 ms per MiB returned.
    """
    trim = _malloc_trim()
    if trim is not None and os.environ.get(KEEP_FREED_MEMORY) != "1":
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl does not have it
    return found


@cache
def _thaw_at_exit() -> None:
    """Unfreeze at exit if Triton was imported: nanobind counts its objects then and reports frozen ones as leaks."""

    def thaw() -> None:
        if "triton" in sys.modules:
            gc.unfreeze()

    atexit.register(thaw)


def collect_seldom() -> None:
    """Raise the threshold of young-generation garbage collection from 700 to 100,000 new objects, since starting an engine
    creates a million."""
    gc.set_threshold(100_000, 20, 50)


VARIABLES: Final = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Environment variables that set the capacity of torch's per-thread cache of oneDNN kernels and of oneDNN's own cache. The
default is 1,024 kernels each."""

CAPACITY: Final = 256
"""Maximum number of compiled oneDNN GEMM kernels per cache. Each row count and weight shape needs a kernel, which takes about 200
KiB. 256 kernels are enough for a decoder's four or five weight shapes at 50 row counts."""


def bound_kernel_caches() -> None:
    """Limit torch's and oneDNN's caches to CAPACITY compiled kernels, unless the environment sets a limit.

    A kernel is compiled per row count of a step, so that the default of 1,024 in each of two caches adds hundreds of MiB of
    resident memory in the first minutes (measurements: docs/reliability.md). Recompiling an evicted kernel takes less than a
    millisecond. Both libraries read their variable at their first GEMM; later calls have no effect.
    """
    for name in VARIABLES:
        os.environ.setdefault(name, str(CAPACITY))
    log.info("oneDNN: kernel caches are limited: %s", ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES))


def interrupt_command(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT as Python does, except while modules are being imported: the signal then ends the process.

    During an import, a KeyboardInterrupt may become a different error in C extensions, abort the process, or be dropped, and
    there is nothing to save yet. Shells report both endings as exit code 130.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        frame = frame.f_back
    signal.default_int_handler(number, None)


@contextmanager
def handle_sigint(by: Callable[[int, FrameType | None], object], instead_of: object) -> Iterator[None]:
    """Handle SIGINT with `by` inside the context if the current handler is `instead_of`. A different handler stays installed."""
    replaces = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is instead_of
    before = signal.signal(signal.SIGINT, by) if replaces else None
    try:
        yield
    finally:
        if replaces:
            signal.signal(signal.SIGINT, before)
