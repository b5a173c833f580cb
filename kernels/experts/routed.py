"""Tokens with their experts, as a layer hands them to its kernel, and the wider call of Headway's own kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from headway.core.contract.experts import ExpertsKernel, ExpertsSpec, ExpertsWeights
from headway.core.contract.kernel import GraphLevel
from headway.kernels.experts.weights import RoutedWeights


@dataclass(frozen=True, slots=True)
class Routed:
    """The normed rows of a step and their experts."""

    x: Tensor
    """[num_tokens, hidden_size], normed"""
    experts: Tensor
    """int32 [num_tokens, num_slots]"""
    weights: Tensor
    """float32 [num_tokens, num_slots]"""
    counts: Tensor | None = None
    """int32 [tiles, num_all], pairs of each expert in each tile of `block_t` tokens; None: the router has counted nothing."""
    block_t: int = 0


RouteTokens = Callable[[Tensor, bool], Routed]
"""(residual stream [num_tokens, hidden_size], whether pairs will be sorted) -> its normed rows and their experts."""
Front = Callable[[RoutedWeights, Any], RouteTokens]
"""(weights of a layer, its norm) -> what norms and routes its tokens."""


class RoutedKernel(ExpertsKernel):
    """A kernel of Headway's own on a GPU. The engine calls `add`, which also gets what the router has counted on its way."""

    graph_level = GraphLevel.ANY
    sorts: ClassVar[bool] = True
    """Whether the kernel sorts pairs by expert, for which the router counts them where there are many."""

    def __init__(self, spec: ExpertsSpec, shared: dict[Any, Any] | None = None) -> None:
        """shared: objects that the kernels of one kind of layers have in common, by whatever key; None: nothing is shared."""
        super().__init__(spec)
        self.shared = {} if shared is None else shared

    @abstractmethod
    def add(self, routed: Routed, weights: Any, out: Tensor) -> None:
        """Add what the experts give to `out` [num_tokens, hidden_size], in place. weights: what `prepare` returned."""

    def apply(self, x: Tensor, experts: Tensor, scores: Tensor, weights: Any, out: Tensor) -> None:
        """See ExpertsKernel."""
        self.add(Routed(x, experts, scores), weights, out)

    def extra_bytes(self, weights: ExpertsWeights) -> int:
        """Return the bytes that a layer's arrangement takes besides the weights; kernels that share one return the same."""
        return 0
