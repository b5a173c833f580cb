"""The experts' kernels over quantised weights against float64 under Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from expert_layers import CONFIGS, FORMS, SMALL, UNGATED, Layer
from headway.kernels.experts.config import ExpertsConfig

CPU, BF16 = torch.device("cpu"), torch.bfloat16
PLAIN = dataclasses.replace(SMALL, num_experts=5, intermediate_size=64, renormalize=True)
GPT_OSS = dataclasses.replace(CONFIGS["gpt_oss"], num_experts=5, intermediate_size=96)
SHARED = dataclasses.replace(CONFIGS["qwen2_moe"], num_experts=4, intermediate_size=64, shared_intermediate_size=128)


def way_of(method: str, config: ExpertsConfig) -> object:
    from headway.kernels.experts.fused import Dequantized
    from headway.kernels.experts.methods import ExpertTiling, RowMethod, TileMethod
    from headway.kernels.experts.route_kernels import Router
    from headway.kernels.linear.quantized_ways import QuantizedWays

    router = Router(config, CPU)
    if method == "rows":
        return RowMethod(config, router, CPU)
    tiles = ExpertTiling(16, 32, 64, 4, 2, swapped=True, group_m=2)
    if method == "dequantize":
        return Dequantized(TileMethod(tiles, config, router, CPU), config, QuantizedWays(CPU))
    tilings = {"tiles": tiles, "wide": dataclasses.replace(tiles, block_n=64, block_k=128)}
    return TileMethod({**tilings, "whole": dataclasses.replace(tiles, whole=True)}[method], config, router, CPU)


def check(form: str, config: ExpertsConfig, num_tokens: int, method: str, dtype: torch.dtype = BF16, hidden: int = 96) -> None:
    layer = Layer(config, dtype, seed=num_tokens, hidden=hidden)
    weights, way = layer.quantized(form), way_of(method, config)
    x = layer.draw(num_tokens, hidden)
    residual = x.to(dtype)
    way.add(residual, way.route(residual, layer.norm_of(dtype), weights), weights)
    error = (residual.double() - layer.reference(x)).norm() / layer.reference(x).norm()
    assert error < {torch.float16: 4e-3, BF16: 2.5e-2}[dtype], error


EVERYDAY = [("fp8 blocks", PLAIN, 2, "rows"), ("mxfp4", GPT_OSS, 1, "rows"), ("mxfp4", GPT_OSS, 5, "tiles")]
WAYS = ("rows", 3), ("tiles", 20), ("wide", 7), ("whole", 4), ("dequantize", 5)
CASES = [(form, config, count, way) for form in FORMS for config in (PLAIN, GPT_OSS, SHARED) for way, count in WAYS]


@pytest.mark.parametrize(
    ("form", "config", "num_tokens", "method"), [*EVERYDAY, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)]
)
def test_every_form_by_every_way(form: str, config: ExpertsConfig, num_tokens: int, method: str) -> None:
    check(form, config, num_tokens, method)


@pytest.mark.parametrize("method", ["rows", pytest.param("tiles", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["int4, zeros", pytest.param("fp8 rows", marks=pytest.mark.slow)])
def test_half_precision_of_another_kind(form: str, method: str) -> None:
    check(form, PLAIN, 3, method, torch.float16)


@pytest.mark.parametrize("form", ["fp8 blocks", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_rows_that_fill_no_chunk(form: str) -> None:
    """Slices of a row that are no multiple of a chunk's, several chunks, and rows that fill no block."""
    config = dataclasses.replace(PLAIN, num_experts=2, intermediate_size=160)
    check(form, config, 1, "rows", hidden=640 if form == "mxfp4" else 736)
    check(form, config, 5, "wide", hidden=640 if form == "mxfp4" else 736)


def test_experts_without_a_gate() -> None:
    config = dataclasses.replace(UNGATED, intermediate_size=64, shared_intermediate_size=64)
    check("fp8 blocks", config, 7, "tiles")


def test_only_one_of_the_two_weights_may_be_quantised() -> None:
    for method in ("rows", "tiles"):
        layer = Layer(PLAIN, BF16, hidden=96)
        weights = layer.quantized("fp8 blocks")
        weights = dataclasses.replace(weights, down=layer.tensors["down"].to(BF16))
        x = layer.draw(3, 96)
        residual, way = x.to(BF16), way_of(method, PLAIN)
        way.add(residual, way.route(residual, layer.norm_of(BF16), weights), weights)
        assert (residual.double() - layer.reference(x)).norm() / layer.reference(x).norm() < 1.5e-2, method


def test_a_kind_of_quantised_layers_has_methods_that_read_them() -> None:
    from headway.kernels.experts.fused import FusedExperts

    kind = FusedExperts(PLAIN, BF16, CPU, forms=("fp8 128x128", "fp8 128x128"))
    layer = Layer(PLAIN, BF16, hidden=96)
    kind.layer(layer.quantized("fp8 blocks"), layer.norm_of(BF16))
    assert "torch.grouped_mm" not in kind.methods
    assert {"triton.rows", "dequantize+torch.grouped_mm"} <= set(kind.methods)
    assert kind.describe().startswith("fp8 128x128: triton.rows from 1, triton.tiles16")
    for count in (1, 64, 4096):
        assert kind.method_for(count).takes(count, BF16)
