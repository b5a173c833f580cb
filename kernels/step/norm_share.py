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

    def normed(self, eps: float, *parts: Tensor) -> list[Tensor]:
        """RMSNorm without a weight, of each part by itself, with one sum over ranks.

        parts: float32 [rows, size], the rank's elements.
        """
        group = self.ranks.rank * self.groups // self.ranks.size
        squares = parts[0].new_zeros(parts[0].shape[0], self.groups, len(parts))
        squares[:, group] = torch.stack([part.square().sum(dim=1) for part in parts], dim=1)
        sums = self.ranks.all_reduce(squares)[:, group]
        share = self.groups / self.ranks.size
        return [part * torch.rsqrt(sums[:, place, None] * (share / part.shape[1]) + eps) for place, part in enumerate(parts)]
