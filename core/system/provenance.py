"""Provenance of a result: commit and version of this code, versions of libraries and compilers, name of the CPU."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from headway.core.system.text import harmless

COMMIT_VARIABLE = "HEADWAY_COMMIT"
"""Environment variable with the commit, for copies of the sources without a git folder, such as in a container."""
_SHORT = 12
_UNKNOWN = "unknown"
"""Placeholder for the version of sources that are not installed."""
_SECONDS = 10
PTXAS, NVRTC, CUBLAS = "ptxas", "nvrtc", "cublas"
_RELEASE = re.compile(r"\bV(\d+(?:\.\d+)+)|\brelease (\d+(?:\.\d+)+)")
"""Version in the output of `ptxas --version`, such as "release 12.8" or "V12.8.93"."""


def command_line(*program: str) -> str:
    """Return the running command as typed, beginning with `program` ("headway"), with undecodable bytes escaped."""
    return harmless(shlex.join([*(program or ("headway",)), *sys.argv[1:]]), keep="\n\t")


class Origin(BaseModel):
    """Identity of the code that produced a result."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    """Version of the distribution headway."""
    commit: str | None = None
    """Commit of the checkout, abbreviated to twelve digits. None if neither git nor $HEADWAY_COMMIT gives it."""
    modified: bool = False
    """True if tracked files differed from `commit`."""

    @classmethod
    def here(cls) -> Origin:
        """Return the origin of the running code, from git in a checkout, else from $HEADWAY_COMMIT."""
        try:
            version = metadata.version("headway")
        except metadata.PackageNotFoundError:
            version = _UNKNOWN
        root = Path(__file__).resolve().parents[2]
        commit = _git(root, "rev-parse", f"--short={_SHORT}", "HEAD") if (root / ".git").exists() else None
        if commit:
            return cls(version=version, commit=commit, modified=bool(_git(root, "status", "--porcelain", "--untracked-files=no")))
        return cls(version=version, commit=os.environ.get(COMMIT_VARIABLE, "").strip()[:_SHORT] or None)

    def __str__(self) -> str:
        commit = f", commit {self.commit}{' plus uncommitted changes' if self.modified else ''}" if self.commit else ""
        return f"headway{'' if self.version == _UNKNOWN else f' {self.version}'}{commit}"


def _git(root: Path, *words: str) -> str | None:
    """Return git's output, or None if git is missing or fails."""
    try:
        found = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return distribution -> version for installed distributions, from package metadata, without importing them."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def compiler_versions(capability: tuple[int, int]) -> dict[str, str]:
    """Return name -> version of the compilers and libraries of GPU code in this process: Triton's ptxas, NVRTC and cuBLAS.

    The version of ptxas includes its path: "12.8.93 (/usr/bin/ptxas)". Programs and libraries that are not installed are left
    out. No GPU is used. capability: compute capability of the GPU, because Triton has a separate ptxas for some capabilities.
    """
    found = {PTXAS: _ptxas_version(10 * capability[0] + capability[1]), NVRTC: _nvrtc_version(), CUBLAS: _cublas_version()}
    return {name: version for name, version in found.items() if version}


def _ptxas_version(arch: int) -> str:
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        path = get_ptxas(arch).path
        return f"{_release_of(path)} ({path})"
    except Exception:  # absent, another build, or a file from $TRITON_PTXAS_PATH that does not run
        return ""


@cache
def _release_of(path: str) -> str:
    """Return the full version that ptxas prints, since two builds of version 12.8 may generate different code."""
    printed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    releases = [exact or short for exact, short in _RELEASE.findall(printed)]
    return max(releases, key=len, default=_UNKNOWN)


def _nvrtc_version() -> str:
    """Return NVRTC's version, major.minor, which is also part of the key of cached kernels."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except Exception:  # the CUDA loader raises exceptions of its own classes
        return ""
    return f"{major}.{minor}"


@cache
def _cublas_version() -> str:
    """Return the version of torch's cuBLAS, or "" without cuBLAS. Does not create a handle."""
    import torch

    try:
        library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")
        parts = [ctypes.c_int() for _ in range(3)]
        failed = [library.cublasGetProperty(number, ctypes.byref(part)) for number, part in enumerate(parts)]
    except (OSError, AttributeError):
        return ""
    return "" if any(failed) else ".".join(str(part.value) for part in parts)


def cpu_name() -> str:
    """Return the model name of the CPU if the system reports it, else its architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def interpreted() -> bool:
    """Return whether Triton's kernels run in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
