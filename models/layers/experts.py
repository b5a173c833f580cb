"""A layer's mixture of experts in place of its MLP, with its norm and residual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.models.config import DecoderConfig
from headway.models.experts.weights import ExpertWeights, take_experts
from headway.models.layers.tensors import LayerTensors
from headway.models.linear import Linear
from headway.models.operations import Experts, Operations

if TYPE_CHECKING:
    from headway.models.experts.fused import FusedExperts


class ExpertsMLP:
    """Routing, the experts' products, and their sum."""

    def __init__(self, config: DecoderConfig, tensors: LayerTensors) -> None:
        """:raises ModelError: an activation that experts do not have."""
        assert config.experts is not None
        if config.activation != "silu":
            raise ModelError(f"hidden_act: experts need silu, got {config.activation}")
        names = config.names
        self.norm = tensors.norm(names.mlp_norm or "", config.hidden_size)
        self._config = config.experts
        self._weights: ExpertWeights | None = take_experts(
            config.experts, names.experts, config.hidden_size, tensors.weights, tensors.prefix
        )
        self.compute: Experts | None = None
        """What computes the layer, once `absorb_norms` has told."""

    @property
    def linears(self) -> list[Linear]:
        """One of each kind of its products, while the weights are as the checkpoint has them."""
        weights = self._weights
        return [] if weights is None else [Linear(weights.router), Linear(weights.gate_up[0]), Linear(weights.down[0])]

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
        return self.compute(x)
