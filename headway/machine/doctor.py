"""The doctor: this machine's hardware and software, and the commands that would install a missing backend."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
import torch

from headway.core.contract.support import Support
from headway.core.system.files import cache_folder, kernel_folders, obstacle
from headway.core.system.provenance import installed_versions


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU."""

    name: str
    capability: tuple[int, int]
    """Compute capability, such as (9, 0)."""
    memory_gib: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that decide which backends can run and how to install the others."""

    system: str
    """Operating system, as platform.system() returns: "Linux", "Windows", "Darwin"."""
    arch: str
    """Architecture, as platform.machine() returns: "x86_64"."""
    python: str
    torch: str
    torch_cuda: str | None
    """CUDA version that torch was built for. None means a build without CUDA."""
    cuda_works: bool
    cores: int
    threads: int
    memory_gib: float
    model_cache: str
    kernel_cache: tuple[tuple[str, str], ...] = ()
    """Folders of compiled kernels, each with the reason why it is not writable, or "" if it is writable."""
    driver: str | None = None
    """Version of the NVIDIA driver. None if the driver or nvidia-smi is missing."""
    gpus: tuple[Gpu, ...] = ()
    nvcc: str | None = None
    """CUDA version of nvcc. None if nvcc is not found."""
    ninja: str | None = None
    """Path of ninja. None if it is not found."""
    compiler: str | None = None
    """Path of a C++ compiler. None if no compiler is found."""
    cxx11abi: bool = True
    """True if torch was built with the C++11 ABI, which is part of the names of flash-attn's wheels."""
    installer: str = "python -m pip"
    """Command that installs into this Python. Empty if neither pip nor uv is found."""
    installed: Mapping[str, str] = field(default_factory=dict)
    """Requested distribution -> its version. Distributions that are not installed are left out."""


def examine(distributions: tuple[str, ...]) -> Machine:
    """Return a description of this machine, importing only torch. distributions: names of the distributions whose versions to
    look up."""
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
    """Return the driver's version and the GPUs, from nvidia-smi (which works if torch lacks CUDA) or else from torch."""
    rows = _run("nvidia-smi", "--query-gpu=driver_version,name,compute_cap,memory.total", "--format=csv,noheader,nounits")
    driver, gpus = parse_gpus(rows)
    if not gpus and torch.version.cuda and torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        gpus = tuple(Gpu(gpu.name, (gpu.major, gpu.minor), round(gpu.total_memory / 2**30, 1)) for gpu in found)
    return driver, gpus


def parse_gpus(rows: str) -> tuple[str | None, tuple[Gpu, ...]]:
    """Return the driver's version and the GPUs in nvidia-smi's rows "driver, name, capability, MiB"; other rows are ignored."""
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
    """Return a program's output, or "" if the program is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _find(*names: str) -> str | None:
    beside = str(Path(sys.executable).parent)  # pip installs ninja here, even if the environment is not activated
    found = [place for name in names if name for place in (shutil.which(name), shutil.which(name, path=beside)) if place]
    return found[0] if found else None


def _installer() -> str:
    python = shutil.which("python")
    same = python is not None and Path(python).parent == Path(sys.executable).parent
    if importlib.util.find_spec("pip"):
        return f"{'python' if same else sys.executable} -m pip"
    return "uv pip" if shutil.which("uv") else ""


@dataclass(frozen=True, slots=True)
class Package:
    """A kernel library and how to install it."""

    requirement: str
    """Requirement specifier for pip."""
    options: str = ""
    """Options for `pip install`."""
    capability: tuple[int, int] | None = None
    """Minimum compute capability. None if only the installed library can report it."""
    systems: tuple[str, ...] = ("Linux",)
    """Operating systems for which the package is released, as platform.system() names them."""
    releases: str = ""
    """URL of a page with prebuilt wheels that pip does not find. Their names end in `wheel_tag`."""
    build_time: str = ""
    """Duration of a build from source. Empty if pip finds a wheel or nothing is compiled."""
    build_gib: int = 0
    """Memory per compiler job in GiB, which limits MAX_JOBS in a build."""
    note: str = ""
    """Remark on further requirements of the installation."""
    generation: int | None = None
    """The only major compute capability that the library has kernels for. None means any."""


PACKAGES: Final = {
    "triton": Package("triton>=3.6", capability=(8, 0)),
    "flash-attn": Package(
        "flash-attn>=2.7",
        "--no-build-isolation",
        capability=(8, 0),
        releases="https://github.com/Dao-AILab/flash-attention/releases",
        build_time="5 minutes to 2 hours, by cores and MAX_JOBS",
        build_gib=9,
    ),
    "flash-attn-3": Package("flash-attn-3", capability=(9, 0), generation=9),
    "flash-attn-4": Package("flash-attn-4>=4.0.0b36", "--pre", capability=(9, 0)),
    "xformers": Package(
        "xformers>=0.0.32",
        note="wheels built for CUDA 12 load beside a newer torch if nvidia-cuda-runtime-cu12 is installed and its lib folder "
        "is on LD_LIBRARY_PATH",
    ),
}
"""Name of a library -> its package. A backend names its library in BackendInfo.extra."""

FA3_WHEELS: Final = {"2.11": "0.24.0", "2.14": "0.33.0"}
"""torch version -> vLLM release built for it and CUDA 13. Its wheel has FlashAttention 3 in a file that needs only torch."""

STABLE_WHEEL: Final = "0.33.0"
"""Release of vLLM whose `_C_stable_libtorch` is built for CUDA 13 and torch's stable ABI, for any other torch."""

TORCH_BUILDS: Final = ((580, "13.0", "cu130"), (525, "12.6", "cu126"))
"""Minimum major version of the driver, CUDA version, and name of torch's wheel index for that CUDA, newest first."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice on making a missing backend available."""

    text: str
    commands: tuple[str, ...] = ()
    """Commands to try, in order. Each can work on this machine."""
    note: str = ""
    """Remark on the commands."""


def library(extra: str) -> str:
    """Return the library of a backend's `extra`, which is "headway[flash-attn]" or a requirement such as "flash_attn>=2.7"."""
    ours = re.fullmatch(r"headway\[([^\]]+)\]", extra.strip())
    name = re.split(r"[\s\[<>=!~;,]", ours[1] if ours else extra.strip(), maxsplit=1)[0]
    return name.lower().replace("_", "-")


def advise(extra: str, support: Support, devices: Collection[str] | None, machine: Machine) -> Advice:
    """Return advice on making a backend available. extra: BackendInfo.extra. devices: device types of the backend; None if its
    import failed."""
    name = library(extra)
    package = PACKAGES.get(name)
    hints = "; ".join(reason.hint for reason in support.reasons if reason.hint and "pip install" not in reason.hint)
    if package is not None or (devices is not None and "cpu" not in devices):
        blocked = _gpu_in_the_way(package, machine)
        if blocked is not None:
            return blocked
    if package is None and name in ("", "torch"):  # one backend is not enough reason to replace torch
        return Advice(
            f"comes with torch, this is {machine.torch}; nothing to install" if name else "nothing to install", note=hints
        )
    if package is not None and machine.system not in package.systems:
        return Advice(
            f"{name} is not released for {machine.system}, only for {' and '.join(package.systems)}; nothing to install"
        )
    broken = name in machine.installed
    if broken and not any(reason.what == "import" or "Error" in reason.got for reason in support.reasons):
        return Advice(f"{name} {machine.installed[name]} is installed; nothing to install", note=hints)
    if not machine.installer:
        return Advice("this Python has neither pip nor uv: first install pip", (f"python -m ensurepip{_AGAIN}",))
    if name == "flash-attn-3":
        return _flash_attn_3(machine, hints)
    again = f"{name} {machine.installed[name]} is installed but does not load: install it again" if broken else ""
    force = "--force-reinstall --no-deps " if broken else ""
    if package is None:
        return Advice(again or f"install {name}", (f"{machine.installer} install {force}'{extra.strip()}'",), hints)
    if package.releases:
        return _compiled(name, package, machine, again, force)
    options = f"{package.options} " if package.options else ""
    return Advice(
        again or f"install {name}", (f"{machine.installer} install {force}{options}'{package.requirement}'",), package.note
    )


def wheel_tag(machine: Machine) -> str:
    """Return the part after the version in the name of flash-attn's wheel for this torch, CUDA and Python."""
    cuda = (machine.torch_cuda or "").partition(".")[0]
    torch = ".".join(machine.torch.split("+")[0].split(".")[:2])
    python = "cp" + "".join(machine.python.split(".")[:2])
    return f"cu{cuda}torch{torch}cxx11abi{str(machine.cxx11abi).upper()}-{python}-{python}-linux_{machine.arch}.whl"


def build_jobs(machine: Machine, build_gib: int) -> int:
    """Return the MAX_JOBS that uses all cores without running out of memory."""
    return max(1, min(machine.cores, int(machine.memory_gib // build_gib)))


_AGAIN = " && headway doctor"

NO_GPU: Final = Advice("needs an NVIDIA GPU; nothing to install")


def _gpu_in_the_way(package: Package | None, machine: Machine) -> Advice | None:
    """Return advice on the GPU, driver or torch, which all GPU libraries need, or None if they work."""
    if not machine.gpus:
        return NO_GPU
    newest = max(gpu.capability for gpu in machine.gpus)
    if package is not None and package.capability is not None and newest < package.capability:
        need, got = ("{}.{}".format(*version) for version in (package.capability, newest))
        return Advice(f"needs compute capability {need}, the GPU has {got}; nothing to install")
    if package is not None and package.generation not in (None, newest[0]):
        got = "{}.{}".format(*newest)
        return Advice(f"has kernels for compute capability {package.generation}.x alone, the GPU has {got}; nothing to install")
    if machine.cuda_works:
        return None
    major = int((machine.driver or "0").partition(".")[0] or 0)
    build = next((build for build in TORCH_BUILDS if major >= build[0]), None)
    if build is None:
        oldest = TORCH_BUILDS[-1][0]
        return Advice(f"first update the NVIDIA driver to {oldest} or newer: this one is {machine.driver or 'not found'}")
    _, cuda, index = build
    command = f"{machine.installer} install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}"
    commands = (command,) if machine.installer and machine.system in ("Linux", "Windows") else ()
    note = "then run headway doctor again"
    if machine.torch_cuda is None:
        return Advice(f"first a CUDA build of torch: this one, {machine.torch}, is for CPUs", commands, note)
    if float(machine.torch_cuda) > float(cuda):
        text = f"first a torch for this driver: {machine.driver} is too old for CUDA {machine.torch_cuda}"
        return Advice(text, commands, note)
    return Advice(f"torch {machine.torch} cannot use the GPU: see what nvidia-smi and torch.cuda.init() say; nothing to install")


def _compiled(name: str, package: Package, machine: Machine, again: str, force: str) -> Advice:
    """Return advice on a library with wheels on a separate page: the wheel first, then a build if there is a compiler."""
    page = f"the wheel that ends in {wheel_tag(machine)} from {package.releases}"
    text = f"{again or f'install {name}'}; first try a prebuilt one: download {page}, then"
    wheel = f"{machine.installer} install {force}./{name.replace('-', '_')}-*+{wheel_tag(machine)}"
    cuda = (machine.torch_cuda or "").partition(".")[0]
    lacking = [what for what, there in (("nvcc", machine.nvcc), ("a C++ compiler", machine.compiler)) if not there]
    if lacking:
        return Advice(text, (wheel,), f"without such a wheel: a build needs {' and '.join(lacking)}, not found here")
    if machine.nvcc and machine.nvcc.partition(".")[0] != cuda:
        return Advice(
            text, (wheel,), f"without such a wheel: a build needs nvcc {cuda}.x like torch's CUDA, here is {machine.nvcc}"
        )
    jobs = build_jobs(machine, package.build_gib)
    tools = () if machine.ninja else (f"{machine.installer} install ninja",)
    build = f"MAX_JOBS={jobs} {machine.installer} install {force}{package.options} '{package.requirement}'"
    slow = "" if machine.ninja else "; without ninja it takes hours"
    return Advice(
        text, (wheel, *tools, build), f"without such a wheel the last command builds from source: {package.build_time}{slow}"
    )


def advise_vllm_library(support: Support, machine: Machine) -> Advice:
    """Return advice on getting vLLM's library of GEMM kernels for quantized weights, which is optional."""
    hints = "; ".join(reason.hint for reason in support.reasons if reason.hint)
    blocked = _gpu_in_the_way(Package("vllm", capability=(8, 0)), machine)
    if blocked is not None:
        return blocked
    if (machine.torch_cuda or "").startswith("13.") and machine.installer == "python -m pip" and machine.arch == "x86_64":
        release = FA3_WHEELS.get(".".join(machine.torch.split("+")[0].split(".")[:2]), STABLE_WHEEL)
        text = "take it out of vLLM's wheel, which need not be installed"
        return Advice(text, _from_wheel("vllm", release, "vllm/_C_stable_libtorch.abi3.so", "HEADWAY_VLLM_LIBRARY"))
    return Advice("no wheel of vLLM with this library is known for this machine", note=hints)


def _from_wheel(folder: str, release: str, file: str, variable: str) -> tuple[str, ...]:
    """Return commands that extract one file from a vLLM wheel and set an environment variable to its path."""
    return (
        f"python -m pip download --no-deps --dest {folder} vllm=={release}",
        f"python -m zipfile -e {folder}/vllm-{release}-*.whl {folder}",
        f"export {variable}=$PWD/{folder}/{file}{_AGAIN}",
    )


def _flash_attn_3(machine: Machine, found: str) -> Advice:
    """Return advice on extracting FlashAttention 3 from vLLM's wheel, since there is no separate wheel. found: hints for the
    rejected libraries."""
    torch = ".".join(machine.torch.split("+")[0].split(".")[:2])
    release = FA3_WHEELS.get(torch) if (machine.torch_cuda or "").startswith("13.") else None
    source = "build the folder hopper of https://github.com/Dao-AILab/flash-attention: nvcc, an hour"
    if release is None or machine.installer != "python -m pip" or machine.arch != "x86_64":
        return Advice(
            f"no wheel with FlashAttention 3 for torch {torch} and CUDA {machine.torch_cuda} is known; {source}", note=found
        )
    return Advice(
        f"take it out of vLLM's wheel for torch {torch}, which need not be installed",
        _from_wheel("fa3", release, "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "HEADWAY_FA3_LIBRARY"),
        f"or {source}",
    )
