"""The gated delta rule with its surroundings in a layer (Yang et al. 2024, arXiv 2412.06464): Qwen3-Next and its kin."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headway.core.contract.model import Attention
from headway.kernels.linear.axes import Axis
from headway.kernels.step.operations import Operations, Rope
from headway.models.cut import StateCut
from headway.models.layers.state_part import StatePart


class GatedDelta(StatePart):
    """One product gives q, k, v, both gates of the recurrence and that of its output."""

    @staticmethod
    def sections(cut: StateCut) -> Mapping[str, Axis]:
        """q, k, v; a, of which the decay is made, and b, of which beta is; z, the gate of the output."""
        return {"q": cut.keys, "k": cut.keys, "v": cut.values, "a": cut.heads, "b": cut.heads, "z": cut.values}

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """See MixerPart."""
        qkv, parts = self._split(x, ops)
        out = attention.state(self._place, qkv, [parts["a"], parts["b"]])
        return ops.gate(out, parts["z"], self.gate)
