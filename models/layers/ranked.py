"""A decoder's operations on one of several ranks: what all ranks have to put together, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.ranks import Ranks
from headway.kernels.experts.bound import Experts
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.linear.linear import Linear
from headway.kernels.step.operations import Embedding, Norm, Operations, Rope


class RankedOperations:
    """Operations of a rank's own parts, with the sums over ranks behind embedding, last products and experts.

    The residual stream has the same bits on every rank, since a sum over ranks has. It is added after the sum, once.
    """

    def __init__(self, inner: Operations, ranks: Ranks) -> None:
        """inner: what computes the rank's own."""
        self._inner = inner
        self._ranks = ranks
        self.absorb = inner.absorb
        self.norm = inner.norm
        self.add_norm = inner.add_norm
        self.softcap = inner.softcap
        self.norm_product = inner.norm_product
        self.norm_gated_product = inner.norm_gated_product
        self.norm_qkv = inner.norm_qkv
        self.gate = inner.gate
        self.linear_choices = inner.linear_choices
        self.rotate_latent = inner.rotate_latent
        self.latent_layer = inner.latent_layer
        self.rotate_heads = inner.rotate_heads
        self.activated = inner.activated

    def embed(self, input_ids: Tensor, positions: Tensor, embed: Embedding) -> tuple[Tensor, tuple[Rope, ...]]:
        """See Operations. Every token's row is one rank's, and zeros on the others."""
        if embed.tokens is not None:
            own = (input_ids >= embed.tokens.start) & (input_ids < embed.tokens.stop)
            input_ids = torch.where(own, input_ids - embed.tokens.start, len(embed.table) - 1)
        x, ropes = self._inner.embed(input_ids, positions, embed)
        return self._ranks.all_reduce(x), ropes

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """See Operations. The sum over ranks, where a rank's product is a part of it."""
        if linear.summed:
            return _into(out, self._ranks.all_reduce(self._inner.product(x, linear)))
        return self._inner.product(x, linear, out)

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """See Operations."""
        return self.add_products(residual, [(x, linear)])

    def add_products(self, residual: Tensor, terms: Sequence[tuple[Tensor, Linear]]) -> Tensor:
        """See Operations. One sum over ranks for all of them."""
        assert all(linear.summed for _, linear in terms)
        (x, linear), *more = terms
        own = self._inner.add_products(self._inner.product(x, linear), more)
        return self._ranks.all_reduce(own, onto=residual)

    def experts(self, config: ExpertsConfig, weights: RoutedWeights, norm: Norm) -> Experts:
        """See Operations."""
        return RankedExperts(self._inner.experts(config, weights, norm), self._ranks)


class RankedExperts:
    """A layer of experts of which each rank computes a part."""

    def __init__(self, inner: Experts, ranks: Ranks) -> None:
        """inner: the rank's part."""
        self._inner = inner
        self._ranks = ranks
        self.kind: Any = getattr(inner, "kind", None)
        """What chooses among ways of computing the part; None where there is one."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """See Experts."""
        own = self._inner(x, torch.zeros_like(x))
        return self._ranks.all_reduce(own, onto=x if onto is None else onto)


class SumsInOrder:
    """Ranks whose sums are added in the order of ranks wherever an element lies, so that a row's bits do not depend on others.

    A library's own sum begins with another rank in each part of what it sums. Costs `size` times its memory.
    """

    def __init__(self, inner: Ranks) -> None:
        """inner: what gathers."""
        self.rank = inner.rank
        self.size = inner.size
        self.all_gather = inner.all_gather
        self.broadcast = inner.broadcast

    def all_reduce(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """See `Ranks.all_reduce`."""
        total = functools.reduce(torch.add, self.all_gather(x).unbind())
        return total if onto is None else onto.add_(total)


def over_ranks(operations: Operations, ranks: Ranks) -> Operations:
    """Return operations that put together what ranks compute; those given where there is one rank."""
    return operations if ranks.size == 1 else RankedOperations(operations, ranks)


def _into(out: Tensor | None, whole: Tensor) -> Tensor:
    return whole if out is None else out.copy_(whole)
