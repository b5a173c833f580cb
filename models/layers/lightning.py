"""Lightning attention with its surroundings in a layer (Qin et al. 2024, arXiv 2401.04658): MiniMax-01."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import silu

from headway.core.contract.model import Attention, StateLayer
from headway.kernels.linear.axes import Axis
from headway.kernels.step.operations import Operations, Rope
from headway.models.config import StateConfig
from headway.models.cut import StateCut
from headway.models.families.names import StateNames
from headway.models.layers.state_part import StatePart
from headway.models.layers.tensors import LayerTensors


class Lightning(StatePart):
    """One product gives q, k, v, which are activated, and the gate of the normed output."""

    @staticmethod
    def sections(cut: StateCut) -> Mapping[str, Axis]:
        """q, k, v, and z, the gate of the output."""
        return {"q": cut.keys, "k": cut.keys, "v": cut.values, "z": cut.values}

    def _layers(self, state: StateConfig, names: StateNames, tensors: LayerTensors) -> list[StateLayer]:
        """The slopes follow from the layer's number."""
        (layer,) = super()._layers(state, names, tensors)
        A_log = torch.tensor(tensors.cut.state.heads.pick(state.slopes), dtype=torch.float32, device=tensors.weights.device).log()
        return [StateLayer(layer.spec, replace(layer.parameters, A_log=A_log))]

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """See MixerPart."""
        qkv, parts = self._split(x, ops)
        return ops.gate(attention.state(self._place, silu(qkv), []), parts["z"], self.gate)
