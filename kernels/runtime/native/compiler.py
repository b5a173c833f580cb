"""The C compiler of this machine, and the shared library that it builds of our C: once for each source, compiler and CPU."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

import torch

from headway.core.contract.errors import BackendError
from headway.core.contract.support import YES, Support
from headway.core.system.files import kernel_folders, warn_unwritable, write_whole

log = logging.getLogger("headway")

VARIABLE = "HEADWAY_CC"
"""Environment variable that names a C compiler; `none` stands for a machine without one."""
ROUNDS = "HEADWAY_CPU_ROUNDS_ACTIVATIONS"
"""Environment variable: products over the blocks of .gguf files round what they multiply to 16 bits where the CPU has AVX-512's
VNNI; 1: to 8 bits there, which is faster; 0: not at all."""
_X_BITS = {"0": "-DX_BITS=0", "1": "-DX_BITS=8"}
SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-std=gnu11")
_SECONDS = 120
"""For a compilation, which takes some 5 s."""
_LOADING = Lock()
"""Held while the library is compiled: a start does so in a thread, next to what reads the model."""
_OPENMP = ("libgomp", "libiomp5", "libomp")


@dataclass(frozen=True, slots=True)
class CCompiler:
    """A C compiler with OpenMP."""

    path: str
    version: str
    """The first line of what it says of itself."""


@cache
def find_compiler() -> tuple[CCompiler | None, Support]:
    """The C compiler: of $HEADWAY_CC, else cc, gcc or clang; (None, why not) where there is none."""
    hint = f"install gcc, or set {VARIABLE} to a C compiler"
    named = os.environ.get(VARIABLE)
    for name in [named] if named else ["cc", "gcc", "clang"]:
        path = None if name == "none" else shutil.which(name)
        if path is None:
            continue
        try:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        return CCompiler(path, said.partition("\n")[0]), YES
    return None, Support.no("C compiler", "gcc or clang", named or "none", hint)


def library() -> tuple[ctypes.CDLL | None, Support]:
    """Return our C library, compiled at the first call on a machine; (None, why not) if there is no compiler, or it fails."""
    with _LOADING:
        return build_library()


@cache
def build_library() -> tuple[ctypes.CDLL | None, Support]:
    """Compile and load our C library, without a lock; `library` is for callers in several threads."""
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return None, Support.no("OpenMP", "a torch with OpenMP", "one without")
    compiler, support = find_compiler()
    runtime = _openmp()
    if compiler is None or runtime is None:
        return None, support & (YES if runtime else Support.no("OpenMP", "torch's own runtime, loaded", "none of that kind"))
    try:
        return ctypes.CDLL(str(_built(compiler, runtime))), YES
    except (OSError, BackendError) as error:
        return None, Support.no("C compiler", "one that builds our C", f"{compiler.path}: {' '.join(str(error).split())}")


def _openmp() -> Path | None:
    """The OpenMP runtime that torch has loaded: with another one, two pools of threads would take each other's cores."""
    torch.get_num_threads()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = dict.fromkeys(Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/"))
    ours = [path for path in paths if path.name.startswith(_OPENMP)]
    inside = [path for path in ours if Path(torch.__file__).parent in path.parents]
    return next(iter(inside or ours), None)


def _flags() -> tuple[str, ...]:
    bits = _X_BITS.get(os.environ.get(ROUNDS, ""))
    return _FLAGS if bits is None else (*_FLAGS, bits)


def _built(compiler: CCompiler, runtime: Path) -> Path:
    """The shared library's file.

    :raises BackendError: it does not compile.
    """
    digest = hashlib.sha256(repr((compiler, _flags(), str(runtime), _cpu())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    name = f"native-{digest.hexdigest()[:24]}.so"
    path = kernel_folders()[0] / name
    if path.is_file():
        return path
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / name
        _compile(compiler, runtime, target)
        content = target.read_bytes()
    log.info("native: compiled our C with %s in %.1f s", compiler.path, time.perf_counter() - began)
    try:
        write_whole(path, content)
    except OSError as error:
        warn_unwritable(path.parent, error.strerror or str(error))
        kept = Path(tempfile.mkdtemp()) / name
        kept.write_bytes(content)
        return kept
    return path


def _compile(compiler: CCompiler, runtime: Path, target: Path) -> None:
    """Compile and link, with the runtime by its path: -fopenmp at the link would bring the compiler's own."""
    objects = {str(source): str(target.with_name(f"{source.stem}.o")) for source in sorted(SOURCES.glob("*.c"))}
    commands = [[compiler.path, *_flags(), "-c", source, "-o", compiled] for source, compiled in objects.items()]
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(_run, commands))
    linked = [*objects.values(), str(runtime), f"-Wl,-rpath,{runtime.parent}", "-lm"]
    _run([compiler.path, "-shared", "-o", str(target), *linked])


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        told = next((line for line in lines if "error" in line), lines[-1])
        raise BackendError(f"native: {command[0]} does not compile our C: {told}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendError(f"native: {command[0]} cannot be run ({error})") from error


def _cpu() -> str:
    """What -march=native depends on: the CPU's instructions, as the system lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "flags", "Features"))]
    return " ".join(sorted(set(told)))
