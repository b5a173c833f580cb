"""The arguments of a kernel, laid out once in memory that its launches read."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from struct import Struct

import numpy

Value = int | numpy.int32 | numpy.float32 | bytes
"""An int is a pointer or a long long; bytes are a struct handed in by value, such as a tensor map."""
_PITCH = 64
"""Every value begins at a multiple of this: the alignment of a tensor map, the largest that a parameter asks for."""


class Arguments:
    """Values for a kernel's parameters in their order, in the form that the driver takes.

    A launch copies the values, so that they may be changed for the next one as soon as it returns: `set` is one
    write into memory. One thread at a time may set and launch.
    """

    __slots__ = ("_formats", "_memory", "_pointers", "_start", "address", "values")

    def __init__(self, *values: Value) -> None:
        self._formats = tuple([_format_of(value) for value in values])
        packer, places = _layout(self._formats)
        self._memory = ctypes.create_string_buffer(packer.size + _PITCH)
        base = ctypes.addressof(self._memory)
        self._start = -base % _PITCH
        first = base + self._start
        self._pointers = (ctypes.c_void_p * len(places))(*[first + place for place in places])
        self.address = ctypes.addressof(self._pointers)
        """Address of the array of pointers to the values: what the driver calls kernelParams."""
        self.values: tuple[Value, ...] = values
        """As they are now, for tests and messages."""
        packer.pack_into(self._memory, self._start, *values)

    def set(self, *values: Value) -> None:
        """Change the first values; each keeps the type that it was made with."""
        packer, _ = _layout(self._formats[: len(values)])
        packer.pack_into(self._memory, self._start, *values)
        self.values = values + self.values[len(values) :]


def _format_of(value: Value) -> str:
    """How `struct` writes a value."""
    kind = type(value)
    if kind is int:
        return "q"
    if kind is numpy.int32:
        return "i"
    if kind is numpy.float32:
        return "f"
    if isinstance(value, bytes):
        return f"{len(value)}s"
    raise TypeError(f"a kernel's argument is an int (pointer, long long), numpy.int32, numpy.float32 or bytes, not {value!r}")


@lru_cache(maxsize=1024)
def _layout(formats: tuple[str, ...]) -> tuple[Struct, tuple[int, ...]]:
    """What writes values in one go, and where each begins."""
    text, places, end = "=", [], 0
    for each in formats:
        places.append(end)
        size = Struct(f"={each}").size
        padding = -size % _PITCH
        text += f"{each}{padding}x"
        end += size + padding
    return Struct(text), tuple(places)
