"""Headers of .gguf files that do not fit the file: refused in one line, at once, without memory for what they claim."""

from __future__ import annotations

import random
import re
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest

from headway.core.contract.errors import ModelError

gguf = pytest.importorskip("gguf")
TENSORS = {"token_embd.weight": ((8, 64), "F32"), "blk.0.ffn_up.weight": ((96, 64), "Q8_0"), "output_norm.weight": ((64,), "F16")}


def packed(tensors: list[dict[str, Any]], alignment: int = 32, counts: tuple[int, int] | None = None, keys: bytes = b"") -> bytes:
    """A header with a text, an array of texts, `keys` and these tensors: name, shape (innermost first), kind, offset."""
    text = lambda each: struct.pack("<Q", len(each)) + each  # noqa: E731
    found = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    found += text(b"tokens") + struct.pack("<IIQ", 9, 8, 3) + text(b"a") + text(b"") + text("é".encode()) + keys
    found += text(b"general.alignment") + struct.pack("<II", 4, alignment)
    for each in tensors:
        found += text(each["name"].encode()) + struct.pack("<I", len(each["shape"]))
        found += struct.pack(f"<{len(each['shape'])}Q", *each["shape"]) + struct.pack("<IQ", each["kind"], each["offset"])
    number, count = counts or (len(tensors), 3 + bool(keys))
    head = b"GGUF" + struct.pack("<IQQ", 3, number, count) + found
    return head + bytes(-len(head) % alignment)


def placed() -> tuple[list[dict[str, Any]], int]:
    """Three tensors one after the other, and the bytes of their data."""
    placed, offset = [], 0
    for name, (shape, kind) in TENSORS.items():
        number = gguf.GGMLQuantizationType[kind]
        columns, size = gguf.GGML_QUANT_SIZES[number]
        placed.append({"name": name, "shape": list(shape[::-1]), "kind": int(number), "offset": offset})
        offset += -(-int(numpy.prod(shape)) // columns * size // 32) * 32
    return placed, offset


def refused(path: Path, content: bytes) -> str:
    """The error of a file, or "" if it is fine; it takes neither time nor memory."""
    from headway.models.checkpoints.gguf.layout import check_layout

    path.write_bytes(content)
    start = time.perf_counter()
    tracemalloc.start()
    try:
        check_layout(path)
        return ""
    except ModelError as error:
        return str(error)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 1 << 20
        assert time.perf_counter() - start < 2


CHANGES: dict[str, tuple[int, dict[str, Any], str]] = {
    "a type of fewer bytes": (
        0,
        {"kind": 1},
        "token_embd.weight' of type F16, .*1024 bytes .*got 2048 up to tensor blk.0.ffn_up",
    ),
    "a type of more bytes": (1, {"kind": 0}, "ffn_up.weight' of type F32, .*24576 bytes .*got 6528 up to tensor output_norm"),
    "a neighbour's type": (1, {"kind": 7}, "ffn_up.weight' of type Q5_1, .*4608 bytes"),
    "more bytes than the file has": (
        2,
        {"kind": 0},
        "output_norm.weight' of type F32, .*256 bytes .*got 128 up to the file's end",
    ),
    "fewer bytes than the file has": (2, {"shape": [32]}, "output_norm.weight' of type F16, .*64 bytes .*got 128"),
    "an unknown type": (1, {"kind": 4}, "needs one of GGML's types .*got type 4"),
    "rows that are no whole blocks": (1, {"shape": [48, 128]}, "multiple of 32 in type Q8_0, got .48, 128."),
    "another shape": (0, {"shape": [64, 9]}, r"shape \[64, 9\], .*needs 2304 bytes .*got 2048"),
    "an axis beyond 64 bits of elements": (0, {"shape": [2**40, 2**40]}, "token_embd.weight.*got 2048"),
    "an axis of nothing": (0, {"shape": [64, 0]}, "axes above 0"),
    "many axes": (0, {"shape": [1] * 9}, "at most 4 axes, got 9"),
    "an overlap": (1, {"offset": 2016}, "token_embd.weight.*2048 bytes .*got 2016"),
    "a gap": (1, {"offset": 2080}, "token_embd.weight.*2048 bytes .*got 2080"),
    "an offset between steps": (1, {"offset": 2049}, "ffn_up.weight' of type Q8_0, .*at offset 2049, needs"),
    "an offset beyond the file": (2, {"offset": 2**62}, "ffn_up.weight.*6528 bytes"),
    "no first tensor": (0, {"offset": 32}, "offset 0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_has_the_bytes_that_its_type_and_shape_need(tmp_path: Path, change: str) -> None:
    tensors, size = placed()
    assert not refused(tmp_path / "fine.gguf", packed(tensors) + bytes(size))
    number, changed, told = CHANGES[change]
    tensors[number] |= changed
    assert re.search(told, refused(tmp_path / "m.gguf", packed(tensors) + bytes(size)))


ALIGNMENTS = {
    1: "steps of 1",
    8: "steps of 8",
    16: "steps of 16",
    4096: "steps of 4096",
    24: "a power of two",
    0: "a power of two",
}


def aligned(tensors: list[dict[str, Any]], said: int) -> bytes:
    """A header whose data begin at a multiple of 32, and whose key says another number."""
    key = b"alignment" + struct.pack("<II", 4, 32)
    pads = (struct.pack("<Q", count) + bytes(count) + struct.pack("<IB", 7, 1) for count in range(1, 33))
    header = next(found for pad in pads if (found := packed(tensors, keys=pad)).endswith(bytes(31)))
    return header.replace(key, key[:-4] + struct.pack("<I", said))


def test_counts_and_lengths_are_compared_with_the_file(tmp_path: Path) -> None:
    tensors, size = placed()
    data = bytes(size)
    name = struct.pack("<Q", 2**60) + b"x"
    key = struct.pack("<Q", 1) + b"x"
    for content, told in (
        (packed(tensors, counts=(10**9, 3)), "the number of tensors needs at most "),
        (packed(tensors, counts=(3, 10**9)), "the number of keys needs at most "),
        (packed(tensors, keys=name), f"the name of a key needs {2**60} bytes"),
        (packed(tensors, keys=key + struct.pack("<IIQ", 9, 4, 10**12)), "the length of key 'x' needs at most "),
        (packed(tensors, keys=key + struct.pack("<IIQ", 9, 8, 2**63)), "the length of key 'x' needs at most "),
        (packed(tensors, keys=key + struct.pack("<IIQ", 9, 9, 1)), "an array of numbers or texts"),
        (packed(tensors, keys=key + struct.pack("<IQ", 8, 2**60)), f"key 'x' needs {2**60} bytes"),
        (packed(tensors, keys=key + struct.pack("<IQ", 99, 0)), "type 99"),
        *((aligned(tensors, said), told) for said, told in ALIGNMENTS.items()),
        (b"GGUF", "do not begin as one"),
    ):
        assert told in refused(tmp_path / "m.gguf", content + data * (len(content) > 24)), told


def test_a_file_cut_anywhere_or_with_any_byte_changed_is_refused_or_fine(tmp_path: Path) -> None:
    tensors, size = placed()
    head = packed(tensors)
    draw = random.Random(0)
    for cut in (*range(0, len(head), 7), len(head) + 5, len(head) + size - 33):
        assert refused(tmp_path / "m.gguf", (head + bytes(size))[:cut])
    for _ in range(100):
        changed = bytearray(head + bytes(size))
        for place in draw.choices(range(len(head)), k=2):
            changed[place] = draw.randrange(256)
        refused(tmp_path / "m.gguf", bytes(changed))
