"""GPU time of a decode step: kernels of a trace by name, and the GPU's idle time before each kernel.

headway bench throughput --model llama-3-8b --load-format dummy --batch-size 16 --input-len 512 --profile step.json
python -m headway.bench.studies.step_trace step.json

With --lora N, the trace is of steps with adapters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from headway.bench.generate.profile import STEP
from headway.bench.studies.command import run_study
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal

_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LONGEST_NAME = 38


@dataclass
class KernelShare:
    """All launches of one kernel in a trace, in microseconds."""

    name: str
    launches: int = 0
    busy: float = 0.0
    """Time in which this kernel ran and no earlier kernel did. Summed over all kernels, this is the GPU's busy time."""
    idle: float = 0.0
    """Idle time of the GPU directly before the kernel's launches."""


@dataclass(frozen=True)
class TracedSteps:
    """GPU activity in the steps of a trace."""

    num_steps: int
    kernels: Sequence[KernelShare]
    """Kernels, longest first."""

    @property
    def busy(self) -> float:
        """Busy microseconds per step."""
        return sum(each.busy for each in self.kernels) / self.num_steps

    @property
    def idle(self) -> float:
        """Idle microseconds per step, including the host's pauses between steps."""
        return sum(each.idle for each in self.kernels) / self.num_steps


def read_trace(path: Path) -> TracedSteps:
    """Return the kernel times of a Chrome trace from `headway bench throughput --profile`.
    :raises ConfigError: if the file is not such a trace or has no kernels."""
    need = "a trace that `headway bench throughput --profile` wrote on a GPU"
    try:
        events = json.loads(path.read_text())["traceEvents"]
        steps = sum(event.get("name") == STEP and event.get("cat") == "user_annotation" for event in events)
        work = [(event["ts"], event["ts"] + event["dur"], event["name"]) for event in events if event.get("cat") in _WORK]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("TRACE", need, f"{path}: {type(error).__name__}: {error}") from None
    if not steps or not work:
        raise ConfigError("TRACE", need, f"{path}: {steps} steps, {len(work)} kernels")
    return TracedSteps(steps, _shares(sorted(work)))


def _shares(work: Sequence[tuple[float, float, str]]) -> list[KernelShare]:
    """Return the times of each kernel. work: (start, end, name) of each launch, ordered by start."""
    shares: dict[str, KernelShare] = {}
    reached = work[0][0]
    for start, end, name in work:
        share = shares.setdefault(name, KernelShare(name))
        share.launches += 1
        share.idle += max(0.0, start - reached)
        share.busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return sorted(shares.values(), key=lambda each: -each.busy)


def short_name(name: str) -> str:
    """Return a kernel's name without return type, namespaces, template arguments and parameters."""
    plain = re.sub(r"[<(].*", "", name.removeprefix("void ").replace("(anonymous namespace)::", ""))
    return plain.rsplit("::", 1)[-1].strip()[:_LONGEST_NAME]


def step_trace(
    trace: Annotated[Path, typer.Argument(help="Trace from `headway bench throughput --profile`.")],
    most: Annotated[int, typer.Option(min=1, help="Number of kernels with their own row.")] = 20,
) -> None:
    """Show the kernels of a decode step by time, and the GPU's idle time before each kernel."""
    found = read_trace(trace)
    table = Table(box=box.SIMPLE_HEAD, title=f"microseconds per step, mean of {found.num_steps}")
    table.add_column("kernel")
    for column in ("launches", "busy", "idle before"):
        table.add_column(column, justify="right")
    for each in found.kernels[:most]:
        _add_row(table, short_name(each.name), [each], found.num_steps)
    if found.kernels[most:]:
        _add_row(table, f"{len(found.kernels) - most} others", found.kernels[most:], found.num_steps)
    table.add_section()
    launches = sum(each.launches for each in found.kernels) / found.num_steps
    table.add_row("all", f"{launches:.4g}", f"{found.busy:,.1f}", f"{found.idle:,.1f}")
    Terminal().print(table)


def _add_row(table: Table, name: str, shares: Sequence[KernelShare], steps: int) -> None:
    launches = sum(each.launches for each in shares) / steps
    busy, idle = (sum(times) / steps for times in ([each.busy for each in shares], [each.idle for each in shares]))
    table.add_row(name, f"{launches:.4g}", f"{busy:,.1f}", f"{idle:,.1f}")


if __name__ == "__main__":
    run_study(step_trace)
