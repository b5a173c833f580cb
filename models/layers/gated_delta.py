"""The gated delta rule with its surroundings in a layer (Yang et al. 2024, arXiv 2412.06464): Qwen3-Next and its kin."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headway.core.contract.model import Attention
from headway.core.contract.state import StateSpec
from headway.models.layers.state_part import StatePart
from headway.models.operations import Operations, Rope


class GatedDelta(StatePart):
    """One product gives q, k, v, both gates of the recurrence and that of its output."""

    @staticmethod
    def sections(spec: StateSpec) -> Mapping[str, int]:
        """q, k, v; a, of which the decay is made, and b, of which beta is; z, the gate of the output."""
        keys, values, heads = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim, spec.num_heads
        return {"q": keys, "k": keys, "v": values, "a": heads, "b": heads, "z": values}

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """See MixerPart."""
        qkv, parts = self._split(x, ops)
        out = attention.state(self._place, qkv, [parts["a"], parts["b"]])
        return ops.gate(out, parts["z"], self.gate)
