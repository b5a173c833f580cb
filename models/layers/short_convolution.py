"""A gated short convolution with its surroundings in a layer (LFM2, Liquid AI 2025, arXiv 2511.23404)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headway.core.contract.model import Attention
from headway.kernels.linear.axes import Axis
from headway.kernels.step.operations import Gate, Operations, Rope
from headway.models.cut import StateCut
from headway.models.layers.state_part import StatePart


class ShortConvolution(StatePart):
    """The input is multiplied by one gate before the convolution, and its result by another."""

    @staticmethod
    def sections(cut: StateCut) -> Mapping[str, Axis]:
        """x, and its gates before and behind the convolution."""
        return {"x": cut.out, "B": cut.out, "C": cut.out}

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """See MixerPart."""
        inputs, parts = self._split(x, ops)
        out = attention.state(self._place, ops.gate(inputs, parts["B"], _PLAIN), [])
        return ops.gate(out, parts["C"], self.gate)


_PLAIN = Gate("none")
