"""A linear layer that keeps its weight in whatever form the device multiplies fastest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from headway.core.contract.errors import ModelError
from headway.models.quantization.forms import QuantizedWeight


class Linear:
    """y = x W^T + b over weights that are only read.

    On a CPU in float32 a weight of more than _SMALL elements is packed once for oneDNN, whose product is 2 to 5 times faster than
    torch.mm at the 1 to 64 rows of decode and no slower at a prompt's (docs/benchmarks.md); a smaller one is multiplied sooner
    than oneDNN has found its kernel. The two operators are those that torch.compile emits when it freezes weights; their names
    are private, so they are probed with a small product, and torch.mm serves where they are missing or wrong.
    """

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, summed: bool = False) -> None:
        """weight: [out_features, in_features]; bias: [out_features].

        summed: the weight is some columns of the whole one, and what all ranks get is to be summed: by `RankedOperations`.

        :raises ModelError: a quantised weight, which no product of ours reads as it is.
        """
        if not isinstance(weight, Tensor):
            raise ModelError(
                f"weights: no product reads {weight.kind} as it is; without keep_quantized it is expanded when it is read"
            )
        self.summed = summed
        self.out_features, self.in_features = weight.shape
        large = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > _SMALL
        self._packed = large and _can_pack()
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS) if self._packed else weight
        self.weight: Tensor = reordered
        self.bias = bias
        self._transposed = None if self._packed else self.weight.t()

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [rows, in_features] to [rows, out_features]: `out`, where it is given."""
        if self._transposed is None:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return packed if out is None else out.copy_(packed)
        # What F.linear comes down to; it takes no `out` itself.
        if self.bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self.bias, x, self._transposed, out=out)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + y in one product where there is no bias; residual: [rows, out_features], overwritten or not."""
        if self._transposed is None or self.bias is not None:
            return residual + self(x)
        return residual.addmm_(x, self._transposed)


_SMALL = 2**17
"""Elements of a weight up to which torch.mm was no slower when measured, at 1 to 256 rows."""
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
