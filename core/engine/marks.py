"""The parts of a step by name, for profilers that are looking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch.profiler import record_function

Mark = Callable[[str], None]
"""Ends the part that was under way and begins the one of this name; "" begins none."""

PARTS: Final = ("schedule", "prepare", "launch", "wait", "read", "outputs")


def no_mark(part: str) -> None:
    """Nobody looks."""


class Marks:
    """Shows the parts as ranges "headway.NAME" to torch's profiler, and on a CUDA device by NVTX to Nsight Systems."""

    def __init__(self, device: torch.device) -> None:
        self._nvtx = device.type == "cuda"
        self._open: record_function | None = None

    def __call__(self, part: str) -> None:
        """See `Mark`."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
            if self._nvtx:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        if part:
            self._open = record_function(f"headway.{part}")
            self._open.__enter__()  # type: ignore[no-untyped-call]
            if self._nvtx:
                torch.cuda.nvtx.range_push(f"headway.{part}")  # type: ignore[no-untyped-call]
