"""The ways of multiplying over a quantised weight on a GPU. All run inside CUDA graphs: the number of rows alone decides."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from headway.backends.nvrtc.compiler import find_compiler
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.contract.support import YES, Support
from headway.models.fused.cuda_cuts import CudaCutRule, few_rows_cut, shared_rows_cut, shared_rows_cut_narrow
from headway.models.fused.cuda_products import MOST_FEW_ROWS, MOST_SHARED_ROWS, Arrangements, CudaProducts, computes
from headway.models.fused.cutlass import Cutlass
from headway.models.fused.marlin import Marlin
from headway.models.fused.product_way import ProductWay
from headway.models.fused.quantized import CutRule, QuantizedProducts, quantized_cut
from headway.models.fused.quantized_choice import FEW, KERNEL, SHARED, ProductKind
from headway.models.fused.quantized_cuts import CHANGES, MOST_ROWS, changed
from headway.models.fused.torch_ways import Dequantize, RowRounding, ScaledMM
from headway.models.linear import Linear
from headway.models.operations import Norm
from headway.models.quantization.forms import QuantizedWeight, form_name


class KernelWay(ProductWay):
    """Our kernel under one rule of cuts."""

    norms = True

    def __init__(self, name: str, kernel: QuantizedProducts, most_rows: int | None) -> None:
        self.name, self.kernel, self.most_rows = name, kernel, most_rows
        self._kernel = kernel

    def takes(self, dtype: torch.dtype, weight: QuantizedWeight) -> Support:
        """Half precision, and groups of at least 16 columns that fill a row."""
        if self._kernel.reads(dtype, weight):
            return YES
        return Support.no(form_name(weight), "a form that the kernel reads with this dtype", dtype)

    def __call__(self, x: Tensor, linear: Linear, out: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """One launch."""
        return self._kernel(x, linear, norm, out=out)


class CudaWay(ProductWay):
    """Kernels of ours in CUDA C++, which NVRTC compiles."""

    norms = True

    def __init__(
        self, name: str, device: torch.device, cut: CudaCutRule, most_rows: int, arranged: Arrangements, hopper: bool = False
    ) -> None:
        """hopper: whether it multiplies by the matrix units of compute capability 9.0."""
        self._hopper = hopper
        self.name, self.most_rows, self._arranged = name, most_rows, arranged
        self.kernel = self._kernel = CudaProducts(device, cut, arranged)
        self._capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)

    def takes(self, dtype: torch.dtype, weight: QuantizedWeight) -> Support:
        """fp8, int8, int4 and mxfp4; clusters of blocks of threads need compute capability 9.0."""
        support = computes(dtype, weight)
        if self._capability != (9, 0) if self._hopper else self._capability < (8, 0):
            need = "8.0 or newer" if not self._hopper else "9.0, whose matrix units it multiplies by"
            support &= Support.no("compute capability", need, "{}.{}".format(*self._capability))
        return support & find_compiler()[1]

    def prepare(self, linear: Linear) -> int:
        """See ProductWay: scales once more, some percent of the weight; `few_rows` and `shared_rows` have one arrangement."""
        return self._arranged.num_bytes(linear.weight)

    def __call__(self, x: Tensor, linear: Linear, out: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """One launch; with `shared_rows` one before it for a norm."""
        return self._kernel(x, linear, norm, out=out)


class QuantizedWays:
    """Products of x in half precision over quantised weights, by ways that are chosen for each kind of product."""

    def __init__(self, device: torch.device, cut: CutRule = quantized_cut) -> None:
        self.kernel = QuantizedProducts(device, cut)
        self.rounding, self.dequantize = RowRounding(device), Dequantize(device)
        arranged = Arrangements()
        changes = {f"{KERNEL} {name}": QuantizedProducts(device, changed(change)) for name, change in CHANGES.items()}
        self.ways: dict[str, ProductWay] = {
            way.name: way
            for way in (
                KernelWay(KERNEL, self.kernel, None),
                *(KernelWay(name, kernel, MOST_ROWS) for name, kernel in changes.items()),
                CudaWay(FEW, device, few_rows_cut, MOST_FEW_ROWS, arranged),
                CudaWay(SHARED, device, shared_rows_cut, MOST_SHARED_ROWS, arranged, hopper=True),
                CudaWay(f"{SHARED} narrow", device, shared_rows_cut_narrow, MOST_SHARED_ROWS, arranged, hopper=True),
                ScaledMM(device, self.rounding),
                self.dequantize,
                Marlin(device),
                Cutlass(device, self.rounding),
            )
        }
        self._kinds: dict[Hashable, ProductKind] = {}
        self._kind_of: dict[tuple[Linear, torch.dtype, bool], ProductKind] = {}

    def kind(self, linear: Linear, dtype: torch.dtype, gated: bool = False) -> ProductKind | None:
        """The kind that a layer's product belongs to; None: its weight is not quantised.

        dtype: of x. gated: the product is of a gate and of what it multiplies, and the kernel computes that too.
        """
        if isinstance(linear.weight, Tensor):
            return None
        place = linear, dtype, gated
        kind = self._kind_of.get(place)
        if kind is None:
            weight, (rows, columns) = linear.weight, linear.weight.shape
            words = [form_name(weight), f"{rows}x{columns}", *(["gated"] if gated else []), DTYPE_NAMES[dtype]]
            name = " ".join(words if linear.bias is None else [*words, "with a bias"])
            kind = self._kinds.get(name)
            if kind is None:
                answers = {way.name: way.takes(dtype, weight) for way in self.ways.values()}
                ways = [self.ways[way] for way, support in answers.items() if support]
                refused = {way: support for way, support in answers.items() if not support}
                kind = self._kinds[name] = ProductKind(name, ways, gated, refused=refused)
            self._kind_of[place] = kind
        return kind

    def way(self, x: Tensor, linear: Linear, gated: bool = False) -> ProductWay | None:
        """What serves products of so many rows; None: the weight is not quantised, or there are no rows."""
        kind = self.kind(linear, x.dtype, gated)
        return None if kind is None or not x.shape[0] else self.ways[kind.way_for(x.shape[0])]
