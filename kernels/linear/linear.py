"""A linear layer that keeps its weight in the form that the device multiplies fastest, and torch's packed products on a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from headway.core.contract.weights import Int4Weight, packed, unpacked
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.forms import QuantizedWeight, device_of, num_bytes
from headway.kernels.linear.gguf_weight import GgufWeight
from headway.kernels.runtime.native.library import Panels, coded_panels, dense_panels, functions, multiply

Product = Callable[[Tensor], Tensor]
"""From x [rows, K] to [rows, N]."""


def packed_product(weight: QuantizedWeight, dtype: torch.dtype) -> tuple[Tensor, Product] | None:
    """A product of x in `dtype` by torch's operators over packed weights, and what it reads; None where torch has none.

    The operator's name is private, so it is tried once with a small product.
    """
    return _int4(weight, dtype) if isinstance(weight, Int4Weight) and packs(weight, dtype) else None


def packs(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether torch has a product of x in `dtype` over a weight in this form that is faster than one over the expanded weight.

    It has for whole numbers of 4 bits in groups of 32, 64, 128 or 256, a multiple of 16 rows, and x in bfloat16: 2 to 3 times
    as fast at one row, as fast at 16. In float32 it is 5 times slower than over the expanded weight, and so is that over whole
    numbers of 8 bits, which in bfloat16 is as fast at one row and 2 to 3 times slower at 16 (docs/notes/cpu.md).
    """
    whole = isinstance(weight, Int4Weight) and weight.group_size in _GROUPS and weight.shape[0] % 16 == 0
    return whole and dtype == torch.bfloat16 and _works()


_GROUPS = (32, 64, 128, 256)
"""Columns under one scale that torch's product of 4 bits takes."""


def _int4(weight: Int4Weight, dtype: torch.dtype) -> tuple[Tensor, Product]:
    """torch's value is (code - 8) * scale + zero."""
    group, order = weight.group_size, weight.order
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpacked(weight.packed, group).int(), 1)
    scales = weight.scales.float()
    zeros = torch.zeros_like(scales) if weight.zeros is None else (8 - weight.zeros.float()) * scales
    both = torch.stack([scales.t(), zeros.t()], dim=2).to(dtype).contiguous()

    def product(x: Tensor) -> Tensor:
        x = x if order is None else x.index_select(1, order)
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, group, both)
        return y

    return codes, product


@cache
def _works() -> bool:
    generator = torch.Generator().manual_seed(0)
    codes, x = torch.randint(0, 16, (32, 64), generator=generator), torch.randn(3, 64, generator=generator).bfloat16()
    scales, zeros = torch.rand(32, 2, generator=generator), codes[:, :2].to(torch.uint8)
    weight = Int4Weight(packed(codes.to(torch.uint8), 32), scales, zeros, 32)
    try:
        product = _int4(weight, torch.bfloat16)[1](x)
    except (AttributeError, RuntimeError):
        return False
    expected = x.double() @ weight.dequantized(torch.float64).t()
    return bool((product - expected).norm() < 8 * torch.finfo(torch.bfloat16).eps * expected.norm())


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


class Linear:
    """y = x W^T + b over weights that are only read.

    On a CPU a weight of more than SMALL elements is packed once for our C, if there is a compiler. Without
    one it is packed once for oneDNN (see `can_pack`), whose product is 2 to 5 times faster than torch.mm at the 1 to 64 rows of
    decode and no slower at a prompt's (docs/benchmarks.md); a smaller one is multiplied sooner than oneDNN has found its kernel.
    The two operators are those that torch.compile emits when it freezes
    weights; their names are private, so they are probed with a small product, and torch.mm serves where they are missing or
    wrong.

    A quantised weight stays as it is on a GPU, whose operations multiply it (kernels/linear); called by itself, the layer expands
    it each time. On a CPU our C multiplies the blocks of .gguf files, and torch's products over packed weights serve; where there
    are none the weight is expanded once.
    """

    def __init__(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None = None,
        summed: bool = False,
        dtype: torch.dtype | None = None,
        kept: bool = False,
        origin: ProductOrigin | None = None,
    ) -> None:
        """weight: [out_features, in_features]; bias: [out_features].

        summed: the weight is some columns of the whole one, and what all ranks get is to be summed: by `RankedOperations`.
        dtype: of x, for a quantised weight; None: the bias's, else float32 on a CPU and bfloat16 on a GPU.
        kept: a quantised weight stays as it is on a CPU too, for operations that multiply it themselves. origin: what the weight
        was made of; None: nobody asks.
        """
        self.summed = summed
        self.origin = origin
        out_features, in_features = weight.shape
        self.out_features = out_features
        self.in_features = in_features
        self.bias = bias
        self.expanded_bytes = 0
        """Bytes that a quantised weight takes because it was expanded; 0: it was not."""
        self._product: Product | None = None
        self.panels: Panels | None = None
        """The weight as our C reads it on a CPU; None: torch multiplies."""
        self.held_bytes = weight.nbytes if isinstance(weight, Tensor) else num_bytes(weight)
        """Bytes that a product reads: of a quantised weight with its scales, and of what it became where it was expanded."""
        if isinstance(weight, Tensor):
            self.dtype = weight.dtype
            self.device = weight.device
        else:
            self.device = device_of(weight)
            usual = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            self.dtype = dtype or (usual if bias is None else bias.dtype)
            weight = self._on_device(weight, kept or self.device.type != "cpu")
        self.reads_quantized = self._product is not None or self.panels is not None
        """Whether products read a quantised weight as it is."""
        if (
            self._product is None
            and self.panels is None
            and isinstance(weight, Tensor)
            and weight.device.type == "cpu"
            and weight.numel() > SMALL
        ):
            self.panels = dense_panels(weight, bias)
        self._packed = False
        if self.panels is not None:
            weight = self.panels.data
            self.held_bytes = self.panels.nbytes
        elif self._product is None and isinstance(weight, Tensor) and _to_pack(weight):
            self._packed = True
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self.weight = weight
        """As it was given, or as the product reads it."""
        dense = isinstance(weight, Tensor) and not self._packed and self._product is None and self.panels is None
        self._transposed = weight.t() if dense and isinstance(weight, Tensor) else None

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
        self._transposed = self.weight.t()
        return Linear(whole, None if bias is None else torch.cat([bias, bias.new_zeros(rows)]))

    def _on_device(self, weight: QuantizedWeight, kept: bool) -> Tensor | QuantizedWeight:
        """What a quantised weight becomes."""
        if kept:
            self._product = lambda x: torch.mm(x, weight.dequantized(x.dtype).t())
            return weight
        if isinstance(weight, GgufWeight):
            self.panels = coded_panels(weight.coded(), self.bias)
            if self.panels is not None:
                return self.panels.data
        packed = packed_product(weight, self.dtype)
        if packed is None:
            expanded = weight.dequantized(self.dtype)
            self.expanded_bytes = self.held_bytes = expanded.nbytes
            return expanded
        read, product = packed
        self._product = product
        return read

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [rows, in_features] to [rows, out_features]: `out`, where it is given."""
        if self.panels is not None:
            return multiply(self.panels, x, out)
        if self._product is not None:
            y = self._product(x)
            y = y if self.bias is None else y.add_(self.bias)
            return y if out is None else out.copy_(y)
        if self._transposed is None:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return packed if out is None else out.copy_(packed)
        # What F.linear comes down to; it takes no `out` itself.
        if self.bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self.bias, x, self._transposed, out=out)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + y in one product where there is no bias; residual: [rows, out_features], overwritten or not."""
        if self._transposed is None or self.bias is not None:
            return residual + self(x)
        return residual.addmm_(x, self._transposed)


def _to_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.numel() > SMALL and can_pack(weight.dtype)


SMALL = 2**17
"""Elements of a weight up to which torch.mm was no slower when measured, at 1 to 256 rows."""
_PACK_ROWS = 16
"""Rows the packing is tuned for: a decode batch. Other row counts stay right, and were no slower when measured."""


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies packed weights of this type fast, and right: float32, and the CPU's own bfloat16."""
    return (dtype == torch.float32 or (dtype == torch.bfloat16 and _has_bfloat16())) and _packs(dtype)


def _has_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16: AVX-512's, or AMX's, whose CPUs have both."""
    has: Callable[[], bool] = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return has()


def _packs(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 40, generator=generator).to(dtype) for rows in (24, 3))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(product.float(), linear(x.float(), weight.float()), atol=1e-4 if dtype == torch.float32 else 0.1)


def reads_as_it_is(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a layer's product reads a quantised weight as it is: by our kernels on a GPU, by torch's packed ones on a CPU.

    dtype: of x.
    """
    if isinstance(weight, GgufWeight):
        return device.type == "cpu" and functions() is not None
    if device.type == "cpu":
        return packs(weight, dtype)
    return importlib.util.find_spec("triton") is not None
