"""The sources of few_rows.cu and shared_rows.cu beside float64, run by the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm, silu

pytest.importorskip("triton")

from headway.kernels.linear.cuda_variant import CudaCut, CudaCutRule, few_rows_cut, shared_rows_cut, shared_rows_cut_narrow
from headway.kernels.step.operations import Norm
from host_kernels import HostProduct, HostRotation, multiply
from quantized_weights import FORMS, int4

BF16, FP16 = torch.bfloat16, torch.float16
WAYS = {**FORMS, "int4 of a row": lambda weight: int4(weight, weight.shape[1])}


def fixed(**cut: int) -> CudaCutRule:
    """A cut that no rule chooses for work so small."""
    return lambda *_: CudaCut(**{"tiles": 1, "warps": 4, "stages": 2, "splits": 1, **cut})


def check(
    form: str,
    rows: int,
    rule: CudaCutRule,
    shape: tuple[int, int] = (96, 512),
    dtype: torch.dtype = BF16,
    norm: bool = False,
    gated: bool = False,
    **how: Any,
) -> None:
    """Multiply fresh random rows."""
    seed = torch.seed()
    weight, x = WAYS[form](torch.randn(shape) * 0.1), torch.randn(rows, shape[1]).to(dtype)
    before = Norm(torch.randn(shape[1]).to(dtype), 1e-5) if norm else None
    bias = torch.randn(shape[0]).to(dtype) if how.pop("bias", False) else None
    y = torch.randn(rows, shape[0] // (2 if gated else 1)).to(dtype)
    wide = x.double() if before is None else rms_norm(x.double(), x.shape[1:], before.weight.double(), before.eps)
    expected = wide @ weight.dequantized(torch.float64).t() + (0 if bias is None else bias.double())
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = silu(gate) * up
    if how.get("add"):
        expected = expected + y.double()
    multiply(HostProduct(x, weight, rule, y, before, gated=gated, activation="silu" if gated else None, bias=bias, **how))
    assert (y.double() - expected).norm() < (6e-3 if dtype == BF16 else 1.5e-3) * expected.norm(), f"seed {seed}"


@pytest.mark.parametrize(("rows", "cut", "order"), [(5, {"splits": 2}, 0), (130, {"tiles": 2}, 1)])
def test_four_bits_with_zeros(rows: int, cut: dict[str, int], order: int) -> None:
    check("int4 of 64 with zeros", rows, fixed(**cut), shape=(96, 1024), add=True, bias=True, order=order)


@pytest.mark.parametrize(("rows", "warps", "order"), [(1, 4, 2), (6, 4, 0), (13, 2, 1)])
def test_x_that_is_kept_for_all_tiles(rows: int, warps: int, order: int) -> None:
    cut = fixed(tiles=2, warps=warps, stages=3, splits=0, kept=True)
    check("int4 of 64 with zeros", rows, cut, shape=(224, 1024), norm=True, add=True, order=order)
    check("fp8 rows", rows, cut, shape=(448, 832), gated=True, order=order)


@pytest.mark.parametrize(("rows", "order"), [(1, 0), (7, 2), (16, 1)])
@pytest.mark.parametrize(("heads", "normed"), [((3, 1, 64), True), ((2, 1, 80), False), ((4, 2, 32), True)])
def test_heads_are_turned(heads: tuple[int, int, int], normed: bool, rows: int, order: int) -> None:
    """QK-norm and RoPE by the block that completes a head; values stay as they are. Twice, since counters must be zero again."""
    num_heads, num_kv_heads, head_dim = heads
    seed, turned = torch.seed(), num_heads + num_kv_heads
    weight, x = (
        WAYS["int4 of 64 with zeros"](torch.randn((turned + num_kv_heads) * head_dim, 512) * 0.1),
        torch.randn(rows, 512).to(BF16),
    )
    angles = torch.rand(rows, head_dim // 2) * 6.28
    norms = [torch.rand(head_dim) + 0.5 if normed else None for _ in range(2)]
    rotation = HostRotation(heads, angles.cos(), angles.sin(), *norms, 1e-5, torch.zeros(turned, dtype=torch.int32))
    y = torch.full((rows, weight.shape[0]), torch.nan, dtype=BF16)
    expected = (x.double() @ weight.dequantized(torch.float64).t()).view(rows, -1, head_dim)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    for head in range(turned):
        norm = norms[0] if head < num_heads else norms[1]
        if norm is not None:
            expected[:, head] = rms_norm(expected[:, head], (head_dim,), norm.double(), 1e-5)
    low, high = expected[:, :turned].chunk(2, dim=-1)
    whole = torch.cat([torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1), expected[:, turned:]], dim=1).flatten(
        1
    )
    for _ in range(2):
        multiply(HostProduct(x, weight, few_rows_cut, y.fill_(torch.nan), order=order, rotation=rotation))
        assert (y.double() - whole).norm() < 1e-2 * whole.norm(), f"seed {seed}"
        assert not rotation.arrivals.any()


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "order"), [(1, 0), (6, 1), (13, 2)])
@pytest.mark.parametrize("form", [form for form in WAYS if form != "int4 of 32 in another order"])
def test_every_form_by_few_rows(form: str, rows: int, order: int) -> None:
    check(form, rows, few_rows_cut, shape=(160, 512), bias=True, norm=True, add=True, order=order)
    check(form, rows, few_rows_cut, shape=(256, 1024), gated=True, order=order)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 128])
@pytest.mark.parametrize("form", [form for form in WAYS if form != "int4 of 32 in another order"])
def test_every_form(form: str, rows: int) -> None:
    tiles = 2 if rows > 64 else 1
    check(form, rows, fixed(tiles=tiles, splits=2), shape=(160, 512), bias=True)
    check(form, rows, fixed(tiles=tiles, warps=8), shape=(256, 256), gated=True, norm=True)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [shared_rows_cut, shared_rows_cut_narrow])
@pytest.mark.parametrize("rows", [33, 65, 129, 300])
def test_cuts_that_rules_choose(rows: int, rule: CudaCutRule) -> None:
    check("int4 of 128", rows, rule, shape=(288, 1024), add=True)
    check("fp8 rows", rows, rule, shape=(192, 512), dtype=FP16, norm=True, gated=True)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2])
def test_threads_in_any_order(order: int) -> None:
    for tiles in (1, 2):
        check("mxfp4", 100, fixed(tiles=tiles, warps=8, splits=4, stages=3), shape=(96, 2048), order=order)
