"""Profile of a few decode steps in the middle of a generation: fraction of time in which the GPU is idle, and a trace.

The profiler slows the host but hardly slows the kernels. Step time is therefore measured without the profiler, and GPU busy time
with the profiler in later steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from headway.bench.generate.workloads import Requests
from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.core.system.json_files import write_bytes

STEP = "headway.step"
"""Name under which a step appears in a trace."""
MAX_STEPS = 20
_SETTLED = 3
"""Number of consecutive decode-only steps before profiling."""


class Window:
    """Decode steps of one workload, starting with half of each output, with as many sequences as the engine runs at once.

    `close` must be called at the end, to drop the sequences.
    """

    def __init__(
        self,
        engine: EngineLoop,
        device: torch.device,
        requests: Requests,
        temperature: float,
        adapters: Sequence[LoRARequest | None] = (None,),
    ) -> None:
        """Queue each sequence with half of its output, and run until only decode steps are left. adapters: adapters that the
        sequences use in rotation."""
        self._engine = engine
        self._device = device
        self.num_steps = min(MAX_STEPS, min(requests.output_lens) // 8)
        """Number of steps to profile; 0 if the outputs are too short."""
        engine.forget_prefixes()
        for number, prompt in enumerate(requests.halfway() if self.num_steps else []):
            room = engine.capacity.max_model_len - len(prompt)
            params = SamplingParams(temperature=temperature, max_tokens=room, ignore_eos=True)
            own = adapters[number % len(adapters)]
            engine.add_request(f"window {number}", engine.limits.checked(prompt, params, lora_request=own))
        settled = 0
        while settled < _SETTLED and engine.has_unfinished:
            before = engine.stats.num_prefill_tokens
            engine.step()
            settled = settled + 1 if engine.stats.num_prefill_tokens == before else 0

    @property
    def open(self) -> bool:
        """True if there are steps to profile."""
        return self.num_steps > 0 and self._engine.has_unfinished

    def gpu_idle_share(self) -> float | None:
        """Return 1 - busy / wall, where busy is the time per profiled step covered by kernels and copies, and wall is the step
        time without the profiler.

        None on a CPU, or without steps to profile.
        """
        if self._device.type != "cuda" or not self.open:
            return None
        started = time.perf_counter()
        unprofiled = self._run()  # a step returns when it or the previous step is finished, so as many steps finish as start
        wall = (time.perf_counter() - started) / unprofiled
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            profiled = self._run()
            torch.cuda.synchronize()
        spans = (
            (event.time_range.start, event.time_range.end)
            for event in profiler.events() or []
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        )
        return 1 - 1e-6 * covered(spans) / profiled / wall if profiled else None

    def write_trace(self, path: Path) -> None:
        """Write a Chrome trace of the steps (chrome://tracing, https://ui.perfetto.dev); studies/step_trace.py sums up its
        kernels.
        :raises ConfigError: if there are no steps to profile or the file cannot be written."""
        if not self.open:
            raise ConfigError(
                "--profile", "outputs of at least 16 tokens, and a pool that holds them", "too few steps to look at"
            )
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        with profile(activities=activities, acc_events=True) as profiler:
            self._run()
            if self._device.type == "cuda":
                torch.cuda.synchronize()
        with TemporaryDirectory(prefix="headway-trace-") as folder:  # the profiler can only write its own file
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            write_bytes(trace.read_bytes(), path, "--profile")

    def close(self) -> None:
        """Drop the sequences."""
        self._engine.abort_all()

    def _run(self) -> int:
        """Run up to `num_steps` steps. Return the number of steps that ran."""
        for number in range(self.num_steps):
            if not self._engine.has_unfinished:
                return number
            with record_function(STEP):
                self._engine.step()
        return self.num_steps


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
