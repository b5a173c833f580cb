"""The kernels of experts, over plain and over quantised weights, against the plain way in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from expert_layers import CONFIGS, FORMS, HIDDEN, SMALL, UNGATED, Layer
from headway.core.contract.experts import ExpertsConfig
from headway.kernels.experts.fused import Dequantized, FusedExperts
from headway.kernels.experts.methods import ExpertTiling, RowCut, RowMethod, TileMethod
from headway.kernels.experts.plain import route, sort_by_expert
from headway.kernels.experts.route_kernels import Router
from headway.kernels.linear.gpu_kernels import Dequantizer

CPU = torch.device("cpu")
UNEVEN = dataclasses.replace(SMALL, intermediate_size=24, num_experts=5, top_k=2, renormalize=True)


def way_of(method: str, config: ExpertsConfig, router: object) -> object:
    """A method of few and large programs, which the interpreter runs one after the other."""
    if method == "rows":
        return RowMethod(config, router, CPU, RowCut(gate_rows=16, down_rows=16, down_chunk=32))
    swapped = ExpertTiling(16, 64, 32, 4, 2, swapped=True, group_m=2)
    tilings = {"tiles": ExpertTiling(16, 32, 64, 4, 2), "swapped": swapped}
    tilings |= {"whole": ExpertTiling(16, 32, 64, 4, 2, whole=True), "whole.swapped": dataclasses.replace(swapped, whole=True)}
    return TileMethod(tilings[method], config, router, CPU)


def check(config: ExpertsConfig, num_tokens: int, method: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    layer = Layer(config, dtype, seed)
    way = way_of(method, config, Router(config, CPU))
    x = layer.draw(num_tokens, HIDDEN)
    residual = x.to(dtype)
    weights = layer.weights(dtype)
    way.add(residual, way.route(residual, layer.norm_of(dtype), weights), weights)
    error = (residual.double() - layer.reference(x)).norm() / layer.reference(x).norm()
    assert error < {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}[dtype], error


EVERYDAY = [("qwen2_moe", "rows", 2), ("deepseek_v3", "rows", 1), ("gpt_oss", "tiles", 5)]
WAYS = ("rows", 1), ("rows", 3), ("tiles", 5), ("tiles", 33), ("swapped", 20), ("whole", 1), ("whole", 16), ("tiles", 70)
WAYS += (("whole.swapped", 7),)
CASES = [(name, *way) for name in CONFIGS for way in WAYS]


@pytest.mark.parametrize(
    ("name", "method", "num_tokens"), [*EVERYDAY, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)]
)
def test_every_kind_of_routing(name: str, method: str, num_tokens: int) -> None:
    check(CONFIGS[name], num_tokens, method, seed=num_tokens)


@pytest.mark.parametrize(("method", "num_tokens"), [("tiles", 5), ("whole.swapped", 7)])
def test_experts_without_a_gate(method: str, num_tokens: int) -> None:
    check(UNGATED, num_tokens, method, seed=num_tokens)


def test_what_needs_a_gate_takes_no_experts_without() -> None:
    methods = FusedExperts(UNGATED, torch.bfloat16, CPU).methods
    assert methods
    assert "triton.rows" not in methods


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("rows", torch.bfloat16),
        pytest.param("tiles", torch.bfloat16, marks=pytest.mark.slow),
        *(pytest.param(method, torch.float16, marks=pytest.mark.slow) for method in ("rows", "tiles", "swapped")),
    ],
    ids=str,
)
def test_half_precision_and_sizes_that_fill_no_tile(method: str, dtype: torch.dtype) -> None:
    check(UNEVEN, 3, method, dtype)
    check(CONFIGS["gpt_oss"], 2, method, dtype)


@pytest.mark.parametrize("num_tokens", [18, pytest.param(1, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.slow)])
def test_routing_equals_that_of_torch_token_by_token(num_tokens: int) -> None:
    names = ("qwen2_moe", "deepseek_v3") if num_tokens == 18 else CONFIGS
    for name, config in ((name, CONFIGS[name]) for name in names):
        layer = Layer(config, torch.float32, seed=num_tokens)
        router, weights = Router(config, CPU), layer.weights(torch.float32)
        x = layer.draw(num_tokens, HIDDEN).float()
        routed = router.tiles(x, layer.norm_of(torch.float32), weights)
        logits = torch.nn.functional.linear(routed.x, weights.router, weights.router_bias)
        expected = route(logits, config, weights.correction_bias)
        assert torch.equal(routed.experts, expected.experts), name
        torch.testing.assert_close(routed.weights, expected.weights)
        order, sorted_by_torch = router.order(routed), sort_by_expert(expected.experts, config.num_all)
        assert torch.equal(order.pairs, sorted_by_torch.pairs), name
        assert torch.equal(order.places, sorted_by_torch.places)
        assert torch.equal(order.ends, sorted_by_torch.ends)
        rows = router.rows(x, layer.norm_of(torch.float32), weights)
        assert torch.equal(rows.experts, expected.experts), name
        torch.testing.assert_close(rows.weights, expected.weights)


@pytest.mark.parametrize("method", ["tiles", pytest.param("rows", marks=pytest.mark.slow)])
def test_a_nan_stays_in_its_row(method: str) -> None:
    config = CONFIGS["deepseek_v3"]
    layer, router = Layer(config, torch.float32), Router(config, CPU)
    weights, norm = layer.weights(torch.float32), layer.norm_of(torch.float32)
    way = way_of(method, config, router)
    x = layer.draw(4, HIDDEN).float()
    x[2] = torch.nan
    routed = way.route(x, norm, weights)
    assert bool(((routed.experts >= 0) & (routed.experts < config.num_all)).all())
    assert all(len(set(row)) == config.num_slots for row in routed.experts.tolist())
    way.add(x, routed, weights)
    assert x.isnan().any(1).tolist() == [False, False, True, False]


CPU, BF16 = torch.device("cpu"), torch.bfloat16
PLAIN = dataclasses.replace(SMALL, num_experts=5, intermediate_size=64, renormalize=True)
GPT_OSS = dataclasses.replace(CONFIGS["gpt_oss"], num_experts=5, intermediate_size=96)
SHARED = dataclasses.replace(CONFIGS["qwen2_moe"], num_experts=4, intermediate_size=64, shared_intermediate_size=128)


def quantized_way(method: str, config: ExpertsConfig) -> object:
    router = Router(config, CPU)
    if method == "rows":
        return RowMethod(config, router, CPU)
    tiles = ExpertTiling(16, 32, 64, 4, 2, swapped=True, group_m=2)
    if method == "dequantize":
        return Dequantized(TileMethod(tiles, config, router, CPU), config, Dequantizer(CPU))
    tilings = {"tiles": tiles, "wide": dataclasses.replace(tiles, block_n=64, block_k=128)}
    return TileMethod({**tilings, "whole": dataclasses.replace(tiles, whole=True)}[method], config, router, CPU)


def check_form(form: str, config: ExpertsConfig, tokens: int, method: str, dtype: torch.dtype = BF16, hidden: int = 96) -> None:
    layer = Layer(config, dtype, seed=tokens, hidden=hidden)
    weights, way = layer.quantized(form), quantized_way(method, config)
    x = layer.draw(tokens, hidden)
    residual = x.to(dtype)
    way.add(residual, way.route(residual, layer.norm_of(dtype), weights), weights)
    error = (residual.double() - layer.reference(x)).norm() / layer.reference(x).norm()
    assert error < {torch.float16: 4e-3, BF16: 2.5e-2}[dtype], error


FEW = [("fp8 blocks", PLAIN, 2, "rows"), ("mxfp4", GPT_OSS, 1, "rows"), ("mxfp4", GPT_OSS, 5, "tiles")]
BY = ("rows", 3), ("tiles", 20), ("wide", 7), ("whole", 4), ("dequantize", 5)
CASES_OF_FORMS = [(form, config, count, way) for form in FORMS for config in (PLAIN, GPT_OSS, SHARED) for way, count in BY]


@pytest.mark.parametrize(
    ("form", "config", "num_tokens", "method"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES_OF_FORMS)]
)
def test_every_form_by_every_way(form: str, config: ExpertsConfig, num_tokens: int, method: str) -> None:
    check_form(form, config, num_tokens, method)


@pytest.mark.parametrize("method", ["rows", pytest.param("tiles", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["int4, zeros", pytest.param("fp8 rows", marks=pytest.mark.slow)])
def test_half_precision_of_another_kind(form: str, method: str) -> None:
    check_form(form, PLAIN, 3, method, torch.float16)


@pytest.mark.parametrize("form", ["fp8 blocks", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_rows_that_fill_no_chunk(form: str) -> None:
    """Slices of a row that are no multiple of a chunk's, several chunks, and rows that fill no block."""
    config = dataclasses.replace(PLAIN, num_experts=2, intermediate_size=160)
    check_form(form, config, 1, "rows", hidden=640 if form == "mxfp4" else 736)
    check_form(form, config, 5, "wide", hidden=640 if form == "mxfp4" else 736)


def test_quantised_experts_without_a_gate() -> None:
    config = dataclasses.replace(UNGATED, intermediate_size=64, shared_intermediate_size=64)
    check_form("fp8 blocks", config, 7, "tiles")


def test_only_one_of_the_two_weights_may_be_quantised() -> None:
    for method in ("rows", "tiles"):
        layer = Layer(PLAIN, BF16, hidden=96)
        weights = layer.quantized("fp8 blocks")
        weights = dataclasses.replace(weights, down=layer.tensors["down"].to(BF16))
        x = layer.draw(3, 96)
        residual, way = x.to(BF16), quantized_way(method, PLAIN)
        way.add(residual, way.route(residual, layer.norm_of(BF16), weights), weights)
        assert (residual.double() - layer.reference(x)).norm() / layer.reference(x).norm() < 1.5e-2, method


def test_a_kind_of_quantised_layers_has_methods_that_read_them() -> None:
    kind = FusedExperts(PLAIN, BF16, CPU, forms=("fp8 128x128", "fp8 128x128"))
    layer = Layer(PLAIN, BF16, hidden=96)
    kind.layer(layer.quantized("fp8 blocks"), layer.norm_of(BF16))
    assert "torch.grouped_mm" not in kind.methods
    assert {"triton.rows", "dequantize+torch.grouped_mm"} <= set(kind.methods)
    assert kind.describe().startswith("fp8 128x128: triton.rows from 1, triton.tiles16")
    for count in (1, 64, 4096):
        assert kind.method_for(count).takes(count, BF16)
