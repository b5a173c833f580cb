"""few_rows.cu, shared_rows.cu and w8a8.cu beside float64, run by the host: the sources, and what launches hand to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from headway.core.contract.linear import LinearSpec
from headway.core.contract.weights import Float8Weight, WeightFormat
from headway.kernels.linear.cuda_products import FewRowsKernel, SharedRowsKernel, W8A8Kernel, arranged
from headway.kernels.linear.cuda_variant import (
    CudaTiling,
    CudaTilingRule,
    few_rows_tiling,
    float8_tiling,
    float8_tiling_narrow,
    shared_rows_tiling,
    shared_rows_tiling_narrow,
)
from headway.kernels.linear.forms import Operand
from headway.kernels.step.operations import Norm
from host_kernels import HostProduct, HostRotation, multiply, multiply_float8, on_the_host
from quantized_weights import FORMS, float8, int4

pytest.importorskip("triton")

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LIMIT = {BF16: 2.5e-3, FP16: 3.5e-4}
"""Of an answer's distance from float64's over the same rounded numbers, relative to the norm: y's own rounding."""
COARSE = 6e-2
"""Likewise over x as it was."""
ROWS, TENSOR, BLOCKS = "rows", "tensor", "blocks"


def fixed(**tiling: int) -> CudaTilingRule:
    """A cut that no rule chooses for work so small."""
    return lambda *_: CudaTiling(**{"tiles": 1, "warps": 4, "stages": 2, "splits": 1, **tiling})


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
    rule: CudaTilingRule,
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
    ("scales", "rows", "tiling", "shape", "how"),
    [
        (ROWS, 9, {"splits": 2}, (96, 512), {"add": True, "bias": True}),
        (BLOCKS, 33, {"warps": 8, "stages": 3}, (192, 384), {"gated": True, "norm": BF16, "order": 1}),
        pytest.param(TENSOR, 100, {"tiles": 2, "warps": 8}, (288, 128), {"order": 2}, marks=pytest.mark.slow),
    ],
)
def test_rounded_rows(scales: str, rows: int, tiling: dict[str, int], shape: tuple[int, int], how: dict[str, Any]) -> None:
    check(scales, rows, fixed(**tiling), shape, **how)


@pytest.mark.slow
@pytest.mark.sampled(4, then="soak")
@pytest.mark.parametrize("rows", [1, 9, 16, 33, 64, 100, 130])
@pytest.mark.parametrize("scales", [ROWS, TENSOR, BLOCKS])
def test_every_number_of_rows(scales: str, rows: int) -> None:
    rule = fixed(tiles=2 if rows > 64 else 1, splits=2)
    check(scales, rows, rule, shape=(96, 256), dtype=FP16 if rows == 33 else BF16, bias=True, add=scales == ROWS)


@pytest.mark.slow
@pytest.mark.sampled(3, then="soak")
@pytest.mark.parametrize("scales", [ROWS, BLOCKS])
@pytest.mark.parametrize(("tiles", "rows"), [(1, 16), (2, 40), (2, 100)])
def test_gate_and_up_behind_a_norm(scales: str, tiles: int, rows: int) -> None:
    check(scales, rows, fixed(tiles=tiles, warps=8), (320, 256), norm=FP32 if tiles == 1 else BF16, gated=True, bias=True)


@pytest.mark.slow
@pytest.mark.sampled(3, then="soak")
@pytest.mark.parametrize("rule", [float8_tiling, float8_tiling_narrow])
@pytest.mark.parametrize("rows", [9, 65])
def test_cuts_that_rules_choose(rows: int, rule: CudaTilingRule) -> None:
    check(BLOCKS, rows, rule, shape=(288, 768), add=True)


@pytest.mark.slow
@pytest.mark.sampled(3, 1, then="soak")
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


WAYS = {**FORMS, "int4 of a row": lambda weight: int4(weight, weight.shape[1])}


def check_product(
    form: str,
    rows: int,
    rule: CudaTilingRule,
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rows", "tiling", "order"), [(5, {"splits": 2}, 0), (130, {"tiles": 2}, 1)])
def test_four_bits_with_zeros(rows: int, tiling: dict[str, int], order: int) -> None:
    check_product("int4 of 64 with zeros", rows, fixed(**tiling), shape=(96, 1024), add=True, bias=True, order=order)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize(("rows", "warps", "order"), [(1, 4, 2), (6, 4, 0), (13, 2, 1)])
def test_x_that_is_kept_for_all_tiles(rows: int, warps: int, order: int) -> None:
    tiling = fixed(tiles=2, warps=warps, stages=3, splits=0, kept=True)
    check_product("int4 of 64 with zeros", rows, tiling, shape=(224, 1024), norm=True, add=True, order=order)
    check_product("fp8 rows", rows, tiling, shape=(448, 832), gated=True, order=order)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("heads", "normed", "rows", "order"), [((2, 1, 80), False, 7, 2), ((3, 1, 64), True, 16, 1), ((4, 2, 32), True, 1, 0)]
)
def test_heads_are_turned(heads: tuple[int, int, int], normed: bool, rows: int, order: int) -> None:
    """QK-norm and RoPE by the block that completes a head; values stay as they are. Twice, since counters must be zero again."""
    num_heads, num_kv_heads, head_dim = heads
    seed, turned = torch.seed(), num_heads + num_kv_heads
    weight = WAYS["int4 of 64 with zeros"](torch.randn((turned + num_kv_heads) * head_dim, 512) * 0.1)
    x = torch.randn(rows, 512).to(BF16)
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
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    whole = torch.cat([rotated, expected[:, turned:]], dim=1).flatten(1)
    for _ in range(2):
        multiply(HostProduct(x, weight, few_rows_tiling, y.fill_(torch.nan), order=order, rotation=rotation))
        assert (y.double() - whole).norm() < 1e-2 * whole.norm(), f"seed {seed}"
        assert not rotation.arrivals.any()


@pytest.mark.slow
@pytest.mark.sampled(4, then="soak")
@pytest.mark.parametrize(("rows", "order"), [(1, 0), (6, 1), (13, 2)])
@pytest.mark.parametrize("form", [form for form in WAYS if form != "int4 of 32 in another order"])
def test_every_form_by_few_rows(form: str, rows: int, order: int) -> None:
    check_product(form, rows, few_rows_tiling, shape=(160, 512), bias=True, norm=True, add=True, order=order)
    check_product(form, rows, few_rows_tiling, shape=(256, 1024), gated=True, order=order)


@pytest.mark.slow
@pytest.mark.sampled(3, then="soak")
@pytest.mark.parametrize("rows", [3, 128])
@pytest.mark.parametrize("form", [form for form in WAYS if form != "int4 of 32 in another order"])
def test_every_form(form: str, rows: int) -> None:
    tiles = 2 if rows > 64 else 1
    check_product(form, rows, fixed(tiles=tiles, splits=2), shape=(160, 512), bias=True)
    check_product(form, rows, fixed(tiles=tiles, warps=8), shape=(256, 256), gated=True, norm=True)


@pytest.mark.slow
@pytest.mark.sampled(3, then="soak")
@pytest.mark.parametrize("rule", [shared_rows_tiling, shared_rows_tiling_narrow])
@pytest.mark.parametrize("rows", [33, 65, 129, 300])
def test_cuts_that_rules_choose_for_rows(rows: int, rule: CudaTilingRule) -> None:
    check_product("int4 of 128", rows, rule, shape=(288, 1024), add=True)
    check_product("fp8 rows", rows, rule, shape=(192, 512), dtype=FP16, norm=True, gated=True)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2])
def test_threads_in_any_order_of_shared_rows(order: int) -> None:
    for tiles in (1, 2):
        check_product("mxfp4", 100, fixed(tiles=tiles, warps=8, splits=4, stages=3), shape=(96, 2048), order=order)


CPU, BF16 = torch.device("cpu"), torch.bfloat16
CUTS = {
    "few_rows": (FewRowsKernel, CudaTiling(2, 4, 3)),
    "shared_rows": (SharedRowsKernel, CudaTiling(1, 4, 2, splits=2)),
    "w8a8": (W8A8Kernel, CudaTiling(1, 8, 2, splits=2)),
}
LAUNCH_LIMIT = {FewRowsKernel: 1e-2, SharedRowsKernel: 1e-2, W8A8Kernel: 6e-2}

SPEC = LinearSpec(256, 192, BF16, CPU, WeightFormat("fp8"))


def layer_of(rows: int, bias: bool, blocks: bool) -> tuple[Tensor, Operand, Tensor]:
    """Random rows and a layer, and what float64 gives without its bias."""
    weight = float8(torch.randn(192, 256) * 0.1, (128, 128) if blocks else None)
    layer = Operand.of(weight, torch.randn(192).to(BF16) if bias else None, arranged(weight))
    return torch.randn(rows, 256).to(BF16), layer, weight.dequantized(torch.float64).t()


@pytest.mark.parametrize("kernel", ["w8a8", *(pytest.param(name, marks=pytest.mark.slow) for name in CUTS if name != "w8a8")])
def test_a_gated_product(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_host(monkeypatch)
    (kind, tiling), seed = CUTS[kernel], torch.seed()
    x, layer, weight = layer_of(12, bias=False, blocks=kernel == "w8a8")
    norm = Norm(torch.randn(256).to(BF16), 1e-6)
    gate, up = (rms_norm(x.double(), (256,), norm.weight.double(), norm.eps) @ weight).chunk(2, 1)
    expected = silu(gate) * up
    found = kind(SPEC, tiling=lambda *_: tiling).compute(x, layer, norm, gated=True, activation="silu")
    assert (found.double() - expected).norm() < LAUNCH_LIMIT[kind] * expected.norm(), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", CUTS)
def test_a_product_that_is_added(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_host(monkeypatch)
    (kind, tiling), seed = CUTS[kernel], torch.seed()
    x, layer, weight = layer_of(11, bias=True, blocks=False)
    y = torch.randn(11, 192).to(BF16)
    expected = y.double() + x.double() @ weight + layer.bias.double()
    assert kind(SPEC, tiling=lambda *_: tiling).compute(x, layer, add_to=y) is y
    assert (y.double() - expected).norm() < LAUNCH_LIMIT[kind] * expected.norm(), f"seed {seed}"
