"""The dense MLP of a layer, with its norms and residual."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from headway.kernels.experts.plain import Experts
from headway.kernels.experts.weights import ExpertWeights, each_expert
from headway.kernels.linear.forms import num_bytes
from headway.kernels.linear.linear import Linear
from headway.kernels.step.operations import Operations
from headway.models.checkpoints.expert_weights import take_experts
from headway.models.config import DecoderConfig
from headway.models.layers.tensors import LayerTensors

if TYPE_CHECKING:
    from headway.kernels.experts.fused import FusedExperts


class MLP:
    """Up, activation, down; gated (SwiGLU and its kin, Shazeer 2020) or plain."""

    def __init__(self, config: DecoderConfig, tensors: LayerTensors) -> None:
        names, hidden, inner = config.names, config.hidden_size, tensors.cut.inner
        self._gated = config.gated
        self._activation = config.activation
        rows = inner + inner if config.gated and len(names.up) == 1 else inner
        self.norm = tensors.norm_if_any(names.mlp_norm, hidden)
        by = config.multipliers
        scales = [by.gate] * inner.size + [1.0] * inner.size if by.gate != 1.0 else 1.0
        self.up_proj = tensors.linear(dict.fromkeys(names.up, rows), hidden, config.mlp_bias, scale=scales)
        scale = config.residual_scale * by.mlp
        self.down_proj = tensors.linear({names.down: hidden}, inner, config.mlp_bias, scale=scale)
        self.post_norm = tensors.norm_if_any(names.mlp_post_norm, hidden)

    @property
    def linears(self) -> list[Linear]:
        """Products of the layer."""
        return [self.up_proj, self.down_proj]

    @property
    def gated_product(self) -> Linear | None:
        """The product whose first half is activated and multiplies the second."""
        return self.up_proj if self._gated else None

    def absorb_norms(self, ops: Operations) -> None:
        """Let the operations prepare the layer's norm and the product after the norm."""
        if self.norm is not None and self._gated:
            self.norm, self.up_proj = ops.absorb(self.norm, self.up_proj)

    def __call__(self, x: Tensor, ops: Operations) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream, used up."""
        compute = ops.norm_gated_product if self._gated else ops.norm_product
        inner = compute(x, self.norm, self.up_proj, self._activation)
        if self.post_norm is None:
            return ops.add_product(x, inner, self.down_proj)
        return ops.add_norm(x, ops.product(inner, self.down_proj), self.post_norm)


class ExpertsMLP:
    """Routing, the experts' products, and their sum."""

    def __init__(self, config: DecoderConfig, tensors: LayerTensors, kept: float | None = None) -> None:
        """kept: of the normed stream, which is added to instead; see LayerConfig."""
        assert config.experts is not None
        assert config.activation == config.experts.activation
        names = config.names
        self.norm = tensors.norm(names.mlp_norm or "", config.hidden_size)
        self._kept = None if kept is None else replace(self.norm, weight=self.norm.weight * kept)
        self._config = config.experts
        self._weights: ExpertWeights | None = take_experts(
            tensors.cut.experts,
            names.experts,
            config.hidden_size,
            tensors.weights,
            tensors.prefix,
            config.residual_scale * config.multipliers.mlp,
        )
        routed = (self._weights.gate_up, self._weights.down)
        self.num_elements = sum(math.prod(each.shape) for each in routed)
        """How many numbers the routed experts' weights are."""
        self.held_bytes = sum(each.nbytes if isinstance(each, Tensor) else num_bytes(each) for each in routed)
        """Bytes that they take, scales included."""
        self.compute: Experts | None = None
        """What computes the layer, once `absorb_norms` has told."""

    @property
    def linears(self) -> list[Linear]:
        """One of each kind of its products, while the weights are as the checkpoint has them."""
        weights, config = self._weights, self._config
        if weights is None:
            return []
        count = config.num_held + config.num_shared
        firsts = [each_expert(stacked, count)[0] for stacked in (weights.gate_up, weights.down)]
        return [Linear(weights.router), *(Linear(first, dtype=weights.router.dtype) for first in firsts)]

    @property
    def kind(self) -> FusedExperts | None:
        """What chooses among ways of computing the layer; None where there is one."""
        return getattr(self.compute, "kind", None)

    def absorb_norms(self, ops: Operations) -> None:
        """Hand the weights to what computes the layer, which may keep them in another form."""
        if self._weights is not None:
            self.compute = ops.experts(self._config, self._weights, self.norm)
            self._weights = None

    def __call__(self, x: Tensor, ops: Operations) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream, used up."""
        assert self.compute is not None
        return self.compute(x, None if self._kept is None else ops.norm(x, self._kept))
