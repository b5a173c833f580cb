"""CUDA streams that run on a CPU in any order that real ones could have: events, copies and memory operations."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from headway.kernels.runtime.triton_launch import FixedLauncher

Work = Callable[[], bool]
"""Work at the head of a stream. It returns False if it has to wait."""
WAIT = 1


class FakeStream:
    """A queue of work."""

    def __init__(self, streams: FakeStreams) -> None:
        self.cuda_stream = next(streams.numbers)
        self.queue: list[Work] = []
        streams.made[self.cuda_stream] = self

    def put(self, run: Callable[[], object]) -> None:
        self.queue.append(lambda: (run(), True)[1])

    def record_event(self) -> list[bool]:
        event: list[bool] = []
        self.put(lambda: event.append(True))
        return event

    def wait_event(self, event: list[bool]) -> None:
        self.queue.append(lambda: bool(event))


class FakeStreams:
    """All streams of a process, whose work `run` does in a random order."""

    def __init__(self, patch: pytest.MonkeyPatch, module: ModuleType) -> None:
        """module: the module whose calls of the driver and launches go to these streams."""
        self.numbers = itertools.count(1)
        self.made: dict[int, FakeStream] = {}
        self.current = FakeStream(self)
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: FakeStream(self))
        patch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        patch.setattr(torch.cuda, "stream", self.within)
        patch.setattr(module, "call", self.call)
        patch.setattr(module, "FixedLauncher", lambda *given: self.launcher(FixedLauncher(*given)))

    @contextlib.contextmanager
    def within(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def launcher(self, launch: FixedLauncher) -> Callable[..., None]:
        return lambda grid, **given: self.current.put(lambda: launch(grid, **given))

    def call(self, function: str, *given: Any) -> None:
        """Do what the driver does."""
        values = [getattr(each, "value", each) for each in given]
        if function == "cuMemcpyDtoDAsync_v2":
            to, source, count, stream = values
            self.made[stream].put(lambda: ctypes.memmove(to, source, count))
        elif function == "cuMemsetD32Async":
            to, value, count, stream = values
            self.made[stream].put(lambda: ctypes.memmove(to, bytes(ctypes.c_uint32(value)) * count, 4 * count))
        else:
            assert function == "cuStreamBatchMemOp_v2"
            stream, count, operations, _ = values
            assert count == len(operations)
            assert ctypes.sizeof(operations[0]) == 48
            for each in operations:
                self.made[stream].queue.append(memory_operation(each.operation, each.address, each.value))

    def run(self, chance: random.Random) -> int:
        """Work until nothing is left or all streams wait. Return how much is left."""
        waiting: set[int] = set()
        while busy := [each for each in self.made.values() if each.queue and each.cuda_stream not in waiting]:
            stream = chance.choice(busy)
            if stream.queue[0]():
                stream.queue.pop(0)
                waiting.clear()
            else:
                waiting.add(stream.cuda_stream)
        return sum(len(each.queue) for each in self.made.values())


def memory_operation(operation: int, address: int, value: int) -> Work:
    flag = ctypes.c_int32.from_address(address)

    def run() -> bool:
        if operation == WAIT:
            return ctypes.c_int32(flag.value - value).value >= 0
        flag.value = value
        return True

    return run
