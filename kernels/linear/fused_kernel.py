"""Headway's own linear kernels: what they compute around a product in one call."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from headway.core.contract.kernel import GraphLevel
from headway.core.contract.linear import LinearKernel
from headway.core.contract.weights import Weight
from headway.kernels.linear.forms import Operand
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Heads, Norm, Rope


class FusedKernel(LinearKernel):
    """A kernel that computes some of what stands around a product, too: `compute` takes what its capabilities name as fused."""

    graph_level = GraphLevel.ANY
    library: ClassVar[bool] = False
    """Whether a library that is found computes it, which may change from one start to the next: each start tries it."""
    copies: ClassVar[bool] = False
    """Whether `prepare` copies the whole weight."""

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> Any:
        """Return what `compute` reads of a layer."""
        return Operand.of(weight, bias)

    @abstractmethod
    def compute(
        self,
        x: Tensor,
        weight: Any,
        norm: Norm | None = None,
        gated: bool = False,
        activation: Activation | None = None,
        add_to: Tensor | None = None,
        rotated: tuple[Heads, Rope] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the product of x [rows, in_features]: [rows, out_features], half of it if gated.

        weight: what `prepare` returned. norm: RMSNorm of x, before. activation: of the product; gated: of its first half, times
        the second. add_to: what the product is added to, in place. rotated: its q and k heads are normed and RoPE is applied.
        out: where it goes, contiguous, unless it is added to something.
        """

    def rotates(self, rows: int, weight: Any, heads: Heads) -> bool:
        """Return whether the kernel applies RoPE to these heads, too."""
        return False

    def apply(self, x: Tensor, weight: Any, out: Tensor) -> None:
        """Write the product of x, bias included, to `out`."""
        self.compute(x, weight, out=out)
