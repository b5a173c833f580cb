"""The ways of multiplying over a quantised weight on a GPU. All run inside CUDA graphs: the number of rows alone decides."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from headway.core.contract.spec import DTYPE_NAMES
from headway.core.contract.support import YES, Support
from headway.kernels.linear.cuda_products import Arrangements, CudaProducts, Float8Products, computes
from headway.kernels.linear.cuda_variant import (
    FLOAT8_COLUMNS,
    MOST_FEW_ROWS,
    MOST_FLOAT8_ROWS,
    MOST_SHARED_ROWS,
    PART_ROWS,
    CudaCutRule,
    few_rows_cut,
    float8_cut,
    float8_cut_narrow,
    shared_rows_cut,
    shared_rows_cut_narrow,
)
from headway.kernels.linear.forms import QuantizedWeight, form_name
from headway.kernels.linear.linear import Linear
from headway.kernels.linear.marlin import Cutlass, Marlin
from headway.kernels.linear.product_way import Dequantize, FusedProducts, ProductWay, RowRounding, ScaledMM, float8_scales
from headway.kernels.linear.quantized import CutRule, QuantizedCut, QuantizedProducts, quantized_cut
from headway.kernels.linear.quantized_choice import FEW, FLOAT8, KERNEL, SHARED, ProductKind
from headway.kernels.runtime.nvrtc.compiler import find_compiler
from headway.kernels.runtime.probe import HALF_DTYPES, capability
from headway.kernels.step.operations import Norm

Change = Callable[[QuantizedCut], QuantizedCut]
MOST_ROWS: Final = 64
"""Rows up to which changes are measured: beyond, kernels multiply more than they read."""
CHANGES: Final[Mapping[str, Change]] = {
    "n64": lambda cut: replace(cut, block_n=64),
    "n128": lambda cut: replace(cut, block_n=128),
    "splits x2": lambda cut: replace(cut, splits=2 * cut.splits),
}


def changed(change: Change) -> CutRule:
    """Return the rule with a change after it."""
    return lambda *product: change(quantized_cut(*product))


class FusedWay(ProductWay):
    """A kernel of ours that norms x, too."""

    norms = True

    def __init__(self, name: str, kernel: FusedProducts, most_rows: int | None) -> None:
        self.name = name
        self.kernel = self._kernel = kernel
        self.most_rows = most_rows

    def __call__(self, x: Tensor, linear: Linear, out: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """One launch; of kernels whose thread blocks share a sum, one before it for x."""
        return self._kernel(x, linear, norm, out=out)


class KernelWay(FusedWay):
    """Our kernel in Triton under one rule of cuts."""

    def __init__(self, name: str, kernel: QuantizedProducts, most_rows: int | None) -> None:
        super().__init__(name, kernel, most_rows)
        self._reads = kernel.reads

    def takes(self, dtype: torch.dtype, weight: QuantizedWeight) -> Support:
        """Half precision, and groups of at least 16 columns that fill a row."""
        if self._reads(dtype, weight):
            return YES
        return Support.no(form_name(weight), "a form that the kernel reads with this dtype", dtype)


class CudaWay(FusedWay):
    """Kernels of ours in CUDA C++, which NVRTC compiles."""

    def __init__(
        self, name: str, device: torch.device, cut: CudaCutRule, most_rows: int, arranged: Arrangements, hopper: bool = False
    ) -> None:
        """hopper: whether it multiplies by the matrix units of compute capability 9.0."""
        super().__init__(name, CudaProducts(device, cut, arranged), most_rows)
        self._hopper = hopper
        self._arranged = arranged
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


class Float8Way(FusedWay):
    """A kernel of ours in CUDA C++ that multiplies rows of x, rounded to floats of 8 bits, by weights of such floats."""

    rounds = True

    def __init__(self, name: str, device: torch.device, cut: CudaCutRule, arranged: Arrangements) -> None:
        super().__init__(name, Float8Products(device, cut, arranged), MOST_FLOAT8_ROWS)
        self._device = device
        self._arranged = arranged

    def takes(self, dtype: torch.dtype, weight: QuantizedWeight) -> Support:
        """Floats of 8 bits, by rows or by blocks of 128 x 128, where a GPU multiplies them so."""
        support, (rows, columns) = float8_scales(weight, whole=False), weight.shape
        if dtype not in HALF_DTYPES:
            support &= Support.no("dtype", "bfloat16 or float16", dtype)
        if rows % (2 * PART_ROWS) or columns % FLOAT8_COLUMNS:
            support &= Support.no("shape", f"multiples of {2 * PART_ROWS} x {FLOAT8_COLUMNS}", f"{rows} x {columns}")
        found = capability(self._device)
        if found != (9, 0):
            got = "none" if found is None else "{}.{}".format(*found)
            support &= Support.no("compute capability", "9.0, whose matrix units it multiplies by", got)
        return support & find_compiler()[1]

    def prepare(self, linear: Linear) -> int:
        """See ProductWay: scales of rows once more."""
        return self._arranged.num_bytes(linear.weight)


class QuantizedWays:
    """Products of x in half precision over quantised weights, by ways that are chosen for each kind of product."""

    def __init__(self, device: torch.device) -> None:
        self.kernel = QuantizedProducts(device)
        self.rounding = RowRounding(device)
        self.dequantize = Dequantize(device)
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
                Float8Way(FLOAT8, device, float8_cut, arranged),
                Float8Way(f"{FLOAT8} narrow", device, float8_cut_narrow, arranged),
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
