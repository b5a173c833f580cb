"""The tensors of a layer of experts, and where checkpoints keep them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.models.experts.config import ExpertsConfig
from headway.models.experts.cut import ExpertsCut
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
    """[num_held + num_shared, up_size, hidden_size], gate over up, or up alone"""
    gate_up_bias: Tensor | None
    """[num_held + num_shared, up_size]"""
    down: Tensor
    """[num_held + num_shared, hidden_size, intermediate_size]"""
    down_bias: Tensor | None
    """[num_held + num_shared, hidden_size]"""


def take_experts(
    cut: ExpertsCut, names: ExpertNames, hidden_size: int, weights: WeightSource, at: str, scale: float = 1.0
) -> ExpertWeights:
    """Take the tensors of one layer. at: the layer's prefix; scale: multiplies what all experts give.

    Memory for all experts is allocated once, and every tensor is copied to its place in it.
    """
    config = cut.own
    router, router_bias, correction = _take_router(config, names, hidden_size, weights, at)
    if names.interleaved:
        assert scale == 1.0
        return ExpertWeights(router, router_bias, correction, *_take_interleaved(cut, names, hidden_size, weights, at))
    inner, held = config.intermediate_size, config.num_held
    gate_up = _empty(weights, held + config.num_shared, config.up_size, hidden_size)
    down = _empty(weights, held + config.num_shared, hidden_size, inner)
    if at + names.stacked_gate_up in weights:
        rows = cut.inner + cut.inner if config.gated else cut.inner
        weights.take_into(gate_up[:held], at + names.stacked_gate_up, (cut.experts, rows, hidden_size))
        weights.take_into(down[:held], at + names.stacked_down, (cut.experts, hidden_size, cut.inner))
    else:
        _take_single(cut, names, weights, at, gate_up[:held], down[:held])
    if config.num_shared:
        _take_shared(cut, names, weights, at + names.shared, gate_up[held:], down[held:])
    if scale != 1.0:
        down *= scale
    return ExpertWeights(router, router_bias, correction, gate_up, None, down, None)


def _take_router(
    config: ExpertsConfig, names: ExpertNames, hidden_size: int, weights: WeightSource, at: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The router's weight, its bias, and the correction of the choice."""
    routed = config.num_experts
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
    return router, router_bias, correction


def _take_single(cut: ExpertsCut, names: ExpertNames, weights: WeightSource, at: str, gate_up: Tensor, down: Tensor) -> None:
    """Take experts whose tensors lie one by one; of those that others hold, nothing, so that no tensor is left over."""
    hidden, inner = down.shape[1], cut.own.intermediate_size
    place_of = {number: place for place, number in enumerate(cut.experts.pick(range(cut.experts.whole)))}
    for number in range(cut.experts.whole):
        place = place_of.get(number)
        columns = cut.inner.none if place is None else cut.inner
        up, out = (gate_up[0, :0], down[0, :, :0]) if place is None else (gate_up[place], down[place])
        if cut.own.gated:
            weights.take_into(up[:inner], f"{at}{names.gate.format(number)}.weight", (columns, hidden))
        weights.take_into(up[-inner:], f"{at}{names.up.format(number)}.weight", (columns, hidden))
        weights.take_into(out, f"{at}{names.down.format(number)}.weight", (hidden, columns))


def _take_shared(cut: ExpertsCut, names: ExpertNames, weights: WeightSource, at: str, gate_up: Tensor, down: Tensor) -> None:
    """Cut the shared experts' MLP into pieces along its intermediate axis; the last is filled up with zeros."""
    hidden, inner, size = down.shape[1], cut.own.intermediate_size, cut.shared.size
    halves = cut.own.up_size // inner
    rows = cut.shared if len(names.shared_up) == halves else cut.shared + cut.shared
    merged = weights.take_merged({f"{at}.{name}.weight": rows for name in names.shared_up}, hidden).chunk(halves)
    out = weights.take(f"{at}.{names.shared_down}.weight", (hidden, cut.shared))
    for number, first in enumerate(range(0, size, inner)):
        count = min(inner, size - first)
        gate_up[number].zero_()
        down[number].zero_()
        for half, part in enumerate(merged):
            gate_up[number, half * inner : half * inner + count] = part[first : first + count]
        down[number, :, :count] = out[:, first : first + count]


def _take_interleaved(
    cut: ExpertsCut, names: ExpertNames, hidden: int, weights: WeightSource, at: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gate_up, its bias, down, its bias of a checkpoint that stacks all experts, transposed, gate and up in turn (gpt-oss)."""
    inner, held = cut.own.intermediate_size, cut.own.num_held
    gate_up = _empty(weights, held, 2 * inner, hidden)
    down = _empty(weights, held, hidden, inner)
    in_turn = weights.take(at + names.stacked_gate_up, (cut.experts, hidden, cut.inner * 2))
    gate_up[:, :inner], gate_up[:, inner:] = in_turn[:, :, ::2].mT, in_turn[:, :, 1::2].mT
    del in_turn
    down.copy_(weights.take(at + names.stacked_down, (cut.experts, cut.inner, hidden)).mT)
    in_turn = weights.take(f"{at}{names.stacked_gate_up}_bias", (cut.experts, cut.inner * 2))
    gate_up_bias = torch.cat([in_turn[:, ::2], in_turn[:, 1::2]], dim=1)
    down_bias = weights.take(f"{at}{names.stacked_down}_bias", (cut.experts, hidden))
    if not (cut.first or cut.own.held):  # added once, where all ranks hold columns of one expert
        down_bias.zero_()
    return gate_up, gate_up_bias, down, down_bias


def _empty_float(weights: WeightSource, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=weights.device)


def _empty(weights: WeightSource, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=weights.dtype, device=weights.device)
