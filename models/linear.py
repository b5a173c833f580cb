"""A linear layer that keeps its weight in whatever form the device multiplies fastest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


class Linear:
    """y = x W^T + b over weights that are only read.

    On a CPU in float32 the weight is packed once for oneDNN, whose product is 2 to 5 times faster than F.linear at the 1 to
    64 rows of decode and no slower at a prompt's (docs/benchmarks.md). The two operators are those that torch.compile emits
    when it freezes weights; their names are private, so they are probed with a small product, and F.linear serves where they
    are missing or wrong.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out_features, in_features]; bias: [out_features]."""
        self.out_features, self.in_features = weight.shape
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.float32 and _can_pack()
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [rows, in_features] to [rows, out_features]: `out`, where it is given."""
        if self._packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return packed if out is None else out.copy_(packed)
        if out is None:
            return linear(x, self.weight, self.bias)
        # What F.linear comes down to on a GPU; it takes no `out` itself.
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + y in one product where there is no bias; residual: [rows, out_features], overwritten or not."""
        if self._packed or self.bias is not None:
            return residual + self(x)
        return residual.addmm_(x, self.weight.t())


_PACK_ROWS = 16
"""Rows the packing is tuned for: a decode batch. Other row counts stay right, and were no slower when measured."""

_probed: bool | None = None


def _can_pack() -> bool:
    global _probed
    if _probed is None:
        generator = torch.Generator().manual_seed(0)
        weight, x = torch.randn(24, 40, generator=generator), torch.randn(3, 40, generator=generator)
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
            product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
            _probed = torch.allclose(product, linear(x, weight), atol=1e-4)
        except (AttributeError, RuntimeError):
            _probed = False
    return _probed
