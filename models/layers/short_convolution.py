"""A gated short convolution with its surroundings in a layer (LFM2, Liquid AI 2025, arXiv 2511.23404)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headway.core.contract.model import Attention
from headway.core.contract.state import StateSpec
from headway.models.layers.state_part import StatePart
from headway.models.operations import Gate, Operations, Rope


class ShortConvolution(StatePart):
    """The input is multiplied by one gate before the convolution, and its result by another."""

    @staticmethod
    def sections(spec: StateSpec) -> Mapping[str, int]:
        """x, and its gates before and behind the convolution."""
        return {"x": spec.conv_channels, "B": spec.conv_channels, "C": spec.conv_channels}

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """See MixerPart."""
        inputs, parts = self._split(x, ops)
        out = attention.state(self._place, ops.gate(inputs, parts["B"], _PLAIN), [])
        return ops.gate(out, parts["C"], self.gate)


_PLAIN = Gate("none")
