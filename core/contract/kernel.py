"""The parts of the kernel contract that all kinds of operations share: base class, registration and compilation."""

from __future__ import annotations

import os
import sys
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar
from weakref import WeakMethod

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.support import YES, Support

_ALIGN = 4
"""Alignment of fields, in int32 elements. Kernels may rely on the resulting alignment of 16 bytes."""


class Packed:
    """Several int32 fields in one host buffer, copied to the device in one transfer."""

    def __init__(self, **lengths: int) -> None:
        """Allocate zeroed fields. lengths: number of int32 elements of each field, by name."""
        self._at: dict[str, slice] = {}
        end = 0
        for name, length in lengths.items():
            start = -(-end // _ALIGN) * _ALIGN
            end = start + length
            self._at[name] = slice(start, end)
        self._host = numpy.zeros(end, dtype=numpy.int32)
        self._device = torch.empty(0)

    def host(self, name: str) -> NDArray[numpy.int32]:
        """Return a field in host memory. Fill it before `upload`."""
        return self._host[self._at[name]]

    def upload(self, device: torch.device) -> None:
        """Copy all fields to the device without waiting. The fields in host memory must not change afterwards."""
        self._device = upload(torch.from_numpy(self._host), device)

    def device(self, name: str) -> Tensor:
        """Return a field on the device, int32 [length]. Valid after `upload`."""
        return self._device[self._at[name]]


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device and return without waiting for the copy.

    The copy uses pinned memory, which torch keeps until the copy is done. A copy from pageable memory would wait for all work
    queued on the device, and thus defeat overlapped scheduling. While kernels are compiled ahead, nothing is queued.
    """
    if device.type == "cpu":
        return tensor
    if AHEAD.get() is not None:
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy_elements(tensor, pinned)
    return pinned.to(device, non_blocking=True)


def copy_elements(source: Tensor, target: Tensor) -> None:
    """Copy a host tensor to another of the same shape and type, in this thread.

    torch copies more than 32,768 elements in all its threads. With many threads, waking them takes up to 26 ms.
    """
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[source.itemsize]
    numpy.copyto(target.view(bits).numpy(), source.view(bits).numpy())


Listener = Callable[[str], None]
CompileAhead = Callable[[], AbstractContextManager[object]]
"""Function that returns a context manager such as `compile_ahead`."""

_WORKERS = 16
"""Maximum number of threads that compile kernels. Compilers do most of their work outside the GIL."""
_PYTHONS_SECONDS, _SWITCH_SECONDS = sys.getswitchinterval(), 0.0005
"""Interval after which Python passes on the GIL, usually and while kernels are compiled. With the usual 5 ms, each of a thread's
many short waits would be followed by a wait of 5 ms per compiling thread."""


class Ahead(ThreadPoolExecutor):
    """Threads that compile the kernels of one `compile_ahead` context."""

    num_new = 0
    """Number of queued compilations, plus the number of compiled kernels that were called for the first time."""

    def submit(self, /, *task: Any, **options: Any) -> Future[Any]:
        """Run a task in one of the threads."""
        self.num_new += 1
        return super().submit(*task, **options)


AHEAD: ContextVar[Ahead | None] = ContextVar("headway_compiles_ahead", default=None)
"""Thread pool that compiles kernels in this context; launches then only queue a compilation. None means that launches run as
usual."""

_LISTENERS: list[WeakMethod[Listener]] = []
"""Listeners of the process. All engines share them, because a kernel compiled for one engine is used by all engines."""


@contextmanager
def compile_ahead() -> Iterator[Ahead]:
    """Return a context in which launches compile their kernels on a thread pool instead of running them.

    Only kernels that check `AHEAD` support this. All compilations have finished when the context ends. Discard results computed
    inside the context, because the kernels have not written their outputs. A compilation error is raised by the next real launch,
    not in the context.
    """
    sys.setswitchinterval(min(_PYTHONS_SECONDS, _SWITCH_SECONDS))
    try:
        with Ahead(min(_WORKERS, os.cpu_count() or 1), "compile") as pool:
            token = AHEAD.set(pool)
            try:
                yield pool
            finally:
                AHEAD.reset(token)
    finally:
        sys.setswitchinterval(_PYTHONS_SECONDS)


def listen(listener: Listener) -> None:
    """Call a bound method with the name of each kernel compiled from now on, for as long as the method's object lives."""
    _LISTENERS[:] = [each for each in _LISTENERS if each() is not None]
    _LISTENERS.append(WeakMethod(listener))


def announce_compilation(name: str) -> None:
    """Notify listeners that a kernel was compiled or loaded. Any thread may call it. Triton kernels are reported
    automatically."""
    for each in list(_LISTENERS):
        listener = each()
        if listener is not None:
            listener(name)


class GraphLevel(IntEnum):
    """Kinds of steps that a kernel can run in a captured CUDA graph."""

    NONE = 0
    DECODE = 1
    """Decode steps with one query token per sequence."""
    UNIFORM = 2
    """Equal numbers of query tokens in all sequences: verification of draft tokens, and a single prompt. For a prompt, `plan`
    is called once and replays have the captured length; slots and blocks are read from the metadata's tensors, so the plan must
    keep references to them."""
    ANY = 3


class Kernel(ABC):
    """A named implementation of one kind of operation. It sees neither the engine nor the engine's configuration."""

    name: ClassVar[str]
    capabilities: ClassVar[Any]
    """Claims of the kernel, of the type that its kind of operation defines."""
    graph_level: ClassVar[GraphLevel] = GraphLevel.NONE
    """Kinds of steps that may be captured in a CUDA graph."""
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
    """Maximum accepted ||out - reference|| / ||reference|| against a float64 reference, by dtype."""

    @classmethod
    def available(cls) -> Support:
        """Return whether the kernel can run on this machine. Implementations probe libraries, driver, compiler and device."""
        return YES

    @classmethod
    def origin(cls) -> str:
        """Return the location of the kernel's library if several locations are searched, otherwise ""."""
        return ""


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """A plugin's registration of a kernel, loaded only when the kernel is used. Each kind of operation has a subclass."""

    kind: ClassVar[str] = ""
    """Name of the kind of operation."""
    name: str
    summary: str
    """One-line description for tables."""
    load: Callable[[], type[Any]]
    """Function that imports the kernel library and returns the kernel class. It may raise ImportError."""
    extra: str = ""
    """Name of the package or Headway extra to install for the library."""
    devices: tuple[str, ...] = field(default=(), kw_only=True)
    """Supported device types, so that engines on other devices do not import the kernel. Empty means that the kernel class
    decides."""
    api_version: int = field(kw_only=True)
    """Version of the contract that the kernel was written for. Write a literal: a constant imported from Headway matches any
    release."""
