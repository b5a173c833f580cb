"""Operations of one rank's shard of a decoder, including all-reduces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.ranks import AsyncAllReduceKernel, Ranks, Work
from headway.kernels.experts.bound import Experts
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.linear.linear import Linear
from headway.kernels.lora.bank import AdapterBank
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Embedding, Heads, Norm, Operations, Rope


class RankedOperations:
    """Operations of a rank's shard, with an all-reduce after the embedding, each part's last linear layer and the experts.

    The residual stream has the same bits on every rank, because an all-reduce gives every rank the same bits. The residual is
    added once, after the all-reduce.

    The last linear layer of a part runs in chunks of rows if there are many rows. The all-reduce of a chunk then overlaps with
    the linear layers of later chunks, and the next part's first linear layer waits for one chunk after the other.
    """

    def __init__(self, inner: Operations, ranks: Ranks, adapters: AdapterBank | None = None) -> None:
        """inner: operations of this rank's shard. adapters: bank whose adapters `inner` adds, by the row of a step."""
        self._inner = inner
        self._ranks = ranks
        self._adapters = adapters
        self._started: list[tuple[slice, Work]] = []
        """Rows of the residual stream whose all-reduce has been started and not been waited for."""
        self.absorb = inner.absorb
        self.softcap = inner.softcap
        self.gate = inner.gate
        self.linear_choices = inner.linear_choices
        self.rotate_latent = inner.rotate_latent
        self.latent_layer = inner.latent_layer
        self.rotate_heads = inner.rotate_heads
        self.activated = inner.activated

    def embed(self, input_ids: Tensor, positions: Tensor, embed: Embedding) -> tuple[Tensor, tuple[Rope, ...]]:
        """Return hidden states and RoPE tables. The rank that stores a token's embedding supplies the embedding through an
        all-reduce."""
        self.wait()
        if embed.tokens is not None:
            own = (input_ids >= embed.tokens.start) & (input_ids < embed.tokens.stop)
            input_ids = torch.where(own, input_ids - embed.tokens.start, len(embed.table) - 1)
        x, ropes = self._inner.embed(input_ids, positions, embed)
        return self._ranks.all_reduce(x), ropes

    def wait(self) -> None:
        """Make the device's current stream wait for the whole residual stream."""
        for _ in self._arriving():
            pass

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the norm of each row of x."""
        self.wait()
        return self._inner.norm(x, norm)

    def add_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """Return residual + norm of x."""
        self.wait()
        return self._inner.add_norm(residual, x, norm)

    def norm_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation | None) -> Tensor:
        """Apply a norm (if any), a linear layer, and an activation (if any)."""
        self.wait()
        return self._inner.norm_product(x, norm, linear, activation)

    def norm_gated_product(self, x: Tensor, norm: Norm | None, linear: Linear, activation: Activation) -> Tensor:
        """Apply a norm (if any), a gated linear layer and its activation."""
        if not self._started:
            return self._inner.norm_gated_product(x, norm, linear, activation)
        if isinstance(linear.weight, Tensor):
            return self._inner.activated(self._norm_product_by_chunk(x, norm, linear), activation, True)
        # A quantized weight may have a kernel and a layout for this operation that `product` does not share.
        return torch.cat([self._inner.norm_gated_product(x[rows], norm, linear, activation) for rows in self._arriving()])

    def norm_qkv(
        self, x: Tensor, norm: Norm | None, linear: Linear, heads: Heads, rope: Rope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply a norm (if any), the merged qkv linear layer, the norms of the heads, and RoPE."""
        if not self._started:
            return self._inner.norm_qkv(x, norm, linear, heads, rope)
        return self._inner.rotate_heads(self._norm_product_by_chunk(x, norm, linear), heads, rope)

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
        self.wait()
        whole = self._adapters is not None and self._adapters.slots is not None
        kernel = None if whole else self._ranks.overlapped()
        chunks = [] if kernel is None else _chunks(residual, kernel)
        if kernel is None or not chunks:
            return self._ranks.all_reduce(self._sum_of(terms), onto=residual)
        for rows in chunks:
            own = self._sum_of([(x[rows], linear) for x, linear in terms])
            self._started.append((rows, kernel.start(own, residual[rows])))
        return residual

    def _sum_of(self, terms: Sequence[tuple[Tensor, Linear]]) -> Tensor:
        """Return this rank's sum of the linear layers' outputs."""
        (x, linear), *more = terms
        return self._inner.add_products(self._inner.product(x, linear), more)

    def _norm_product_by_chunk(self, x: Tensor, norm: Norm | None, linear: Linear) -> Tensor:
        """Return the linear layer of the normed residual stream x. Each chunk starts when its all-reduce has ended."""
        out = x.new_empty(len(x), linear.out_features)
        for rows in self._arriving():
            normed = x[rows] if norm is None else self._inner.norm(x[rows], norm)
            self._inner.product(normed, linear, out[rows])
        return out

    def _arriving(self) -> Iterator[slice]:
        """Yield the rows of each started all-reduce after the current stream waits for it."""
        started = self._started
        self._started = []
        for rows, work in started:
            work.wait()
            yield rows

    def experts(self, config: ExpertsConfig, weights: RoutedWeights, norm: Norm) -> Experts:
        """Return an MoE layer whose outputs are summed over ranks."""
        return RankedExperts(self._inner.experts(config, weights, norm), self._ranks, self.wait)


def _chunks(x: Tensor, kernel: AsyncAllReduceKernel) -> list[slice]:
    """Return equal chunks of rows, as large as the kernel supports; none if x has fewer rows than two chunks."""
    rows = len(x)
    most = (kernel.capabilities.max_bytes or x.nbytes) // x[:1].nbytes if rows else 0
    if rows < 2 * most or not x.is_contiguous() or not kernel.takes(x[:1]):
        return []
    size = -(-rows // -(-rows // most))
    return [slice(first, first + size) for first in range(0, rows, size)]


class RankedExperts:
    """MoE layer that is sharded over ranks."""

    def __init__(self, inner: Experts, ranks: Ranks, ready: Callable[[], None]) -> None:
        """inner: this rank's shard of the MoE layer. ready: waits for the residual stream."""
        self._inner = inner
        self._ranks = ranks
        self._ready = ready
        self.kind: Any = getattr(inner, "kind", None)
        """Kind of the shard's MoE layer if the layer has several kernels, else None."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return `onto` (or x) plus the experts' output, summed over ranks."""
        self._ready()
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

    def overlapped(self) -> None:
        """Return None, because these sums do not overlap with other kernels."""


def over_ranks(operations: Operations, ranks: Ranks, adapters: AdapterBank | None = None) -> Operations:
    """Return operations that combine the shards of several ranks; the argument itself if there is only one rank."""
    return operations if ranks.size == 1 else RankedOperations(operations, ranks, adapters)
