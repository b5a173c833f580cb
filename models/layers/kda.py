"""Kimi delta attention with its surroundings in a layer (Kimi Team 2025, arXiv 2510.26692): a decay for each channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from headway.core.contract.model import Attention, StateLayer
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.linear import Linear
from headway.kernels.step.operations import Operations, Rope
from headway.models.config import DecoderConfig, StateConfig
from headway.models.cut import StateCut
from headway.models.families.names import StateNames
from headway.models.layers.state_part import StatePart
from headway.models.layers.tensors import LayerTensors


class KimiDelta(StatePart):
    """One product gives q, k, v and beta, and the first halves of two products of low rank: the decay's, the output gate's."""

    def __init__(self, config: DecoderConfig, place: int, tensors: LayerTensors, batch_invariant: bool) -> None:
        """See StatePart."""
        super().__init__(config, place, tensors, batch_invariant)
        cut, (decay, gate) = tensors.cut.state, config.names.state.low_rank
        self.decay_proj = tensors.linear({decay: cut.keys}, cut.low_rank, False)
        self.gate_proj = tensors.linear({gate: cut.out}, cut.low_rank, False)

    @staticmethod
    def sections(cut: StateCut) -> Mapping[str, Axis]:
        """q, k, v; b, of which beta is made; f and g, of rank value_dim: of the decay and of the gate."""
        return {"q": cut.keys, "k": cut.keys, "v": cut.values, "b": cut.heads, "f": cut.low_rank, "g": cut.low_rank}

    def _layers(self, state: StateConfig, names: StateNames, tensors: LayerTensors) -> list[StateLayer]:
        """A_log has axes of size 1 in checkpoints, and dt_bias a single one for heads and channels."""
        cut, channels = tensors.cut.state, self.spec.key_dim
        (layer,) = super()._layers(state, replace(names, A_log="", dt_bias=""), tensors)
        A_log = tensors.take_float(names.A_log, 1, 1, cut.heads, 1).flatten()
        dt_bias = tensors.take_float(names.dt_bias, cut.keys).view(-1, channels)
        return [StateLayer(layer.spec, replace(layer.parameters, A_log=A_log, dt_bias=dt_bias))]

    @property
    def linears(self) -> list[Linear]:
        """Products of the part."""
        return [self.in_proj, self.decay_proj, self.gate_proj, self.out_proj]

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """See MixerPart."""
        qkv, parts = self._split(x, ops)
        a = ops.norm_product(parts["f"], None, self.decay_proj, None).view(len(x), self.spec.num_heads, self.spec.key_dim)
        out = attention.state(self._place, qkv, [a, parts["b"]])
        return ops.gate(out, ops.norm_product(parts["g"], None, self.gate_proj, None), self.gate)
