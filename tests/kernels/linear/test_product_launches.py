"""Launches of products in CUDA C++, with the kernels run by the host: what a GPU is given, and what comes of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

pytest.importorskip("triton")

from headway.kernels.linear.cuda_products import CudaProducts, Float8Products
from headway.kernels.linear.cuda_variant import CudaCut
from headway.kernels.linear.linear import Linear
from headway.kernels.step.operations import Norm
from host_launches import on_the_host
from quantized_weights import float8

CPU, BF16 = torch.device("cpu"), torch.bfloat16
CUTS = {
    "few_rows": (CudaProducts, CudaCut(2, 4, 3)),
    "shared_rows": (CudaProducts, CudaCut(1, 4, 2, splits=2)),
    "w8a8": (Float8Products, CudaCut(1, 8, 2, splits=2)),
}
LIMIT = {CudaProducts: 1e-2, Float8Products: 6e-2}


def product(rows: int, bias: bool, blocks: bool) -> tuple[Tensor, Linear, Tensor]:
    """Random rows and a layer, and what float64 gives without its bias."""
    weight = float8(torch.randn(192, 256) * 0.1, (128, 128) if blocks else None)
    linear = Linear(weight, torch.randn(192).to(BF16) if bias else None, dtype=BF16, kept=True)
    return torch.randn(rows, 256).to(BF16), linear, weight.dequantized(torch.float64).t()


@pytest.mark.parametrize("kernel", ["w8a8", *(pytest.param(name, marks=pytest.mark.slow) for name in CUTS if name != "w8a8")])
def test_a_gated_product(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_host(monkeypatch)
    (kind, cut), seed = CUTS[kernel], torch.seed()
    x, linear, weight = product(12, bias=False, blocks=kernel == "w8a8")
    norm = Norm(torch.randn(256).to(BF16), 1e-6)
    gate, up = (rms_norm(x.double(), (256,), norm.weight.double(), norm.eps) @ weight).chunk(2, 1)
    expected = silu(gate) * up
    found = kind(CPU, lambda *_: cut)(x, linear, norm, gated=True, activation="silu")
    assert (found.double() - expected).norm() < LIMIT[kind] * expected.norm(), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", CUTS)
def test_a_product_that_is_added(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_host(monkeypatch)
    (kind, cut), seed = CUTS[kernel], torch.seed()
    x, linear, weight = product(11, bias=True, blocks=False)
    y = torch.randn(11, 192).to(BF16)
    assert linear.bias is not None
    expected = y.double() + x.double() @ weight + linear.bias.double()
    assert kind(CPU, lambda *_: cut)(x, linear, add_to=y) is y
    assert (y.double() - expected).norm() < LIMIT[kind] * expected.norm(), f"seed {seed}"
