"""Products of floats of 8 bits by CUTLASS, out of vLLM's library."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.contract.support import Support
from headway.kernels.linear.forms import Float8Weight, QuantizedWeight
from headway.kernels.linear.linear import Linear
from headway.kernels.linear.product_way import ProductWay
from headway.kernels.linear.torch_ways import BLOCK, RowRounding, float8_scales, row_scales
from headway.kernels.runtime.bound_operator import BoundOperator
from headway.kernels.runtime.probe import HALF_DTYPES
from headway.kernels.runtime.vllm_library.library import bind
from headway.kernels.step.operations import Norm

CUTLASS = "cutlass"
_PRODUCT, _ROWS, _BLOCKS = "cutlass_scaled_mm", "cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"


class Cutlass(ProductWay):
    """vLLM's `cutlass_scaled_mm`: x is rounded as for `torch._scaled_mm`, and the weight is read as it is."""

    name = CUTLASS
    library = norms = rounds = True

    def __init__(self, device: torch.device, rounding: RowRounding) -> None:
        self._device = device
        self._rounding = rounding
        self._operators: dict[str, BoundOperator] = {}

    def takes(self, dtype: torch.dtype, weight: QuantizedWeight) -> Support:
        """Floats of 8 bits, by rows or by blocks, as far as the library was built for this GPU."""
        support = float8_scales(weight)
        if dtype not in HALF_DTYPES:
            support &= Support.no("dtype", "bfloat16 or float16", dtype)
        if not support:
            return support
        self._operators, support = bind(_PRODUCT, _ROWS, _BLOCKS)
        if not support:
            return support
        assert isinstance(weight, Float8Weight)
        asked = _BLOCKS if weight.block == (BLOCK, BLOCK) else _ROWS
        major, minor = torch.cuda.get_device_capability(self._device) if self._device.type == "cuda" else (0, 0)
        if not self._operators[asked](cuda_device_capability=10 * major + minor):
            support &= Support.no("compute capability", "one that the library's products are built for", f"{major}.{minor}")
        return support

    def __call__(self, x: Tensor, linear: Linear, out: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """A launch for x, one for the product, and one for a bias over blocks."""
        weight, rows = linear.weight, x.shape[0]
        assert isinstance(weight, Float8Weight)
        blocks = weight.block == (BLOCK, BLOCK)
        y, x_scales = self._rounding(x, BLOCK if blocks else x.shape[1], norm)
        if not blocks:  # those take any number of rows, and contiguous scales
            y, x_scales = y[:rows], x_scales[:rows].contiguous()
        product = out if out is not None and len(y) == rows else x.new_empty(len(y), linear.out_features)
        self._operators[_PRODUCT](
            out=product,
            a=y,
            b=weight.values.t(),
            a_scales=x_scales,
            b_scales=weight.scales.t() if blocks else row_scales(weight),
            bias=None if blocks else linear.bias,
        )
        product = product[:rows]
        product = product.add_(linear.bias) if blocks and linear.bias is not None else product
        return product if out is None or product.data_ptr() == out.data_ptr() else out.copy_(product)
