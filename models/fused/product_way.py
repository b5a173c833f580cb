"""The seam between products over quantised weights and what computes them: kernels of ours, torch's functions, libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from headway.core.contract.support import YES, Support
from headway.models.linear import Linear
from headway.models.operations import Norm
from headway.models.quantization.forms import QuantizedWeight

if TYPE_CHECKING:
    from headway.models.fused.quantized import QuantizedProducts


class ProductWay:
    """One way of computing products of x in half precision over quantised weights, under a name that times are kept by."""

    name: str
    kernel: QuantizedProducts | None = None
    """Our kernel, which computes what comes before and after the product too."""
    norms: ClassVar[bool] = False
    """Whether the norm before the product is a part of it."""
    rounds: ClassVar[bool] = False
    """Whether x is rounded to floats of 8 bits, which makes a coarser product."""
    library: ClassVar[bool] = False
    """Whether a library that is found computes it, which may change from one start to the next: each start tries it."""
    arranges: ClassVar[bool] = False
    """Whether it reads an arrangement of its own, which is made of a layer once and takes memory beside the layer's weight."""
    most_rows: int | None = None
    """Rows up to which it may serve; None: any."""

    def takes(self, dtype: torch.dtype, weight: QuantizedWeight) -> Support:
        """Whether it computes products over a weight, whose elements may be missing, and why not. dtype: of x."""
        return YES

    def prepare(self, linear: Linear) -> int:
        """Make the arrangement of a layer, where there is none; bytes that it takes.

        :raises ArithmeticError: the weight's scales have no place in it.
        """
        return 0

    def release(self, linear: Linear) -> None:
        """Drop the arrangement of a layer, if there is one."""

    def __call__(self, x: Tensor, linear: Linear, out: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """The product of x [rows, in_features]: [rows, out_features]; `out`, contiguous, where it is given.

        norm: of x before the product, for a way that norms. No call synchronises, and all of it can be captured in a CUDA graph.
        """
        raise NotImplementedError
