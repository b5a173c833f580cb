"""The parts of a step: the seconds that each takes, and ranges for a profiler that is attached."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch.profiler import record_function

from headway.core.engine.data.stats import EngineStats

EnterRange = Callable[[str], None]
"""Closes the profiler's range that is open and opens the one of this name; "" opens none."""

PARTS: Final = ("schedule", "prepare", "launch", "wait", "read", "outputs")

_ANY: Final = ("", *PARTS)


def no_ranges(part: str) -> None:
    """Show nothing: no profiler is attached."""


class ProfilerRanges:
    """Shows the parts as ranges "headway.NAME" to torch's profiler, and on a CUDA device by NVTX to Nsight Systems."""

    def __init__(self, device: torch.device) -> None:
        self._nvtx = device.type == "cuda"
        self._open: record_function | None = None

    def __call__(self, part: str) -> None:
        """See `EnterRange`."""
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


class StepClock:
    """Adds up in `EngineStats` how long the host spends in each part of its steps, and shows the parts to a profiler.

    One part follows the other: entering one ends the one before. The clock is called some eight times a step, never per sequence.
    """

    def __init__(self, stats: EngineStats, now: Callable[[], float] = time.perf_counter) -> None:
        """now: the time in seconds."""
        self.enter_range: EnterRange = no_ranges
        """Replaced while a profiler is attached."""
        self._stats = stats
        self._now = now
        self._seconds = dict.fromkeys(_ANY, 0.0)
        """Seconds of each part that are not in the statistics yet."""
        self._part = ""
        self._entered = self._began = 0.0
        self._waited = stats.wait_seconds
        self._waited_before = 0.0

    def begin_step(self) -> None:
        """Begin a step; a part that an interrupt has cut short is not counted."""
        self._part = ""
        self._entered = self._now()
        self._began = self._entered
        self._waited_before = self._stats.wait_seconds

    def enter(self, part: str) -> float:
        """End the part under way and enter one of PARTS, or "" for what belongs to none; returns the time."""
        now = self._now()
        self._seconds[self._part] += now - self._entered
        self._part = part
        self._entered = now
        self.enter_range(part)
        return now

    def leave(self) -> float:
        """End the part under way and bring the statistics up to date; returns the time.

        What `EngineStats.count` has added to `wait_seconds` was waited for while launching, and is not counted as launching.
        """
        now, seconds, stats = self.enter(""), self._seconds, self._stats
        stats.schedule_seconds += seconds["schedule"]
        stats.prepare_seconds += seconds["prepare"]
        stats.launch_seconds += seconds["launch"] - (stats.wait_seconds - self._waited)
        stats.wait_seconds += seconds["wait"]
        stats.read_seconds += seconds["read"]
        stats.output_seconds += seconds["outputs"]
        self._waited = stats.wait_seconds
        self._seconds = dict.fromkeys(_ANY, 0.0)
        return now

    def end_step(self) -> None:
        """End the step: the time in it that was not spent waiting for the device was the host's work."""
        now, stats = self.leave(), self._stats
        stats.host_seconds += now - self._began - (stats.wait_seconds - self._waited_before)
