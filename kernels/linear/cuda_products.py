"""Products of few rows over quantised weights by CUDA C++ of our own.

Triton cannot say that a thread multiplies the very bytes that it has copied, which is most of what csrc/product.cuh is about.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from headway.kernels.linear.cuda_arranged import Arrangements
from headway.kernels.linear.cuda_cuts import PART_ROWS, CudaCut, CudaCutRule, fitted, most_rows_of
from headway.kernels.linear.cuda_launchers import FewRowsLauncher, Float8Launcher, ProductOperands, SharedRowsLauncher
from headway.kernels.linear.cuda_variant import CudaVariant, Float8Variant
from headway.kernels.linear.linear import Linear
from headway.kernels.linear.quantized import InOrder, WeightBytes
from headway.kernels.runtime.triton_launch import shared_memory
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Heads, Norm, Rope


class CudaProducts:
    """Products of up to MOST_SHARED_ROWS rows in half precision over quantised weights, with what comes before and after.

    Weights alone are quantised: x stays as it is, and sums are float32. The cut follows from the number of rows, rounded up to 1
    or a power of two from 8 on, and the shape; a row's result does not depend on the other rows. One thread at a time.
    """

    variant: type[CudaVariant] = CudaVariant
    """What its kernels are compiled for."""

    def __init__(self, device: torch.device, cut: CudaCutRule, arranged: Arrangements | None = None) -> None:
        """arranged: what several of these share."""
        self._device = device
        self._arranged = arranged or Arrangements()
        cuda = device.type == "cuda"
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 4
        room = shared_memory(device)

        def cut_of(weight: WeightBytes, rows: int, out_features: int, gated: bool) -> CudaCut:
            found = cut(weight, rows, out_features, gated, self._multiprocessors)
            return found if found.splits else fitted(found, weight, most_rows_of(rows), room)

        self._cut = cache(cut_of)  # a launch asks for it
        self._launchers: dict[CudaVariant, Callable[[ProductOperands], None]] = {}
        self._in_order = InOrder()
        self._arrivals: dict[int, Tensor] = {}
        """Counters by their number, zero between launches; never freed, since captured graphs keep their addresses."""

    def turns(self, rows: int, linear: Linear, heads: Heads) -> bool:
        """Whether the kernel rotates the heads of a product that it reads, too."""
        cut = self._cut(self._arranged(linear.weight).described, rows, linear.out_features, False)
        return not cut.splits and heads.head_dim % PART_ROWS == 0

    def __call__(
        self,
        x: Tensor,
        linear: Linear,
        norm: Norm | None = None,
        gated: bool = False,
        activation: Activation | None = None,
        add_to: Tensor | None = None,
        rotated: tuple[Heads, Rope] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `FewRows`, whose arguments these are."""
        rows, in_features = x.shape
        out_features = linear.out_features // 2 if gated else linear.out_features
        weight = self._arranged(linear.weight)
        y = add_to if add_to is not None else out
        if y is None:
            y = torch.empty(rows, out_features, dtype=x.dtype, device=self._device)
        heads = None if rotated is None else rotated[0]
        cut = self._cut(weight.described, rows, out_features, gated)
        variant = self.variant(
            x.dtype,
            weight.described,
            weight.scales.dtype,
            weight.wide,
            cut,
            max(most_rows_of(rows), 8) if cut.splits else most_rows_of(rows),
            in_features,
            out_features,
            None if norm is None else norm.weight.dtype,
            gated,
            activation,
            add_to is not None,
            linear.bias is not None,
            None if heads is None else (heads.num_heads, heads.num_kv_heads, heads.head_dim),
            None if heads is None or heads.q_norm is None else heads.q_norm.weight.dtype,
        )
        launch = self._launchers.get(variant)
        if launch is None:
            launch = self._launchers[variant] = self._launcher(variant)
        x, norm_weight = self._in_order(x, norm, linear)
        if x.data_ptr() % 16:  # copies are of 16 bytes
            x = x.clone()
        eps = 0.0 if norm is None else norm.eps
        head_eps = 0.0 if heads is None or heads.q_norm is None else heads.q_norm.eps
        launch(ProductOperands(x, weight, norm_weight, eps, linear.bias, y, self._rotation(rotated), head_eps))
        return y

    def _launcher(self, variant: CudaVariant) -> Callable[[ProductOperands], None]:
        if variant.cut.splits:
            return SharedRowsLauncher(variant, self._device)
        return FewRowsLauncher(variant, self._device, self._multiprocessors)

    def _rotation(self, rotated: tuple[Heads, Rope] | None) -> tuple[Tensor | None, ...]:
        """cos, sin, the weights of q's and k's norm, and counters."""
        if rotated is None:
            return (None,) * 5
        heads, rope = rotated
        count = heads.num_heads + heads.num_kv_heads
        arrivals = self._arrivals.get(count)
        if arrivals is None:
            arrivals = self._arrivals[count] = torch.zeros(count, dtype=torch.int32, device=self._device)
        q_norm, k_norm = heads.q_norm, heads.k_norm
        return (*rope, None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight, arrivals)


class Float8Products(CudaProducts):
    """Products of up to MOST_FLOAT8_ROWS rows, rounded to floats of 8 bits, over weights of such floats, likewise."""

    variant = Float8Variant

    def _launcher(self, variant: CudaVariant) -> Callable[[ProductOperands], None]:
        assert isinstance(variant, Float8Variant)
        return Float8Launcher(variant, self._device)
