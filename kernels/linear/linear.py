"""A linear layer: its weight, what kernels have prepared of it, and the kernel for each number of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.linear import LinearKernel, LinearParts, LinearSpec
from headway.core.contract.weights import WeightFormat
from headway.core.system.held_tensors import held_tensors
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.choice import (
    EXPANDED,
    INT4PACK,
    NATIVE,
    TORCH,
    LinearChoice,
    LinearKernels,
    builtin_kernels,
)
from headway.kernels.linear.forms import QuantizedWeight, device_of, format_of, num_bytes
from headway.kernels.runtime.native.library import Panels, multiply

Compute = Callable[..., Tensor]
"""From x [rows, in_features] to [rows, out_features], bias included; `out`, by name, is where it goes if it is given."""
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class ProductOrigin:
    """Which modules of a checkpoint a product was made of, and how, for what is added to it later (adapters)."""

    modules: Mapping[str, Axis]
    """Full name of each module -> the rows of its weight, and which of them the rank holds, one module after the other."""
    in_features: Axis
    """The columns of all of them."""
    order: Sequence[int] | None
    """The product's rows by their number among those that are held; None: in that order."""
    scale: float | Sequence[float]
    """What multiplies the rows of the product: one factor, or one for each."""


class Applied:
    """A kernel by the calls of the contract, bound to a layer. One that raises is replaced by the next."""

    def __init__(self, layer: Linear, kernel: LinearKernel, again: Callable[..., Compute] | None = None) -> None:
        """again: returns the layer bound to another kernel, for the same arguments; None: `Linear.bound_to`."""
        self._layer = layer
        self._kernel = kernel
        self._prepared = layer.prepared_for(kernel)
        self._again = again or layer.bound_to
        self._fused = kernel.capabilities.fused

    def __call__(self, x: Tensor, out: Tensor | None = None, add_to: Tensor | None = None, **around: Any) -> Tensor:
        """Return the product of x [rows, in_features] with its bias, added to `add_to` if that is given.

        around: those of `FusedKernel.compute` that the kernel claims.

        :raises BackendError: the kernel raised, and the user asked for it or no other can compute the layer.
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
            if choice is None:
                raise
            choice.replace_failed(self._kernel.label, error)
            given = {name: value for name, value in (("out", out), ("add_to", add_to)) if value is not None}
            return self._again(choice.kernels[choice.kernel_for(len(x))])(**{"x": x, **given, **around})
        return y if bias is None or "bias" in self._fused else y.add_(bias)


class Buckets:
    """A layer's kernels on a CPU by number of rows, each bound at its first step."""

    def __init__(self, layer: Linear) -> None:
        self._layer = layer
        self.bound: dict[int, Compute] = {}

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the product by the kernel for the rows of x."""
        rows, layer = x.shape[0], self._layer
        if not rows:
            return x.new_empty(0, layer.out_features) if out is None else out
        compute = self.bound.get(bucket := (rows - 1).bit_length())
        if compute is None:
            assert layer.choice is not None
            compute = self.bound[bucket] = layer.bound_to(layer.choice.kernels[layer.choice.kernel_for(rows)])
        return compute(x, out=out)


class Linear:
    """y = x W^T + b over weights that are only read.

    On a GPU the weight stays as it is, and the device's operations bind the layer to kernels (`choice`); called by itself, the
    layer is torch.mm over the weight, which is dequantised for each call.

    On a CPU it is bound when it is made. If only Headway's kernels can compute it, the first of them takes the weight in the form
    that it reads: our C, torch's product over int4, oneDNN (both faster than torch.mm at the 1 to 64 rows of decode,
    docs/benchmarks.md), or torch.mm; a weight that none of them reads is dequantised once. If a third party's kernel can compute
    it, too, the weight stays until times decide (`settle`).
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
        """weight: [out_features, in_features]; bias: [out_features].

        summed: the weight is some columns of the whole one, and what all ranks get is to be summed: by `RankedOperations`.
        dtype: of x, for a quantised weight; None: the bias's, else float32 on a CPU and bfloat16 on a GPU.
        kept: a quantised weight stays as it is on a CPU too, for operations that multiply it themselves. origin: what the weight
        was made of; None: nobody asks. kernels: those of the model; None means Headway's own.
        """
        self.number = next(_NUMBERS)
        self.summed = summed
        self.origin = origin
        out_features, in_features = weight.shape
        self.out_features = out_features
        self.in_features = in_features
        self.bias = bias
        self.weight = weight
        """As it was given, or as the product reads it."""
        self.prepared: dict[str, Any] = {}
        """What kernels read of the layer, by the name of the arrangement."""
        self.expanded_bytes = 0
        """Bytes that a quantised weight takes because it was expanded; 0: it was not."""
        self.panels: Panels | None = None
        """The weight as our C reads it on a CPU; None: others multiply."""
        self.held_bytes = weight.nbytes if isinstance(weight, Tensor) else num_bytes(weight)
        """Bytes that a product reads: of a quantised weight with its scales, and of what it became where it was expanded."""
        self.reads_quantized = False
        """Whether products read a quantised weight as it is."""
        self.choice: LinearChoice | None = None
        """The kernels that can compute the layer, and the one for each number of rows."""
        self.steps: Any = None
        """The layer bound to kernels by the operations of a GPU, `kernels/step/fused.py`; None until they need it."""
        self.gated_steps: Any = None
        self._compute: Compute | None = None
        self._transposed = weight.t() if isinstance(weight, Tensor) else None
        if isinstance(weight, Tensor):
            self.dtype = weight.dtype
            self.device = weight.device
        else:
            self.device = device_of(weight)
            usual = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            self.dtype = dtype or (usual if bias is None else bias.dtype)
            self.reads_quantized = True
        if self.device.type == "cpu" and not (kept and not isinstance(weight, Tensor)):
            self._bind_on_cpu(kernels or usual_kernels())

    def spec(self, device: torch.device | None = None, gated: bool = False) -> LinearSpec:
        """Return the layer as kernels are asked for it. device: another than the weight's."""
        form = WeightFormat("plain") if isinstance(self.weight, Tensor) else format_of(self.weight)
        bias = self.bias is not None
        return LinearSpec(self.in_features, self.out_features, self.dtype, device or self.device, form, gated=gated, bias=bias)

    def _bind_on_cpu(self, kernels: LinearKernels) -> None:
        choice = kernels.choice(self.spec())
        if not choice.is_open and [*choice.kernels] == [EXPANDED]:
            assert not isinstance(self.weight, Tensor)
            self.weight = self.weight.dequantized(self.dtype)
            self._transposed = self.weight.t()
            self.expanded_bytes = self.held_bytes = self.weight.nbytes
            self.reads_quantized = False
            choice = kernels.choice(self.spec())
        self.choice = choice
        if choice.is_open:
            choice.add(self)
            self._compute = Buckets(self)
        else:
            self._close(choice.kernels[choice.kernel_for(1)])

    def _close(self, kernel: LinearKernel) -> None:
        """Bind the layer to one kernel for good: the weight stays in no other form."""
        quantized = not isinstance(self.weight, Tensor)
        self._compute = None if kernel.name == TORCH else self.bound_to(kernel)
        if kernel.name == EXPANDED:
            self._take(self.prepared.pop(kernel.name))
        elif kernel.name != TORCH:
            self._transposed = None
            read = self.prepared[kernel.name]
            self.weight = next(iter(held_tensors(read).values()))
            if isinstance(read, Panels):
                self.panels = read
                self.held_bytes = read.nbytes
        self.reads_quantized = quantized and kernel.name in (NATIVE, INT4PACK)

    def _take(self, dense: Linear) -> None:
        """Become a layer whose weight is this one's, dequantised."""
        self.weight = dense.weight
        self.panels = dense.panels
        self.prepared = dense.prepared
        self._compute = dense._compute
        self._transposed = dense._transposed
        self.expanded_bytes = self.in_features * self.out_features * self.dtype.itemsize
        self.held_bytes = dense.held_bytes

    def settle(self) -> None:
        """Prepare the layer for the kernels that serve, and let go of whatever no one reads: once times have decided.

        If one of Headway's kernels serves on a CPU, whatever the number of rows, the weight stays only in that kernel's form.
        """
        choice = self.choice
        assert choice is not None
        serving = [*choice.serving()]
        if self.device.type == "cpu" and self._compute is not None and len(serving) == 1 and not choice.is_guest(serving[0]):
            self.prepared.clear()
            self._close(choice.kernels[serving[0]])

    def unbind(self) -> None:
        """Have the layer bound anew, by the present choice."""
        self.steps = None
        self.gated_steps = None
        if isinstance(self._compute, Buckets):
            self._compute.bound.clear()

    def prepared_for(self, kernel: LinearKernel) -> Any:
        """Return what a kernel reads of the layer, which is made at the first call.

        :raises ArithmeticError: the weight's scales have no place in it.
        """
        name = kernel.arrangement or kernel.name
        if name not in self.prepared:
            weight: Any = self.weight
            if "bias" in kernel.capabilities.fused and hasattr(kernel, "compute"):
                prepare: Any = kernel.prepare
                self.prepared[name] = prepare(weight, self.bias)
            else:
                self.prepared[name] = kernel.prepare(weight)
        return self.prepared[name]

    def bytes_of(self, kernel: LinearKernel) -> int:
        """Return the bytes that a kernel's arrangement takes besides the weight and the bias."""
        own = {each.untyped_storage().data_ptr() for each in held_tensors(self.weight, self.bias).values()}
        held = held_tensors(self.prepared.get(kernel.arrangement or kernel.name)).values()
        return sum(each.nbytes for each in held if each.untyped_storage().data_ptr() not in own)

    def prepare(self, kernel: LinearKernel) -> int:
        """Prepare the layer for a kernel, and return the bytes that this takes besides the weight and the bias."""
        self.prepared_for(kernel)
        return self.bytes_of(kernel)

    def release(self, kernel: LinearKernel) -> None:
        """Drop what was prepared for a kernel."""
        self.prepared.pop(kernel.arrangement or kernel.name, None)

    def bound_to(self, kernel: LinearKernel, again: Callable[..., Compute] | None = None) -> Compute:
        """Return the layer's product by a kernel, bias included. again: as in `Applied`."""
        compute = getattr(kernel, "compute", None)
        if compute is not None and kernel.capabilities.fused:
            return partial(compute, weight=self.prepared_for(kernel))
        return Applied(self, kernel, again)

    def fused_by(self, kernel: LinearKernel) -> frozenset[str]:
        """Return what a kernel computes around the product: a bias that it leaves to the engine comes before the activation."""
        fused = kernel.capabilities.fused
        return fused if self.bias is None or "bias" in fused else fused - {"activation", "gated"}

    @property
    def hands_over(self) -> bool:
        """Whether a third party's kernel on a CPU may compute more than the product: the operations then hand that over."""
        return isinstance(self._compute, Buckets) and self.choice is not None and self.choice.hands_over

    @property
    def may_have_copies(self) -> bool:
        """Whether a third party's kernel may have prepared a copy of the weight."""
        settled = self.device.type == "cpu" and not isinstance(self._compute, Buckets)
        return self.choice is not None and self.choice.is_open and not settled

    @property
    def is_dense(self) -> bool:
        """Whether the weight is a plain matrix, arranged for nothing."""
        return self._transposed is not None

    def followed_by(self, rows: int) -> Linear:
        """Move a plain weight to where so many rows of zeros follow it; return the layer of all these rows, for another to fill.

        Both layers read the same memory.
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
        """x: [rows, in_features] to [rows, out_features]: `out`, where it is given."""
        if self.panels is not None:
            return multiply(self.panels, x, out)
        if self._compute is not None:
            return self._compute(x, out=out)
        transposed = self._transposed
        if transposed is None:
            weight = self.weight
            assert not isinstance(weight, Tensor)
            transposed = weight.dequantized(x.dtype).t()
        # What F.linear comes down to; it takes no `out` itself.
        if self.bias is None:
            return torch.mm(x, transposed, out=out)
        return torch.addmm(self.bias, x, transposed, out=out)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + y in one product where there is no bias; residual: [rows, out_features], overwritten or not."""
        if self._transposed is None or self.bias is not None or self._compute is not None:
            return residual + self(x)
        return residual.addmm_(x, self._transposed)


@cache
def usual_kernels() -> LinearKernels:
    """Headway's own kernels for a CPU."""
    return builtin_kernels(torch.device("cpu"))
