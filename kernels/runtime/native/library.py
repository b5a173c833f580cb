"""Our C library: its build by the compiler that is here, its functions with their types, and the structures that they read."""

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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

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


TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types, as `vectors.h` numbers them."""
LANES = 16
"""Outputs of a panel."""


class WeightStruct(ctypes.Structure):
    """`Weight` of panels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("next", "panels", "scales", "supers", "bias", "table")),
        *((name, c_int64) for name in ("n", "k", "panel_bytes", "scale_bytes", "super_bytes")),
        *((name, c_int32) for name in ("form", "scale", "group", "superblock")),
    )


class ProductStruct(ctypes.Structure):
    """`Product` of steps.c."""

    _fields_ = (
        ("weight", POINTER(WeightStruct)),
        *((name, c_void_p) for name in ("x", "out", "cos", "sin")),
        *((name, c_int64) for name in ("rows", "ldx", "ldo", "head_dim", "q_heads", "heads")),
        *(field for norm in ("norm", "q_norm", "k_norm") for field in ((norm, c_void_p), (f"{norm}_least", c_double))),
        *((name, c_int32) for name in ("type", "mode", "activation")),
    )


class NormStruct(ctypes.Structure):
    """`NormRows` of steps.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "out")),
        *((name, c_int64) for name in ("rows", "ldx", "size")),
        ("norm", c_void_p),
        ("norm_least", c_double),
        ("type", c_int32),
    )


class CacheStruct(ctypes.Structure):
    """`Cache` of attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("key", "value")),
        *(
            (name, c_int64)
            for name in ("key_block", "key_slot", "key_head", "value_block", "value_slot", "value_head", "block_size")
        ),
    )


class StepStruct(ctypes.Structure):
    """`Step` of attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("lens", "sequences", "table", "slots")),
        *((name, c_int64) for name in ("table_row", "tokens", "num_heads", "num_kv_heads", "dim", "value_dim", "window")),
        ("scale", c_float),
        ("type", c_int32),
    )


class DecodeStruct(ctypes.Structure):
    """`Decode` of attention.c."""

    _fields_ = (
        ("step", POINTER(StepStruct)),
        ("cache", POINTER(CacheStruct)),
        *((name, c_void_p) for name in ("q", "k", "v", "out")),
        *((name, c_int64) for name in ("q_row", "k_row", "v_row")),
    )


class _Call(ctypes.Structure):
    """`Call` of steps.c."""

    _fields_ = (("kind", c_int64), ("of", c_void_p))


class Recording:
    """Calls of our C in the order in which they were made, to be made again as one."""

    def __init__(self, repeat: Callable[..., int]) -> None:
        """repeat: our C's function for that."""
        self._repeat = repeat
        self._held: list[ctypes.Structure] = []
        self._calls: list[_Call] = []
        self._whole: ctypes.Array[_Call] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, kind: int, of: ctypes.Structure) -> None:
        """Note a call. of: what it reads, which nobody changes from now on."""
        self._held.append(of)
        self._calls.append(_Call(kind, ctypes.addressof(of)))
        self._whole = None

    def repeat(self) -> None:
        """Make the calls once more; what they point to must still be there."""
        if self._whole is None:
            self._whole = (_Call * len(self._calls))(*self._calls)
        _check(self._repeat(self._whole, len(self._calls)))


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


class Functions:
    """Our C's functions. Each runs on as many threads as torch's own operations, and takes addresses and sizes in elements."""

    def __init__(self, built: ctypes.CDLL) -> None:
        self.x_bits: int = built.headway_x_bits()
        """Bits to which products over codes round x, in groups of 32 columns; 0: they round nothing."""
        self.product = _recorded(0, built.headway_product)
        self.norm = _recorded(1, built.headway_norm)
        self.decode = _recorded(2, built.headway_decode)
        self._repeat = built.headway_repeat
        self._repeat.argtypes = [c_void_p, c_int64]

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Note the calls that are made meanwhile by this thread."""
        recording = Recording(self._repeat)
        token = _recording.set(recording)
        try:
            yield recording
        finally:
            _recording.reset(token)


def is_recording() -> bool:
    """Whether calls of this thread are noted, to be made again."""
    return _recording.get() is not None


def _recorded(kind: int, function: Any) -> Callable[[ctypes.Structure], None]:
    """What calls a function, and notes that where calls are noted. kind: as steps.c numbers the functions."""
    function.argtypes = [c_void_p]

    def call(of: ctypes.Structure) -> None:
        recording = _recording.get()
        if recording is not None:
            recording.add(kind, of)
        _check(function(ctypes.addressof(of)))

    return call


def _check(result: int) -> None:
    if result:
        raise BackendError("native: no memory for the intermediate results of a step")


@cache
def functions() -> Functions | None:
    """The library's functions; None where there is none (`native_support` tells why)."""
    built, _ = library()
    return None if built is None else Functions(built)


def native_support() -> Support:
    """Whether our C runs on this machine, and why not."""
    return library()[1]
