"""A GPU that is not there: what is launched on it is compiled for it, by the compilers that Triton brings, and never runs."""

from __future__ import annotations

import os
import re
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from triton import JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from attention_layer import variant_of
from headway.core.contract.kernel import AHEAD
from headway.core.contract.support import YES
from headway.kernels.experts import row_kernels
from headway.kernels.experts.builtin import builtin_classes

Capability = tuple[int, int]
_ERROR = re.compile(r"\berror *:")
META, CUDA = torch.device("meta"), torch.device("cuda", 0)
MULTIPROCESSORS = {(8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 188}
"""By compute capability: of A100, RTX A6000, L40S, H100, B200 and RTX PRO 6000."""
SHARED_MEMORY = {(8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448, (10, 0): 232_448, (12, 0): 101_376}
"""Bytes that a program may ask for (CUDA C++ Programming Guide, Technical Specifications per Compute Capability). An SM has 1 KiB
more, and a program takes 1 KiB more than it asks for."""
THREADS = {(8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048, (12, 0): 1536}
"""Of an SM (likewise)."""


@dataclass
class Compilations:
    """Record of kernels compiled for one GPU."""

    capability: Capability
    variants: dict[tuple[object, ...], Any] = field(default_factory=dict)
    """Compiled code of each kernel variant and Triton's metadata; None if the result is not machine code."""
    faults: list[str] = field(default_factory=list)
    """A line each: the kernel, the capability, its constants, and the compiler's last line."""
    too_large: dict[str, list[str]] = field(default_factory=dict)
    """Such lines of the kernels that ask for more shared memory than there is, by their names."""

    @property
    def kernels(self) -> set[object]:
        return {variant[0] for variant in self.variants}

    @property
    def constants(self) -> list[dict[str, str]]:
        """Constants of each launch, including options."""
        return [dict(variant[1]) for variant in self.variants]  # type: ignore[call-overload]

    def blocks_per_multiprocessor(self, compiled: Any) -> int:
        """Return the number of thread blocks that an SM holds, by registers, shared memory and threads."""
        threads, memory = 32 * compiled.metadata.num_warps, SHARED_MEMORY[self.capability] + 1024
        by_memory, by_threads = memory // (compiled.metadata.shared + 1024), THREADS[self.capability] // threads
        return min(blocks_that_fit(compiled.asm["cubin"], threads), by_memory, by_threads)

    def compile(self, warmup: Any, kernel: Any, arguments: Any, constants: dict[str, Any]) -> None:
        """warmup: Triton's, which compiles and launches nothing."""
        variant = variant_of(kernel, arguments, constants)
        if variant in self.variants:
            return
        self.variants[variant] = None
        given = ", ".join(f"{name}={value}" for name, value in constants.items())
        where = f"{kernel.__name__} for {'{}.{}'.format(*self.capability)} ({given})"
        with _written() as written:
            try:
                self.variants[variant] = compiled = warmup(kernel, *arguments, grid=(1,), **constants)
            except _EnoughError:
                return
            except Exception as error:
                self.faults.append(f"{where}: {type(error).__name__}: {_told(str(error), _read(written))}")
                return
        shared, most = compiled.metadata.shared, SHARED_MEMORY[self.capability]
        if shared > most:
            self.too_large.setdefault(kernel.__name__, []).append(f"{where}: {shared} bytes of shared memory, of {most}")


@contextmanager
def absent_gpu(capability: Capability, whole: bool = True) -> Iterator[Compilations]:
    """Inside, "cuda" is a GPU of this compute capability; a launch of a Triton kernel compiles it, if that variant is new.

    whole: down to machine code, whose shared memory is compared with what there is; else as far as Triton's front end goes, which
    finds most of what its interpreter cannot: types that change in a loop, shapes that do not fit.
    """
    number, found = capability[0] * 10 + capability[1], Compilations(capability)
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", number, 32),
        get_current_device=lambda: 1000 + number,  # where no kernel is kept for a GPU that is there
        get_current_stream=lambda device=None: 0,
    )
    properties = SimpleNamespace(
        multi_processor_count=MULTIPROCESSORS[capability], shared_memory_per_block_optin=SHARED_MEMORY[capability]
    )
    warmup, stages = JITFunction.warmup, CUDABackend.add_stages

    def compile_variant(kernel: Any, *arguments: Any, grid: Any, **constants: Any) -> None:
        found.compile(warmup, kernel, arguments, constants)

    def add_front_end(backend: Any, into: dict[str, Any], *rest: Any, **more: Any) -> None:
        stages(backend, into, *rest, **more)
        front = into["ttir"]
        into.clear()
        into |= {"ttir": front, "ttgir": _stop}

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        given: list[tuple[Any, str, Any]] = [
            (knobs.cache, "dir", folder),
            (tempfile, "tempdir", folder),  # an assembler that fails leaves its input there
            (driver, "_active", gpu),
            (JITFunction, "warmup", compile_variant),
            (CUDABackend, "add_stages", stages if whole else add_front_end),
            (row_kernels, "can_launch", lambda: YES),
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
        ]
        for owner, name, value in given:
            stack.enter_context(patch.object(owner, name, value, create=True))
        builtin_classes.cache_clear()  # classes that can run here, which a GPU changes
        stack.callback(builtin_classes.cache_clear)
        stack.callback(AHEAD.reset, AHEAD.set(SimpleNamespace(num_new=0)))  # type: ignore[arg-type]
        stack.enter_context(_OnMeta())
        yield found


class _OnMeta(TorchFunctionMode):
    """Tensors of the absent GPU are torch's meta tensors, which have shapes, strides and types, and no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _AS_IT_IS:
            return args[0]
        result = func(*map(_there, args), **{name: _there(value) for name, value in (kwargs or {}).items()})
        return CUDA if isinstance(result, torch.device) and result == META else result


_AS_IT_IS = torch.Tensor.pin_memory, torch.Tensor.addmm_
"""Methods that return their own tensor. (torch's decomposition of addmm_ for meta tensors starts with an import of seconds.)"""


def _there(value: Any) -> Any:
    cuda = (isinstance(value, torch.device) and value.type == "cuda") or (isinstance(value, str) and value.startswith("cuda"))
    return META if cuda else value


class _EnoughError(Exception):
    """Compiled as far as was asked for."""


def _stop(*_: Any) -> None:
    raise _EnoughError


@contextmanager
def _written() -> Iterator[IO[str]]:
    """A file that takes what is written meanwhile, by libraries and other programs too: a compiler that fails shows its input."""
    with tempfile.TemporaryFile("w+", errors="replace") as file, ExitStack() as stack:
        for number in (1, 2):
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(file.fileno(), number)
        stack.enter_context(redirect_stdout(file))
        stack.enter_context(redirect_stderr(file))
        yield file


def _told(*texts: str) -> str:
    """The line that says what is wrong: the last that a compiler marks as an error, else the last of the exception."""
    lines = [line.strip() for text in texts for line in text.strip().splitlines()]
    errors = [line for line in lines if _ERROR.search(line)]
    return (errors or texts[0].strip().splitlines() or [""])[-1].strip()[:300]


def _read(file: IO[str]) -> str:
    file.flush()
    file.seek(0)
    return file.read()


_REGCOUNT = b"\x04\x2f\x08\x00"
"""EIATTR_REGCOUNT of a section .nv.info, with a value of eight bytes: the kernel's symbol and its registers."""
_FRAME_SIZE = b"\x04\x11\x08\x00"
"""EIATTR_FRAME_SIZE entry: a function and the bytes of local memory per thread."""
_MOST = 255
"""Registers that a thread may have."""
_MOST_LOCAL = 512 * 1024
"""Bytes of local memory that a thread may have."""
_PART, _PARTS = 16 * 1024, 4
"""Registers of a part of a multiprocessor, which a warp gets 256 at a time, and parts."""


def most_registers(cubin: bytes) -> int:
    """Registers of a thread of the kernel that takes most."""
    return max(count for count in _values(cubin, _REGCOUNT) if count <= _MOST)  # machine code may hold the same four bytes


def most_local_bytes(cubin: bytes) -> int:
    """Bytes of local memory of a thread, such as what registers are spilled to, of the function that takes most."""
    return max(count for count in _values(cubin, _FRAME_SIZE) if count <= _MOST_LOCAL)  # likewise


def _values(cubin: bytes, attribute: bytes) -> list[int]:
    found, at = [], cubin.find(attribute)
    while at >= 0:
        found.append(struct.unpack_from("<II", cubin, at + len(attribute))[1])
        at = cubin.find(attribute, at + 1)
    return found


def blocks_that_fit(cubin: bytes, threads: int) -> int:
    """Return the number of thread blocks for which an SM has registers, as in cuda_occupancy.h of CUDA 13.0."""
    of_warp = -(-most_registers(cubin) * 32 // 256) * 256
    return _PART // of_warp * _PARTS // -(-threads // 32)
