"""Pinned memory and events for the tokens of steps: taken for a step, and taken again once it has been read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostResults:
    """Copies int64 tensors to the host. Making pinned memory and an event for each step would cost more than the copy."""

    def __init__(self, num_longs: int, device: torch.device) -> None:
        """num_longs: as many numbers as most steps have; one with more gets memory of its own."""
        self._num_longs, self._gpu = num_longs, device.type == "cuda"
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def copy(self, tensors: Sequence[Tensor]) -> Coming:
        """Begin to copy, after all that the current stream has been given."""
        length = sum(tensor.numel() for tensor in tensors)
        memory, done = self._take(length)
        views, end = list[Tensor](), 0
        for tensor in tensors:
            views.append(memory[end : end + tensor.numel()].view(tensor.shape))
            views[-1].copy_(tensor, non_blocking=True)
            end += tensor.numel()
        if done is not None:
            done.record()
        return Coming(self, memory, done, views)

    def _take(self, length: int) -> tuple[Tensor, torch.cuda.Event | None]:
        if self._free and length <= self._num_longs:
            return self._free.pop()
        memory = torch.empty(max(length, self._num_longs), dtype=torch.int64, pin_memory=self._gpu)
        return memory, torch.cuda.Event() if self._gpu else None  # type: ignore[no-untyped-call]

    def give_back(self, memory: Tensor, done: torch.cuda.Event | None) -> None:
        """Nobody looks at it any more. What is never given back, because nobody waited for its step, is not taken again."""
        if len(memory) == self._num_longs:
            self._free.append((memory, done))


class Coming:
    """Tensors on their way to the host."""

    def __init__(self, owner: HostResults, memory: Tensor, done: torch.cuda.Event | None, views: Sequence[Tensor]) -> None:
        self._owner, self._memory, self._done, self._views = owner, memory, done, views

    def wait(self) -> list[NDArray[numpy.int64]]:
        """The tensors, once the device has done all it was given before the copy. May be called once."""
        if self._done is not None:
            self._done.synchronize()
        found = [view.numpy().copy() for view in self._views]
        self._owner.give_back(self._memory, self._done)
        return found
