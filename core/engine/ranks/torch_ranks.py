"""Ranks over a process group of torch: gloo on CPUs, NCCL on CUDA devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from headway.core.contract.errors import HeadwayError
from headway.core.select.costs import AxisTimes, CountAxis
from headway.core.system.shared_ring import LifeSigns

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

SIZES: Final = tuple(2**n for n in range(10, 24))
"""Bytes of tensors that are measured; any other takes the nearest one's choice, by ratio."""
BYTES: Final = CountAxis("bytes", SIZES, nearest=True)


class AllReduce(Protocol):
    """A way of summing a tensor over all ranks. Every rank takes the same one for the same call."""

    @property
    def name(self) -> str:
        """The way's name in reports and tables."""

    def takes(self, x: Tensor) -> bool:
        """Whether it sums such a tensor: by shape and type alone, so that all ranks agree."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the sum, or `onto` with the sum added; see `Ranks.all_reduce`."""

    def abort(self) -> None:
        """Have calls that wait for other ranks end or fail; any thread may do so."""


def fastest_sum(times: AxisTimes, num_bytes: int, names: Sequence[str]) -> str:
    """Return the fastest way of summing this many bytes; the last of `names`, which takes any tensor, if none was measured."""
    return times.fastest(num_bytes, names) or names[-1]


def describe_sums(times: AxisTimes) -> str:
    """Return in words which way sums how many bytes."""
    changes = BYTES.changes(lambda num_bytes: fastest_sum(times, num_bytes, list(times.us)))
    return BYTES.describe(changes, times.source)


LOOPBACK: Final = "127.0.0.1"
"""All ranks are processes of one machine."""
_FOREVER: Final = timedelta(days=7)
"""The group's own limit of a call: none, for a logits processor may take its time, and a rank that hangs is found otherwise."""
_NCCL: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_NVLS_ENABLE": "0"}
"""Environment variables unless they are set: torch leaves it to the engine to end a process whose other ranks are gone, and NCCL
asks for no multicast of NVLink, which not every machine's fabric lets a process have."""
_JOIN: Final = timedelta(seconds=60)
"""The longest that ranks wait for one another when the group is made."""


class MeetingError(HeadwayError):
    """A call in which all ranks meet has failed: as a rule another rank has ended."""


class GroupAllReduce:
    """Sums by a process group of torch: of any tensor."""

    def __init__(self, group: Any, name: str) -> None:
        self._group = group
        self.name = name

    def takes(self, x: Tensor) -> bool:
        """Any."""
        return True

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """See AllReduce."""
        _meet(lambda: self._group.allreduce([x]))
        return x if onto is None else onto.add_(x)

    def abort(self) -> None:
        """See AllReduce."""
        self._group.abort()


class TorchRanks:
    """`Ranks` over a process group that is this engine's own: another group of the process, or another engine, is left alone."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, progress: LifeSigns) -> None:
        """Join the group, and wait for all ranks to do so.

        store: of a `torch.distributed.TCPStore` on rank 0. device: gloo serves a CPU, NCCL a CUDA device, one for each rank.
        progress: where this rank counts the calls in which ranks meet.

        :raises RuntimeError: a rank has not come.
        """
        self._rank = rank
        self._size = size
        self._device = device
        self._progress = progress
        self._group = _joined(store, rank, size, device)
        self.store = store
        self.device = device
        self._sums: Sequence[AllReduce] = [GroupAllReduce(self._group, "gloo" if device.type == "cpu" else "nccl")]
        self.times: AxisTimes | None = None
        self._chosen: dict[tuple[int, torch.dtype], AllReduce] = {}

    @property
    def rank(self) -> int:
        """See `Ranks`."""
        return self._rank

    @property
    def size(self) -> int:
        """See `Ranks`."""
        return self._size

    def all_reduce(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """See `Ranks`; x is overwritten."""
        self._progress.call()
        kind = x.nbytes, x.dtype
        way = self._chosen.get(kind)
        if way is None:
            able = {each.name: each for each in self._sums if each.takes(x)}
            names = list(able)
            way = self._chosen[kind] = able[names[0] if self.times is None else fastest_sum(self.times, x.nbytes, names)]
        return way(x, onto)

    def sum_by(self, sums: Sequence[AllReduce], times: AxisTimes | None) -> None:
        """Sum in these ways from now on, before any graph is captured. sums: see `sums`; times: None: in their order."""
        self._sums = sums
        self.times = times
        self._chosen.clear()

    @property
    def sums(self) -> Sequence[AllReduce]:
        """Ways of summing, the process group's last: the first that takes a tensor sums it, unless `times` know a faster one."""
        return self._sums

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        self._progress.call()
        out = x.new_empty((self._size, *x.shape))
        _meet(lambda: self._group._allgather_base(out.view(-1), x.reshape(-1)))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        from torch.distributed import BroadcastOptions

        self._progress.call()
        options = BroadcastOptions()
        options.rootRank = 0
        _meet(lambda: self._group.broadcast([x], options))
        return x

    def abort(self) -> None:
        """Have calls that wait for other ranks fail; any thread may do so."""
        for each in self._sums:
            each.abort()


def _meet(call: Callable[[], Any]) -> None:
    try:
        call().wait()
    except RuntimeError as error:
        raise MeetingError(f"ranks: {' '.join(str(error).split())}") from error


def make_store(size: int) -> Any:
    """Make rank 0's store, at which the ranks find one another: a TCPStore on a free port of the loopback."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(LOOPBACK, 0, size, is_master=True, timeout=_JOIN, wait_for_workers=False)


def find_store(port: int, size: int) -> Any:
    """Connect to the store of rank 0."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(LOOPBACK, port, size, is_master=False, timeout=_JOIN, wait_for_workers=False)


def _joined(store: Store, rank: int, size: int, device: torch.device) -> Any:
    import torch.distributed as dist

    if device.type == "cuda":
        for name, value in _NCCL.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = _FOREVER
        group: Any = dist.ProcessGroupNCCL(store, rank, size, nccl)
        group.allreduce([torch.zeros(1, device=device)]).wait()  # connects the ranks, and waits for ever for one that is gone
        torch.cuda.synchronize(device)
        return group
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    gloo._timeout = _JOIN
    group = dist.ProcessGroupGloo(store, rank, size, gloo)
    group._set_default_timeout(_FOREVER)
    return group
