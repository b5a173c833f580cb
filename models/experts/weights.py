"""The tensors of a layer of experts, and where checkpoints keep them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.models.experts.config import ExpertsConfig
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
    """[num_all, 2 intermediate_size, hidden_size], gate over up"""
    gate_up_bias: Tensor | None
    """[num_all, 2 intermediate_size]"""
    down: Tensor
    """[num_all, hidden_size, intermediate_size]"""
    down_bias: Tensor | None
    """[num_all, hidden_size]"""


@dataclass(frozen=True)
class Naming:
    """Names below a layer's prefix, as a family's checkpoints spell them. {} is an expert's number."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate.weight"


QWEN = Naming(shared="mlp.shared_expert")
DEEPSEEK = Naming()
MIXTRAL = Naming(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
)


def take_experts(config: ExpertsConfig, weights: WeightSource, at: str, naming: Naming) -> ExpertWeights:
    """Take the tensors of one layer, an expert's each by itself in the checkpoint. at: the layer's prefix.

    Memory for all experts is allocated once, and every tensor is copied to its place in it.
    """
    hidden, inner, routed = config.hidden_size, config.intermediate_size, config.num_experts
    gate_up = _empty(weights, config.num_all, 2 * inner, hidden)
    down = _empty(weights, config.num_all, hidden, inner)
    for number in range(routed):
        weights.take_into(gate_up[number, :inner], at + naming.gate.format(number))
        weights.take_into(gate_up[number, inner:], at + naming.up.format(number))
        weights.take_into(down[number], at + naming.down.format(number))
    if config.num_shared:
        _take_shared(config, weights, at + naming.shared, gate_up[routed:], down[routed:])
    router = _empty(weights, config.num_logits, hidden)
    weights.take_into(router[:routed], f"{at}{naming.router}.weight")
    if config.shared_gate:
        weights.take_into(router[routed:], at + naming.shared_gate)
    correction = None
    if config.correction_bias:
        correction = torch.empty(routed, dtype=torch.float32, device=weights.device)
        weights.take_into(correction, f"{at}{naming.router}.e_score_correction_bias")
    return ExpertWeights(router, None, correction, gate_up, None, down, None)


def _take_shared(config: ExpertsConfig, weights: WeightSource, at: str, gate_up: Tensor, down: Tensor) -> None:
    """Cut the shared experts' MLP into pieces along its intermediate axis; the last is filled up with zeros."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.shared_intermediate_size
    gate = weights.take(f"{at}.gate_proj.weight", (size, hidden))
    up = weights.take(f"{at}.up_proj.weight", (size, hidden))
    out = weights.take(f"{at}.down_proj.weight", (hidden, size))
    for number, first in enumerate(range(0, size, inner)):
        count = min(inner, size - first)
        gate_up[number].zero_()
        down[number].zero_()
        gate_up[number, :count] = gate[first : first + count]
        gate_up[number, inner : inner + count] = up[first : first + count]
        down[number, :, :count] = out[:, first : first + count]


def _empty(weights: WeightSource, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=weights.dtype, device=weights.device)


def take_gpt_oss_experts(config: ExpertsConfig, weights: WeightSource, at: str) -> ExpertWeights:
    """Take the tensors of a layer of gpt-oss, whose checkpoint stacks all experts, transposed, gate and up in turn."""
    hidden, inner, routed = config.hidden_size, config.intermediate_size, config.num_experts
    experts = f"{at}mlp.experts."
    gate_up = _empty(weights, routed, 2 * inner, hidden)
    down = _empty(weights, routed, hidden, inner)
    in_turn = weights.take(f"{experts}gate_up_proj", (routed, hidden, 2 * inner))
    gate_up[:, :inner], gate_up[:, inner:] = in_turn[:, :, ::2].mT, in_turn[:, :, 1::2].mT
    del in_turn
    down.copy_(weights.take(f"{experts}down_proj", (routed, inner, hidden)).mT)
    in_turn = weights.take(f"{experts}gate_up_proj_bias", (routed, 2 * inner))
    router_bias = torch.empty(routed, dtype=torch.float32, device=weights.device)
    weights.take_into(router_bias, f"{at}mlp.router.bias")
    return ExpertWeights(
        router=weights.take(f"{at}mlp.router.weight", (routed, hidden)),
        router_bias=router_bias,
        correction_bias=None,
        gate_up=gate_up,
        gate_up_bias=torch.cat([in_turn[:, ::2], in_turn[:, 1::2]], dim=1),
        down=down,
        down_bias=weights.take(f"{experts}down_proj_bias", (routed, hidden)),
    )
