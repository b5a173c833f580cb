"""A norm over elements that lie on several ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.contract.ranks import Ranks


@dataclass(frozen=True, slots=True)
class NormShare:
    """One rank's share of rows whose elements are normed together: a part of one group of them, as long as every other's."""

    ranks: Ranks
    groups: int = 1
    """Groups of elements, each normed by itself and held by equally many ranks that follow one another."""

    def normed(self, x: Tensor, eps: float) -> Tensor:
        """RMSNorm without a weight. x: float32 [rows, size], the rank's elements."""
        group = self.ranks.rank * self.groups // self.ranks.size
        squares = x.new_zeros(x.shape[0], self.groups)
        squares[:, group] = x.square().sum(dim=1)
        mean = self.ranks.all_reduce(squares)[:, group, None] * (self.groups / (x.shape[1] * self.ranks.size))
        return x * torch.rsqrt(mean + eps)
