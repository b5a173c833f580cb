"""Ranks that are threads of this process: no process starts, and whatever one of them raises is raised here."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from headway.core.contract.ranks import AllReduceCapabilities, AsyncAllReduceKernel, RankGroup, Ranks

Result = TypeVar("Result")
WAIT = 60.0
"""Seconds after which a rank that waits for another gives up."""


_NUMBERS = itertools.count()
_MADE: WeakValueDictionary[int, ThreadRanks] = WeakValueDictionary()


@torch.library.custom_op("headway_tests::gather", mutates_args=())
def _gather(x: Tensor, number: int) -> Tensor:
    """An operator, so that what writes operators down and does them again (graph_stub.Tape) meets the other threads again."""
    return _MADE[number].meet(x)


class ThreadRanks:
    """One thread's view of all of them. Counts its sums, which begin with another rank in each part, as a ring's do."""

    def __init__(self, rank: int, given: list[Tensor], barrier: threading.Barrier, turn: threading.Lock) -> None:
        """given: storage for every rank's tensor; turn: lock of the rank that computes, since Triton's interpreter is
        single-threaded.
        """
        self.rank, self.size, self.sums = rank, len(given), 0
        self.late: AsyncAllReduceKernel | None = None
        self.gathered = 0
        """Bytes that the thread has given to the others."""
        self._given, self._barrier, self._turn = given, barrier, turn
        self._number = next(_NUMBERS)
        _MADE[self._number] = self

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()

    def all_gather(self, x: Tensor) -> Tensor:
        return _gather(x, self._number)

    def meet(self, x: Tensor) -> Tensor:
        """Meet the other threads, and take what all of them have brought."""
        assert x.is_contiguous()
        self._given[self.rank] = x
        self.gathered += x.nbytes
        self._wait()
        assert {(each.shape, each.dtype) for each in self._given} == {(x.shape, x.dtype)}
        gathered = torch.stack(self._given)
        self._wait()
        return gathered

    def all_reduce(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        self.sums += 1
        pieces = self.all_gather(x).flatten(1).chunk(self.size, dim=1)
        orders = [[(first + step) % self.size for step in range(self.size)] for first in range(len(pieces))]
        sums = [sum(piece[rank] for rank in order) for piece, order in zip(pieces, orders, strict=True)]
        x.fill_(torch.nan)  # it may be overwritten
        total = torch.cat(sums).view_as(x)
        return total if onto is None else onto.add_(total)

    def overlapped(self) -> AsyncAllReduceKernel | None:
        return self.late

    def broadcast(self, x: Tensor) -> Tensor:
        return x.copy_(self.all_gather(x)[0])


class LateSum(AsyncAllReduceKernel):
    """A sum that nobody has before `wait`: until then, the residual stream is not a number."""

    name = "late"
    capabilities = AllReduceCapabilities(devices=("cpu",), max_bytes=1200)

    def __init__(self, ranks: ThreadRanks) -> None:
        self._ranks = ranks
        self.rows: list[int] = []
        """Number of rows of each sum."""

    @classmethod
    def join(cls, group: RankGroup) -> Self:
        return cls(group.process_group)

    def start(self, x: Tensor, onto: Tensor | None = None) -> LateResult:
        assert onto is not None
        self.rows.append(len(x))
        whole = self._ranks.all_reduce(x, onto.clone())
        return LateResult(whole, onto.fill_(torch.nan))

    def abort(self) -> None:
        """Do nothing: threads end by the barrier's timeout."""


class LateResult:
    def __init__(self, whole: Tensor, onto: Tensor) -> None:
        self._whole = whole
        self._onto = onto

    def wait(self) -> None:
        self._onto.copy_(self._whole)


def alone(rank: int, size: int) -> Ranks:
    """One rank of several that are not there: enough for what no rank has to be asked about."""
    return ThreadRanks(rank, [torch.empty(0)] * size, threading.Barrier(1), threading.Lock())


def on_ranks(size: int, work: Callable[[Ranks], Result]) -> list[Result]:
    """Run a function on each of several ranks at once, without gradients; return the results by rank."""
    barrier, given, turn = threading.Barrier(size, timeout=WAIT), [torch.empty(0)] * size, threading.Lock()

    def of_rank(rank: int) -> Result:
        try:
            with torch.inference_mode(), turn:
                return work(ThreadRanks(rank, given, barrier, turn))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(of_rank, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
    own = [error for error in errors if error is not None and not isinstance(error, threading.BrokenBarrierError)]
    for error in [*own, *(error for error in errors if error is not None)]:
        raise error
    return [future.result() for future in futures]
