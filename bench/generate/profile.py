"""A few decode steps in the middle of a generation, looked at closely: how busy the GPU is, and a trace of them.

The profiler makes the host slower but the kernels hardly, so a step's length is taken from steps without it and the time in which
the GPU is busy from the ones that follow with it.
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
"""The name of a step in a trace."""
MAX_STEPS = 20
_SETTLED = 3
"""Steps without a prompt in them, one after the other, before anything is looked at."""


class Window:
    """Decode steps of one workload at half of its outputs' lengths, as many sequences as the engine runs at once.

    Leave it by `close`, which drops the sequences.
    """

    def __init__(
        self,
        engine: EngineLoop,
        device: torch.device,
        requests: Requests,
        temperature: float,
        adapters: Sequence[LoRARequest | None] = (None,),
    ) -> None:
        """Queue the sequences, each as it is halfway, and run them until only decode steps are left.

        adapters: of the sequences, in turn.
        """
        self._engine = engine
        self._device = device
        self.num_steps = min(MAX_STEPS, min(requests.output_lens) // 8)
        """Steps that are looked at; 0 where the outputs are too short for any."""
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
        """Whether there is anything to look at."""
        return self.num_steps > 0 and self._engine.has_unfinished

    def gpu_idle_share(self) -> float | None:
        """1 - busy / wall: the union of kernels and copies a profiled step, over the time of a step before the profiler began.

        None on a CPU, or where nothing is left to look at.
        """
        if self._device.type != "cuda" or not self.open:
            return None
        started = time.perf_counter()
        unprofiled = self._run()  # a step returns when the device has done it, or the one before: as many end as are launched
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
        """A Chrome trace of the steps (chrome://tracing, https://ui.perfetto.dev); studies/step_trace.py adds up its kernels.

        :raises ConfigError: no step to look at, or a file that cannot be written.
        """
        if not self.open:
            raise ConfigError(
                "--profile", "outputs of at least 16 tokens, and a pool that holds them", "too few steps to look at"
            )
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        with profile(activities=activities, acc_events=True) as profiler:
            self._run()
            if self._device.type == "cuda":
                torch.cuda.synchronize()
        with TemporaryDirectory(prefix="headway-trace-") as folder:  # the profiler writes into a file of its own alone
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            write_bytes(trace.read_bytes(), path, "--profile")

    def close(self) -> None:
        """Drop the sequences."""
        self._engine.abort_all()

    def _run(self) -> int:
        """Steps that were run: `num_steps`, or as many as there were."""
        for number in range(self.num_steps):
            if not self._engine.has_unfinished:
                return number
            with record_function(STEP):
                self._engine.step()
        return self.num_steps


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
