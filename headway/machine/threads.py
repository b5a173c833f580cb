"""Threads on a CPU, as many as there are free cores: two torch threads on one free core are several times slower than one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

import psutil
import torch

from headway.core.contract.errors import ConfigError

SWITCH_INTERVAL: Final = 0.0005
"""Interval in seconds of sys.setswitchinterval where a thread steps an engine: threads wait this long for one another at most.
Python's own 5 ms are longer than a step."""
_SAMPLE_SECONDS = 0.1
_BUSY_PERCENT = 50.0


def free_cores() -> int:
    """Count the cores that this process may use and no other keeps busy, measured over a tenth of a second; at least 1."""
    allowed: Iterable[int] = (
        psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else range(psutil.cpu_count() or 1)
    )
    loads: list[float] = psutil.cpu_percent(interval=_SAMPLE_SECONDS, percpu=True)
    return max(1, sum(loads[core] < _BUSY_PERCENT for core in allowed if core < len(loads)))


def set_threads(num_threads: int | None = None, num_ranks: int = 1) -> int:
    """Set and return the number of torch's threads: `num_threads`, else $OMP_NUM_THREADS, else the number of free cores.

    num_ranks: processes that share this number, each of which has one at least.
    """
    if num_threads is None and os.environ.get("OMP_NUM_THREADS"):
        num_threads = int(torch.get_num_threads())
    if num_threads is not None and num_threads < 1:
        raise ConfigError("num_threads", "a whole number of at least 1", num_threads)
    count = num_threads if num_threads is not None else min(free_cores(), int(torch.get_num_threads()))
    count = max(1, count // num_ranks)
    torch.set_num_threads(count)
    return count
