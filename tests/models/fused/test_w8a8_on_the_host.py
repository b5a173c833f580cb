"""The source of w8a8.cu beside float64, run by the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

pytest.importorskip("triton")

from headway.models.fused.cuda_cuts import CudaCut, CudaCutRule
from headway.models.operations import Norm
from headway.models.quantization.forms import Float8Weight
from host_kernels import HostProduct, multiply_float8
from quantized_weights import float8

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LIMIT = {BF16: 2.5e-3, FP16: 3.5e-4}
"""Of an answer's distance from float64's over the same rounded numbers, relative to the norm: y's own rounding."""
COARSE = 6e-2
"""Likewise over x as it was."""
ROWS, TENSOR, BLOCKS = "rows", "tensor", "blocks"


def fixed(**cut: int) -> CudaCutRule:
    """A cut that no rule chooses for work so small."""
    return lambda *_: CudaCut(**{"tiles": 1, "warps": 4, "stages": 2, "splits": 1, **cut})


def weight_of(scales: str, shape: tuple[int, int], size: float = 0.1) -> Float8Weight:
    block = {ROWS: None, TENSOR: shape, BLOCKS: (128, 128)}[scales]
    return float8(torch.randn(shape) * torch.rand(shape[0], 1) * size, block)


def rounded(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x in floats of 8 bits, and its scales, [groups, rows]: the largest of a row, or of each 128 columns of it, is 448."""
    groups = x.float().unflatten(1, (-1, group))
    scales = (groups.abs().amax(2) / 448).clamp(min=1e-12)
    return (groups / scales[:, :, None]).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn), scales.t()


def check(
    scales: str,
    rows: int,
    rule: CudaCutRule,
    shape: tuple[int, int] = (96, 512),
    dtype: torch.dtype = BF16,
    norm: torch.dtype | None = None,
    gated: bool = False,
    size: float = 0.1,
    x: Tensor | None = None,
    **how: Any,
) -> None:
    """Multiply fresh random rows."""
    seed = torch.seed()
    weight, x = weight_of(scales, shape, size), torch.randn(rows, shape[1]).to(dtype) if x is None else x
    before = Norm(torch.randn(shape[1]).to(norm), 1e-5) if norm else None
    bias = (torch.randn(shape[0]) * size).to(dtype) if how.pop("bias", False) else None
    y = (torch.randn(rows, shape[0] // (2 if gated else 1)) * size).to(dtype)

    def expected(x: Tensor, add: Tensor) -> Tensor:
        product = x @ weight.dequantized(FP64).t() + (0 if bias is None else bias.double())
        if gated:
            gate, up = product.chunk(2, dim=1)
            product = silu(gate) * up
        return product + add

    add = y.double() if how.get("add") else torch.zeros(y.shape, dtype=FP64)
    activation = "silu" if gated else None
    found, factors = multiply_float8(HostProduct(x, weight, rule, y, before, bias, gated, activation, **how))
    group = shape[1] // len(factors)
    wide = x.double() if before is None else rms_norm(x.double(), x.shape[1:], before.weight.double(), before.eps)
    read = found.double() * factors.double().t().repeat_interleave(group, 1)
    if before is None:
        assert torch.equal(found.view(torch.uint8), rounded(x, group)[0].view(torch.uint8)), f"seed {seed}"
        assert torch.equal(factors, rounded(x, group)[1]), f"seed {seed}"
    steps = factors.double().t().repeat_interleave(group, 1) * 2**-9
    assert ((read - wide).abs() <= 1.001 * torch.maximum(wide.abs() / 16, steps / 2) + steps * 1e-3).all(), f"seed {seed}"
    exact, whole = expected(read, add), expected(wide, add)
    assert (y.double() - exact).norm() < LIMIT[dtype] * exact.norm(), f"seed {seed}"
    assert (y.double() - whole).norm() < COARSE * whole.norm(), f"seed {seed}"


@pytest.mark.parametrize(
    ("scales", "rows", "cut", "shape", "how"),
    [
        (ROWS, 9, {"splits": 2}, (96, 512), {"add": True, "bias": True}),
        (BLOCKS, 33, {"warps": 8, "stages": 3}, (192, 384), {"gated": True, "norm": BF16, "order": 1}),
        (TENSOR, 100, {"tiles": 2, "warps": 8}, (288, 128), {"order": 2}),
    ],
)
def test_rounded_rows(scales: str, rows: int, cut: dict[str, int], shape: tuple[int, int], how: dict[str, Any]) -> None:
    check(scales, rows, fixed(**cut), shape, **how)
