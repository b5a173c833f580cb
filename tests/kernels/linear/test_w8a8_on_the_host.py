"""The source of w8a8.cu beside float64, run by the host."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

pytest.importorskip("triton")

from headway.kernels.linear.cuda_variant import CudaCut, CudaCutRule, float8_cut, float8_cut_narrow
from headway.kernels.linear.forms import Float8Weight
from headway.kernels.step.operations import Norm
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
        y = x @ weight.dequantized(FP64).t() + (0 if bias is None else bias.double())
        if gated:
            gate, up = y.chunk(2, dim=1)
            y = silu(gate) * up
        return y + add

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
        pytest.param(TENSOR, 100, {"tiles": 2, "warps": 8}, (288, 128), {"order": 2}, marks=pytest.mark.slow),
    ],
)
def test_rounded_rows(scales: str, rows: int, cut: dict[str, int], shape: tuple[int, int], how: dict[str, Any]) -> None:
    check(scales, rows, fixed(**cut), shape, **how)


SELDOM = {(TENSOR, rows) for rows in (1, 9, 33, 64, 100, 130)} | {(ROWS, 1), (BLOCKS, 9), (ROWS, 64)}
"""Cases that differ little from others."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scales", "rows"),
    [
        pytest.param(*case, marks=pytest.mark.soak) if case in SELDOM else case
        for case in product((ROWS, TENSOR, BLOCKS), (1, 9, 16, 33, 64, 100, 130))
    ],
)
def test_every_number_of_rows(scales: str, rows: int) -> None:
    rule = fixed(tiles=2 if rows > 64 else 1, splits=2)
    check(scales, rows, rule, shape=(96, 256), dtype=FP16 if rows == 33 else BF16, bias=True, add=scales == ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("scales", [ROWS, BLOCKS])
@pytest.mark.parametrize(("tiles", "rows"), [(1, 16), (2, 40), (2, 100)])
def test_gate_and_up_behind_a_norm(scales: str, tiles: int, rows: int) -> None:
    check(scales, rows, fixed(tiles=tiles, warps=8), (320, 256), norm=FP32 if tiles == 1 else BF16, gated=True, bias=True)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [float8_cut, float8_cut_narrow])
@pytest.mark.parametrize("rows", [9, pytest.param(65, marks=pytest.mark.soak)])
def test_cuts_that_rules_choose(rows: int, rule: CudaCutRule) -> None:
    check(BLOCKS, rows, rule, shape=(288, 768), add=True)


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, 1, 2])
def test_threads_in_any_order(order: int) -> None:
    check(BLOCKS, 20, fixed(splits=4, stages=3), shape=(96, 1920), order=order)


@pytest.mark.slow
@pytest.mark.parametrize("scales", [ROWS, BLOCKS])
@pytest.mark.parametrize("size", [1e-28, 1e28])
def test_huge_and_tiny_scales(scales: str, size: float) -> None:
    check(scales, 9, fixed(), shape=(64, 256), size=size, x=torch.randn(9, 256).to(BF16) / (1e6 if size > 1 else 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("scales", [ROWS, BLOCKS])
def test_rows_of_zeros_stay_zeros_and_what_is_no_number_shows(scales: str) -> None:
    weight, x = weight_of(scales, (64, 384)), torch.randn(12, 384).to(BF16)
    x[3], x[5, 256:], x[7, 130], x[8, 2] = 0, 0, torch.nan, torch.inf
    y = torch.empty(12, 64, dtype=BF16)
    found, factors = multiply_float8(HostProduct(x, weight, fixed(), y))
    assert torch.equal(y[3], torch.zeros(64, dtype=BF16))
    assert y[7:9].isnan().all()
    rest = [row for row in range(12) if row not in (7, 8)]
    read = found.double() * factors.double().t().repeat_interleave(384 // len(factors), 1)
    expected = read[rest] @ weight.dequantized(FP64).t()
    assert (y[rest].double() - expected).norm() < LIMIT[BF16] * expected.norm()


@pytest.mark.slow
def test_a_block_as_long_as_a_row_and_a_long_row() -> None:
    check(BLOCKS, 9, fixed(), shape=(160, 128))
    check(ROWS, 9, fixed(stages=4), shape=(64, 10240), norm=BF16)
