"""Recurrent parts (linear attention, state-space models, convolutions) with their projections, norms and gates."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import silu

from headway.core.contract.layer import Invariance
from headway.core.contract.model import Attention, StateLayer
from headway.core.contract.state import StateParameters
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.linear import Linear
from headway.kernels.step.operations import Gate, Norm, NormShare, Operations, Rope
from headway.models.config import DecoderConfig, StateConfig, StateNames, state_spec
from headway.models.layers.tensors import LayerTensors
from headway.models.shard import StateShard


class StatePart(ABC):
    """A recurrent part. Subclasses define the sections of the input projection and the use of each section."""

    def __init__(self, config: DecoderConfig, place: int, tensors: LayerTensors, invariance: Invariance) -> None:
        """place: index of the part's first layer among the model's recurrent layers. invariance: level that the state backend
        must keep."""
        assert config.state is not None
        state, names, weights, hidden = config.state, config.names.state, tensors.weights, config.hidden_size
        self._place = place
        self.spec = state_spec(state, weights.dtype, weights.device, invariance)
        shard = tensors.shard.state
        sizes = self.sections(shard)
        self.norm = tensors.norm_if_any(names.norm, hidden)
        groups, factors = shard.key_heads.whole if names.by_key_head else 1, dict(config.multipliers.sections)
        self.in_proj = tensors.sections(names.inputs, sizes, hidden, state.in_bias, groups, factors)
        self._at = _places(sizes)
        out_norm = _out_norm(config, state, tensors) if state.norm_size else None
        self.gate = Gate(state.gate, out_norm, state.norm_size, state.gate_first)
        scale = config.residual_scale * config.multipliers.state
        self.out_proj = tensors.linear({names.out: hidden}, shard.out, state.out_bias, scale=scale)
        self.state_layers = self._layers(state, names, tensors)

    @staticmethod
    @abstractmethod
    def sections(shard: StateShard) -> Mapping[str, Axis]:
        """Return the sections of the merged input projection with their sizes, in order; the convolution's inputs come first."""

    def _layers(self, state: StateConfig, names: StateNames, tensors: LayerTensors) -> list[StateLayer]:
        """Return the layers that a state backend runs for this part."""
        spec, shard = self.spec, tensors.shard.state
        heads, weight, bias = shard.heads, None, None
        if spec.conv_channels:
            sizes = _convolved(names.conv, [*self.sections(shard).values()], spec.conv_channels)
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
        """Linear layers of this part, in the order of computation."""
        return [self.in_proj, self.out_proj]

    def absorb_norms(self, ops: Operations) -> None:  # noqa: B027  (most kinds have nothing to merge)
        """Merge norms into the linear layers after them, if the operations support it."""

    def __call__(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """Compute the part and return the updated residual stream.

        x: [num_tokens, hidden_size], the residual stream, overwritten; rope: from `Operations.embed`.
        """
        return self.add(x, self.mix(x, rope, ops, attention), ops)

    @abstractmethod
    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        """Return the input of the output projection. x: [num_tokens, hidden_size], the residual stream, not modified."""

    def add(self, x: Tensor, mixed: Tensor, ops: Operations) -> Tensor:
        """Return the updated residual stream. x: the residual stream, overwritten. mixed: the result of `mix`."""
        return ops.add_product(x, mixed, self.out_proj)

    def _split(self, x: Tensor, ops: Operations) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the recurrence's input [num_tokens, input_channels], and the sections by name. x: [num_tokens, hidden_size]."""
        y = ops.norm_product(x, self.norm, self.in_proj, None)
        return y[:, : self.spec.input_channels], {name: y[:, place] for name, place in self._at.items()}


def _out_norm(config: DecoderConfig, state: StateConfig, tensors: LayerTensors) -> Norm:
    """Return the norm of the recurrence's output. Its weight has no added 1, even if the model's other norms add 1."""
    shard = tensors.shard.state
    all_weights = state.norm_all_weights or shard.norms == 1
    weight = tensors.take(f"{config.names.state.out_norm}.weight", shard.out if all_weights else state.norm_size)
    share = NormShare(tensors.ranks, shard.norms) if shard.norms_are_shared else None
    return Norm(weight, state.norm_eps or config.norm_eps, share=share)


def _convolved(modules: Sequence[str], sections: Sequence[Axis], channels: int) -> Mapping[str, Axis]:
    """Return the channels of each convolution: a single convolution over the first sections, or one convolution for each of these
    sections."""
    ends = itertools.accumulate(section.size for section in sections)
    read = [section for section, end in zip(sections, ends, strict=True) if end <= channels]
    return dict(zip(modules, read if len(modules) > 1 else [functools.reduce(Axis.__add__, read)], strict=True))


def _places(sizes: Mapping[str, Axis]) -> dict[str, slice]:
    places, first = {}, 0
    for name, axis in sizes.items():
        places[name] = slice(first, first + axis.size)
        first += axis.size
    return places


class GatedDelta(StatePart):
    """Gated delta rule (Yang et al. 2024, arXiv 2412.06464). One projection computes q, k, v, the recurrence's two gates and
    the output gate.
    """

    @staticmethod
    def sections(shard: StateShard) -> Mapping[str, Axis]:
        """Return the sections: q, k, v; a, the input of the decay; b, the input of beta; z, the output gate."""
        return {"q": shard.keys, "k": shard.keys, "v": shard.values, "a": shard.heads, "b": shard.heads, "z": shard.values}

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        qkv, parts = self._split(x, ops)
        out = attention.state(self._place, qkv, [parts["a"], parts["b"]])
        return ops.gate(out, parts["z"], self.gate)


class KimiDelta(StatePart):
    """Kimi delta attention (Kimi Team 2025, arXiv 2510.26692), with a decay per channel. One projection computes q, k, v,
    beta, and the first linear layers of the low-rank projections for the decay and the output gate.
    """

    def __init__(self, config: DecoderConfig, place: int, tensors: LayerTensors, invariance: Invariance) -> None:
        super().__init__(config, place, tensors, invariance)
        shard, (decay, gate) = tensors.shard.state, config.names.state.low_rank
        self.decay_proj = tensors.linear({decay: shard.keys}, shard.low_rank, False)
        self.gate_proj = tensors.linear({gate: shard.out}, shard.low_rank, False)

    @staticmethod
    def sections(shard: StateShard) -> Mapping[str, Axis]:
        """Return the sections: q, k, v; b, the input of beta; f and g, of rank value_dim, for the decay and the output gate."""
        return {"q": shard.keys, "k": shard.keys, "v": shard.values, "b": shard.heads, "f": shard.low_rank, "g": shard.low_rank}

    def _layers(self, state: StateConfig, names: StateNames, tensors: LayerTensors) -> list[StateLayer]:
        """Return the state layer; in checkpoints, A_log has axes of size 1, and dt_bias has one axis for heads and channels."""
        shard, channels = tensors.shard.state, self.spec.key_dim
        (layer,) = super()._layers(state, replace(names, A_log="", dt_bias=""), tensors)
        A_log = tensors.take_float(names.A_log, 1, 1, shard.heads, 1).flatten()
        dt_bias = tensors.take_float(names.dt_bias, shard.keys).view(-1, channels)
        return [StateLayer(layer.spec, replace(layer.parameters, A_log=A_log, dt_bias=dt_bias))]

    @property
    def linears(self) -> list[Linear]:
        return [self.in_proj, self.decay_proj, self.gate_proj, self.out_proj]

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        qkv, parts = self._split(x, ops)
        a = ops.norm_product(parts["f"], None, self.decay_proj, None).view(len(x), self.spec.num_heads, self.spec.key_dim)
        out = attention.state(self._place, qkv, [a, parts["b"]])
        return ops.gate(out, ops.norm_product(parts["g"], None, self.gate_proj, None), self.gate)


class Lightning(StatePart):
    """Lightning attention (Qin et al. 2024, arXiv 2401.04658). One projection computes q, k and v, which are activated,
    and the gate of the normed output.
    """

    @staticmethod
    def sections(shard: StateShard) -> Mapping[str, Axis]:
        """Return the sections: q, k, v; z, the output gate."""
        return {"q": shard.keys, "k": shard.keys, "v": shard.values, "z": shard.values}

    def _layers(self, state: StateConfig, names: StateNames, tensors: LayerTensors) -> list[StateLayer]:
        """Return the state layer, whose decays depend on the layer's index."""
        (layer,) = super()._layers(state, names, tensors)
        A_log = torch.tensor(
            tensors.shard.state.heads.pick(state.slopes), dtype=torch.float32, device=tensors.weights.device
        ).log()
        return [StateLayer(layer.spec, replace(layer.parameters, A_log=A_log))]

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        qkv, parts = self._split(x, ops)
        return ops.gate(attention.state(self._place, silu(qkv), []), parts["z"], self.gate)


class Mamba2(StatePart):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060). One projection computes x, B, C, dt and the output gate."""

    @staticmethod
    def sections(shard: StateShard) -> Mapping[str, Axis]:
        """Return the sections: x, B and C, the convolution's inputs; dt; z, the output gate."""
        return {"x": shard.values, "B": shard.keys, "C": shard.keys, "dt": shard.heads, "z": shard.values}

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        inputs, parts = self._split(x, ops)
        return ops.gate(attention.state(self._place, inputs, [parts["dt"]]), parts["z"], self.gate)


class Mamba1(StatePart):
    """Mamba 1 as in Jamba (arXiv 2312.00752): a convolution, a projection of its output to dt, B and C, and the recurrence.

    The convolution and the recurrence are two layers, each with a state.
    """

    def __init__(self, config: DecoderConfig, place: int, tensors: LayerTensors, invariance: Invariance) -> None:
        super().__init__(config, place, tensors, invariance)
        assert config.state is not None
        names, spec, rank, shard = config.names.state, self.spec, config.state.dt_rank, tensors.shard.state
        self._sizes = [rank, spec.key_dim, spec.key_dim]
        self.x_proj = tensors.linear({names.from_conv: sum(self._sizes)}, shard.heads, False)
        self.norms = [tensors.norm(name, size) for name, size in zip(names.from_conv_norms, self._sizes, strict=True)]
        self.dt_proj = tensors.linear({names.low_rank[0]: shard.heads}, rank, False)

    @staticmethod
    def sections(shard: StateShard) -> Mapping[str, Axis]:
        """Return the sections: x, the convolution's input; z, the output gate."""
        return {"x": shard.heads, "z": shard.heads}

    def _layers(self, state: StateConfig, names: StateNames, tensors: LayerTensors) -> list[StateLayer]:
        """Return two layers: the convolution, and the recurrence after it."""
        spec, heads = self.spec, tensors.shard.state.heads
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
        return [self.in_proj, self.x_proj, self.dt_proj, self.out_proj]

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        inputs, parts = self._split(x, ops)
        inputs = attention.state(self._place, inputs, [])
        made = torch.split(ops.product(inputs, self.x_proj), self._sizes, dim=1)
        dt, B, C = (ops.norm(part.contiguous(), norm) for part, norm in zip(made, self.norms, strict=True))
        out = attention.state(self._place + 1, inputs, [ops.product(dt, self.dt_proj), B, C])
        return ops.gate(out, parts["z"], self.gate)


class ShortConvolution(StatePart):
    """LFM2's short convolution (Liquid AI 2025, arXiv 2511.23404), with a gate on its input and a gate on its output."""

    @staticmethod
    def sections(shard: StateShard) -> Mapping[str, Axis]:
        """Return the sections: x, and the gates before and after the convolution."""
        return {"x": shard.out, "B": shard.out, "C": shard.out}

    def mix(self, x: Tensor, rope: Rope | None, ops: Operations, attention: Attention) -> Tensor:
        inputs, parts = self._split(x, ops)
        out = attention.state(self._place, ops.gate(inputs, parts["B"], _PLAIN), [])
        return ops.gate(out, parts["C"], self.gate)


_PLAIN = Gate("none")
