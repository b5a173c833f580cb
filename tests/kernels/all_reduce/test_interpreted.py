"""Our all-reduce kernels in Triton's interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.kernels.all_reduce import copy_kernels
from headway.kernels.all_reduce.copy_kernels import CopyAllReduce
from headway.kernels.all_reduce.one_shot_kernels import NOTHING, OneShotAllReduce
from headway.kernels.all_reduce.two_shot_kernels import TwoShotAllReduce
from headway.kernels.runtime.triton_launch import FixedLauncher

SIZE = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_to_come_finds_what_all_have_given(dtype: torch.dtype) -> None:
    """One launch after the other cannot wait for later ones, so that all but the last are told not to."""
    shared = [torch.full((OneShotAllReduce.shared_bytes(SIZE) // 2,), NOTHING - 2**16, dtype=torch.int16) for _ in range(SIZE)]
    addresses = [each.data_ptr() for each in shared]
    *others, last = (OneShotAllReduce(rank, torch.device("cpu"), addresses, each) for rank, each in enumerate(shared))
    for other in others:
        other.abort()
    for count, adds in ((5000, False), (16, True), (24_000, True), (40, False), (2400, True), (16_000, False), (8, False)):
        parts = [torch.randn(count).to(dtype) for _ in range(SIZE)]
        onto = torch.randn(count).to(dtype) if adds else None
        for part in parts:
            part[:2] = torch.tensor(
                [-0.0, torch.tensor(-0x7FFF8000, dtype=torch.int32).view(torch.float32)]
            )  # what stands for nothing
        expected = sum(part.double() for part in parts) + (0.0 if onto is None else onto.double())
        for other, part in zip(others, parts[:-1], strict=True):
            assert last.takes(part)
            other(part.clone())
        found = last(parts[-1].clone(), onto)
        # The interpreter cuts bits off where a GPU rounds.
        assert (found.double() - expected).abs().max() <= expected.abs().max() * (1e-6 if dtype == torch.float32 else 2**-7)
        assert onto is None or found is onto


class SmallTwoShot(TwoShotAllReduce):
    """Two programs and small tiles, so that each program works on several."""

    num_states = 2
    block_bytes = 512


COUNTS = ((5000, False), (16, True), (4000, True), (8, False), (2400, True), (7000, False))


def sum_all(rank: int, addresses: list[int], parts: list[Tensor], onto: list[Tensor]) -> None:
    """Run one rank: every sum replaces the rank's row of `parts`, or is added to its row of `onto`."""
    torch.set_num_threads(1)
    kernel = SmallTwoShot(rank, torch.device("cpu"), addresses, None)
    for (_, adds), part, residual in zip(COUNTS, parts, onto, strict=True):
        assert kernel.takes(part[rank])
        kernel(part[rank], residual[rank] if adds else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_shot_gives_all_ranks_the_sums(dtype: torch.dtype) -> None:
    """Each rank is a process, forked so that addresses are the same in all of them."""
    shared = [torch.zeros(SmallTwoShot.shared_bytes(SIZE), dtype=torch.uint8).share_memory_() for _ in range(SIZE)]
    parts = [torch.randn(SIZE, count).to(dtype).share_memory_() for count, _ in COUNTS]
    onto = [torch.randn(count).to(dtype).repeat(SIZE, 1).share_memory_() for count, _ in COUNTS]
    added = [first[0].double() * adds for first, (_, adds) in zip(onto, COUNTS, strict=True)]
    expected = [part.double().sum(0) + first for part, first in zip(parts, added, strict=True)]
    fork, addresses = multiprocessing.get_context("fork"), [each.data_ptr() for each in shared]
    ranks = [fork.Process(target=sum_all, args=(rank, addresses, parts, onto), daemon=True) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * SIZE
    for (_, adds), part, residual, right in zip(COUNTS, parts, onto, expected, strict=True):
        found = residual if adds else part
        assert all(torch.equal(row, found[0]) for row in found)
        # The interpreter cuts bits off where a GPU rounds.
        assert (found[0].double() - right).abs().max() <= right.abs().max() * (1e-6 if dtype == torch.float32 else 2**-6)


def test_two_shot_ends_without_the_other_ranks() -> None:
    shared = [torch.zeros(SmallTwoShot.shared_bytes(SIZE), dtype=torch.uint8) for _ in range(SIZE)]
    kernel = SmallTwoShot(0, torch.device("cpu"), [each.data_ptr() for each in shared], None)
    kernel.abort()
    kernel(torch.ones(5000))


Work = Callable[[], bool]
"""Work in a stream. It returns False if it has to wait."""
WAIT = 1


class FakeStream:
    """A CUDA stream on a CPU: a queue of work."""

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
    """All streams of a process. `run` does their work in an order that real streams could have."""

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
        if function in ("cuCtxGetCurrent", "cuCtxSetCurrent"):
            return
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
        """Work until nothing is left or all streams wait. Some streams are much slower than others. Return how much is left."""
        waiting: set[int] = set()
        speeds = {number: 100 ** chance.random() for number in self.made}
        while busy := [each for each in self.made.values() if each.queue and each.cuda_stream not in waiting]:
            (stream,) = chance.choices(busy, [speeds[each.cuda_stream] for each in busy])
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


@pytest.mark.parametrize("seed", range(12))
def test_copies_give_all_ranks_the_sums_in_any_order_of_streams(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Several calls are under way at once. Summands and residuals are written late, and summands are overwritten after `wait`."""
    streams, chance = FakeStreams(monkeypatch, copy_kernels), random.Random(seed)
    device, shared = torch.device("cpu"), [torch.zeros(CopyAllReduce.shared_bytes(SIZE), dtype=torch.uint8) for _ in range(SIZE)]
    ranks = [CopyAllReduce(rank, device, [each.data_ptr() for each in shared], None) for rank in range(SIZE)]
    own, dtype = [FakeStream(streams) for _ in ranks], (torch.float32, torch.bfloat16)[seed % 2]
    found: list[list[Tensor]] = [[] for _ in ranks]
    expected, kept = list[Tensor](), list[Tensor]()
    for counts in ((5000, 16, 4000), (8, 2400), (7000, 40, 40, 1200)):
        parts = [torch.randn(SIZE, count).to(dtype) for count in counts]
        residuals = [torch.randn(count).to(dtype) for count in counts]
        expected += [part.double().sum(0) + first.double() for part, first in zip(parts, residuals, strict=True)]
        for rank in chance.sample(range(SIZE), SIZE):
            with streams.within(own[rank]):
                started = []
                for part, first in zip(parts, residuals, strict=True):
                    x, onto = torch.full_like(first, torch.nan), torch.full_like(first, torch.nan)
                    own[rank].put(lambda to=x, by=part[rank]: to.copy_(by))
                    own[rank].put(lambda to=onto, by=first: to.copy_(by))
                    assert ranks[rank].takes(x)
                    started.append((ranks[rank].start(x, onto), x, onto))
                for work, x, onto in started:
                    work.wait()
                    own[rank].put(lambda of=onto, to=found[rank]: to.append(of.clone()))
                    own[rank].put(lambda to=x: to.fill_(torch.nan))
                    kept += [x, onto]
    assert streams.run(chance) == 0
    for number, right in enumerate(expected):
        sums = [of_rank[number] for of_rank in found]
        assert all(torch.equal(each, sums[0]) for each in sums)
        # The interpreter cuts bits off where a GPU rounds.
        assert (sums[0].double() - right).abs().max() <= right.abs().max() * (1e-6 if dtype == torch.float32 else 2**-6)


def test_copies_end_without_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, chance = FakeStreams(monkeypatch, copy_kernels), random.Random(1)
    shared = [torch.zeros(CopyAllReduce.shared_bytes(SIZE), dtype=torch.uint8) for _ in range(SIZE)]
    kernel = CopyAllReduce(0, torch.device("cpu"), [each.data_ptr() for each in shared], None)
    kernel.start(torch.ones(5000)).wait()
    kernel.start(torch.ones(5000)).wait()
    assert streams.run(chance) > 0
    kernel.abort()
    assert streams.run(chance) == 0
