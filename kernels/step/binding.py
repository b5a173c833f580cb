"""Bind linear layers to kernels, with launches for the operations around a GEMM that the kernel does not fuse."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor

from headway.core.contract.linear import FUSED, LinearKernel
from headway.kernels.linear.choice import NUM_BUCKETS, LinearChoice
from headway.kernels.linear.linear import Linear
from headway.kernels.step.config import ACTIVATE, Activation
from headway.kernels.step.operations import Heads, Norm, Rope

RowScale = tuple[Tensor, float]
"""x [rows, size] and epsilon of an RMSNorm whose factor per row is still to be applied."""
Step = Callable[..., Tensor]
"""A layer bound to a kernel. Its arguments are x [rows, in_features] and keyword arguments for fused operations: see
`FusedKernel.compute`."""


def bound(ops: Any, linear: Linear, rows: int, gated: bool = False, heads: Heads | None = None) -> Step:
    """Return a layer bound to its kernel for this number of rows. ops: the device's operations. heads: heads that the step
    rotates (RoPE)."""
    steps: BoundSteps | None = linear.gated_steps if gated else linear.steps
    if steps is None or steps.ops is not ops or (heads is not None and steps.heads is not heads):
        steps = BoundSteps(ops, linear, ops.choice_for(linear, gated), gated, heads)
        if gated:
            linear.gated_steps = steps
        else:
            linear.steps = steps
    return steps[(rows - 1).bit_length() if rows else -1]


class BoundSteps(list[Step]):
    """Steps of a layer, each bound to a kernel, for all buckets of row counts. The last item is for steps without rows."""

    borrows = True
    """Marker for `held_tensors`: all tensors that this object references belong to other objects."""

    def __init__(self, ops: Any, linear: Linear, choice: LinearChoice, gated: bool, heads: Heads | None) -> None:
        self.ops = ops
        self.heads = heads
        buckets = [partial(self._bind, linear, choice, heads, bucket) for bucket in range(NUM_BUCKETS)]
        super().__init__([*buckets, partial(self._nothing, linear)])

    def _bind(self, linear: Linear, choice: LinearChoice, heads: Heads | None, bucket: int, x: Tensor, **around: Any) -> Tensor:
        """Bind the layer for a bucket of row counts at the bucket's first step, and run that step."""
        step = self[bucket] = bound_step(self.ops, linear, choice.kernel_of(bucket), heads, 1 << bucket)
        return step(**{"x": x, **around})

    def _nothing(self, linear: Linear, x: Tensor, **around: Any) -> Tensor:
        """Return the result of a step without rows."""
        given = around.get("add_to") if around.get("out") is None else around["out"]
        columns = linear.out_features // 2 if around.get("gated") else linear.out_features
        return x.new_empty(0, columns) if given is None else given


def bound_step(ops: Any, linear: Linear, kernel: LinearKernel, heads: Heads | None, rows: int) -> Step:
    """Return a layer bound to a kernel, with extra launches for operations that it does not fuse. rows: maximum of the bucket."""

    def again(other: LinearKernel) -> Step:
        return bound_step(ops, linear, other, heads, rows)

    compute, fused = linear.bound_to(kernel, again), linear.fused_by(kernel)
    if heads is not None and "rotary" in fused:
        ours: Any = kernel
        if heads.v_norm is not None or not ours.rotates(rows, linear.prepared_for(kernel), heads):
            fused = fused - {"rotary"}
    around = frozenset(FUSED) - {"bias"}
    activations = ACTIVATE if hasattr(kernel, "compute") else kernel.capabilities.activations
    return compute if fused >= around else Surrounded(ops, compute, fused, activations)


class Surrounded:
    """A bound kernel, with launches for operations before and after the GEMM that the kernel does not fuse."""

    def __init__(self, ops: Any, compute: Step, fused: frozenset[str], activations: Collection[str]) -> None:
        """Wrap `compute`. fused: operations that the kernel fuses. activations: activations that the kernel can fuse."""
        self._ops = ops
        self._compute = compute
        self._norms = "norm" in fused
        self._gates = activations if "gated" in fused else ()
        self._activates = activations if "activation" in fused else ()
        self._adds = "residual" in fused
        self._rotates = "rotary" in fused

    def __call__(
        self,
        x: Tensor,
        norm: Norm | None = None,
        gated: bool = False,
        activation: Activation | None = None,
        add_to: Tensor | None = None,
        rotated: tuple[Heads, Rope] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer; see `FusedKernel.compute`."""
        ops, scaled_by = self._ops, None
        gates, activates = activation in self._gates, activation in self._activates
        inner: dict[str, Any] = {}
        if norm is not None:
            if self._norms and norm.bias is None:
                inner["norm"] = norm
            elif norm.absorbed and ((gated and not gates) or (rotated is not None and not self._rotates)):
                scaled_by = (x, norm.eps)  # the launch after the GEMM applies the norm's factor
            else:
                x = ops.norm(x, norm)
        if gated and gates:
            inner |= {"gated": True, "activation": activation}
        elif not gated and activation is not None and activates:
            inner["activation"] = activation
        if add_to is not None and self._adds:
            inner["add_to"] = add_to
        if rotated is not None and self._rotates:
            inner["rotated"] = rotated
        if out is not None:
            inner["out"] = out
        inner["x"] = x
        y = self._compute(**inner)
        if gated and not gates:
            assert activation is not None
            y = ops.gated(y, activation, scaled_by)
        elif not gated and activation is not None and not activates:
            y = ACTIVATE[activation](y)
        if rotated is not None and not self._rotates:
            heads, rope = rotated
            ops.rotate(y, heads, rope, scaled_by)
        return y if add_to is None or self._adds else add_to.add_(y)
