"""Library of the C kernels for CPUs: build with the local compiler, functions and structures, and packed weights (GEMM)."""

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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.errors import BackendError
from headway.core.contract.support import YES, Support
from headway.core.system.files import kernel_folders, warn_unwritable, write_whole

log = logging.getLogger("headway")

VARIABLE = "HEADWAY_CC"
"""Environment variable that names a C compiler. `none` simulates a machine without a compiler."""
ROUNDS = "HEADWAY_CPU_ROUNDS_ACTIVATIONS"
"""Environment variable for the precision of activations in GEMMs over .gguf weights.

By default, activations are rounded to 16 bits if the CPU has AVX-512 VNNI. 1 means rounding to 8 bits, which is faster. 0
disables rounding.
"""
_X_BITS = {"0": "-DX_BITS=0", "1": "-DX_BITS=8"}
SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-std=gnu11")
_SECONDS = 120
"""Timeout of a compilation in seconds. It takes about 5 s."""
_LOADING = Lock()
"""Lock for the compilation, which an engine runs in a thread at startup while the model loads."""
_OPENMP = ("libgomp", "libiomp5", "libomp")


@dataclass(frozen=True, slots=True)
class CCompiler:
    """A C compiler with OpenMP."""

    path: str
    version: str
    """First line that the compiler prints for `--version`."""


@cache
def find_compiler() -> tuple[CCompiler | None, Support]:
    """Return the C compiler from $HEADWAY_CC, or else cc, gcc or clang. Return (None, the reason) if no compiler is found."""
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
    """Return the C library, or (None, the reason) if it cannot be built. The first call on a machine compiles it. Thread-safe."""
    with _LOADING:
        return build_library()


@cache
def build_library() -> tuple[ctypes.CDLL | None, Support]:
    """Compile and load the C library without a lock. Threads call `library` instead."""
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
    """Return the OpenMP runtime that torch has loaded. A second one would create a thread pool that competes for cores."""
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
    """Return the path of the shared library, which is compiled if needed.

    :raises BackendError: if the library does not compile.
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
    log.info("native: compiled Headway's C code with %s in %.1f s", compiler.path, time.perf_counter() - began)
    try:
        write_whole(path, content)
    except OSError as error:
        warn_unwritable(path.parent, error.strerror or str(error))
        temporary = Path(tempfile.mkdtemp()) / name
        temporary.write_bytes(content)
        return temporary
    return path


def _compile(compiler: CCompiler, runtime: Path, target: Path) -> None:
    """Compile the library and link it with the given OpenMP runtime. -fopenmp in the link step would add the compiler's own
    runtime."""
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
        message = next((line for line in lines if "error" in line), lines[-1])
        raise BackendError(f"native: {command[0]} does not compile our C: {message}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendError(f"native: {command[0]} cannot be run ({error})") from error


def _cpu() -> str:
    """Return the CPU features that -march=native depends on, as listed by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    features = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "flags", "Features"))]
    return " ".join(sorted(set(features)))


TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Integers by which `vectors.h` identifies element types."""
LANES = 16
"""Number of output features per packed block."""


class WeightStruct(ctypes.Structure):
    """ctypes mirror of `Weight` in panels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("next", "panels", "scales", "supers", "bias", "table")),
        *((name, c_int64) for name in ("n", "k", "panel_bytes", "scale_bytes", "super_bytes")),
        *((name, c_int32) for name in ("form", "scale", "group", "superblock")),
    )


class ProductStruct(ctypes.Structure):
    """ctypes mirror of `Product` in steps.c."""

    _fields_ = (
        ("weight", POINTER(WeightStruct)),
        *((name, c_void_p) for name in ("x", "out", "cos", "sin")),
        *((name, c_int64) for name in ("rows", "ldx", "ldo", "head_dim", "q_heads", "heads")),
        *(field for norm in ("norm", "q_norm", "k_norm") for field in ((norm, c_void_p), (f"{norm}_least", c_double))),
        *((name, c_int32) for name in ("type", "mode", "activation")),
    )


class NormStruct(ctypes.Structure):
    """ctypes mirror of `NormRows` in steps.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "out")),
        *((name, c_int64) for name in ("rows", "ldx", "size")),
        ("norm", c_void_p),
        ("norm_least", c_double),
        *((name, c_int32) for name in ("type", "adds")),
    )


class CacheStruct(ctypes.Structure):
    """ctypes mirror of `Cache` in attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("key", "value")),
        *(
            (name, c_int64)
            for name in ("key_block", "key_slot", "key_head", "value_block", "value_slot", "value_head", "block_size")
        ),
    )


class StepStruct(ctypes.Structure):
    """ctypes mirror of `Step` in attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("lens", "sequences", "table", "slots")),
        *((name, c_int64) for name in ("table_row", "tokens", "num_heads", "num_kv_heads", "dim", "value_dim", "window")),
        ("scale", c_float),
        ("type", c_int32),
    )


class DecodeStruct(ctypes.Structure):
    """ctypes mirror of `Decode` in attention.c."""

    _fields_ = (
        ("step", POINTER(StepStruct)),
        ("cache", POINTER(CacheStruct)),
        *((name, c_void_p) for name in ("q", "k", "v", "out")),
        *((name, c_int64) for name in ("q_row", "k_row", "v_row")),
    )


class _Call(ctypes.Structure):
    """ctypes mirror of `Call` in steps.c."""

    _fields_ = (("kind", c_int64), ("of", c_void_p))


class Recording:
    """Sequence of recorded calls to the C library, replayed by one call."""

    def __init__(self, repeat: Callable[..., int]) -> None:
        """Make an empty recording. repeat: the C function that replays calls."""
        self._repeat = repeat
        self._held: list[ctypes.Structure] = []
        self._calls: list[_Call] = []
        self._whole: ctypes.Array[_Call] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, kind: int, of: ctypes.Structure) -> None:
        """Append a call. of: the call's argument structure, which must not change from now on."""
        self._held.append(of)
        self._calls.append(_Call(kind, ctypes.addressof(of)))
        self._whole = None

    def repeat(self) -> None:
        """Replay the calls. The memory that their arguments point to must still be allocated."""
        if self._whole is None:
            self._whole = (_Call * len(self._calls))(*self._calls)
        _check(self._repeat(self._whole, len(self._calls)))


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


class Functions:
    """Functions of the C library.

    Each function runs on as many threads as torch's operations. Arguments are addresses, and sizes in elements.
    """

    def __init__(self, built: ctypes.CDLL) -> None:
        self.x_bits: int = built.headway_x_bits()
        """Number of bits to which GEMMs over quantized weights round activations, in groups of 32 columns. 0 means no
        rounding."""
        self.product = _recorded(0, built.headway_product)
        self.norm = _recorded(1, built.headway_norm)
        self.decode = _recorded(2, built.headway_decode)
        self._repeat = built.headway_repeat
        self._repeat.argtypes = [c_void_p, c_int64]

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Return a context that records the C calls of this thread."""
        recording = Recording(self._repeat)
        token = _recording.set(recording)
        try:
            yield recording
        finally:
            _recording.reset(token)


def is_recording() -> bool:
    """Return whether the calls of this thread are being recorded."""
    return _recording.get() is not None


def _recorded(kind: int, function: Any) -> Callable[[ctypes.Structure], None]:
    """Return a wrapper that calls a C function, and records the call if a recording is active. kind: integer that identifies the
    function in steps.c."""
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
    """Return the library's functions, or None if it is unavailable (`native_support` gives the reason)."""
    built, _ = library()
    return None if built is None else Functions(built)


def native_support() -> Support:
    """Return whether the C library works on this machine, with the reason if it does not."""
    return library()[1]


_FLOAT32, _HALF, _PAIRS, _CODES4, _CODES5, _CODES6, _CODES8 = range(7)
_FORMS = {torch.float32: _FLOAT32, torch.float16: _HALF, torch.bfloat16: _PAIRS}
SCALE_NONE, SCALE_D, SCALE_DM, SCALE_SUPER, SCALE_SUPER_DM = range(5)
"""Dequantization schemes, identified by the same integers as in panels.h."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [n, k] in packed blocks of 16 output features, with the structure that the C library reads."""

    data: Tensor
    """The packed blocks, uint8 or the weight's element type."""
    out_features: int
    in_features: int
    described: ctypes._Pointer[WeightStruct]
    held: tuple[Tensor, ...]
    """Other tensors that the structure points to."""
    more: tuple[ctypes._Pointer[WeightStruct], ...] = ()
    """Structures for later rows whose quantization formats differ from the format of the first rows."""

    @property
    def nbytes(self) -> int:
        """Size of the weight in bytes."""
        return self.data.nbytes + sum(each.nbytes for each in self.held)

    @property
    def gates(self) -> bool:
        """True if gate and up, the two halves of the output features, each fill complete packed blocks."""
        return self.out_features % (2 * LANES) == 0 and not self.more


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedValues:
    """A quantized weight: values of 4, 5, 6 or 8 bits, and the scales that dequantize them."""

    codes: Tensor
    """int8 [n, k]: quantized values. 4-bit values are 0 to 15."""
    table: Tensor | None
    """int8 [16]: integer that each 4-bit value represents (0 to 15 if there is a minimum). None for wider values, which are used
    as is."""
    scale: int
    """Dequantization scheme (`SCALE_...`, see panels.h)."""
    group: int
    """Number of columns per scale."""
    scales: tuple[Tensor, ...]
    """Matrices [n, k / group], one for each kind of value that a group has. The element type is float16, or int8 or uint8 if
    superblocks scale the values."""
    supers: tuple[Tensor, ...] = ()
    """Matrices float16 [n, k / superblock]: scales of the superblocks, and their minimums if any."""
    superblock: int = 0
    num_bits: int = 8
    """Number of bits that values without a table need."""


def pack_dense(weight: Tensor, bias: Tensor | None = None) -> PackedWeight | None:
    """Pack a dense weight. Return None if the library is unavailable, the element type is unsupported, or k is odd in
    bfloat16."""
    n, k = weight.shape
    form = _FORMS.get(weight.dtype)
    if form is None or functions() is None or (form == _PAIRS and k % 2):
        return None
    rows = _whole(weight).view(-1, LANES, k)
    columns = rows.view(-1, LANES, k // 2, 2) if form == _PAIRS else rows
    return _pack(columns.transpose(1, 2).contiguous(), n, k, form, bias)


def pack_quantized(parts: Sequence[QuantizedValues], bias: Tensor | None = None) -> PackedWeight | None:
    """Pack a quantized weight, whose rows may use several formats. Return None if the library is unavailable."""
    if (own := functions()) is None:
        return None
    weights, row = [], 0
    for coded in parts:
        n, k = coded.codes.shape
        rows = _whole(coded.codes).view(-1, LANES, k)
        if coded.table is not None:
            data, form = _paired(rows.view(torch.uint8)), _CODES4
        elif own.x_bits and coded.num_bits < 8:
            data, form = _with_high_bits(rows, coded), _CODES5 if coded.num_bits == 5 else _CODES6
        else:
            data, form = (rows.view(-1, LANES, k // 4, 4).int() + 128).to(torch.uint8).transpose(1, 2).contiguous(), _CODES8
        weights.append(_pack(data, n, k, form, None if bias is None else bias[row : row + n], coded))
        row += n
    for one, after in pairwise(weights):
        one.described.contents.next = ctypes.cast(after.described, ctypes.c_void_p)
    first = weights[0]
    if len(weights) == 1:
        return first
    held = (*first.held, *(tensor for each in weights[1:] for tensor in (each.data, *each.held)))
    structs = tuple(each.described for each in weights[1:])
    return PackedWeight(first.data, row, first.in_features, first.described, held, structs)


def _paired(rows: Tensor) -> Tensor:
    """Pack values of 4 bits, uint8 [blocks, 16, k], to [blocks, k / 8, 16, 4]: first the low, then the high halves of bytes."""
    low, high = rows.view(len(rows), LANES, -1, 2, 4).unbind(3)
    return (low | high << 4).transpose(1, 2).contiguous()


def _with_high_bits(rows: Tensor, coded: QuantizedValues) -> Tensor:
    """Pack values of 5 or 6 bits, int8 [blocks, 16, k], to uint8 [blocks, k / 32, bytes] (codes5 or codes6)."""
    planes = coded.num_bits - 4
    values = rows if len(coded.scales) == 2 else rows + (8 << planes)  # with a minimum, values are not negative
    values = values.view(torch.uint8)
    low = _paired(values & 15).view(len(rows), -1, 256)
    quads = values.view(len(rows), LANES, -1, 8, 4).permute(0, 2, 3, 1, 4)  # [blocks, groups, quads, 16, 4]
    bits = torch.stack([quads >> 4 + plane & 1 for plane in range(planes)], dim=3).unflatten(4, (8, 2)).flatten(5)
    high = (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return torch.cat([low, high.flatten(2)], dim=2)


class HugePages:
    """Memory in huge pages, which tensors share. A CPU reads weights up to 15 % faster from them than from pages of 4 KiB.

    NumPy asks Linux for huge pages for arrays of at least 4 MiB. A layer's weight is often smaller.
    """

    _ARRAY = 2**26
    _ALIGN = 64

    def __init__(self) -> None:
        self._lock = Lock()
        self._newest: weakref.ref[NDArray[numpy.uint8]] | None = None  # freed with the last tensor in it
        self._used = 0

    def hold(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor."""
        place = torch.from_numpy(self._take(tensor.nbytes))
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _take(self, nbytes: int) -> NDArray[numpy.uint8]:
        if nbytes > self._ARRAY // 4:
            return numpy.empty(nbytes, dtype=numpy.uint8)
        with self._lock:
            array = None if self._newest is None else self._newest()
            if array is None or self._used + nbytes > self._ARRAY:
                array = numpy.empty(self._ARRAY, dtype=numpy.uint8)
                self._newest = weakref.ref(array)
                self._used = 0
            begin = self._used
            self._used += -(-nbytes // self._ALIGN) * self._ALIGN
        return array[begin : begin + nbytes]


_HUGE_PAGES = HugePages()


def _pack(data: Tensor, n: int, k: int, form: int, bias: Tensor | None, coded: QuantizedValues | None = None) -> PackedWeight:
    data = _HUGE_PAGES.hold(data)
    whole = None if bias is None else _whole(bias.float())
    table = None if coded is None or coded.table is None else (coded.table.int() + 128).to(torch.uint8)
    scales = None if coded is None else _HUGE_PAGES.hold(_by_group(coded.scales))
    supers = None if coded is None or not coded.supers else _HUGE_PAGES.hold(_by_group(coded.supers))

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
    return PackedWeight(data, n, k, ctypes.pointer(struct), held)


def _by_group(matrices: tuple[Tensor, ...]) -> Tensor:
    """Pack matrices [n, groups] into one tensor [blocks, groups, matrices, 16]."""
    blocks = [_whole(each).view(-1, LANES, each.shape[1]).transpose(1, 2) for each in matrices]
    return torch.stack(blocks, dim=2).contiguous()


def _whole(rows: Tensor) -> Tensor:
    """Return rows padded with zeros to a multiple of a packed block's rows."""
    missing = -len(rows) % LANES
    return rows.contiguous() if not missing else torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def multiply(packed: PackedWeight, x: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply x [rows, k] by a packed weight and add the bias (GEMM). Return [rows, n], written to `out` if it is given."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    found, target = functions(), x.new_empty(len(x), packed.out_features) if out is None else out
    assert found is not None
    found.product(product_of(packed, x, target))
    return target


def product_of(packed: PackedWeight, x: Tensor, out: Tensor, others: Mapping[str, Any] | None = None) -> ProductStruct:
    """Return the arguments of `Functions.product`. others: further fields."""
    given = {"weight": packed.described, "x": x.data_ptr(), "out": out.data_ptr(), "rows": len(x), "type": TYPES[x.dtype]}
    strides = {"ldx": x.stride(0), "ldo": out.stride(0)}
    return ProductStruct(**given, **strides, **(others or {}))
