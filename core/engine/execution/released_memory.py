"""Memory of tensors that is given back for a while, the tensors staying what they are."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from typing import Final, NamedTuple

import torch
from torch import Tensor, UntypedStorage

_DONTNEED: Final = 4
"""Linux's MADV_DONTNEED: pages go back to the system, and are zero when they are next touched."""


class _Released(NamedTuple):
    storage: UntypedStorage
    num_bytes: int
    kept: Tensor | None
    """The bytes in the host's memory; None: they are lost."""


class ReleasedMemory:
    """The memory of tensors on a device, released when this is made and there again after `restore`.

    On a GPU the memory comes back at other addresses, which a CUDA graph does not know. On a CPU the addresses stay: pages are
    handed to the system, and what is kept needs no other place.
    """

    def __init__(self, *, kept: Iterable[Tensor] = (), lost: Iterable[Tensor] = ()) -> None:
        """kept: what they hold is there again afterwards. lost: they are zero then; a tensor that is in both is lost."""
        self._released: list[_Released] = []
        empty = _storages(lost)
        for key, storage in {**_storages(kept), **empty}.items():
            if storage.device.type == "cuda":
                size = storage.nbytes()
                self._released.append(_Released(storage, size, None if key in empty else _on_host(storage)))
                storage.resize_(0)
            elif key in empty:
                _empty_pages(storage)

    @torch.inference_mode()
    def restore(self) -> None:
        """Allocate the memory again, and put back into it what was kept."""
        while self._released:
            storage, num_bytes, kept = self._released.pop()
            storage.resize_(num_bytes)
            memory = _bytes_of(storage)
            memory.zero_() if kept is None else memory.copy_(kept)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """What tensors lie in, each once."""
    found = (each.untyped_storage() for each in tensors if each.layout == torch.strided)
    return {storage._cdata: storage for storage in found}


@torch.inference_mode()
def _on_host(storage: UntypedStorage) -> Tensor:
    kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
    return kept.copy_(_bytes_of(storage))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@torch.inference_mode()
def _empty_pages(storage: UntypedStorage) -> None:
    """Make a CPU's memory zero; on Linux, by handing its whole pages to the system."""
    memory, page = _bytes_of(storage), mmap.PAGESIZE
    begin = -storage.data_ptr() % page
    length = (storage.nbytes() - begin) // page * page
    if length <= 0 or sys.platform != "linux":
        memory.zero_()
        return
    memory[:begin].zero_()
    memory[begin + length :].zero_()
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(storage.data_ptr() + begin), ctypes.c_size_t(length), _DONTNEED):
        memory.zero_()
