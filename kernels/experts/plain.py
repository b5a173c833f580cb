"""Routing and experts (MoE) with torch's operations, one expert after another, for CPUs and as a reference for the kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import relu, silu

from headway.core.contract.experts import ExpertsCapabilities, ExpertsConfig, ExpertsKernel, ExpertsSpec, ExpertsWeights
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.weights import FORMATS
from headway.kernels.experts.weights import RoutedWeights, each_expert
from headway.kernels.linear.linear import Linear


@dataclass(frozen=True, slots=True)
class Routed:
    """Normed rows of a step and their experts."""

    x: Tensor
    """[num_tokens, hidden_size]: normed rows."""
    experts: Tensor
    """int32 [num_tokens, num_slots]: experts of each token."""
    weights: Tensor
    """float32 [num_tokens, num_slots]: weight of each expert's output."""
    counts: Tensor | None = None
    """int32 [tiles, num_all]: number of pairs of each expert, for each tile of tokens. None if the router did not count pairs."""
    block_t: int = 0


RouteTokens = Callable[[Tensor, bool], Routed]
"""(residual stream [num_tokens, hidden_size], True if pairs will be sorted) -> normed rows and their experts."""
Front = Callable[[RoutedWeights, Any], RouteTokens]
"""(weights of a layer, its norm) -> function that norms and routes its tokens."""


class RoutedKernel(ExpertsKernel):
    """A GPU kernel of Headway's own. The engine calls `add`, which also receives the router's counts."""

    graph_level = GraphLevel.ANY
    sorts: ClassVar[bool] = True
    """True if the kernel sorts pairs by expert. In steps with many tokens, the router then counts the pairs of each expert."""

    def __init__(self, spec: ExpertsSpec, shared: dict[Any, Any] | None = None) -> None:
        """Prepare the kernel. shared: objects that kernels for one kind of layer share, with arbitrary keys. None means that
        nothing is shared."""
        super().__init__(spec)
        self.shared = {} if shared is None else shared

    @abstractmethod
    def add(self, routed: Routed, weights: Any, out: Tensor) -> None:
        """Add the experts' output to `out` [num_tokens, hidden_size], in place. weights: result of `prepare`."""

    def apply(self, x: Tensor, experts: Tensor, scores: Tensor, weights: Any, out: Tensor) -> None:
        self.add(Routed(x, experts, scores), weights, out)

    def extra_bytes(self, weights: ExpertsWeights) -> int:
        """Return the number of bytes that a layer needs in addition to its weights. Kernels that share this memory return the
        same number."""
        return 0


TINY = 1e-20
"""Term added to the sum of a token's weights before they are divided by it, in case all sigmoids are 0 (as in DeepSeek-V3)."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Slots of every token: the routed experts in the order of their scores, then the shared experts."""

    experts: Tensor
    """int32 [num_tokens, num_slots]: experts of each token."""
    weights: Tensor
    """float32 [num_tokens, num_slots]: weight of each expert's output."""


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Pairs (token, slot) in a stable sort by expert, so that each expert's tokens stay in order. Pair p is slot p % num_slots of
    token p // num_slots."""

    pairs: Tensor
    """int32 [num_pairs]: pair at each position of the sorted order."""
    places: Tensor
    """int32 [num_pairs]: position of each pair in the sorted order."""
    ends: Tensor
    """int32 [num_all]: position after each expert's last pair."""


def route(logits: Tensor, config: ExpertsConfig, correction_bias: Tensor | None = None) -> Routing:
    """Select each token's experts, without synchronising. Ties go to the lower expert id.

    logits: [num_tokens, num_logits]. correction_bias: float32 [num_experts].
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits, shared = logits[:, : config.num_experts], logits[:, config.num_experts :]
    scores = logits.softmax(dim=1) if config.scoring == "softmax" else logits.sigmoid()
    ranked = scores if correction_bias is None else scores + correction_bias
    if config.num_groups > 1:
        ranked = ranked.masked_fill(~_allowed(ranked, config), -torch.inf)
    # A stable sort, since topk returns ties in any order.
    chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, : config.top_k]
    weights = scores.gather(1, chosen)
    if config.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + TINY)
    weights = weights * config.scale
    if config.num_shared:
        size = (len(logits), config.num_shared)
        always = torch.arange(config.num_experts, config.num_all, device=logits.device).expand(size)
        chosen = torch.cat([chosen, always], dim=1)
        gate = shared.sigmoid().expand(size) if config.shared_gate else weights.new_ones(size)
        weights = torch.cat([weights, gate], dim=1)
    return Routing(chosen.int(), weights)


def _allowed(ranked: Tensor, config: ExpertsConfig) -> Tensor:
    """Return bool [num_tokens, num_experts]: True for experts in the token's best groups."""
    grouped = ranked.view(-1, config.num_groups, config.group_size)
    best = grouped.topk(config.scores_a_group, dim=2).values.sum(dim=2)
    groups = best.sort(dim=1, descending=True, stable=True).indices[:, : config.top_k_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, value=True)
    return allowed.repeat_interleave(config.group_size, dim=1, output_size=ranked.shape[1])


def sort_by_expert(experts: Tensor, num_all: int) -> ExpertOrder:
    """Sort pairs by expert, without synchronising. experts: int32 [num_tokens, num_slots]."""
    ordered, pairs = experts.flatten().sort(stable=True)
    numbers = torch.arange(num_all, dtype=ordered.dtype, device=experts.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    places = torch.empty_like(ordered).scatter_(0, pairs, torch.arange(len(pairs), dtype=torch.int32, device=experts.device))
    return ExpertOrder(pairs.int(), places, ends)


Product = Callable[[Tensor, Linear], Tensor]
"""A linear layer's GEMM: x [rows, in_features] -> [rows, out_features]."""
Matrix = Callable[[Tensor], Tensor]


class TorchExperts(ExpertsKernel):
    """Experts computed sequentially, each with two GEMMs over the tokens that selected it, for CPUs and as the reference in
    trials.

    The host reads the number of tokens of each expert. This costs nothing on a CPU, but would prevent CUDA graphs on a GPU.
    """

    name = "torch"
    capabilities = ExpertsCapabilities(
        formats=frozenset(FORMATS),
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        devices=("cpu", "meta"),
        biases=True,
        ungated=True,
        clamped=True,
        partial=True,
    )

    def __init__(self, spec: ExpertsSpec, product: Product | None = None, gate: Matrix = silu) -> None:
        """Prepare the kernel. product: computes a linear layer; None means that the `Linear` does. gate: computes the SiLU of a
        matrix."""
        super().__init__(spec)
        self._product = product or _multiplied
        self._gate = gate

    def prepare(self, weights: ExpertsWeights) -> tuple[dict[int, Linear], dict[int, Linear]]:
        """Return the gate/up projections and the down projections of the experts on this rank, keyed by the index of the
        expert."""
        config, dtype = self.spec.config, self.spec.dtype
        held = [*(config.held or range(config.num_experts)), *range(config.num_experts, config.num_all)]
        both = (weights.gate_up, weights.gate_up_bias), (weights.down, weights.down_bias)
        first, second = (
            {
                number: Linear(weight, None if biases is None else biases[place], dtype=dtype)
                for place, (number, weight) in enumerate(zip(held, each_expert(stacked, len(held)), strict=True))
            }
            for stacked, biases in both
        )
        return first, second

    def apply(
        self, x: Tensor, experts: Tensor, scores: Tensor, weights: tuple[dict[int, Linear], dict[int, Linear]], out: Tensor
    ) -> None:
        config, product, (gate_up, down) = self.spec.config, self._product, weights
        order = sort_by_expert(experts, config.num_all)
        tokens = order.pairs // config.num_slots
        shares = scores.flatten()[order.pairs, None]
        sums = x.new_zeros(x.shape, dtype=shares.dtype)
        start = 0
        for number, end in enumerate(order.ends.tolist()):
            if end > start and number in gate_up:
                at = tokens[start:end]
                hidden = activate(product(x[at], gate_up[number]), config, self._gate)
                sums.index_add_(0, at, product(hidden, down[number]) * shares[start:end])
            start = end
        out += sums.to(x.dtype)


def _multiplied(x: Tensor, linear: Linear) -> Tensor:
    return linear(x)


def front_of(norm_rows: Callable[[Tensor, Any], Tensor], product: Product, config: ExpertsConfig) -> Front:
    """Return a factory for norms and routers that uses a model's operations. norm_rows: computes a norm. product: computes the
    router's linear layer."""

    def front(weights: RoutedWeights, norm: Any) -> RouteTokens:
        bias, correction = weights.router_bias, weights.correction_bias
        router = Linear(weights.router, None if bias is None else bias.to(weights.router))

        def routed(x: Tensor, _: bool) -> Routed:
            x = norm_rows(x, norm)
            routing = route(product(x, router), config, correction)
            return Routed(x, routing.experts, routing.weights)

        return routed

    return front


def activate(gate_up: Tensor, config: ExpertsConfig, gate: Matrix = silu) -> Tensor:
    """Apply the activation to the first GEMM's output [rows, up_size]. Return the experts' hidden rows [rows,
    intermediate_size]."""
    if not config.gated:
        return relu(gate_up).square()
    low, high = gate_up.chunk(2, dim=1)
    if config.swiglu_limit is not None:
        low = low.clamp(max=config.swiglu_limit)
        high = high.clamp(-config.swiglu_limit, config.swiglu_limit) + 1
    alpha = config.swiglu_alpha
    return (gate(low) if alpha == 1 else gate(low * alpha) / alpha) * high
