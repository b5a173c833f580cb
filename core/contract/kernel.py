"""The part of a kernel's contract that all kinds of operations share, and its registration by a plugin."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

import torch

from headway.core.contract.support import YES, Support


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
