"""The part of a kernel's contract that all kinds of operations share: its class, its registration, and its compilation."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
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


class GraphLevel(IntEnum):
    """Steps that a kernel can run inside a captured CUDA graph."""

    NONE = 0
    DECODE = 1
    """One query token per sequence."""
    UNIFORM = 2
    """The same number of query tokens in every sequence: drafts, and a single prompt. A prompt is planned by `plan`, replayed at
    the captured length, and finds its slots and blocks in the metadata's tensors, which a plan must keep as they are."""
    ANY = 3


class Kernel(ABC):
    """One named way to compute one kind of operation; it never sees the engine or its configuration."""

    name: ClassVar[str]
    capabilities: ClassVar[Any]
    """The kernel's claims, of its kind's type."""
    graph_level: ClassVar[GraphLevel] = GraphLevel.NONE
    """Calls that may be captured in a CUDA graph."""
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
    """Largest accepted ||out - reference|| / ||reference|| against float64, by dtype."""

    @classmethod
    def available(cls) -> Support:
        """Return whether the kernel can run on this machine: libraries, driver, compiler, device (all probed)."""
        return YES

    @classmethod
    def origin(cls) -> str:
        """Return where the library was found, if the kernel searches several places; else an empty string."""
        return ""


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """Registration of a kernel by a plugin: cheap to list, loaded only when it is used. Each kind of operation has a subclass."""

    kind: ClassVar[str] = ""
    """Name of the kind of operation."""
    name: str
    summary: str
    """One line for the table."""
    load: Callable[[], type[Any]]
    """Imports the kernel library and returns the kernel's class; may raise ImportError."""
    extra: str = ""
    """What to install for the library: an extra of headway or a package."""
    devices: tuple[str, ...] = field(default=(), kw_only=True)
    """Types of device that it runs on; empty: its class says so. A start on another type then need not import it."""
    api_version: int = field(kw_only=True)
    """Version of the contract the kernel was written for, as a number: a constant of ours would agree with any release."""
