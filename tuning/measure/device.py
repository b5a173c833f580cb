"""Device, driver and software versions of a measurement, and two measured rates with which results are compared."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import psutil
import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.system.provenance import Origin, compiler_versions, cpu_name, installed_versions
from headway.tuning.measure.timing import Timer
from headway.tuning.table.noise import LEAST_DIFFERENCE
from headway.tuning.table.schema import CrossoverTable, DeviceIdentity, DeviceInfo, DeviceRates, KernelRecord, LayerRecord

LIBRARIES = ("triton", "flash-attn", "flash-attn-4", "flashinfer-python", "xformers", "nvidia-cutlass-dsl", "headway")
"""Distributions whose versions are recorded if installed. Versions come from package metadata; nothing is imported."""


_NEGLIGIBLE = 0.25
"""Number of CPU cores that an idle system uses."""


def default_device() -> torch.device:
    """Return the current GPU, or the CPU if there is no GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def resolve_device(name: str | None) -> torch.device:
    """Return the device for a name: auto, cpu, cuda or cuda:N. auto and None mean `default_device`.

    :raises ConfigError: if no such device exists, or if torch's default device is the meta device, whose tensors hold no data.
    """
    if torch.empty(0).is_meta:
        hint = "call Headway outside of `with torch.device(...)` and torch.set_default_device"
        raise ConfigError("device", "one that holds numbers", "meta, torch's default device here", hint)
    if name in (None, "auto"):
        return default_device()
    count = torch.cuda.device_count()
    known = ["auto", "cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    if name not in known:
        seen = f"torch sees {count or 'no'} CUDA device{'s' * (count > 1)} here; headway doctor says more"
        raise ConfigError("device", " or ".join(known), repr(name), seen if str(name).startswith("cuda") else "")
    return default_device() if name == "cuda" else torch.device(name)


def identify_device(device: torch.device) -> DeviceIdentity:
    """Return the identity of a device: its name, driver, and versions of the installed software."""
    found: dict[str, Any] = {
        "type": device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "libraries": installed_versions(LIBRARIES),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if device.type != "cuda":
        found |= {"name": cpu_name(), "threads": torch.get_num_threads(), "compilers": {}}
    else:
        properties = torch.cuda.get_device_properties(device)
        driver, clock = _driver(device)
        found |= {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "sm_count": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": driver,
            "clock_mhz": clock,
            "compilers": compiler_versions((properties.major, properties.minor)),
        }
    return DeviceIdentity(**found)


def new_table(
    spec: LayerRecord, device: DeviceIdentity, kernels: Sequence[KernelRecord], command: str = "", graph_len: int | None = None
) -> CrossoverTable:
    """Return a table without cells, with the current date and the version of the running code."""
    return CrossoverTable(
        kind=spec.kind,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command or " ".join(sys.argv),
        origin=Origin.here(),
        complete=False,
        device=device,
        spec=spec,
        graph_len=graph_len,
        noise=LEAST_DIFFERENCE,
        kernels=list(kernels),
        cells=[],
    )


def crowding() -> str:
    """Return a description of how many CPU cores other processes use, or "" if enough cores are free for this process's threads.

    The call takes 0.1 s, during which this process must be idle.
    """
    allowed = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else range(psutil.cpu_count() or 1)
    shares: list[float] = psutil.cpu_percent(interval=0.1, percpu=True)
    cores = [core for core in allowed if core < len(shares)]
    taken = 1e-2 * sum(shares[core] for core in cores)
    wanted = min(int(torch.get_num_threads()), len(cores))
    return "" if taken + wanted <= len(cores) + _NEGLIGIBLE else f"other processes kept {taken:.1f} of {len(cores)} cores busy"


def describe_device(device: torch.device, dtype: torch.dtype, timer: Timer) -> DeviceInfo:
    """Return the device's identity and two rates, measured in the dtype of the run. The call takes about a second on a GPU."""
    copy_gbps, matrix_tflops = measured_rates(device, dtype, timer)
    rates = {"copy_gbps": copy_gbps, "matrix_tflops": matrix_tflops, "matrix_dtype": DTYPE_NAMES[dtype]}
    return DeviceInfo(**identify_device(device).model_dump() | rates)


def rates_of(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Return the two rates of a device, measured in a dtype. The call takes about a second on a GPU."""
    copy_gbps, matrix_tflops = measured_rates(device, dtype, Timer())
    return DeviceRates(copy_gbps=copy_gbps, matrix_tflops=matrix_tflops)


def measured_rates(device: torch.device, dtype: torch.dtype, timer: Timer) -> tuple[float, float]:
    """Return the rate of a large copy in GB/s (bytes read plus bytes written), and the rate of a GEMM of square random matrices
    in TFLOP/s.

    The copy has 2 GiB on a GPU (less if little memory is free) and 64 MiB on a CPU. The matrices have 8192 rows on a GPU and 512
    rows on a CPU. The copy is larger than usual caches.
    """
    if device.type == "cuda":
        size, n = min(2**31, torch.cuda.mem_get_info(device)[0] // 8), 8192
    else:
        size, n = 2**26, 512
    # Drawing bytes instead of 8-byte integers takes a CPU a quarter of a second.
    source = torch.randint(2**62, (size // 8,), dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    copy_us = timer.time(lambda: target.copy_(source), device).median_us
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    return 2e-3 * source.nbytes / copy_us, 2e-6 * n**3 / timer.time(lambda: torch.mm(a, b, out=product), device).median_us


def _driver(device: torch.device) -> tuple[str | None, int | None]:
    """Return the driver version and the maximum SM clock in MHz. Both are None if nvidia-smi is missing or does not know the
    device."""
    query = ["nvidia-smi", "--query-gpu=uuid,driver_version,clocks.max.sm", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None, None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.count(",") == 2]
    chosen = [row for row in rows if uuid and uuid in row[0]] or rows  # all GPUs of a machine have the same driver
    if not chosen:
        return None, None
    _, driver, clock = chosen[0]
    return driver, int(clock) if clock.isdigit() else None
