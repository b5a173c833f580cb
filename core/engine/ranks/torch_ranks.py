"""Ranks over a torch process group: gloo on CPUs, NCCL on CUDA devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor

from headway.core.contract.errors import HeadwayError
from headway.core.contract.kernel import AHEAD, GraphLevel
from headway.core.contract.ranks import AllReduceCapabilities, AllReduceKernel, AsyncAllReduceKernel, RankGroup
from headway.core.select.costs import AxisTimes, CountAxis
from headway.core.system.shared_ring import LifeSigns

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

SIZES: Final = tuple(2**n for n in range(10, 27))
"""Tensor sizes in bytes at which all-reduce is measured. Tensors of other sizes use the kernel chosen for the nearest size, by
ratio."""
BYTES: Final = CountAxis("bytes", SIZES, nearest=True)


def fastest_sum(times: AxisTimes, num_bytes: int, names: Sequence[str]) -> str:
    """Return the name of the fastest all-reduce kernel for `num_bytes` bytes. If no kernel was timed, return the last of `names`,
    which supports every tensor."""
    return times.fastest(num_bytes, names) or names[-1]


def describe_sums(times: AxisTimes) -> str:
    """Return a description of the all-reduce kernel for each range of sizes."""
    changes = BYTES.changes(lambda num_bytes: fastest_sum(times, num_bytes, list(times.us)))
    return BYTES.describe(changes, times.source)


LOOPBACK: Final = "127.0.0.1"
_FOREVER: Final = timedelta(days=7)  # Timeout of a call: long, since logits processors may be slow; the watchdog finds hangs
_NCCL: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_NVLS_ENABLE": "0"}
"""Defaults of environment variables. torch must not end a process when other ranks have ended, because the engine handles this.
NCCL must not use NVLink multicast, which the fabric of some machines does not allow."""
_JOIN: Final = timedelta(seconds=60)  # Maximum wait for the other ranks when the group is made


class CollectiveError(HeadwayError):
    """Failure of a collective call, usually because another rank has ended."""


class GroupAllReduce(AllReduceKernel):
    """All-reduce by a torch process group, for any tensor."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group.process_group

    @classmethod
    def join(cls, group: RankGroup) -> Self:
        return cls(group)

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        _collective(lambda: self._group.allreduce([x]))
        return x if onto is None else onto.add_(x)

    def abort(self) -> None:
        self._group.abort()


class Gloo(GroupAllReduce):
    """All-reduce by gloo, on a CPU."""

    name = "gloo"
    capabilities = AllReduceCapabilities(devices=("cpu",))


class Nccl(GroupAllReduce):
    """All-reduce by NCCL."""

    name = "nccl"
    capabilities = AllReduceCapabilities()
    graph_level = GraphLevel.ANY


class TorchRanks:
    """`Ranks` over this engine's process group, which is separate from other groups of the process."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, progress: LifeSigns) -> None:
        """Join the group of all ranks.

        store: a `torch.distributed.TCPStore` on rank 0. device: the rank's device; ranks on CPUs use gloo, ranks on GPUs NCCL.
        progress: counter of this rank's collective calls.

        :raises RuntimeError: if a rank does not join.
        """
        self.rank = rank
        self.size = size
        self._progress = progress
        self._group = _joined(store, rank, size, device)
        self.device = device
        self.group = RankGroup(rank, size, device, store, self._group)
        self.sums: Sequence[AllReduceKernel] = [(Gloo if device.type == "cpu" else Nccl)(self.group)]
        """All-reduce kernels, the last of which is the process group's. The first kernel that supports a tensor is used, unless
        `times` shows that a different one is faster."""
        self._overlapped: AsyncAllReduceKernel | None = None
        self.times: AxisTimes | None = None
        self._chosen: dict[tuple[int, torch.dtype], AllReduceKernel] = {}

    def all_reduce(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Sum a tensor over all ranks; see `Ranks`. Overwrites x."""
        self._progress.call()
        kind = x.nbytes, x.dtype
        kernel = self._chosen.get(kind)
        if kernel is None:
            able = {each.name: each for each in self.sums if each.takes(x)}
            names = list(able)
            kernel = self._chosen[kind] = able[names[0] if self.times is None else fastest_sum(self.times, x.nbytes, names)]
        return kernel(x, onto)

    def overlapped(self) -> AsyncAllReduceKernel | None:
        if self._overlapped is None or AHEAD.get() is not None:  # while compiling ahead, ranks make different calls
            return None
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        self._progress.call()
        return self._overlapped

    def sum_by(
        self, sums: Sequence[AllReduceKernel], times: AxisTimes | None, overlapped: AsyncAllReduceKernel | None = None
    ) -> None:
        """Use these all-reduce kernels from now on. Must be called before any graph is captured. times: measured times that
        select the kernel, or None to use the first kernel that supports a tensor. overlapped: kernel that overlaps with other
        kernels."""
        self.sums = sums
        self._overlapped = overlapped
        self.times = times
        self._chosen.clear()

    def all_gather(self, x: Tensor) -> Tensor:
        self._progress.call()
        out = x.new_empty((self.size, *x.shape))
        _collective(lambda: self._group._allgather_base(out.view(-1), x.reshape(-1)))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        from torch.distributed import BroadcastOptions

        self._progress.call()
        options = BroadcastOptions()
        options.rootRank = 0
        _collective(lambda: self._group.broadcast([x], options))
        return x

    def abort(self) -> None:
        """Make calls that wait for other ranks fail. Any thread may call this."""
        # The group's kernel is last: it may raise, or wait for the work of the others.
        for each in (*([] if self._overlapped is None else [self._overlapped]), *self.sums):
            with suppress(Exception):
                each.abort()


def _collective(call: Callable[[], Any]) -> None:
    try:
        call().wait()
    except RuntimeError as error:
        raise CollectiveError(f"ranks: {' '.join(str(error).split())}") from error


def make_store(size: int, port: int = 0) -> Any:
    """Return a TCPStore through which the ranks find one another: rank 0's, on a free loopback port, or a connection to it.

    port: port of rank 0's store, or 0 on rank 0.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(LOOPBACK, port, size, is_master=port == 0, timeout=_JOIN, wait_for_workers=False)


def _joined(store: Store, rank: int, size: int, device: torch.device) -> Any:
    import torch.distributed as dist

    if device.type == "cuda":
        for name, value in _NCCL.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = _FOREVER
        group: Any = dist.ProcessGroupNCCL(store, rank, size, nccl)
        group.allreduce([torch.zeros(1, device=device)]).wait()  # connects the ranks, and waits forever for one that has ended
        torch.cuda.synchronize(device)
        return group
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    gloo._timeout = _JOIN
    group = dist.ProcessGroupGloo(store, rank, size, gloo)
    group._set_default_timeout(_FOREVER)
    return group
