"""Compilation of kernels: backends announce each one here, and ask here whether to compile without launching."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from weakref import WeakMethod

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN = 4
"""Fields begin at multiples of 16 bytes, which kernels may rely on."""


class Packed:
    """Several int32 fields in one piece of host memory, copied to the device at once."""

    def __init__(self, **lengths: int) -> None:
        """Make fields of zeros. lengths: number of int32 elements of each field, by name."""
        self._at: dict[str, slice] = {}
        end = 0
        for name, length in lengths.items():
            start = -(-end // _ALIGN) * _ALIGN
            end = start + length
            self._at[name] = slice(start, end)
        self._host = numpy.zeros(end, dtype=numpy.int32)
        self._device = torch.empty(0)

    def host(self, name: str) -> NDArray[numpy.int32]:
        """Return a field in host memory, to be filled before `upload`."""
        return self._host[self._at[name]]

    def upload(self, device: torch.device) -> None:
        """Copy all fields without waiting; host memory must not change afterwards."""
        self._device = upload(torch.from_numpy(self._host), device)

    def device(self, name: str) -> Tensor:
        """Return a field on the device, int32 [length]; valid after `upload`."""
        return self._device[self._at[name]]


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device; returns before the copy is done.

    From pageable memory a copy waits for everything queued on the device before it, which would undo overlapped scheduling, so
    it goes through pinned memory, which torch keeps until the copy is done.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


Listener = Callable[[str], None]
CompileAhead = Callable[[], AbstractContextManager[object]]
"""A function that makes a context such as `compile_ahead`."""

AHEAD: ContextVar[Executor | None] = ContextVar("headway_compiles_ahead", default=None)
"""Threads that compile what the launches of this context need, while the launches themselves start nothing; None: they run."""
_WORKERS = 16
"""Most threads at once: compilers do most of their work outside Python's lock."""

_LISTENERS: list[WeakMethod[Listener]] = []
"""Listeners of the process, because a kernel that is compiled for one engine serves all."""


@contextmanager
def compile_ahead() -> Iterator[Executor]:
    """Compile the kernels that are launched inside, on many threads, and launch none of those that know of `AHEAD`.

    All have been compiled when the context ends. Whatever runs inside computes with memory that no kernel has filled, so its
    results must be thrown away. A kernel that does not compile raises at the later launch that needs it, not here.
    """
    with ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1), "compile") as pool:
        token = AHEAD.set(pool)
        try:
            yield pool
        finally:
            AHEAD.reset(token)


def listen(listener: Listener) -> None:
    """Register a bound method that is called with the name of every kernel compiled from now on, as long as its object lives."""
    _LISTENERS[:] = [each for each in _LISTENERS if each() is not None]
    _LISTENERS.append(WeakMethod(listener))


def announce_compilation(name: str) -> None:
    """Announce that a kernel has been compiled or loaded, from any thread; Triton's kernels are announced without it."""
    for each in list(_LISTENERS):
        listener = each()
        if listener is not None:
            listener(name)
