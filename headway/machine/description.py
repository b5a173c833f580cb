"""Description of the machine and the software on it, as plain data: so the doctor can be tested without such a machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from headway.core.system.files import cache_folder, kernel_folders, obstacle
from headway.core.system.provenance import installed_versions


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str
    capability: tuple[int, int]
    """Compute capability, such as (9, 0)."""
    memory_gib: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that decide which backends can run and how the rest could be installed."""

    system: str
    """Operating system, as platform.system() returns: "Linux", "Windows", "Darwin"."""
    arch: str
    """Architecture, as platform.machine() returns: "x86_64"."""
    python: str
    torch: str
    torch_cuda: str | None
    """The CUDA version torch was built for; None: a build without CUDA."""
    cuda_works: bool
    """True where torch can use a GPU now."""
    cores: int
    threads: int
    """CPU threads that torch uses."""
    memory_gib: float
    model_cache: str
    kernel_cache: tuple[tuple[str, str], ...] = ()
    """Folders of compiled kernels, each with the reason why files cannot be written there; empty: they can."""
    driver: str | None = None
    """Version of the NVIDIA driver; None where the driver or nvidia-smi is missing."""
    gpus: tuple[Gpu, ...] = ()
    nvcc: str | None = None
    """CUDA version of nvcc; None where nvcc is not found."""
    ninja: str | None = None
    """Path of ninja; None where ninja is not found."""
    compiler: str | None = None
    """Path of a C++ compiler; None where none is found."""
    cxx11abi: bool = True
    """C++ ABI of torch's build, which stands in the names of flash-attn's wheels."""
    installer: str = "python -m pip"
    """Command that installs into this Python; empty: neither pip nor uv is found."""
    installed: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> version, of the requested ones that are installed."""


def examine(distributions: tuple[str, ...]) -> Machine:
    """Describe this machine; no library but torch is imported. distributions: names whose versions to look up."""
    driver, gpus = _gpus()
    return Machine(
        system=platform.system(),
        arch=platform.machine(),
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        cuda_works=torch.cuda.is_available(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        model_cache=str(cache_folder()),
        kernel_cache=tuple((str(folder), obstacle(folder)) for folder in kernel_folders()),
        driver=driver,
        gpus=gpus,
        nvcc=_nvcc(),
        ninja=_find("ninja"),
        compiler=_find(os.environ.get("CXX", ""), "c++", "g++", "clang++", "cl"),
        cxx11abi=bool(torch.compiled_with_cxx11_abi()),
        installer=_installer(),
        installed=installed_versions(distributions),
    )


def _gpus() -> tuple[str | None, tuple[Gpu, ...]]:
    """Find driver and GPUs by nvidia-smi, which also sees them where torch has no CUDA, else by torch."""
    rows = _run("nvidia-smi", "--query-gpu=driver_version,name,compute_cap,memory.total", "--format=csv,noheader,nounits")
    driver, gpus = parse_gpus(rows)
    if not gpus and torch.version.cuda and torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        gpus = tuple(Gpu(gpu.name, (gpu.major, gpu.minor), round(gpu.total_memory / 2**30, 1)) for gpu in found)
    return driver, gpus


def parse_gpus(rows: str) -> tuple[str | None, tuple[Gpu, ...]]:
    """Parse nvidia-smi's rows "driver, name, capability, MiB" into driver and GPUs; rows of another form are left out."""
    driver, gpus = None, []
    for row in rows.splitlines():
        parts = [part.strip() for part in row.split(",")]
        capability = re.fullmatch(r"(\d+)\.(\d+)", parts[2]) if len(parts) == 4 else None
        if capability and parts[3].isdigit():
            driver = parts[0]
            gpus.append(Gpu(parts[1], (int(capability[1]), int(capability[2])), round(int(parts[3]) / 1024, 1)))
    return driver, tuple(gpus)


def _nvcc() -> str | None:
    folders = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [shutil.which("nvcc"), *(str(folder / "nvcc") for folder in [*folders, Path("/usr/local/cuda/bin")])]
    for place in places:
        version = re.search(r"release (\d+\.\d+)", _run(place, "--version")) if place else None
        if version:
            return version[1]
    return None


def _run(*command: str) -> str:
    """Return the output of a program; empty where the program is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _find(*names: str) -> str | None:
    beside = str(Path(sys.executable).parent)  # where pip puts ninja, even if the environment is not activated
    found = [place for name in names if name for place in (shutil.which(name), shutil.which(name, path=beside)) if place]
    return found[0] if found else None


def _installer() -> str:
    python = shutil.which("python")
    same = python is not None and Path(python).parent == Path(sys.executable).parent
    if importlib.util.find_spec("pip"):
        return f"{'python' if same else sys.executable} -m pip"
    return "uv pip" if shutil.which("uv") else ""
