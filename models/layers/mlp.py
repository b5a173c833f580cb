"""The dense MLP of a layer, with its norms and residual."""

from __future__ import annotations

from torch import Tensor

from headway.models.config import DecoderConfig
from headway.models.layers.tensors import LayerTensors
from headway.models.linear import Linear
from headway.models.operations import Operations


class MLP:
    """Up, activation, down; gated (SwiGLU and its kin, Shazeer 2020) or plain."""

    def __init__(self, config: DecoderConfig, tensors: LayerTensors) -> None:
        names, hidden, inner = config.names, config.hidden_size, config.intermediate_size
        self._gated, self._activation = config.gated, config.activation
        rows = inner * (2 if config.gated else 1) // len(names.up)
        self.norm = tensors.norm_if_any(names.mlp_norm, hidden)
        self.up_proj = tensors.linear(dict.fromkeys(names.up, rows), hidden, config.mlp_bias)
        self.down_proj = tensors.linear({names.down: hidden}, inner, config.mlp_bias, scale=config.residual_scale)
        self.post_norm = tensors.norm_if_any(names.mlp_post_norm, hidden)

    @property
    def linears(self) -> list[Linear]:
        """Its products."""
        return [self.up_proj, self.down_proj]

    def absorb_norms(self, ops: Operations) -> None:
        """Let what computes the layer prepare its norm and the product after it."""
        if self.norm is not None and self._gated:
            self.norm, self.up_proj = ops.absorb(self.norm, self.up_proj)

    def __call__(self, x: Tensor, ops: Operations) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream, used up."""
        compute = ops.norm_gated_product if self._gated else ops.norm_product
        inner = compute(x, self.norm, self.up_proj, self._activation)
        if self.post_norm is None:
            return ops.add_product(x, inner, self.down_proj)
        return ops.add_norm(x, ops.product(inner, self.down_proj), self.post_norm)
