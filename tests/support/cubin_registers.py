"""How many registers a thread of a compiled kernel takes, out of the cubin: what ptxas notes there for the driver."""

from __future__ import annotations

import struct

_REGCOUNT = b"\x04\x2f\x08\x00"
"""EIATTR_REGCOUNT of a section .nv.info, with a value of eight bytes: the kernel's symbol and its registers."""
_PART, _PARTS = 16 * 1024, 4
"""Registers of a part of a multiprocessor, which a warp gets 256 at a time, and parts."""


def most_registers(cubin: bytes) -> int:
    """Registers of a thread of the kernel that takes most."""
    found, at = [], cubin.find(_REGCOUNT)
    while at >= 0:
        found.append(struct.unpack_from("<II", cubin, at + len(_REGCOUNT))[1])
        at = cubin.find(_REGCOUNT, at + 1)
    return max(found)


def blocks_that_fit(cubin: bytes, threads: int) -> int:
    """Blocks of so many threads for which a multiprocessor has registers, as cuda_occupancy.h of CUDA 13.0 reckons."""
    of_warp = -(-most_registers(cubin) * 32 // 256) * 256
    return _PART // of_warp * _PARTS // -(-threads // 32)
