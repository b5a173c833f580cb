"""Compiler of CUDA C++ to cubins, using NVRTC through cuda.core. The kernels include only their own headers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from headway.core.contract.errors import BackendError
from headway.core.contract.support import YES, Support
from headway.kernels.runtime.probe import find

log = logging.getLogger("headway")


class Compiler:
    """NVRTC, CUDA's run-time compiler. It needs neither the CUDA toolkit nor a host compiler, and takes half a second per kernel.

    :raises ImportError or RuntimeError: if cuda.core or the NVRTC library is not installed. `find_compiler` reports which one.
    """

    name = "NVRTC"

    def __init__(self) -> None:
        from cuda.bindings import nvrtc
        from cuda.core import Program, ProgramOptions

        self._program = Program
        self._options = ProgramOptions
        _, major, minor = nvrtc.nvrtcVersion()
        self.version = f"{major}.{minor}"

    def compile(self, source: Path, include: Path, constants: Mapping[str, str | int], arch: str) -> bytes:
        """Return a cubin for `arch` (such as sm_90), with each of `constants` defined as a macro.

        :raises BackendError: if the source does not compile.
        """
        options = self._options(
            name=source.name,
            arch=arch,
            std="c++17",
            include_path=str(include),
            define_macro=[(name, str(value)) for name, value in constants.items()] or None,
        )
        remarks = StringIO()
        try:
            code = self._program(source.read_text(), "c++", options).compile("cubin", logs=remarks).code
        except Exception as error:  # cuda.core's exception class is not public
            raise BackendError(f"NVRTC {self.version} does not compile {source.name}:\n{error}") from error
        for line in filter(None, map(str.strip, remarks.getvalue().split("\0")[0].splitlines())):
            # such as a warning that wgmma instructions are serialised
            log.info("NVRTC %s: %s: %s", self.version, source.name, line)
        return bytes(code)


@cache
def find_compiler() -> tuple[Compiler | None, Support]:
    """Return the compiler. Return (None, the reason) if it is missing or the driver cannot load its kernels."""
    hint = f'pip install "cuda-core[cu{cuda_major()}]>=1.2"'
    launches: Any
    launches, support = find("cuda.core", "LaunchConfig", hint)
    if not support:
        return None, support
    if not hasattr(launches, "programmatic_stream_serialization"):
        return None, Support.no("cuda.core", "LaunchConfig(programmatic_stream_serialization=...)", "one without it", hint)
    try:
        compiler = Compiler()
    except Exception as error:  # the loader of CUDA libraries raises its own exception classes
        text = " ".join(str(error).split())
        return None, Support.no("NVRTC", "to be loadable", f"{type(error).__name__}: {text}", hint)
    if compiler.version.split(".")[0] != cuda_major():
        return None, Support.no("NVRTC", f"version {cuda_major()}, as torch's CUDA", compiler.version, hint)
    return (compiler, YES) if (support := _driver_loads(compiler)) else (None, support)


def _driver_loads(compiler: Compiler) -> Support:
    """Return whether the driver, if any, can load the compiler's output. The driver's major CUDA version must be the same as the
    compiler's or newer."""
    if not torch.cuda.is_available():
        return YES  # compiling for another machine
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    found = f"{version // 1000}.{version % 1000 // 10}"
    if int(found.split(".")[0]) >= int(compiler.version.split(".")[0]):
        return YES
    hint = "update the driver, or install torch and cuda-core for its CUDA version"
    return Support.no("CUDA driver", f"one for CUDA {compiler.version.split('.')[0]} or newer, as NVRTC", found, hint)


def cuda_major() -> str:
    """Return the major CUDA version that torch was built for, because torch's driver can load kernels of that version. Return 13
    for CPU builds."""
    return (torch.version.cuda or "13").split(".")[0]


TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}
"""Element type -> its name in the CUDA sources."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of a kernel: a source file and its compile-time constants."""

    folder: Path
    """Folder of the source and its includes, such as the `csrc` of a backend."""
    source: str
    """Name of the source file in the folder."""
    constants: tuple[tuple[str, str | int], ...] = ()
    """Macros and their values."""

    @classmethod
    def of(
        cls, folder: Path, source: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, block_size: int, **others: int
    ) -> Variant:
        """Make a variant from the constants that all kernels on a KV cache share."""
        shape: dict[str, str | int] = {
            "TYPE": TYPES[dtype],
            "KV_TYPE": TYPES[kv_dtype],
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
        }
        return cls(folder, source, tuple({**shape, **others}.items()))

    @property
    def owner(self) -> str:
        """Name of the backend that contains the source."""
        return self.folder.parent.name

    def compile(self, arch: str, compiler: Compiler) -> bytes:
        """Return the cubin for an architecture, such as sm_90 or sm_90a.

        :raises BackendError: if the source does not compile.
        """
        return compiler.compile(self.folder / self.source, self.folder, dict(self.constants), arch)

    def __str__(self) -> str:
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.constants)])


def architecture(device: torch.device, *, specific: bool = False) -> str:
    """Return the architecture of a device, such as sm_90.

    specific: True to return the name with the suffix a, such as sm_90a, which adds instructions that other generations lack (such
    as Hopper's wgmma).
    """
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) + ("a" if specific else "")
