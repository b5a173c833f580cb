"""Headway's own linear kernels: what they compute around a product in one call."""

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
    """A kernel that computes some of what stands around a product, too: `compute` takes what its capabilities name as fused."""

    graph_level = GraphLevel.ANY
    library: ClassVar[bool] = False
    """True if a library that is found computes it, which may change from one start to the next: each start tries it."""
    copies: ClassVar[bool] = False
    """True if `prepare` copies the whole weight."""

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> Any:
        """Return what `compute` reads of a layer."""
        return Operand.of(weight, bias)

    compute: Callable[..., Tensor]
    """Returns the product of x [rows, in_features], bias included: [rows, out_features], half of it if gated.

    Its arguments, all but the first two of which are left out where nothing of the kind is there, and taken by kernels that fuse
    it: x; weight: what `prepare` returned; norm: `Norm` (RMSNorm) of x, before; gated and activation: of the product, or if
    gated of its first half, times the second; add_to: what the product is added to, in place; rotated: `Heads` of q and k that
    are normed and rotated (RoPE), with cos and sin; out: where it goes, contiguous, unless it is added to something.
    """

    @cached_property
    def multiprocessors(self) -> int:
        """Multiprocessors of the spec's GPU; 4 under an interpreter."""
        device = self.spec.device
        return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

    def rotates(self, rows: int, weight: Any, heads: Heads) -> bool:
        """Return whether the kernel applies RoPE to these heads, too."""
        return False

    def apply(self, x: Tensor, weight: Any, out: Tensor) -> None:
        """Write the product of x, bias included, to `out`."""
        self.compute(x, weight, out=out)
