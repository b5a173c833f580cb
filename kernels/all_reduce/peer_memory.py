"""GPU memory that all ranks can read and write, shared between processes through CUDA IPC handles.

The driver is called through ctypes, since the signatures of these functions have not changed since CUDA 4. torch's symmetric
memory is not used because it numbers its exchanges per process: a process that starts its second engine would not find the ranks
of new processes.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch

from headway.core.contract.ranks import RankGroup

_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class PeerMemory:
    """GPU memory that all ranks share, mapped at addresses of this rank. The memory is freed when the object is deleted."""

    def __init__(self, group: RankGroup, name: str, num_bytes: int, word: int) -> None:
        """Allocate `num_bytes` on every rank. All ranks must call this, each with a different GPU.

        name: name of the memory, unique within the group. word: initial value of every 16 bits.
        :raises RuntimeError: if the driver cannot allocate or share the memory.
        """
        driver, rank, size, device, store = _driver(), group.rank, group.size, group.device, group.store
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # creates torch's context
            own, handle = ctypes.c_uint64(), _Handle()
            _check(driver, driver.cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(num_bytes)))
            addresses = [0] * size
            addresses[rank] = own.value
            self._end = weakref.finalize(self, _free, driver, addresses, rank)
            _check(driver, driver.cuMemsetD16_v2(own, ctypes.c_ushort(word), ctypes.c_size_t(num_bytes // 2)))
            torch.cuda.synchronize(device)
            _check(driver, driver.cuIpcGetMemHandle(ctypes.byref(handle), own))
            store.set(_key(name, rank), bytes(handle).hex())
            for other in range(size):
                if other != rank:
                    theirs, address = (
                        _Handle.from_buffer_copy(bytes.fromhex(store.get(_key(name, other)).decode())),
                        ctypes.c_uint64(),
                    )
                    _check(driver, driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), theirs, _LAZY_PEER_ACCESS))
                    addresses[other] = address.value
        self.addresses: Sequence[int] = addresses
        """Address of each rank's memory on this rank's GPU."""


def _key(name: str, rank: int) -> str:
    return f"headway/peer_memory/{name}/{rank}"


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"no libcuda.so.1: {error}") from error


def _check(driver: Any, result: int) -> None:
    if result != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {result}: {(text.value or b'unknown').decode()}")


def _free(driver: Any, addresses: Sequence[int], rank: int) -> None:
    for number, address in enumerate(addresses):
        if number == rank:
            driver.cuMemFree_v2(ctypes.c_uint64(address))
        elif address:
            driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))
