"""Operations of one rank's shard of a decoder, including all-reduces."""

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
    """Operations of a rank's shard, with an all-reduce after the embedding, each part's last linear layer and the experts.

    The residual stream has the same bits on every rank, because an all-reduce gives every rank the same bits. The residual is
    added once, after the all-reduce.
    """

    def __init__(self, inner: Operations, ranks: Ranks) -> None:
        """inner: operations of this rank's shard."""
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
        """Return hidden states and RoPE tables. The rank that stores a token's embedding supplies the embedding through an
        all-reduce."""
        if embed.tokens is not None:
            own = (input_ids >= embed.tokens.start) & (input_ids < embed.tokens.stop)
            input_ids = torch.where(own, input_ids - embed.tokens.start, len(embed.table) - 1)
        x, ropes = self._inner.embed(input_ids, positions, embed)
        return self._ranks.all_reduce(x), ropes

    def product(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        """Return the linear layer's output, summed over ranks if the layer is sharded by columns."""
        if linear.summed:
            whole = self._ranks.all_reduce(self._inner.product(x, linear))
            return whole if out is None else out.copy_(whole)
        return self._inner.product(x, linear, out)

    def add_product(self, residual: Tensor, x: Tensor, linear: Linear) -> Tensor:
        """Return the residual plus one linear layer's output, summed over ranks."""
        return self.add_products(residual, [(x, linear)])

    def add_products(self, residual: Tensor, terms: Sequence[tuple[Tensor, Linear]]) -> Tensor:
        """Return the residual plus the sum of the linear layers' outputs, with one all-reduce for all of them."""
        assert all(linear.summed for _, linear in terms)
        (x, linear), *more = terms
        own = self._inner.add_products(self._inner.product(x, linear), more)
        return self._ranks.all_reduce(own, onto=residual)

    def experts(self, config: ExpertsConfig, weights: RoutedWeights, norm: Norm) -> Experts:
        """Return an MoE layer whose outputs are summed over ranks."""
        return RankedExperts(self._inner.experts(config, weights, norm), self._ranks)


class RankedExperts:
    """MoE layer that is sharded over ranks."""

    def __init__(self, inner: Experts, ranks: Ranks) -> None:
        """inner: this rank's shard of the MoE layer."""
        self._inner = inner
        self._ranks = ranks
        self.kind: Any = getattr(inner, "kind", None)
        """Kind of the shard's MoE layer if the layer has several kernels, else None."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return `onto` (or x) plus the experts' output, summed over ranks."""
        own = self._inner(x, torch.zeros_like(x))
        return self._ranks.all_reduce(own, onto=x if onto is None else onto)


class SumsInOrder:
    """Ranks whose all-reduce always sums in rank order, so a row's bits do not depend on other rows.

    A library's all-reduce starts with a different rank in each segment of its buffer. This class needs memory for `size` copies
    of a tensor.
    """

    def __init__(self, inner: Ranks) -> None:
        """inner: ranks whose all-gather collects the terms of a sum."""
        self.rank = inner.rank
        self.size = inner.size
        self.all_gather = inner.all_gather
        self.broadcast = inner.broadcast

    def all_reduce(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the sum of x over ranks, added onto `onto` if given."""
        total = functools.reduce(torch.add, self.all_gather(x).unbind())
        return total if onto is None else onto.add_(total)


def over_ranks(operations: Operations, ranks: Ranks) -> Operations:
    """Return operations that combine the shards of several ranks; the argument itself if there is only one rank."""
    return operations if ranks.size == 1 else RankedOperations(operations, ranks)
