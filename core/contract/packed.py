"""Several arrays of a step in one piece of memory, so that one copy takes them to the device."""

from __future__ import annotations

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.transfer import upload

_ALIGN = 4
"""Fields begin at multiples of 16 bytes, which kernels may rely on."""


class Packed:
    """Several int32 fields in one piece of host memory, and then in one of the device's."""

    def __init__(self, **lengths: int) -> None:
        """Fields by name, with their numbers of int32 elements; all are zero."""
        self._at: dict[str, slice] = {}
        end = 0
        for name, length in lengths.items():
            start = -(-end // _ALIGN) * _ALIGN
            end = start + length
            self._at[name] = slice(start, end)
        self._host = numpy.zeros(end, dtype=numpy.int32)
        self._device = torch.empty(0)

    def host(self, name: str) -> NDArray[numpy.int32]:
        """A field in host memory."""
        return self._host[self._at[name]]

    def upload(self, device: torch.device) -> None:
        """Copy all fields; host memory must not change any more."""
        self._device = upload(torch.from_numpy(self._host), device)

    def device(self, name: str) -> Tensor:
        """A field on the device."""
        return self._device[self._at[name]]
