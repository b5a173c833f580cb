"""CUDA C++ to machine code: NVRTC, which comes with torch, or nvcc. The kernels include no header but their own."""

from __future__ import annotations

import ctypes
import os
import shutil
import site
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from headway.core.contract.errors import BackendError
from headway.core.contract.support import YES, Support

_HINT = "pip install nvidia-cuda-nvrtc, or install the CUDA toolkit"


class Compiler(ABC):
    """Turns one source file into a cubin."""

    name: str
    version: str

    @abstractmethod
    def compile(self, source: Path, options: Sequence[str]) -> bytes:
        """options: as nvcc and NVRTC both read them, --gpu-architecture among them. :raises BackendError: it does not compile."""


class NVRTC(Compiler):
    """The run-time compiler as a library: no toolkit, no host compiler, half a second a kernel."""

    name = "NVRTC"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: Path, options: Sequence[str]) -> bytes:
        """As `Compiler.compile`."""
        program = ctypes.c_void_p()
        text = source.read_bytes()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, source.name.encode(), 0, None, None)
        try:
            arguments = [option.encode() for option in options]
            array = (ctypes.c_char_p * len(arguments))(*arguments)
            if self._library.nvrtcCompileProgram(program, len(arguments), array):
                log = self._read("ProgramLog", program).rstrip(b"\0").decode()
                raise BackendError(f"NVRTC {self.version} does not compile {source.name}:\n{log}")
            return self._read("CUBIN", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise BackendError(f"NVRTC: {function} failed with status {status}")


class NVCC(Compiler):
    """The toolkit's compiler driver."""

    name = "nvcc"

    def __init__(self, path: str) -> None:
        self._path = path
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
        self.version = answer.stdout.strip().splitlines()[-1]

    def compile(self, source: Path, options: Sequence[str]) -> bytes:
        """As `Compiler.compile`."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "kernel.cubin"
            command = [self._path, "-cubin", *options, "-o", str(target), str(source)]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            if answer.returncode:
                raise BackendError(f"nvcc does not compile {source.name}:\n{answer.stdout}{answer.stderr}")
            return target.read_bytes()


@cache
def find_nvrtc() -> NVRTC | None:
    """NVRTC of the CUDA version torch was built for, from torch's own packages, the toolkit, or the loader's path."""
    if sys.platform != "linux" or torch.version.cuda is None:
        return None
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    folders = [Path(entry) for entry in (*sys.path, *site.getsitepackages()) if entry]
    packaged = [path for folder in dict.fromkeys(folders) for path in sorted(folder.glob(f"nvidia/*/lib/{name}"))]
    for candidate in (*packaged, name, *(toolkit / "lib64" / name for toolkit in _toolkits())):
        try:
            return NVRTC(ctypes.CDLL(str(candidate)))
        except OSError:
            continue
    return None


@cache
def find_nvcc() -> NVCC | None:
    """The toolkit's nvcc, or one on the path."""
    beside = os.pathsep.join(str(toolkit / "bin") for toolkit in _toolkits())
    path = shutil.which("nvcc", path=beside) or shutil.which("nvcc")
    return NVCC(path) if path else None


def find_compiler() -> tuple[Compiler | None, Support]:
    """The compiler that will be used; (None, why) where there is none."""
    compiler = find_nvrtc() or find_nvcc()
    if compiler is not None:
        return compiler, YES
    return None, Support.no("compiler", "nvcc or NVRTC", "none", _HINT)


def _toolkits() -> list[Path]:
    """Where a CUDA toolkit may be, as torch's extension builder looks for it."""
    named = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return [Path(name) for name in named if name]
