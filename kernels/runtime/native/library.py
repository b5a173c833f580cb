"""The functions of our C library, with the types of their arguments, and the structures that they read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from headway.core.contract.errors import BackendError
from headway.core.contract.support import Support
from headway.kernels.runtime.native.compiler import library

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
