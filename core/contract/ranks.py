"""The ranks of one engine: processes that each hold a part of a model, and how they put their parts together."""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor


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
