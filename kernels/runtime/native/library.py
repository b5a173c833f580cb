"""Our C library: its build by the compiler that is here, its functions and structures, and weights packed for them."""

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

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
    if not torch.backends.openmp.is_available():
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


_FLOAT32, _HALF, _PAIRS, _CODES4, _CODES8 = range(5)
_FORMS = {torch.float32: _FLOAT32, torch.float16: _HALF, torch.bfloat16: _PAIRS}
SCALE_NONE, SCALE_D, SCALE_DM, SCALE_SUPER, SCALE_SUPER_DM = range(5)
"""How the weights of codes follow from them, see panels.h."""


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A weight [n, k] in panels, with the structure that our C reads."""

    data: Tensor
    """The panels; uint8 or the weight's element type."""
    out_features: int
    in_features: int
    described: ctypes._Pointer[WeightStruct]
    held: tuple[Tensor, ...]
    """What the structure points to beside the panels."""
    more: tuple[ctypes._Pointer[WeightStruct], ...] = ()
    """Structures of the rows behind the first ones, where these have another form."""

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""
        return self.data.nbytes + sum(each.nbytes for each in self.held)

    @property
    def gates(self) -> bool:
        """Whether the outputs divide into halves of whole panels."""
        return self.out_features % (2 * LANES) == 0 and not self.more


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """Codes of 4 or 8 bits for the elements of a weight, and the scales that turn them into numbers."""

    codes: Tensor
    """int8 [n, k]; of 4 bits 0 to 15."""
    table: Tensor | None
    """int8 [16], what codes of 4 bits stand for (with an m: 0 to 15); None: codes of 8 bits, which stand for themselves."""
    scale: int
    """A scheme of panels.h."""
    group: int
    """Columns under one scale."""
    scales: tuple[Tensor, ...]
    """For each number of a group a matrix [n, k / group]: float16, or int8 or uint8 where superblocks scale them."""
    supers: tuple[Tensor, ...] = ()
    """float16 [n, k / superblock]"""
    superblock: int = 0


def dense_panels(weight: Tensor, bias: Tensor | None = None) -> Panels | None:
    """Arrange a plain weight; None where our C does not multiply it: no library, another element type, an odd bfloat16."""
    n, k = weight.shape
    form = _FORMS.get(weight.dtype)
    if form is None or functions() is None or (form == _PAIRS and k % 2):
        return None
    rows = _whole(weight).view(-1, LANES, k)
    columns = rows.view(-1, LANES, k // 2, 2) if form == _PAIRS else rows
    return _panels(columns.transpose(1, 2).contiguous(), n, k, form, bias)


def coded_panels(parts: Sequence[Coded], bias: Tensor | None = None) -> Panels | None:
    """Arrange a weight of codes, whose rows may come in several schemes; None where there is no library."""
    if functions() is None:
        return None
    panels, row = [], 0
    for coded in parts:
        n, k = coded.codes.shape
        rows = _whole(coded.codes).view(-1, LANES, k)
        if coded.table is None:
            data, form = (rows.view(-1, LANES, k // 4, 4).int() + 128).to(torch.uint8), _CODES8
        else:
            low, high = rows.view(-1, LANES, k // 8, 2, 4).view(torch.uint8).unbind(3)
            data, form = low | high << 4, _CODES4
        data = data.transpose(1, 2).contiguous()
        panels.append(_panels(data, n, k, form, None if bias is None else bias[row : row + n], coded))
        row += n
    for one, after in pairwise(panels):
        one.described.contents.next = ctypes.cast(after.described, ctypes.c_void_p)
    first = panels[0]
    if len(panels) == 1:
        return first
    held = (*first.held, *(tensor for each in panels[1:] for tensor in (each.data, *each.held)))
    structs = tuple(each.described for each in panels[1:])
    return Panels(first.data, row, first.in_features, first.described, held, structs)


def _panels(data: Tensor, n: int, k: int, form: int, bias: Tensor | None, coded: Coded | None = None) -> Panels:
    whole = None if bias is None else _whole(bias.float())
    table = None if coded is None or coded.table is None else (coded.table.int() + 128).to(torch.uint8)
    scales = None if coded is None else _by_group(coded.scales)
    supers = None if coded is None or not coded.supers else _by_group(coded.supers)

    def address(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    def each(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.nbytes // len(tensor)

    struct = WeightStruct(
        panels=address(data),
        scales=address(scales),
        supers=address(supers),
        bias=address(whole),
        table=address(table),
        n=n,
        k=k,
        panel_bytes=each(data),
        scale_bytes=each(scales),
        super_bytes=each(supers),
        form=form,
        scale=SCALE_NONE if coded is None else coded.scale,
        group=0 if coded is None else coded.group,
        superblock=0 if coded is None else coded.superblock,
    )
    held = tuple(tensor for tensor in (scales, supers, whole, table) if tensor is not None)
    return Panels(data, n, k, ctypes.pointer(struct), held)


def _by_group(matrices: tuple[Tensor, ...]) -> Tensor:
    """Matrices [n, groups] as [panels, groups, matrices, 16]."""
    panels = [_whole(each).view(-1, LANES, each.shape[1]).transpose(1, 2) for each in matrices]
    return torch.stack(panels, dim=2).contiguous()


def _whole(rows: Tensor) -> Tensor:
    """Rows with zeros behind them, up to whole panels."""
    missing = -len(rows) % LANES
    return rows.contiguous() if not missing else torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def multiply(panels: Panels, x: Tensor, out: Tensor | None = None) -> Tensor:
    """The product of x [rows, k] with a weight in panels, and its bias: [rows, n]; `out`, where it is given."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    found, target = functions(), x.new_empty(len(x), panels.out_features) if out is None else out
    assert found is not None
    found.product(
        ProductStruct(
            weight=panels.described,
            x=x.data_ptr(),
            out=target.data_ptr(),
            rows=len(x),
            ldx=x.stride(0),
            ldo=target.stride(0),
            type=TYPES[x.dtype],
        )
    )
    return target
