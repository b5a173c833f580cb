"""A layer of experts by torch's operations, one expert after the other: what a CPU runs, and the reference of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn.functional import relu, silu

from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.experts.routing import Routing, route, sort_by_expert
from headway.kernels.experts.weights import ExpertWeights, each_expert
from headway.kernels.linear.linear import Linear

Product = Callable[[Tensor, Linear], Tensor]
"""x [rows, in_features] to [rows, out_features]."""


class Experts(Protocol):
    """A layer of experts."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the residual stream with what the experts of its normed rows add.

        x: [num_tokens, hidden_size], the residual stream; onto: what they add to in its place; that is used up.
        """


class PlainExperts:
    """The experts of one layer, each a pair of products over the tokens that chose this expert.

    The host reads how many tokens each expert has, which on a CPU costs nothing; on a GPU no graph could be captured.
    """

    def __init__(self, config: ExpertsConfig, weights: ExpertWeights) -> None:
        self.config = config
        self._correction_bias = weights.correction_bias
        router_bias = None if weights.router_bias is None else weights.router_bias.to(weights.router)
        self.router = Linear(weights.router, router_bias)
        gate_up_bias, down_bias = weights.gate_up_bias, weights.down_bias
        dtype, count = weights.router.dtype, config.num_held + config.num_shared
        held = [*(config.held or range(config.num_experts)), *range(config.num_experts, config.num_all)]
        self.gate_up, self.down = (
            {
                number: Linear(weight, None if biases is None else biases[place], dtype=dtype, kept=True)
                for place, (number, weight) in enumerate(zip(held, each_expert(stacked, count), strict=True))
            }
            for stacked, biases in ((weights.gate_up, gate_up_bias), (weights.down, down_bias))
        )
        """The products of each expert that is held, by its number."""

    def __call__(self, x: Tensor, product: Product, gate: Callable[[Tensor], Tensor] = silu) -> Tensor:
        """x: [num_tokens, hidden_size], normed. Returns what the experts add to the residual stream. gate: SiLU of a matrix."""
        routing = route(product(x, self.router), self.config, self._correction_bias)
        return self.apply(x, routing, product, gate)

    def apply(self, x: Tensor, routing: Routing, product: Product, gate: Callable[[Tensor], Tensor] = silu) -> Tensor:
        """The weighted sum of what each token's experts give. Arguments as above."""
        order = sort_by_expert(routing.experts, self.config.num_all)
        tokens = order.pairs // self.config.num_slots
        weights = routing.weights.flatten()[order.pairs, None]
        sums = x.new_zeros(x.shape, dtype=weights.dtype)
        start = 0
        for number, end in enumerate(order.ends.tolist()):
            if end > start and number in self.gate_up:
                at = tokens[start:end]
                hidden = activate(product(x[at], self.gate_up[number]), self.config, gate)
                sums.index_add_(0, at, product(hidden, self.down[number]) * weights[start:end])
            start = end
        return sums.to(x.dtype)


def activate(gate_up: Tensor, config: ExpertsConfig, gate: Callable[[Tensor], Tensor] = silu) -> Tensor:
    """From the first product, [rows, up_size], to the hidden rows of the experts [rows, intermediate_size]."""
    if not config.gated:
        return relu(gate_up).square()
    low, high = gate_up.chunk(2, dim=1)
    if config.swiglu_limit is not None:
        low = low.clamp(max=config.swiglu_limit)
        high = high.clamp(-config.swiglu_limit, config.swiglu_limit) + 1
    alpha = config.swiglu_alpha
    return (gate(low) if alpha == 1 else gate(low * alpha) / alpha) * high
