"""Products over weights of 4 and 8 bits by Marlin, out of vLLM's library."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.contract.support import Support
from headway.kernels.linear.forms import Float8Weight, Int4Weight, QuantizedWeight
from headway.kernels.linear.linear import Linear
from headway.kernels.linear.marlin_layout import (
    MarlinWeight,
    bias_of,
    can_arrange,
    scales_of,
    type_of,
    words,
    zeros_of,
)
from headway.kernels.linear.product_way import ProductWay
from headway.kernels.runtime.bound_operator import BoundOperator
from headway.kernels.runtime.probe import HALF_DTYPES
from headway.kernels.runtime.vllm_library.library import bind
from headway.kernels.step.operations import Norm

MARLIN = "marlin"
_PRODUCT, _REPACK = "marlin_gemm", "gptq_marlin_repack"
_CAPABILITY = (8, 0)


class Marlin(ProductWay):
    """vLLM's `marlin_gemm`: x stays as it is, scales are rounded to its type. An arrangement is as large as the weight."""

    name = MARLIN
    library = arranges = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._operators: dict[str, BoundOperator] = {}
        self._arranged: dict[Linear, MarlinWeight] = {}
        self._locks: Tensor | None = None
        """A word for each multiprocessor, zero between launches."""

    def takes(self, dtype: torch.dtype, weight: QuantizedWeight) -> Support:
        """Forms, groups and shapes that Marlin has kernels for, where vLLM's library is found."""
        support = can_arrange(weight, dtype)
        if dtype not in HALF_DTYPES:
            support &= Support.no("dtype", "bfloat16 or float16", dtype)
        if self._device.type == "cuda" and torch.cuda.get_device_capability(self._device) < _CAPABILITY:
            got = "{}.{}".format(*torch.cuda.get_device_capability(self._device))
            support &= Support.no("compute capability", "{}.{} or newer".format(*_CAPABILITY), got)
        if not support:
            return support
        self._operators, support = bind(_PRODUCT, _REPACK)
        return support

    def prepare(self, linear: Linear) -> int:
        """See ProductWay; the weight's elements are read and repacked on their device."""
        arranged = self._arranged.get(linear)
        if arranged is None:
            arranged = self._arranged[linear] = self._arrange(linear)
        return arranged.num_bytes

    def release(self, linear: Linear) -> None:
        """See ProductWay."""
        self._arranged.pop(linear, None)

    def _arrange(self, linear: Linear) -> MarlinWeight:
        weight, dtype = linear.weight, linear.dtype
        assert not isinstance(weight, Tensor)
        repack, (rows, columns) = self._operators[_REPACK], weight.shape
        given: dict[str, int | Tensor] = {
            "size_k": columns,
            "size_n": rows,
            "num_bits": 8 if isinstance(weight, Float8Weight) else 4,
        }
        if "perm" in repack.place:  # columns lie in the order of their groups already
            given["perm"] = torch.empty(0, dtype=torch.int32, device=self._device)
        return MarlinWeight(
            codes=repack(b_q_weight=words(weight), **given),
            scales=scales_of(weight, dtype),
            zeros=zeros_of(weight),
            bias=bias_of(linear.bias),
            order=weight.order if isinstance(weight, Int4Weight) else None,
            type_id=type_of(weight),
        )

    def __call__(self, x: Tensor, linear: Linear, out: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """One launch, and one before it for columns in another order.

        A layer without an arrangement gets one here: one that is not among its model's products, met by a warm-up.
        """
        assert norm is None
        weight = self._arranged.get(linear)
        if weight is None:
            self.prepare(linear)
            weight = self._arranged[linear]
        x = x if weight.order is None else x.index_select(1, weight.order)
        product: Tensor = self._operators[_PRODUCT](
            a=x,
            c=out,
            b_q_weight=weight.codes,
            b_bias=weight.bias,
            b_scales=weight.scales,
            b_zeros=weight.zeros,
            workspace=self._workspace(),
            b_type_id=weight.type_id,
            size_m=len(x),
            size_n=linear.out_features,
            size_k=linear.in_features,
        )
        return product

    def _workspace(self) -> Tensor:
        if self._locks is None:
            cuda = self._device.type == "cuda"
            count = torch.cuda.get_device_properties(self._device).multi_processor_count if cuda else 1
            self._locks = torch.zeros(count, dtype=torch.int32, device=self._device)
        return self._locks
