"""Pinned memory and events for the tokens of steps: taken for a step, and taken again once it has been read."""

from __future__ import annotations

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostResults:
    """Copies tensors of int64 to the host. Making pinned memory and an event for each step would cost more than the copy."""

    def __init__(self, num_longs: int, device: torch.device) -> None:
        """num_longs: as many numbers as most steps have; where one has more, those after it have room for as many."""
        self._num_longs, self._gpu = num_longs, device.type == "cuda"
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def copy(self, tensor: Tensor) -> Coming:
        """Begin to copy, after all that the current stream has been given."""
        memory, done = self._take(tensor.numel())
        view = memory[: tensor.numel()].view(tensor.shape)
        view.copy_(tensor, non_blocking=True)
        if done is not None:
            done.record()
        return Coming(self, memory, done, view)

    def _take(self, length: int) -> tuple[Tensor, torch.cuda.Event | None]:
        if length > self._num_longs:
            self._num_longs, self._free = length, []
        if self._free:
            return self._free.pop()
        memory = torch.empty(self._num_longs, dtype=torch.int64, pin_memory=self._gpu)
        return memory, torch.cuda.Event() if self._gpu else None  # type: ignore[no-untyped-call]

    def give_back(self, memory: Tensor, done: torch.cuda.Event | None) -> None:
        """Nobody looks at it any more. What is never given back, because nobody waited for its step, is not taken again."""
        if len(memory) == self._num_longs:
            self._free.append((memory, done))


class Coming:
    """A tensor on its way to the host."""

    def __init__(self, owner: HostResults, memory: Tensor, done: torch.cuda.Event | None, view: Tensor) -> None:
        self._owner, self._memory, self._done, self._view = owner, memory, done, view

    def wait(self) -> NDArray[numpy.int64]:
        """The tensor, once the device has done all it was given before the copy. May be called once."""
        if self._done is not None:
            self._done.synchronize()
        found: NDArray[numpy.int64] = self._view.numpy().copy()
        self._owner.give_back(self._memory, self._done)
        return found
