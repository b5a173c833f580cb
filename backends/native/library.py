"""The functions of our C library, with the types of their arguments, and the structures that they read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_long, c_void_p
from functools import cache
from typing import Any

import torch

from headway.backends.native.compiler import library
from headway.core.contract.errors import BackendError
from headway.core.contract.support import Support

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


class CacheStruct(ctypes.Structure):
    """`Cache` of attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("key", "value")),
        *(
            (name, c_int64)
            for name in ("key_block", "key_slot", "key_head", "value_block", "value_slot", "value_head", "block_size")
        ),
    )


class DecodeStruct(ctypes.Structure):
    """`Decode` of attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "lens", "sequences", "table", "out")),
        *(
            (name, c_int64)
            for name in ("q_row", "table_row", "tokens", "num_heads", "num_kv_heads", "dim", "value_dim", "window")
        ),
        ("scale", c_float),
        ("type", c_int32),
    )


class Functions:
    """Our C's functions. Each runs on as many threads as torch's own operations, and takes addresses and sizes in elements."""

    def __init__(self, built: ctypes.CDLL) -> None:
        self.rounds_x = bool(built.headway_rounds_x())
        """Whether products over codes round x to 8 bits, in groups of 32 columns: where the CPU multiplies bytes."""
        norm = [c_void_p, c_float]
        x = [c_void_p, c_long, c_long, c_int]
        self.product = _checked(built.headway_product, [POINTER(WeightStruct), *x, *norm, c_int, c_int, c_void_p, c_long])
        self.qkv = _checked(
            built.headway_qkv,
            [POINTER(WeightStruct), *x, *norm, c_void_p, c_long, c_void_p, c_void_p, c_long, c_long, c_long, *norm, *norm],
        )
        self.norm = built.headway_norm
        self.norm.argtypes, self.norm.restype = [c_void_p, c_long, c_long, c_long, c_int, c_void_p, c_float, c_void_p], None
        self.decode = _checked(
            built.headway_decode,
            [POINTER(DecodeStruct), POINTER(CacheStruct), c_void_p, c_void_p, c_int64, c_int64, c_void_p],
        )


def _checked(function: Any, arguments: list[Any]) -> Callable[..., None]:
    """A function that returns 0, or 1 where there is no memory."""
    function.argtypes, function.restype, function.errcheck = arguments, c_int, _check
    typed: Callable[..., None] = function
    return typed


def _check(result: int, function: object, arguments: object) -> None:
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
