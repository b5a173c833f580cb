"""The tensors of a layer of experts, and where checkpoints keep them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headway.kernels.linear.forms import QuantizedWeight, rows_of


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Routed experts first, then the pieces of the shared ones."""

    router: Tensor
    """[num_logits, hidden_size]"""
    router_bias: Tensor | None
    """float32 [num_logits]"""
    correction_bias: Tensor | None
    """float32 [num_experts]"""
    gate_up: Tensor | QuantizedWeight
    """[num_held + num_shared, up_size, hidden_size], gate over up, or up alone; quantised: rows of all, without the first axis"""
    gate_up_bias: Tensor | None
    """[num_held + num_shared, up_size]"""
    down: Tensor | QuantizedWeight
    """[num_held + num_shared, hidden_size, intermediate_size]; quantised: rows of all"""
    down_bias: Tensor | None
    """[num_held + num_shared, hidden_size]"""


def each_expert(stacked: Tensor | QuantizedWeight, count: int) -> list[Tensor] | list[QuantizedWeight]:
    """Return the weights of single experts, [N, K]. count: of how many the weight is."""
    if isinstance(stacked, Tensor):
        return list(stacked)
    rows = stacked.shape[0] // count
    return [rows_of(stacked, range(number * rows, (number + 1) * rows)) for number in range(count)]
