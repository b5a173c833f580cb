"""The ranks of one engine: processes that each hold a part of a model, and the contract of kernels that sum over them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, Self

import torch
from torch import Tensor

from headway.core.contract.kernel import Kernel, KernelInfo
from headway.core.contract.support import YES, Support


class Ranks(Protocol):
    """One rank's view of all ranks. Every rank calls the same methods in the same order, with tensors of the same shape."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the sum over ranks, the same bits on each; where `onto` is given, that with the sum added, in place.

        x: any shape, contiguous; may be overwritten. onto: as large, and the same on each rank.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """Return [size, *x.shape], each rank's x by rank. x: contiguous."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's x, written over x. x: contiguous."""


class OneRank:
    """The only rank of an engine: it gets back what it gives."""

    rank: Final = 0
    size: Final = 1

    def all_reduce(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        return x if onto is None else onto.add_(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def broadcast(self, x: Tensor) -> Tensor:
        return x


ONE_RANK: Final = OneRank()


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of an engine, as one of them meets the others; the spec of their sums."""

    rank: int
    size: int
    device: torch.device
    store: Any = None
    """A torch.distributed.Store that all ranks share; None before they have joined."""
    process_group: Any = None
    """A process group of torch: gloo on CPUs, NCCL on GPUs."""


@dataclass(frozen=True, slots=True)
class AllReduceCapabilities:
    """The claims of a kernel that sums over ranks."""

    devices: tuple[str, ...] = ("cuda",)
    """Device types, as in torch.device.type."""
    types: tuple[torch.dtype, ...] | None = None
    """Element types; None means any."""
    max_bytes: int | None = None
    """Size of the largest tensor; None means any."""


class AllReduceKernel(Kernel):
    """One named way to sum a tensor over all ranks. Every rank takes the same one for the same call."""

    capabilities: ClassVar[AllReduceCapabilities]

    @classmethod
    def supports(cls, spec: RankGroup) -> Support:
        """Return whether this rank can sum so."""
        devices = cls.capabilities.devices
        return YES if spec.device.type in devices else Support.no("device", " or ".join(devices), spec.device.type)

    @classmethod
    @abstractmethod
    def join(cls, group: RankGroup) -> Self:
        """Return this rank's instance; every rank calls. :raises RuntimeError: it cannot be made here."""

    def takes(self, x: Tensor) -> bool:
        """Return whether the kernel sums such a tensor: by shape and type alone, so that all ranks agree."""
        claims = self.capabilities
        fits = claims.max_bytes is None or x.nbytes <= claims.max_bytes
        return fits and (claims.types is None or x.dtype in claims.types)

    @abstractmethod
    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the sum, or `onto` with the sum added; see `Ranks.all_reduce`."""

    @abstractmethod
    def abort(self) -> None:
        """Have calls that wait for other ranks end or fail; any thread may do so."""


@dataclass(frozen=True, slots=True)
class AllReduceKernelInfo(KernelInfo):
    """Registration of a kernel that sums over ranks, for the hook `headway_register_kernels`."""

    kind: ClassVar[str] = "all_reduce"
