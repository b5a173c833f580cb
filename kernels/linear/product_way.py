"""The seam between products over quantised weights and what computes them: kernels of ours, torch's functions, libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from headway.core.contract.support import YES, Support
from headway.kernels.linear.forms import QuantizedWeight
from headway.kernels.linear.linear import Linear
from headway.kernels.linear.quantized_choice import MeasuredWay
from headway.kernels.step.operations import Norm

if TYPE_CHECKING:
    from headway.kernels.step.config import Activation
    from headway.kernels.step.operations import Heads, Rope


class FusedProducts(Protocol):
    """Kernels that compute what comes before and after a product, too."""

    def turns(self, rows: int, linear: Linear, heads: Heads) -> bool:
        """Whether the heads of a product are rotated, too."""

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


class ProductWay(MeasuredWay, ABC):
    """One way of computing products of x in half precision over quantised weights."""

    kernel: FusedProducts | None = None
    """Our kernel, which computes what comes before and after the product too."""
    norms: ClassVar[bool] = False
    """Whether the norm before the product is a part of it."""

    def takes(self, dtype: torch.dtype, weight: QuantizedWeight) -> Support:
        """Whether it computes products over a weight, whose elements may be missing, and why not. dtype: of x."""
        return YES

    @abstractmethod
    def __call__(self, x: Tensor, linear: Linear, out: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """The product of x [rows, in_features]: [rows, out_features]; `out`, contiguous, where it is given.

        norm: of x before the product, for a way that norms. No call synchronises, and all of it can be captured in a CUDA graph.
        """
