"""How many registers a thread of a compiled kernel takes, out of the cubin: what ptxas notes there for the driver."""

from __future__ import annotations

import struct

_REGCOUNT = b"\x04\x2f\x08\x00"
"""EIATTR_REGCOUNT of a section .nv.info, with a value of eight bytes: the kernel's symbol and its registers."""
_FRAME_SIZE = b"\x04\x11\x08\x00"
"""EIATTR_FRAME_SIZE, likewise: a function and the bytes of local memory of a thread of it."""
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
    """Blocks of so many threads for which a multiprocessor has registers, as cuda_occupancy.h of CUDA 13.0 reckons."""
    of_warp = -(-most_registers(cubin) * 32 // 256) * 256
    return _PART // of_warp * _PARTS // -(-threads // 32)
