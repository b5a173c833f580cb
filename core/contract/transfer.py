"""Asynchronous copies from host to device."""

from __future__ import annotations

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN = 4
"""Fields begin at multiples of 16 bytes, which kernels may rely on."""


class Packed:
    """Several int32 fields in one piece of host memory, copied to the device at once."""

    def __init__(self, **lengths: int) -> None:
        """Make fields of zeros. lengths: number of int32 elements of each field, by name."""
        self._at: dict[str, slice] = {}
        end = 0
        for name, length in lengths.items():
            start = -(-end // _ALIGN) * _ALIGN
            end = start + length
            self._at[name] = slice(start, end)
        self._host = numpy.zeros(end, dtype=numpy.int32)
        self._device = torch.empty(0)

    def host(self, name: str) -> NDArray[numpy.int32]:
        """Return a field in host memory, to be filled before `upload`."""
        return self._host[self._at[name]]

    def upload(self, device: torch.device) -> None:
        """Copy all fields without waiting; host memory must not change afterwards."""
        self._device = upload(torch.from_numpy(self._host), device)

    def device(self, name: str) -> Tensor:
        """Return a field on the device, int32 [length]; valid after `upload`."""
        return self._device[self._at[name]]


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device; returns before the copy is done.

    From pageable memory a copy waits for everything queued on the device before it, which would undo overlapped scheduling, so
    it goes through pinned memory, which torch keeps until the copy is done.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
