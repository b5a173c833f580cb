"""Loading of a mixture-of-experts layer's tensors from a checkpoint."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.weights import QuantizedWeight, merged
from headway.kernels.experts.weights import ExpertsShard, RoutedWeights
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.forms import GgufWeight
from headway.models.checkpoints.weights import WeightSource
from headway.models.config import ExpertNames


def take_experts(
    shard: ExpertsShard, names: ExpertNames, hidden_size: int, weights: WeightSource, at: str, scale: float = 1.0
) -> RoutedWeights:
    """Return the weights of one MoE layer, read from the checkpoint.

    at: prefix of the layer's tensor names. scale: factor of the outputs of all experts.

    Each of the two grouped GEMMs uses the checkpoint's quantization format if the source supports the format and all experts have
    it. If shared experts have a different format, or their slices end within a block, all experts are dequantized.
    """
    config = shard.own
    router, router_bias, correction = _take_router(config, names, hidden_size, weights, at)
    gate_up_bias = down_bias = None
    if names.interleaved:
        assert scale == 1.0
        gate_up, gate_up_bias, down, down_bias = _take_interleaved(shard, names, hidden_size, weights, at)
    else:
        stacked = at + names.stacked_gate_up in weights
        gate_up, down = (_take_stacked if stacked else _take_single)(shard, names, hidden_size, weights, at)
    if config.num_shared and not names.interleaved:
        gate_up = _with_shared_up(gate_up, shard, names, hidden_size, weights, at + names.shared)
        down = _with_shared_down(down, shard, names, hidden_size, weights, at + names.shared)
    if scale != 1.0:
        down = _dequantized(down, weights) * scale
    gate_up, down = (_dequantized(each, weights) if isinstance(each, GgufWeight) else each for each in (gate_up, down))
    return RoutedWeights(
        gate_up=gate_up.view(-1, config.up_size, hidden_size) if isinstance(gate_up, Tensor) else gate_up,
        down=down.view(-1, hidden_size, config.intermediate_size) if isinstance(down, Tensor) else down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        router=router,
        router_bias=router_bias,
        correction_bias=correction,
    )


def _take_router(
    config: ExpertsConfig, names: ExpertNames, hidden_size: int, weights: WeightSource, at: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the router's weight, its bias and its correction bias; None for a bias that the model lacks."""
    routed = config.num_experts
    router = weights.take(f"{at}{names.router}.weight", (routed, hidden_size))
    if config.shared_gate:
        shared = config.num_logits - routed
        router = torch.cat([router, weights.take(f"{at}{names.shared_gate}.weight", (shared, hidden_size))])
    router_bias = correction = None
    if config.router_bias:
        router_bias = weights.take_as(torch.float32, f"{at}{names.router}.bias", (routed,))
    if config.correction_bias:
        correction = weights.take_as(torch.float32, at + names.correction_bias, (routed,))
    return router, router_bias, correction


Rows = Tensor | QuantizedWeight
"""Weights of several experts, concatenated along the rows: [experts * out_features, in_features]."""


def _take_single(shard: ExpertsShard, names: ExpertNames, hidden: int, weights: WeightSource, at: str) -> tuple[Rows, Rows]:
    """Read experts stored as one tensor each. The tensors of other ranks' experts are counted as read, but not loaded."""
    held = set(shard.experts.pick(range(shard.experts.whole)))
    up: dict[str, int | Axis] = {}
    down: dict[str, int | Axis] = {}
    for number in range(shard.experts.whole):
        for name in (names.gate, names.up) if shard.own.gated else (names.up,):
            up[f"{at}{name.format(number)}.weight"] = shard.inner if number in held else shard.inner.none
        down[f"{at}{names.down.format(number)}.weight"] = Axis.all(hidden) if number in held else Axis.all(hidden).none
    return weights.take_experts(up, hidden), weights.take_experts(down, shard.inner)


def _take_stacked(shard: ExpertsShard, names: ExpertNames, hidden: int, weights: WeightSource, at: str) -> tuple[Rows, Rows]:
    """Read experts stored as one stacked tensor for each of the two grouped GEMMs."""
    rows = shard.inner + shard.inner if shard.own.gated else shard.inner
    gate_up = weights.take_stacked(at + names.stacked_gate_up, (shard.experts, rows, hidden))
    down = weights.take_stacked(at + names.stacked_down, (shard.experts, hidden, shard.inner))
    return (
        gate_up.flatten(0, 1) if isinstance(gate_up, Tensor) else gate_up,
        down.flatten(0, 1) if isinstance(down, Tensor) else down,
    )


def _with_shared_up(routed: Rows, shard: ExpertsShard, names: ExpertNames, hidden: int, weights: WeightSource, at: str) -> Rows:
    """Append the shared experts' gate and up rows, split into slices of a routed expert's size.

    The last slice is padded with zeros.
    """
    inner, size = shard.own.intermediate_size, shard.shared.size
    halves = shard.own.up_size // inner
    rows = shard.shared if len(names.shared_up) == halves else shard.shared + shard.shared
    shared = weights.take_experts({f"{at}.{name}.weight": rows for name in names.shared_up}, hidden)
    if not isinstance(routed, Tensor) and not isinstance(shared, Tensor) and size % inner == 0:
        starts = [half * size + first for first in range(0, size, inner) for half in range(halves)]
        with contextlib.suppress(ModelError):  # their groups or blocks differ
            return merged([routed, *(shared.rows(range(start, start + inner)) for start in starts)])
    parts = _dequantized(shared, weights).chunk(halves)
    pieces = parts[0].new_zeros(shard.own.num_shared, halves, inner, hidden)
    for half, part in enumerate(parts):
        for piece, given in zip(pieces[:, half], torch.split(part, inner), strict=True):
            piece[: len(given)] = given
    return torch.cat([_dequantized(routed, weights), pieces.view(-1, hidden)])


def _with_shared_down(routed: Rows, shard: ExpertsShard, names: ExpertNames, hidden: int, weights: WeightSource, at: str) -> Rows:
    """Append the columns of the shared experts' down projection, in slices; the last slice is padded with zeros."""
    inner, size = shard.own.intermediate_size, shard.shared.size
    shared = weights.take_experts({f"{at}.{names.shared_down}.weight": hidden}, shard.shared)
    if not isinstance(routed, Tensor) and not isinstance(shared, Tensor) and size % inner == 0:
        pieces = [shared.columns(range(first, first + inner)) for first in range(0, size, inner)]
        whole = [piece for piece in pieces if piece is not None]
        with contextlib.suppress(ModelError):
            if len(whole) == len(pieces):
                return merged([routed, *whole])
    filled = torch.nn.functional.pad(_dequantized(shared, weights), (0, -size % inner))
    return torch.cat([_dequantized(routed, weights), *torch.split(filled, inner, dim=1)])


def _dequantized(rows: Rows, weights: WeightSource) -> Tensor:
    return rows if isinstance(rows, Tensor) else weights.dequantize(rows)


def _take_interleaved(
    shard: ExpertsShard, names: ExpertNames, hidden: int, weights: WeightSource, at: str
) -> tuple[Rows, Tensor, Rows, Tensor]:
    """Return gate_up, its bias, down and its bias from transposed stacks with interleaved gate and up rows (gpt-oss)."""
    inner, held = shard.own.intermediate_size, shard.own.num_held
    gate_up = weights.take_stacked(at + names.stacked_gate_up, (shard.experts, hidden, shard.inner * 2), transposed=True)
    if isinstance(gate_up, Tensor):
        gate_up = torch.cat([gate_up[:, :, ::2].mT, gate_up[:, :, 1::2].mT], dim=1)
    else:
        in_turn = torch.arange(held * 2 * inner, device=weights.device).view(held, inner, 2)
        gate_up = gate_up.rows(in_turn.mT.flatten())
    down = weights.take_stacked(at + names.stacked_down, (shard.experts, shard.inner, hidden), transposed=True)
    down = down.mT.contiguous() if isinstance(down, Tensor) else down
    both = weights.take(f"{at}{names.stacked_gate_up}_bias", (shard.experts, shard.inner * 2))
    gate_up_bias = torch.cat([both[:, ::2], both[:, 1::2]], dim=1)
    down_bias = weights.take(f"{at}{names.stacked_down}_bias", (shard.experts, hidden))
    if not (shard.first or shard.own.held):  # if all ranks hold columns of one expert, rank 0 adds the bias
        down_bias.zero_()
    return gate_up, gate_up_bias, down, down_bias
