"""Ranks of an engine (processes that each hold one shard of the model), and the contract of all-reduce kernels."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, Self

import torch
from torch import Tensor

from headway.core.contract.kernel import Kernel, KernelInfo
from headway.core.contract.support import YES, Support


class Work(Protocol):
    """All-reduce that has been started. `wait` must be called, even after an error."""

    def wait(self) -> None:
        """Make the device's current stream, not the host, wait for the sum."""


class Ranks(Protocol):
    """Communication of one rank with all ranks. Every rank calls the same methods in the same order, with equal shapes."""

    @property
    def rank(self) -> int:
        """Index of this rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the sum over ranks, bit-identical on every rank. If `onto` is given, add the sum to `onto` in place and return
        `onto`.

        x: any shape, contiguous. May be overwritten.
        onto: same shape as x, and the same elements on every rank.
        """

    def overlapped(self) -> AsyncAllReduceKernel | None:
        """Return the all-reduce that can overlap with other kernels now, the same on every rank. None during the capture of a
        CUDA graph. Like a collective, this counts as progress of the rank."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return [size, *x.shape]: the x of each rank, in rank order. x: contiguous."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x with rank 0's x, and return it. x: contiguous."""


class OneRank:
    """The only rank of a single-process engine. Collectives return their input."""

    rank: Final = 0
    size: Final = 1

    def all_reduce(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        return x if onto is None else onto.add_(x)

    def overlapped(self) -> None:
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def broadcast(self, x: Tensor) -> Tensor:
        return x


ONE_RANK: Final = OneRank()


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One rank's connection to the other ranks, from which all-reduce kernels are made."""

    rank: int
    size: int
    device: torch.device
    store: Any = None
    """torch.distributed.Store that all ranks share. None before the ranks have joined."""
    process_group: Any = None
    """torch process group: gloo on CPUs, NCCL on GPUs."""


@dataclass(frozen=True, slots=True)
class AllReduceCapabilities:
    """Claims of an all-reduce kernel."""

    devices: tuple[str, ...] = ("cuda",)
    """Supported device types, as in torch.device.type."""
    types: tuple[torch.dtype, ...] | None = None
    """Supported element types. None means any."""
    max_bytes: int | None = None
    """Maximum size of a tensor in bytes. None means any."""


class AllReduceKernel(Kernel):
    """A named implementation of all-reduce. Every rank uses the same kernel for the same call."""

    capabilities: ClassVar[AllReduceCapabilities]

    @classmethod
    def supports(cls, spec: RankGroup) -> Support:
        """Return whether the kernel supports this rank's device."""
        devices = cls.capabilities.devices
        return YES if spec.device.type in devices else Support.no("device", " or ".join(devices), spec.device.type)

    @classmethod
    @abstractmethod
    def join(cls, group: RankGroup) -> Self:
        """Return this rank's instance. Every rank calls this method.

        :raises RuntimeError: if this rank cannot make the instance.
        """

    def takes(self, x: Tensor) -> bool:
        """Return whether the kernel can reduce a tensor. The answer must depend only on shape and type, so that all ranks
        agree."""
        claims = self.capabilities
        fits = claims.max_bytes is None or x.nbytes <= claims.max_bytes
        return fits and (claims.types is None or x.dtype in claims.types)

    @abstractmethod
    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the sum over ranks, or `onto` with the sum added; see `Ranks.all_reduce`."""

    @abstractmethod
    def abort(self) -> None:
        """Make calls that wait for other ranks return or raise. Any thread may call this."""


class AsyncAllReduceKernel(AllReduceKernel):
    """All-reduce that leaves the device's multiprocessors to other kernels while it transfers data.

    `capabilities.max_bytes` is also the best size: larger tensors are divided.
    """

    @abstractmethod
    def start(self, x: Tensor, onto: Tensor | None = None) -> Work:
        """Start the sum of x over ranks; see `Ranks.all_reduce`. x and `onto` must not be used until `Work.wait` was called."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        self.start(x, onto).wait()
        return x if onto is None else onto


@dataclass(frozen=True, slots=True)
class AllReduceKernelInfo(KernelInfo):
    """A plugin's registration of an all-reduce kernel, for the hook `headway_register_kernels`."""

    kind: ClassVar[str] = "all_reduce"
