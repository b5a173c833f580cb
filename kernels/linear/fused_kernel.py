"""Base class of Headway's own linear kernels, which can fuse operations around the GEMM in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.core.contract.kernel import GraphLevel
from headway.core.contract.linear import LinearKernel
from headway.core.contract.weights import Weight
from headway.kernels.linear.forms import Operand
from headway.kernels.step.operations import Heads


class FusedKernel(LinearKernel):
    """A linear kernel that can fuse operations around its GEMM. `compute` accepts the arguments that its capabilities list as
    fused.
    """

    graph_level = GraphLevel.ANY
    library: ClassVar[bool] = False
    """True if an external library computes the kernel. The library may change between starts, so the kernel is tested at each
    start."""
    copies: ClassVar[bool] = False
    """True if `prepare` copies the complete weight."""

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> Any:
        """Return the layer's weight and bias in the layout that `compute` reads."""
        return Operand.of(weight, bias)

    compute: Callable[..., Tensor]
    """Return a linear layer's output for x [rows, in_features]: [rows, out_features], or half of the columns if gated.

    All arguments except x and weight are optional, and are only passed to kernels that fuse them. weight: result of `prepare`.
    norm: `Norm` (RMSNorm) of x. activation: function applied to the output or, if gated, to the first half of its columns, which
    is then multiplied by the second half. add_to: tensor to which the output is added, in place. rotated: `Heads` of q and k to
    be normed and rotated (RoPE), with cos and sin. out: contiguous tensor for the output, unless add_to is given.
    """

    @cached_property
    def multiprocessors(self) -> int:
        """Number of SMs of the spec's GPU, or 4 in an interpreter."""
        device = self.spec.device
        return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

    def rotates(self, rows: int, weight: Any, heads: Heads) -> bool:
        """Return whether the kernel also applies RoPE to these heads."""
        return False

    def apply(self, x: Tensor, weight: Any, out: Tensor) -> None:
        """Write the layer's output for x to `out`."""
        self.compute(x, weight, out=out)
