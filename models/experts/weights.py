"""The tensors of a layer of experts, and where checkpoints keep them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.models.experts.config import ExpertsConfig
from headway.models.names import ExpertNames
from headway.models.weights import WeightSource


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Routed experts first, then the pieces of the shared ones."""

    router: Tensor
    """[num_logits, hidden_size]"""
    router_bias: Tensor | None
    """float32 [num_logits]"""
    correction_bias: Tensor | None
    """float32 [num_experts]"""
    gate_up: Tensor
    """[num_all, up_size, hidden_size], gate over up, or up alone"""
    gate_up_bias: Tensor | None
    """[num_all, up_size]"""
    down: Tensor
    """[num_all, hidden_size, intermediate_size]"""
    down_bias: Tensor | None
    """[num_all, hidden_size]"""


def take_experts(
    config: ExpertsConfig, names: ExpertNames, hidden_size: int, weights: WeightSource, at: str, scale: float = 1.0
) -> ExpertWeights:
    """Take the tensors of one layer. at: the layer's prefix; scale: multiplies what all experts give.

    Memory for all experts is allocated once, and every tensor is copied to its place in it.
    """
    routed, shared = config.num_experts, config.num_shared
    router = _empty(weights, config.num_logits, hidden_size)
    weights.take_into(router[:routed], f"{at}{names.router}.weight")
    if config.shared_gate:
        weights.take_into(router[routed:], f"{at}{names.shared_gate}.weight")
    router_bias = correction = None
    if config.router_bias:
        router_bias = _empty_float(weights, routed)
        weights.take_into(router_bias, f"{at}{names.router}.bias")
    if config.correction_bias:
        correction = _empty_float(weights, routed)
        weights.take_into(correction, at + names.correction_bias)
    if names.interleaved:
        assert scale == 1.0
        return ExpertWeights(router, router_bias, correction, *_take_interleaved(config, names, hidden_size, weights, at))
    inner = config.intermediate_size
    gate_up = _empty(weights, config.num_all, config.up_size, hidden_size)
    down = _empty(weights, config.num_all, hidden_size, inner)
    stacked = at + names.stacked_gate_up in weights
    if stacked:
        weights.take_into(gate_up[:routed], at + names.stacked_gate_up)
        weights.take_into(down[:routed], at + names.stacked_down)
    for number in [] if stacked else range(routed):
        if config.gated:
            weights.take_into(gate_up[number, :inner], f"{at}{names.gate.format(number)}.weight")
        weights.take_into(gate_up[number, -inner:], f"{at}{names.up.format(number)}.weight")
        weights.take_into(down[number], f"{at}{names.down.format(number)}.weight")
    if shared:
        _take_shared(config, names, weights, at + names.shared, gate_up[routed:], down[routed:])
    if scale != 1.0:
        down *= scale
    return ExpertWeights(router, router_bias, correction, gate_up, None, down, None)


def _take_shared(
    config: ExpertsConfig, names: ExpertNames, weights: WeightSource, at: str, gate_up: Tensor, down: Tensor
) -> None:
    """Cut the shared experts' MLP into pieces along its intermediate axis; the last is filled up with zeros."""
    hidden, inner, size = down.shape[1], config.intermediate_size, config.shared_intermediate_size
    halves = config.up_size // inner
    rows = halves * size // len(names.shared_up)
    merged = weights.take_merged({f"{at}.{name}.weight": rows for name in names.shared_up}, hidden).chunk(halves)
    out = weights.take(f"{at}.{names.shared_down}.weight", (hidden, size))
    for number, first in enumerate(range(0, size, inner)):
        count = min(inner, size - first)
        gate_up[number].zero_()
        down[number].zero_()
        for half, part in enumerate(merged):
            gate_up[number, half * inner : half * inner + count] = part[first : first + count]
        down[number, :, :count] = out[:, first : first + count]


def _take_interleaved(
    config: ExpertsConfig, names: ExpertNames, hidden: int, weights: WeightSource, at: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gate_up, its bias, down, its bias of a checkpoint that stacks all experts, transposed, gate and up in turn (gpt-oss)."""
    inner, routed = config.intermediate_size, config.num_experts
    gate_up = _empty(weights, routed, 2 * inner, hidden)
    down = _empty(weights, routed, hidden, inner)
    in_turn = weights.take(at + names.stacked_gate_up, (routed, hidden, 2 * inner))
    gate_up[:, :inner], gate_up[:, inner:] = in_turn[:, :, ::2].mT, in_turn[:, :, 1::2].mT
    del in_turn
    down.copy_(weights.take(at + names.stacked_down, (routed, inner, hidden)).mT)
    in_turn = weights.take(f"{at}{names.stacked_gate_up}_bias", (routed, 2 * inner))
    gate_up_bias = torch.cat([in_turn[:, ::2], in_turn[:, 1::2]], dim=1)
    return gate_up, gate_up_bias, down, weights.take(f"{at}{names.stacked_down}_bias", (routed, hidden))


def _empty_float(weights: WeightSource, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=weights.device)


def _empty(weights: WeightSource, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=weights.dtype, device=weights.device)
