"""What all parts with a state share: norms, the merged input product, the convolution, the gate, and the product after it."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.contract.model import Attention, StateLayer
from headway.core.contract.state import StateParameters
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.linear import Linear
from headway.kernels.step.operations import Gate, Norm, NormShare, Operations, Rope
from headway.models.config import DecoderConfig, StateConfig
from headway.models.cut import StateCut
from headway.models.families.attention_specs import state_spec
from headway.models.families.names import StateNames
from headway.models.layers.tensors import LayerTensors


class StatePart(ABC):
    """A part with a state. A kind of it says which sections its input product has, and what becomes of them."""

    def __init__(self, config: DecoderConfig, place: int, tensors: LayerTensors, batch_invariant: bool) -> None:
        """place: index of the part's first layer among the model's layers with a state.

        :raises ModelError: batch_invariant.
        """
        assert config.state is not None
        if batch_invariant:
            raise ModelError("deterministic: layers with a state are not batch invariant; use a model of attention alone")
        state, names, weights, hidden = config.state, config.names.state, tensors.weights, config.hidden_size
        self._place = place
        self.spec = state_spec(state, weights.dtype, weights.device)
        cut = tensors.cut.state
        sizes = self.sections(cut)
        self.norm = tensors.norm_if_any(names.norm, hidden)
        groups, factors = cut.key_heads.whole if names.by_key_head else 1, dict(config.multipliers.sections)
        self.in_proj = tensors.sections(names.inputs, sizes, hidden, state.in_bias, groups, factors)
        self._at = _places(sizes)
        out_norm = _out_norm(config, state, tensors) if state.norm_size else None
        self.gate = Gate(state.gate, out_norm, state.norm_size, state.gate_first)
        scale = config.residual_scale * config.multipliers.state
        self.out_proj = tensors.linear({names.out: hidden}, cut.out, state.out_bias, scale=scale)
        self.state_layers = self._layers(state, names, tensors)

    @staticmethod
    @abstractmethod
    def sections(cut: StateCut) -> Mapping[str, Axis]:
        """Sections of the merged input product and their sizes: in this order, what goes through the convolution first."""

    def _layers(self, state: StateConfig, names: StateNames, tensors: LayerTensors) -> list[StateLayer]:
        """What a backend sees of the part."""
        spec, cut = self.spec, tensors.cut.state
        heads, weight, bias = cut.heads, None, None
        if spec.conv_channels:
            sizes = _convolved(names.conv, [*self.sections(cut).values()], spec.conv_channels)
            weight, bias = tensors.take_conv(sizes, spec.conv_width, state.conv_bias)
        parameters = StateParameters(
            conv_weight=weight,
            conv_bias=bias,
            A_log=tensors.take_float(names.A_log, heads) if names.A_log else None,
            dt_bias=tensors.take_float(names.dt_bias, heads) if names.dt_bias else None,
            D=tensors.take_float(names.D, heads) if names.D else None,
        )
        return [StateLayer(spec, parameters)]

    @property
    def linears(self) -> list[Linear]:
        """Products of the part."""
        return [self.in_proj, self.out_proj]

    def absorb_norms(self, ops: Operations) -> None:  # noqa: B027  (nothing to merge is what most kinds have)
        """Nothing is merged."""

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """See MixerPart."""
        return self.add(x, self.mix(x, rope, ops, attention), ops)

    @abstractmethod
    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """See MixerPart."""

    def add(self, x: Tensor, mixed: Tensor, ops: Operations) -> Tensor:
        """See MixerPart."""
        return ops.add_product(x, mixed, self.out_proj)

    def _split(self, x: Tensor, ops: Operations) -> tuple[Tensor, dict[str, Tensor]]:
        """The layer's input [num_tokens, input_channels], and each section of the product. x: [num_tokens, hidden_size]."""
        y = ops.norm_product(x, self.norm, self.in_proj, None)
        return y[:, : self.spec.input_channels], {name: y[:, place] for name, place in self._at.items()}


def _out_norm(config: DecoderConfig, state: StateConfig, tensors: LayerTensors) -> Norm:
    """The norm of the recurrence's output, whose weight is the plain one also where the model's other norms add 1 to theirs."""
    cut = tensors.cut.state
    all_weights = state.norm_all_weights or cut.norms == 1
    weight = tensors.take(f"{config.names.state.out_norm}.weight", cut.out if all_weights else state.norm_size)
    share = NormShare(tensors.ranks, cut.norms) if cut.norms_are_shared else None
    return Norm(weight, state.norm_eps or config.norm_eps, share=share)


def _convolved(modules: Sequence[str], sections: Sequence[Axis], channels: int) -> Mapping[str, Axis]:
    """Convolutions and their channels: those of the first sections, as one or each by itself."""
    ends = itertools.accumulate(section.size for section in sections)
    read = [section for section, end in zip(sections, ends, strict=True) if end <= channels]
    return dict(zip(modules, read if len(modules) > 1 else [functools.reduce(Axis.__add__, read)], strict=True))


def _places(sizes: Mapping[str, Axis]) -> dict[str, slice]:
    places, first = {}, 0
    for name, axis in sizes.items():
        places[name] = slice(first, first + axis.size)
        first += axis.size
    return places
