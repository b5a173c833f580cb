"""Validation of a .gguf file's layout: every count, length and offset is checked before a library reads the file."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.contract.errors import ModelError
from headway.core.system.text import shown

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_MAGIC = b"GGUF"
_SCALARS = {
    0: 1,
    1: 1,
    2: 2,
    3: 2,
    4: 4,
    5: 4,
    6: 4,
    7: 1,
    10: 8,
    11: 8,
    12: 8,
}  # Bytes of a value, by the number of its scalar type
_UINT32, _STRING, _ARRAY = 4, 8, 9
_LEAST = {**_SCALARS, _STRING: 8}  # Minimum bytes of an array element: a string stores its length
_LEAST_KEY, _LEAST_TENSOR = 13, 24
"""Minimum size in bytes of a key's entry and of a tensor's entry in the header."""
_MOST_AXES = 4


def check_layout(path: Path) -> None:
    """Check that the header of a .gguf file fits the file, and that each tensor has the bytes that its type and shape need.

    Only the header is read. Its sizes are compared with the remaining bytes before anything is allocated for them.

    :raises ModelError: if a size does not fit; the message names the key or tensor, and the needed and found bytes.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 24 or file.read(4) != _MAGIC:
            raise ModelError(f"model {path}: needs a .gguf file, got {size} bytes that do not begin as one")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Layout(path, content).check()


@dataclass(frozen=True)
class _Place:
    """One tensor's entry in the header: type, shape and offset."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # In the file's order: the contiguous axis first
    offset: int  # Bytes from the start of the data
    num_bytes: int


class _Layout:
    """Sequential reader of a .gguf header."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._at = 4
        version = int.from_bytes(content[4:8], "little")
        self._order = "<" if version & 0xFFFF else ">"

    def check(self) -> None:
        """Check the whole header. :raises ModelError: as for `check_layout`."""
        self._number("I", "the version")
        tensors = self._count("the number of tensors", _LEAST_TENSOR)
        keys = self._count("the number of keys", _LEAST_KEY)
        alignment = 32
        for _ in range(keys):
            alignment = self._key(alignment)
        places = sorted((self._tensor() for _ in range(tensors)), key=lambda each: (each.offset, each.num_bytes))
        if places:
            self._check_places(places, -(-self._at // alignment) * alignment, alignment)

    def _refuse(self, what: str, need: str, got: str) -> ModelError:
        return ModelError(f"model {self._path}: {what} needs {need}, got {got}; the file is damaged or cut short, fetch it again")

    @property
    def _left(self) -> int:
        return len(self._content) - self._at

    def _skip(self, count: int, what: str) -> int:
        """Skip `count` bytes, and return the position of the first skipped byte. what: name of the bytes, for errors."""
        if count > self._left:
            raise self._refuse(what, f"{count} bytes", f"{self._left} up to the file's end")
        self._at += count
        return self._at - count

    def _number(self, code: str, what: str) -> int:
        start = self._skip(struct.calcsize(f"={code}"), what)
        number: int = struct.unpack_from(self._order + code, self._content, start)[0]
        return number

    def _count(self, what: str, least: int) -> int:
        """Read the number of elements that follow. what: name of the elements, for errors. least: minimum bytes per element."""
        count = self._number("Q", what)
        if count * least > self._left:
            raise self._refuse(what, f"at most {self._left // least}, for which the file has bytes", str(count))
        return count

    def _text(self, what: str) -> str:
        length = self._number("Q", f"the length of {what}")
        start = self._skip(length, what)
        try:
            return self._content[start : start + length].decode()
        except UnicodeDecodeError:
            raise self._refuse(what, "UTF-8 text", shown(self._content[start : start + length])) from None

    def _key(self, alignment: int) -> int:
        """Read one key and its value. Return the value if the key is general.alignment, else `alignment`."""
        name = self._text("the name of a key")
        what, kind = f"key {shown(name)}", self._number("I", f"the type of key {shown(name)}")
        if name == "general.alignment":
            alignment = self._number("I", what) if kind == _UINT32 else 0
            if alignment < 1 or alignment & (alignment - 1):
                raise self._refuse(what, "a power of two in 32 bits", str(alignment) if kind == _UINT32 else f"type {kind}")
        elif kind == _ARRAY:
            self._array(what)
        elif kind == _STRING:
            self._skip(self._number("Q", what), what)
        elif kind in _SCALARS:
            self._skip(_SCALARS[kind], what)
        else:
            raise self._refuse(what, "a type of GGUF's", f"type {kind}")
        return alignment

    def _array(self, what: str) -> None:
        kind = self._number("I", what)
        if kind not in _LEAST:
            raise self._refuse(what, "an array of numbers or texts", f"one of type {kind}")
        count = self._count(f"the length of {what}", _LEAST[kind])
        if kind != _STRING:
            self._skip(count * _SCALARS[kind], what)
            return
        length, content, at, size = struct.Struct(f"{self._order}Q"), self._content, self._at, len(self._content)
        for _ in range(count):  # a vocabulary and its merges are 100,000 texts
            if at + 8 > size or at + 8 + length.unpack_from(content, at)[0] > size:
                break
            at += 8 + length.unpack_from(content, at)[0]
        else:
            self._at = at
            return
        self._at = at
        self._skip(self._number("Q", what), what)  # raises

    def _tensor(self) -> _Place:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._text("the name of a tensor")
        what, axes = f"tensor {shown(name)}", self._number("I", f"tensor {shown(name)}")
        if axes > _MOST_AXES:
            raise self._refuse(what, f"at most {_MOST_AXES} axes", str(axes))
        shape = tuple(self._number("Q", what) for _ in range(axes))
        number, offset = self._number("I", what), self._number("Q", what)
        if number not in {int(kind) for kind in GGML_QUANT_SIZES}:
            raise self._refuse(what, f"one of GGML's types up to {max(GGML_QUANT_SIZES)}", f"type {number}")
        kind = GGMLQuantizationType(number)
        columns, block = GGML_QUANT_SIZES[kind]
        if min(shape, default=1) < 1 or (shape[0] if shape else 1) % columns:
            need = f"axes above 0, the first of a multiple of {columns} in type {kind.name}"
            raise self._refuse(what, need, str(list(shape)))
        return _Place(name, kind, shape, offset, math.prod(shape) // columns * block)

    def _check_places(self, places: list[_Place], start: int, alignment: int) -> None:
        """Compare each tensor's end with the next tensor's start, and the last end with the file size. start: data offset."""
        first = places[0]
        if first.offset:
            raise self._refuse(f"tensor {shown(first.name)}", "offset 0, as no tensor comes before it", str(first.offset))
        for place, after in zip(places, [*places[1:], None], strict=True):
            end, name = (
                (len(self._content) - start, "the file's end") if after is None else (after.offset, f"tensor {after.name}")
            )
            found = max(end - place.offset, 0)
            if not place.num_bytes <= found < place.num_bytes + alignment or place.offset % alignment:
                what = (
                    f"tensor {shown(place.name)} of type {place.kind.name}, shape {list(place.shape)}, at offset {place.offset},"
                )
                raise self._refuse(what, f"{place.num_bytes} bytes in steps of {alignment}", f"{found} up to {shown(name)[1:-1]}")
