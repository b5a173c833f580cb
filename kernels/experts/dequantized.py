"""Experts of many tokens over quantised weights by way of plain ones: expanded for each layer, for a method over these."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.experts.methods import Method
from headway.kernels.experts.router import Routed
from headway.kernels.experts.weights import ExpertWeights
from headway.kernels.linear.forms import QuantizedWeight
from headway.kernels.linear.quantized_ways import QuantizedWays
from headway.kernels.step.operations import Norm


class Dequantized:
    """Two launches that write the weights of all experts in half precision, and then a method over plain weights.

    Memory for them, `scratch_bytes`, is torch's for the length of the layer, so that all layers have the same in turn; the
    engine's trial step counts it among activations.
    """

    def __init__(self, inner: Method, config: ExpertsConfig, ways: QuantizedWays) -> None:
        self.name = f"dequantize+{inner.name}"
        self._inner = inner
        self._config = config
        self._ways = ways

    def takes(self, num_tokens: int, dtype: torch.dtype) -> bool:
        """See Method. For experts of some pairs each: with fewer, expanding takes longer than all the rest."""
        pairs = num_tokens * self._config.num_slots / self._config.num_all
        return pairs >= _LEAST_PAIRS and self._inner.takes(num_tokens, dtype)

    def route(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> Routed:
        """See Method."""
        return self._inner.route(x, norm, weights)

    def add(self, residual: Tensor, routed: Routed, weights: ExpertWeights) -> None:
        """See Method."""
        config, dtype = self._config, residual.dtype
        gate_up = self._plain(weights.gate_up, config.up_size, dtype)
        down = self._plain(weights.down, residual.shape[1], dtype)
        self._inner.add(residual, routed, replace(weights, gate_up=gate_up, down=down))

    def _plain(self, weight: Tensor | QuantizedWeight, rows: int, dtype: torch.dtype) -> Tensor:
        if isinstance(weight, Tensor):
            return weight
        return self._ways.dequantize.dequantized(weight, dtype).view(-1, rows, weight.shape[1])


def scratch_bytes(weights: ExpertWeights) -> int:
    """Bytes that the expanded weights of a layer take."""
    forms = [each for each in (weights.gate_up, weights.down) if not isinstance(each, Tensor)]
    return sum(each.shape[0] * each.shape[1] for each in forms) * weights.router.itemsize


_LEAST_PAIRS = 16
