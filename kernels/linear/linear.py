"""Linear layer: its weight, the weight's layouts for kernels, and the kernel for each number of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.linear import LinearKernel, LinearParts, LinearSpec
from headway.core.contract.weights import QuantizedWeight, WeightFormat
from headway.core.system.held_tensors import held_tensors
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.choice import EXPANDED, INT4PACK, NATIVE, TORCH, LinearChoice, LinearKernels, builtin_kernels
from headway.kernels.runtime.native.library import PackedWeight, multiply

Compute = Callable[..., Tensor]
"""A layer bound to a kernel: x [rows, in_features] -> y [rows, out_features], including the bias. y is written to `out` if
given."""
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class ProductOrigin:
    """Origin of a merged weight in the checkpoint, for LoRA adapters that are added later."""

    modules: Mapping[str, Axis]
    """Full name of each module -> axis of its weight's rows with the rank's shard, in the order of concatenation."""
    in_features: Axis
    """Axis of the columns of all modules, with the rank's shard."""
    order: Sequence[int] | None
    """Index of each row of the weight among the rows that the rank holds. None means that rows are in order."""
    scale: float | Sequence[float]
    """Factor by which the weight's rows were multiplied: one number, or one per row."""


class Applied:
    """A kernel of the plugin contract, bound to a layer. A kernel that raises is replaced by the next candidate."""

    def __init__(self, layer: Linear, kernel: LinearKernel, again: Callable[..., Compute] | None = None) -> None:
        """Bind the kernel. again: returns the layer bound to another kernel for the same arguments; None means
        `Linear.bound_to`.
        """
        self._layer = layer
        self._kernel = kernel
        self._prepared = layer.prepared_for(kernel)
        self._again = again or layer.bound_to
        self._fused = kernel.capabilities.fused

    def __call__(self, x: Tensor, out: Tensor | None = None, add_to: Tensor | None = None, **around: Any) -> Tensor:
        """Return the layer's output for x [rows, in_features], added to `add_to` if given.

        around: arguments of `FusedKernel.compute` for the operations that the kernel fuses.
        :raises BackendError: if the kernel raised an error, and the user requested it or no other kernel can compute the layer.
        """
        layer, bias, norm, gated = self._layer, self._layer.bias, around.get("norm"), around.get("gated", False)
        y = out if add_to is None else add_to
        if y is None:
            y = x.new_empty(x.shape[0], layer.out_features // 2 if gated else layer.out_features)
        try:
            if self._fused:
                fused_bias = bias if "bias" in self._fused else None
                weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
                parts = LinearParts(weight, eps, fused_bias, around.get("activation"), gated, add_to is not None)
                self._kernel.apply_fused(x.contiguous(), self._prepared, parts, y)
            else:
                self._kernel.apply(x.contiguous(), self._prepared, y)
        except Exception as error:
            choice = layer.choice
            if choice is None or choice.is_on_trial:
                raise
            choice.replace_failed(self._kernel.label, error)
            given = {name: value for name, value in (("out", out), ("add_to", add_to)) if value is not None}
            return self._again(choice.kernel_of((len(x) - 1).bit_length()))(**{"x": x, **given, **around})
        return y if bias is None or "bias" in self._fused else y.add_(bias)


class Buckets:
    """CPU kernels of a layer, keyed by number of rows. Each kernel is bound at the first step that needs it."""

    def __init__(self, layer: Linear) -> None:
        self._layer = layer
        self.bound: dict[int, Compute] = {}

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the layer with the kernel for the number of rows of x."""
        rows, layer = x.shape[0], self._layer
        if not rows:
            return x.new_empty(0, layer.out_features) if out is None else out
        compute = self.bound.get(bucket := (rows - 1).bit_length())
        if compute is None:
            assert layer.choice is not None
            compute = self.bound[bucket] = layer.bound_to(layer.choice.kernel_of(bucket))
        return compute(x, out=out)


class Linear:
    """y = x W^T + b with constant weights.

    On a GPU, the weight keeps its layout, and the device's operations bind the layer to kernels (`choice`). A direct call
    computes the layer with torch.mm, and dequantizes a quantized weight each time.

    On a CPU, the layer is bound when it is made. If only Headway's kernels can compute the layer, the first kernel that supports
    the weight repacks it. The order is: our C library, torch's int4 GEMM, oneDNN (both faster than torch.mm at the 1 to 64 rows
    of decode, docs/benchmarks.md), torch.mm. A weight that none of these kernels reads is dequantized once. If a third party's
    kernel is a candidate, the original weight stays in memory until measured times decide (`settle`).
    """

    def __init__(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None = None,
        summed: bool = False,
        dtype: torch.dtype | None = None,
        kept: bool = False,
        origin: ProductOrigin | None = None,
        kernels: LinearKernels | None = None,
    ) -> None:
        """Make the layer.

        weight: [out_features, in_features]. bias: [out_features]. summed: True if the weight is a column shard, whose outputs
        `RankedOperations` sums over ranks. dtype: type of x for a quantized weight; None means the bias's type, else float32 on a
        CPU and bfloat16 on a GPU. kept: True to leave a quantized weight unchanged on a CPU too, for operations that multiply it
        themselves. origin: modules of the weight; None if adapters do not need it. kernels: linear kernels of the model; None
        means Headway's own.
        """
        self.number = next(_NUMBERS)
        self.summed = summed
        self.origin = origin
        out_features, in_features = weight.shape
        self.out_features = out_features
        self.in_features = in_features
        self.bias = bias
        self.weight = weight
        """Original weight, or the weight in the layout of the kernel that the layer is permanently bound to."""
        self.prepared: dict[str, Any] = {}
        """Weights in kernels' layouts, keyed by the name of the layout."""
        self.expanded_bytes = 0
        """Size of the dequantized weight, in bytes. 0 means that the weight was not dequantized."""
        self.packed: PackedWeight | None = None
        """Weight in packed blocks for our C library on a CPU. None if a different kernel multiplies the weight."""
        self.held_bytes = weight.nbytes
        """Number of bytes of the weight that a GEMM reads: a quantized weight with its scales, or the dequantized weight."""
        self.reads_quantized = False
        """True if kernels read the quantized weight directly."""
        self.choice: LinearChoice | None = None
        """The candidate kernels, and the kernel for each number of rows."""
        self.steps: Any = None
        """The layer bound to kernels by a GPU's operations (`kernels/step/fused.py`). None until the first step."""
        self.gated_steps: Any = None
        self._compute: Compute | None = None
        self._closed: LinearKernel | None = None
        """Kernel that the layer is permanently bound to, on a CPU."""
        self._transposed = weight.t() if isinstance(weight, Tensor) else None
        self.device = weight.device
        if isinstance(weight, Tensor):
            self.dtype = weight.dtype
        else:
            usual = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            self.dtype = dtype or (usual if bias is None else bias.dtype)
            self.reads_quantized = True
        if self.device.type == "cpu" and not (kept and not isinstance(weight, Tensor)):
            self._bind_on_cpu(kernels or usual_kernels())

    def spec(self, device: torch.device | None = None, gated: bool = False) -> LinearSpec:
        """Return the spec of the layer, for calls of kernels' `supports`. device: replaces the weight's device."""
        form, bias = WeightFormat.of(self.weight), self.bias is not None
        return LinearSpec(self.in_features, self.out_features, self.dtype, device or self.device, form, gated=gated, bias=bias)

    def _bind_on_cpu(self, kernels: LinearKernels) -> None:
        choice = kernels.choice(self.spec())
        if not choice.is_open and [*choice.kernels] == [EXPANDED]:
            self._expand(kernels)
            return
        self.choice = choice
        if choice.is_open:
            choice.add(self)
            self._compute = Buckets(self)
        else:
            self._close(choice.kernel_of(0))

    def _close(self, kernel: LinearKernel) -> None:
        """Bind the layer permanently to one kernel. The weight stays in memory only in that kernel's layout."""
        if kernel.name == EXPANDED:
            choice = self.choice
            self._expand(usual_kernels())
            self.choice = choice
            return
        self._closed = kernel
        quantized = not isinstance(self.weight, Tensor)
        self._compute = None if kernel.name == TORCH else self.bound_to(kernel)
        if kernel.name != TORCH:
            self._transposed = None
            read = self.prepared[kernel.name]
            self.weight = read.data if isinstance(read, PackedWeight) else read[0]
            if isinstance(read, PackedWeight):
                self.packed = read
                self.held_bytes = read.nbytes
        self.reads_quantized = quantized and kernel.name in (NATIVE, INT4PACK)

    def _expand(self, kernels: LinearKernels) -> None:
        """Replace the weight by the dequantized weight."""
        assert not isinstance(self.weight, Tensor)
        self.weight = self.weight.dequantized(self.dtype)
        self._transposed = self.weight.t()
        self.reads_quantized = False
        self.expanded_bytes = self.held_bytes = self.weight.nbytes
        self._bind_on_cpu(kernels)

    def settle(self) -> None:
        """Prepare the layer for the selected kernels, after selection by measured times.

        On a CPU, if one of Headway's kernels is selected for every number of rows, the weight stays only in that kernel's layout.
        """
        choice = self.choice
        assert choice is not None
        serving = [*choice.serving()]
        if (
            self.device.type == "cpu"
            and self._compute is not None
            and len(serving) == 1
            and not choice.is_third_party(serving[0])
        ):
            self.prepared.clear()
            self._close(choice.kernels[serving[0]])

    def unbind(self) -> None:
        """Forget bound kernels, so that the layer is bound by the current choice."""
        self.steps = None
        self.gated_steps = None
        if isinstance(self._compute, Buckets):
            self._compute.bound.clear()

    def prepared_for(self, kernel: LinearKernel) -> Any:
        """Return the weight prepared for a kernel. The first call prepares it.

        :raises ArithmeticError: if the kernel's element type cannot represent the weight's scales.
        """
        name = kernel.arrangement or kernel.name
        if name not in self.prepared:
            prepare: Any = kernel.prepare
            both = "bias" in kernel.capabilities.fused and hasattr(kernel, "compute")
            self.prepared[name] = prepare(self.weight, self.bias) if both else prepare(self.weight)
        return self.prepared[name]

    def bytes_of(self, kernel: LinearKernel) -> int:
        """Return the size in bytes of a kernel's layout, excluding tensors of the original weight and bias."""
        own = {each.untyped_storage().data_ptr() for each in held_tensors(self.weight, self.bias).values()}
        held = held_tensors(self.prepared.get(kernel.arrangement or kernel.name)).values()
        return sum(each.nbytes for each in held if each.untyped_storage().data_ptr() not in own)

    def prepare(self, kernel: LinearKernel) -> int:
        """Prepare the layer for a kernel. Return the number of bytes that the kernel's layout takes in addition to the weight and
        bias."""
        self.prepared_for(kernel)
        return self.bytes_of(kernel)

    def release(self, kernel: LinearKernel) -> None:
        """Free a kernel's layout of the weight."""
        self.prepared.pop(kernel.arrangement or kernel.name, None)

    def bound_to(self, kernel: LinearKernel, again: Callable[..., Compute] | None = None) -> Compute:
        """Return the layer bound to a kernel, including the bias. again: see `Applied`."""
        compute = getattr(kernel, "compute", None)
        if compute is not None and kernel.capabilities.fused:
            return partial(compute, weight=self.prepared_for(kernel))
        return Applied(self, kernel, again)

    def fused_by(self, kernel: LinearKernel) -> frozenset[str]:
        """Return the names of the operations that a kernel fuses in this layer. Activations and gating are excluded if the engine
        adds the bias after the kernel."""
        fused = kernel.capabilities.fused
        return fused if self.bias is None or "bias" in fused else fused - {"activation", "gated"}

    @property
    def fuses_more(self) -> bool:
        """True if a third party's CPU kernel may fuse operations around the GEMM. The operations are then passed to the
        kernel."""
        return isinstance(self._compute, Buckets) and self.choice is not None and self.choice.fuses_more

    def bind_as(self, other: Linear) -> None:
        """Prepare this layer's weight for the same kernels as `other`, a layer of the same kind."""
        if other._closed is not None:
            if self._closed is None:
                self._close(other._closed)
            return
        for kernel in other._kernels():
            self.prepared_for(kernel)

    def update(self, built: Linear) -> None:
        """Copy the new weight of `built` (see `bind_as`) over the data that third-party kernels prepared.

        :raises ConfigError: if a kernel does not support updates.
        """
        for kernel in self._kernels() if self._closed is None else ():
            if self.choice is not None and self.choice.is_third_party(kernel.name):
                kernel.update(self.prepared_for(kernel), built.prepared_for(kernel))

    def _kernels(self) -> list[LinearKernel]:
        """Return one kernel for each prepared layout of the layer's weight."""
        kernels = {} if self.choice is None else {each.arrangement or each.name: each for each in self.choice.kernels.values()}
        return [kernels[name] for name in self.prepared if name in kernels]

    @property
    def is_dense(self) -> bool:
        """True if the weight is a dense matrix without a special layout."""
        return self._transposed is not None

    def followed_by(self, rows: int) -> Linear:
        """Move a dense weight to memory with `rows` additional rows of zeros. Return a layer over all rows, whose additional rows
        the caller fills.

        Both layers use the same memory.
        """
        assert self.is_dense, "the rows of another weight are not laid out alike"
        weight, bias = self.weight, self.bias
        assert isinstance(weight, Tensor)
        whole = weight.new_zeros(self.out_features + rows, self.in_features)
        self.weight = whole[: self.out_features]
        self.weight.copy_(weight)
        self.prepared.clear()
        self.unbind()
        self._transposed = self.weight.t()
        return Linear(whole, None if bias is None else torch.cat([bias, bias.new_zeros(rows)]))

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the layer's output for x [rows, in_features]: [rows, out_features], written to `out` if given."""
        if self.packed is not None:
            return multiply(self.packed, x, out)
        if self._compute is not None:
            return self._compute(x, out=out)
        transposed = self._transposed
        if transposed is None:
            weight = self.weight
            assert not isinstance(weight, Tensor)
            transposed = weight.dequantized(x.dtype).t()
        # The implementation of F.linear, which does not accept `out`.
        if self.bias is None:
            return torch.mm(x, transposed, out=out)
        return torch.addmm(self.bias, x, transposed, out=out)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + y, in one GEMM if the layer has no bias. residual: [rows, out_features]; may be overwritten."""
        if self._transposed is None or self.bias is not None or self._compute is not None:
            return residual + self(x)
        return residual.addmm_(x, self._transposed)


@cache
def usual_kernels() -> LinearKernels:
    """Return Headway's own kernels for a CPU."""
    return builtin_kernels(torch.device("cpu"))
