"""Profiling of an engine's steps under load: time of each part, and a trace of some steps."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.stats import EngineStats, ProfilerRanges, no_ranges
from headway.core.engine.data.step import OutputDelta
from headway.hosting.driver import EngineDriver

_MOST_KERNELS: Final = 12  # Maximum number of kernels in a profile


MOST_STEPS: Final = 1000


class ProfileRequest(BaseModel):
    """Request for a profile: which steps to trace, and in which format."""

    model_config = ConfigDict(extra="ignore")

    skip_steps: int = Field(default=50, ge=0)
    """Number of steps to skip before the trace, so that it shows a steady load."""
    num_steps: int = Field(default=20, ge=1, le=MOST_STEPS)
    nvtx: bool = False
    """True to mark the steps for Nsight Systems (`nsys profile --capture-range=cudaProfilerApi`) instead of writing a trace."""


class StepsProfile(BaseModel):
    """Profile of an engine's steps: average milliseconds per part of a step, over the steps that were not traced."""

    model_config = ConfigDict(extra="forbid")

    steps: int
    step_ms: float
    """Milliseconds from the start of one step to the start of the next, while requests run."""
    parts_ms: dict[str, float]
    """Host time in milliseconds per step, for each part (schedule, prepare, launch, wait for the device, read, other, outputs).

    "between" is the time between steps: other threads run, requests arrive, or there are no requests.
    """
    output_tokens: int
    prefill_tokens: int
    steps_by_phase: dict[str, int]
    """Number of steps for each phase and backend, keyed by text such as "decode, triton"."""
    traced_steps: int
    kernels_ms: dict[str, float]
    """Time of the slowest GPU kernels or CPU operations, in milliseconds per traced step."""
    trace: str | None = None
    """Path of the trace on the server's machine. None if there were too few steps, or nvtx was requested."""


class StepProfiler:
    """Profiler of one engine. The thread that steps the engine calls `start` and `stop`, between two steps."""

    def __init__(self, driver: EngineDriver, folder: Path, request: ProfileRequest) -> None:
        """folder: folder for the trace."""
        self._driver = driver
        self._folder = folder
        self._request = request
        self._device = driver.assembly.device
        self._begun = EngineStats()
        self._started_at = self._traced_from = 0.0
        self._traced_seconds = self._ending_seconds = 0.0
        self._before_trace: EngineStats | None = None
        self._traced = EngineStats()
        self._num_steps = 0
        self._profiler: profile | None = None
        self._found: profile | None = None

    def start(self) -> None:
        """Start counting steps."""
        self._begun = self._driver.engine.stats.snapshot()
        self._started_at = time.perf_counter()
        self._driver.add_listener(self._stepped)
        if not self._request.skip_steps:
            self._begin_trace()

    def stop(self) -> StepsProfile:
        """Stop profiling. Return the profile without its trace, which `write_trace` writes."""
        if self._before_trace is not None and not self._traced.num_steps:
            self._end_trace()
        self._driver.remove_listener(self._stepped)
        seconds = time.perf_counter() - self._started_at - self._traced_seconds
        done = self._driver.engine.stats.snapshot() - self._begun
        plain = done - self._traced
        plain.output_seconds -= self._ending_seconds  # they fall within `_stepped`
        steps = plain.num_steps
        parts = plain.host_parts
        outputs = parts.pop("outputs")
        parts |= {"wait": plain.wait_seconds, "outputs": outputs}
        parts["between"] = max(seconds - sum(parts.values()), 0.0)
        phases = {f"{phase}, {name}": count for (phase, name), count in sorted(done.steps_by_phase.items())}
        return StepsProfile(
            steps=done.num_steps,
            step_ms=1e3 * seconds / steps if steps else 0.0,
            parts_ms={name: 1e3 * value / steps for name, value in parts.items()} if steps else {},
            output_tokens=done.num_output_tokens,
            prefill_tokens=done.num_prefill_tokens,
            steps_by_phase=phases,
            traced_steps=self._traced.num_steps,
            kernels_ms=self._kernels(),
        )

    def write_trace(self) -> str | None:
        """Write the trace, from any thread, and return its path, if any. :raises ConfigError: if the folder is not writable."""
        if self._found is None:
            return None
        path = self._folder / f"headway-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}.trace.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._found.export_chrome_trace(str(path))
        except OSError as error:
            raise ConfigError("profile_dir", "a folder that can be written to", str(error)) from error
        return str(path)

    def _stepped(self, _: list[OutputDelta]) -> tuple[tuple[str, int | None], ...]:
        self._num_steps += 1
        if self._before_trace is None and self._num_steps == self._request.skip_steps:
            self._begin_trace()
        elif self._before_trace is not None and self._num_steps == self._request.skip_steps + self._request.num_steps:
            began = time.perf_counter()
            self._end_trace()
            self._ending_seconds = time.perf_counter() - began
        return ()

    def _begin_trace(self) -> None:
        cuda = self._device.type == "cuda"
        self._before_trace = self._driver.engine.stats.snapshot()
        self._traced_from = time.perf_counter()
        if cuda:
            torch.cuda.synchronize()
        if self._request.nvtx:
            if cuda:
                torch.cuda.profiler.start()
        else:
            self._profiler = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])], acc_events=True
            )
            self._profiler.start()
        self._driver.engine.clock.enter_range = ProfilerRanges(self._device)

    def _end_trace(self) -> None:
        assert self._before_trace is not None
        self._driver.engine.clock.enter_range("")
        self._driver.engine.clock.enter_range = no_ranges
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
        if self._profiler is not None:
            self._profiler.stop()
            self._found = self._profiler
            self._profiler = None
        elif cuda:
            torch.cuda.profiler.stop()
        self._traced = self._driver.engine.stats.snapshot() - self._before_trace
        self._traced_seconds = time.perf_counter() - self._traced_from

    def _kernels(self) -> dict[str, float]:
        """Return the time of the slowest kernels or operations, in milliseconds per traced step."""
        if self._found is None or not self._traced.num_steps:
            return {}
        cuda, times = self._device.type == "cuda", Counter[str]()
        if cuda:
            for event in self._found.events() or []:
                if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                    times[event.name] += event.time_range.elapsed_us()
        else:
            for each in self._found.key_averages():
                if not each.key.startswith("headway."):
                    times[each.key] = each.self_cpu_time_total
        return {name: 1e-3 * us / self._traced.num_steps for name, us in times.most_common(_MOST_KERNELS)}


def start_profile(driver: EngineDriver, folder: Path, request: ProfileRequest) -> None:
    """Start profiling steps. Runs as a task of headway.hosting.host."""
    driver.task_state["profiler"] = profiler = StepProfiler(driver, folder, request)
    profiler.start()


def stop_profile(driver: EngineDriver) -> StepsProfile:
    """Stop profiling, and return the profile without the trace."""
    profiler: StepProfiler = driver.task_state["profiler"]
    return profiler.stop()


def write_trace(driver: EngineDriver) -> str | None:
    """Write the trace after `stop_profile`, and return its path."""
    profiler: StepProfiler = driver.task_state.pop("profiler")
    return profiler.write_trace()
