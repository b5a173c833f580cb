"""The host's memory for pages: pinned where a GPU copies to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psutil
import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError

_LARGEST_SLAB = 256 * 2**20
"""Bytes of memory allocated at once: torch pins a power of two."""


class HostSlots:
    """Slots for one page each."""

    def __init__(self, memory: Sequence[Tensor], num_slots: int) -> None:
        """memory: see `page_memory`.

        :raises ConfigError: the host has not as much memory.
        """
        self.num_slots = num_slots
        page_bytes = sum(view[:, 0].nbytes for view in memory)
        free = psutil.virtual_memory().available
        if num_slots * page_bytes > free:
            raise ConfigError(
                "kv_offload_size", f"at most what the host has free, {free // 2**20} MiB", f"{num_slots * page_bytes}"
            )
        pinned = memory[0].device.type == "cuda"
        self._per_slab = max(_LARGEST_SLAB // page_bytes, 1)
        self._slabs: list[list[Tensor]] = []
        """For each view of the memory: uint8 [slots of a slab, count, bytes]."""
        try:
            for view in memory:
                shape = view.shape[0], view.shape[2]
                counts = [min(self._per_slab, num_slots - first) for first in range(0, num_slots, self._per_slab)]
                self._slabs.append([torch.empty((count, *shape), dtype=torch.uint8, pin_memory=pinned) for count in counts])
        except RuntimeError as error:
            raise ConfigError(
                "kv_offload_size", "memory that can be pinned for the GPU", f"{num_slots * page_bytes} bytes: {error}", "lower it"
            ) from error

    def write(self, slots: Sequence[int], staging: Sequence[Tensor]) -> None:
        """Copy the first pages of the staging memory into slots, on the current stream."""
        for slabs, staged in zip(self._slabs, staging, strict=True):
            for number, first, at, count in self._runs(slots):
                slabs[number][first : first + count].view(staged.dtype).copy_(staged[at : at + count], non_blocking=True)

    def read(self, slots: Sequence[int], staging: Sequence[Tensor]) -> None:
        """And back."""
        for slabs, staged in zip(self._slabs, staging, strict=True):
            for number, first, at, count in self._runs(slots):
                staged[at : at + count].copy_(slabs[number][first : first + count].view(staged.dtype), non_blocking=True)

    def parts(self, slot: int) -> list[memoryview]:
        """The bytes of a slot, to be read or written by the host."""
        number, place = divmod(slot, self._per_slab)
        return [slabs[number][place].numpy().data.cast("B") for slabs in self._slabs]

    def _runs(self, slots: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """Stretches of slots that follow each other in one slab: its number, the first in it, the first in `slots`, how many."""
        at = 0
        while at < len(slots):
            number, first = divmod(slots[at], self._per_slab)
            count = 1
            while at + count < len(slots) and slots[at + count] == slots[at] + count and first + count < self._per_slab:
                count += 1
            yield number, first, at, count
            at += count
