"""State spaces with their surroundings in a layer: Mamba 2 (Dao and Gu 2024, arXiv 2405.21060) and Mamba (arXiv 2312.00752)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headway.core.contract.model import Attention, StateLayer
from headway.core.contract.state import StateParameters
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.linear import Linear
from headway.kernels.step.operations import Operations, Rope
from headway.models.config import DecoderConfig, StateConfig
from headway.models.cut import StateCut
from headway.models.families.names import StateNames
from headway.models.layers.state_part import StatePart
from headway.models.layers.tensors import LayerTensors


class Mamba2(StatePart):
    """One product gives x, B, C, dt and the gate of the output."""

    @staticmethod
    def sections(cut: StateCut) -> Mapping[str, Axis]:
        """x, B and C, which go through the convolution; dt; z, the gate of the output."""
        return {"x": cut.values, "B": cut.keys, "C": cut.keys, "dt": cut.heads, "z": cut.values}

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """See MixerPart."""
        inputs, parts = self._split(x, ops)
        return ops.gate(attention.state(self._place, inputs, [parts["dt"]]), parts["z"], self.gate)


class Mamba1(StatePart):
    """A convolution, a product that makes dt, B and C of what it returns, and the recurrence: two layers with a state (Jamba)."""

    def __init__(self, config: DecoderConfig, place: int, tensors: LayerTensors, batch_invariant: bool) -> None:
        """See StatePart."""
        super().__init__(config, place, tensors, batch_invariant)
        assert config.state is not None
        names, spec, rank, cut = config.names.state, self.spec, config.state.dt_rank, tensors.cut.state
        self._sizes = [rank, spec.key_dim, spec.key_dim]
        self.x_proj = tensors.linear({names.from_conv: sum(self._sizes)}, cut.heads, False)
        self.norms = [tensors.norm(name, size) for name, size in zip(names.from_conv_norms, self._sizes, strict=True)]
        self.dt_proj = tensors.linear({names.low_rank[0]: cut.heads}, rank, False)

    @staticmethod
    def sections(cut: StateCut) -> Mapping[str, Axis]:
        """x, which goes through the convolution; z, the gate of the output."""
        return {"x": cut.heads, "z": cut.heads}

    def _layers(self, state: StateConfig, names: StateNames, tensors: LayerTensors) -> list[StateLayer]:
        """The convolution, and the recurrence behind it."""
        spec, heads = self.spec, tensors.cut.state.heads
        weight, bias = tensors.take_conv({names.conv[0]: heads}, spec.conv_width, state.conv_bias)
        recurrence = StateParameters(
            A_log=tensors.take_float(names.A_log, heads, spec.key_dim),
            dt_bias=tensors.take_float(names.dt_bias, heads),
            D=tensors.take_float(names.D, heads),
        )
        convolution = StateParameters(conv_weight=weight, conv_bias=bias)
        return [StateLayer(spec.convolution, convolution), StateLayer(spec.recurrence, recurrence)]

    @property
    def linears(self) -> list[Linear]:
        """Products of the part."""
        return [self.in_proj, self.x_proj, self.dt_proj, self.out_proj]

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """See MixerPart."""
        inputs, parts = self._split(x, ops)
        inputs = attention.state(self._place, inputs, [])
        made = torch.split(ops.product(inputs, self.x_proj), self._sizes, dim=1)
        dt, B, C = (ops.norm(part.contiguous(), norm) for part, norm in zip(made, self.norms, strict=True))
        out = attention.state(self._place + 1, inputs, [ops.product(dt, self.dt_proj), B, C])
        return ops.gate(out, parts["z"], self.gate)
