"""GEMM kernels of linear layers on a CPU: our C library, torch's int4 GEMM, oneDNN, and torch.mm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from headway.core.contract.linear import LinearCapabilities, LinearSpec
from headway.core.contract.support import YES, Support
from headway.core.contract.weights import FORMATS, Int4Weight, Weight, WeightFormat, packed, unpacked
from headway.kernels.linear.choice import EXPANDED, INT4PACK, NATIVE, ONEDNN, TORCH
from headway.kernels.linear.forms import GgufWeight
from headway.kernels.linear.fused_kernel import FusedKernel
from headway.kernels.linear.linear import Linear
from headway.kernels.runtime.native.library import (
    TYPES,
    PackedWeight,
    functions,
    multiply,
    native_support,
    pack_dense,
    pack_quantized,
)

SMALL = 2**17
"""Maximum number of weight elements for which torch.mm is used: in measurements with 1 to 256 rows, it was then no slower than a
packed weight."""
_PACK_ROWS = 16
"""Number of rows, of a decode batch, for which oneDNN packs a weight. Other numbers of rows work too, and were no slower when
measured."""
_GROUPS = (32, 64, 128, 256)
"""Group sizes that torch's int4 GEMM supports, in columns."""


def _large(spec: LinearSpec) -> Support:
    size = spec.in_features * spec.out_features
    return YES if size > SMALL else Support.no("weight", f"more than {SMALL} elements", size)


class Native(FusedKernel):
    """GEMM of our C library, which also fuses operations before and after it (`NativeOperations`)."""

    name = NATIVE
    capabilities = LinearCapabilities(frozenset({"plain"}), tuple(TYPES), ("cpu",), fused=frozenset({"bias"}))

    @classmethod
    def available(cls) -> Support:
        """Return whether the C library is available."""
        return YES if functions() is not None else Support.no("our C", "a C compiler", native_support().brief)

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the weight is dense and large, or consists of .gguf blocks."""
        if spec.weight.name.startswith("gguf"):
            return cls.capabilities.check(replace(spec, weight=WeightFormat("plain")))
        support = cls.capabilities.check(spec) & _large(spec)
        if spec.dtype == torch.bfloat16 and spec.in_features % 2:
            support &= Support.no("in_features", "an even number in bfloat16", spec.in_features)
        return support

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> PackedWeight:
        """Return the weight in packed blocks of 16 rows, with the bias."""
        blocks: Any = weight
        found = pack_quantized(blocks.coded(), bias) if isinstance(blocks, GgufWeight) else pack_dense(blocks, bias)
        assert found is not None
        return found

    def compute(self, x: Tensor, weight: PackedWeight, out: Tensor | None = None) -> Tensor:
        """Multiply x by the weight and add the bias."""
        return multiply(weight, x, out)


class Int4Pack(FusedKernel):
    """torch's GEMM of bfloat16 x over int4 weights in groups of 32, 64, 128 or 256 columns.

    Compared with a GEMM over the dequantized weight, it is two to three times as fast at one row, and equally fast at 16 rows. In
    float32 it is 5 times slower. torch's int8 GEMM is also 5 times slower in float32. In bfloat16 the int8 GEMM is equally fast
    at one row and 2 to 3 times slower at 16 rows (docs/notes/cpu.md).
    """

    name = INT4PACK
    capabilities = LinearCapabilities(
        frozenset({"int4"}), (torch.bfloat16,), ("cpu",), group_sizes=_GROUPS, order=True, fused=frozenset({"bias"})
    )

    @classmethod
    def available(cls) -> Support:
        """Return whether torch has the private operator, and the operator computes a small GEMM correctly."""
        return YES if _works() else Support.no("torch", "_weight_int4pack_mm_for_cpu", torch.__version__)

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether torch can pack the weight."""
        support = cls.capabilities.check(spec)
        if spec.out_features % 16:
            support &= Support.no("out_features", "a multiple of 16", spec.out_features)
        return support

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> tuple[Tensor, Tensor, int, Tensor | None, Tensor | None]:
        """Return quantized values, scales with zeros, group size, column order and bias. torch computes (value - 8) * scale +
        zero.
        """
        assert isinstance(weight, Int4Weight)
        group = weight.group_size
        codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpacked(weight.packed, group).int(), 1)
        scales = weight.scales.float()
        zeros = torch.zeros_like(scales) if weight.zeros is None else (8 - weight.zeros.float()) * scales
        both = torch.stack([scales.t(), zeros.t()], dim=2).to(self.spec.dtype).contiguous()
        return codes, both, group, weight.order, bias

    def compute(
        self, x: Tensor, weight: tuple[Tensor, Tensor, int, Tensor | None, Tensor | None], out: Tensor | None = None
    ) -> Tensor:
        """Multiply x by the weight and add the bias."""
        codes, scales, group, order, bias = weight
        x = x if order is None else x.index_select(1, order)
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, group, scales)
        y = y if bias is None else y.add_(bias)
        return y if out is None else out.copy_(y)


@cache
def _works() -> bool:
    generator = torch.Generator().manual_seed(0)
    codes, x = torch.randint(0, 16, (32, 64), generator=generator), torch.randn(3, 64, generator=generator).bfloat16()
    scales, zeros = torch.rand(32, 2, generator=generator), codes[:, :2].to(torch.uint8)
    weight = Int4Weight(packed(codes.to(torch.uint8), 32), scales, zeros, 32)
    kernel = Int4Pack(LinearSpec(64, 32, torch.bfloat16, x.device, WeightFormat.of(weight)))
    try:
        y = kernel.compute(x, kernel.prepare(weight))
    except (AttributeError, RuntimeError):
        return False
    expected = x.double() @ weight.dequantized(torch.float64).t()
    return bool((y - expected).norm() < 8 * torch.finfo(torch.bfloat16).eps * expected.norm())


class OneDnn(FusedKernel):
    """oneDNN GEMM over a weight that is packed once. It uses the operators that torch.compile uses for frozen weights."""

    name = ONEDNN
    capabilities = LinearCapabilities(frozenset({"plain"}), (torch.float32, torch.bfloat16), ("cpu",), fused=frozenset({"bias"}))

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the weight is large and the CPU multiplies its element type fast."""
        support = cls.capabilities.check(spec) & _large(spec)
        if support and not can_pack(spec.dtype):
            support = Support.no("dtype", "float32, or bfloat16 on a CPU with instructions for it", spec.dtype)
        return support

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the packed weight and the bias."""
        assert isinstance(weight, Tensor)
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS), bias

    def compute(self, x: Tensor, weight: tuple[Tensor, Tensor | None], out: Tensor | None = None) -> Tensor:
        """Multiply x by the weight and add the bias."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight[0], weight[1], "none", [], "")
        return y if out is None else out.copy_(y)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies packed weights of a type fast and correctly. This is true of float32, and of bfloat16 on
    CPUs that support bfloat16."""
    return (dtype == torch.float32 or (dtype == torch.bfloat16 and _has_bfloat16())) and _packs(dtype)


def _has_bfloat16() -> bool:
    """Return whether the CPU has the bfloat16 instructions of AVX-512. CPUs with AMX also have them."""
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


class TorchMM(FusedKernel):
    """torch.mm over a dense weight: any element type, any device."""

    name = TORCH
    capabilities = LinearCapabilities(
        frozenset({"plain"}), devices=("cpu", "cuda", "meta"), fused=frozenset({"bias", "residual"})
    )

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the weight is dense."""
        return YES if spec.weight.name == "plain" else Support.no("weight format", "plain", spec.weight.name)

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the transposed weight and the bias."""
        assert isinstance(weight, Tensor)
        return weight.t(), bias

    def compute(
        self, x: Tensor, weight: tuple[Tensor, Tensor | None], add_to: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Multiply x by the weight and add the bias. If `add_to` is given, add the result to it in place."""
        transposed, bias = weight
        if add_to is not None:
            if bias is None:
                return add_to.addmm_(x, transposed)
            return add_to.add_(torch.addmm(bias, x, transposed))
        return torch.mm(x, transposed, out=out) if bias is None else torch.addmm(bias, x, transposed, out=out)


class Expanded(FusedKernel):
    """Kernel that dequantizes a weight once, and then multiplies it like a dense weight."""

    name = EXPANDED
    capabilities = LinearCapabilities(frozenset(FORMATS) - {"plain"}, devices=("cpu",), order=True, fused=frozenset({"bias"}))

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the weight is quantized and on a CPU."""
        if spec.device.type != "cpu":
            return Support.no("device", "cpu", spec.device.type)
        return YES if spec.weight.name != "plain" else Support.no("weight format", "a quantised weight", "plain")

    def prepare(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return the layer over the dequantized weight."""
        stored: Any = weight
        return Linear(stored.dequantized(self.spec.dtype), bias)

    def compute(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        """Multiply x by the weight and add the bias."""
        return weight(x, out)
