"""The kernels of experts, over plain and over quantised weights, against the plain way in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from expert_layers import CONFIGS, FORMS, HIDDEN, SMALL, UNGATED, Layer, fused_layer
from headway.core.contract.experts import ExpertsConfig
from headway.kernels.experts.builtin import ExpertTiling
from headway.kernels.experts.plain import Routed, RoutedKernel, route, sort_by_expert
from headway.kernels.experts.route_kernels import Router, sorted_pairs
from headway.kernels.experts.row_kernels import RowKernel, RowSplit, row_kernel
from headway.kernels.experts.tiles import DequantizingKernel, tiled
from headway.kernels.experts.weights import RoutedWeights, spec_of
from headway.kernels.runtime.triton_launch import Launchers
from headway.kernels.step.operations import Norm

CPU = torch.device("cpu")
UNEVEN = dataclasses.replace(SMALL, intermediate_size=24, num_experts=5, top_k=2, renormalize=True)


def kernel_class(method: str) -> type[RoutedKernel]:
    """A kernel over plain weights of few and large programs, which the interpreter runs one after the other."""
    if method == "rows":
        cuts = RowSplit(16, 4, 4, 1024), RowSplit(16, 4, 6, 32)
        return type("Rows", (RowKernel,), {"name": "rows", "warps": 1, "plain_splits": cuts})
    swapped = ExpertTiling(16, 64, 32, 4, 2, swapped=True, group_m=2)
    tilings = {"tiles": ExpertTiling(16, 32, 64, 4, 2), "swapped": swapped}
    tilings |= {"whole": ExpertTiling(16, 32, 64, 4, 2, whole=True), "whole.swapped": dataclasses.replace(swapped, whole=True)}
    return tiled(tilings[method], None)


def added(kernel: type[RoutedKernel], config: ExpertsConfig, weights: RoutedWeights, norm: Norm, x: Tensor) -> Routed:
    """Add what a kernel computes to x, and return how its tokens were routed."""
    made = kernel(spec_of(config, weights))
    routed = Router(config, CPU).bind(weights, norm)(x, made.sorts)
    made.add(routed, made.prepare(weights), x)
    return routed


def check(config: ExpertsConfig, num_tokens: int, method: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    layer = Layer(config, dtype, seed)
    x = layer.draw(num_tokens, HIDDEN)
    residual = x.to(dtype)
    added(kernel_class(method), config, layer.weights(dtype), layer.norm_of(dtype), residual)
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
    layer = Layer(UNGATED, torch.bfloat16)
    kernels = fused_layer(UNGATED, layer.weights(torch.bfloat16), layer.norm_of(torch.bfloat16)).kind.kernels
    assert kernels
    assert "triton.rows" not in kernels


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
        order = sorted_pairs(Launchers(CPU), config, routed)
        sorted_by_torch = sort_by_expert(expected.experts, config.num_all)
        assert torch.equal(order.pairs, sorted_by_torch.pairs), name
        assert torch.equal(order.places, sorted_by_torch.places)
        assert torch.equal(order.ends, sorted_by_torch.ends)
        rows = router.rows(x, layer.norm_of(torch.float32), weights)
        assert torch.equal(rows.experts, expected.experts), name
        torch.testing.assert_close(rows.weights, expected.weights)


@pytest.mark.parametrize("method", ["tiles", pytest.param("rows", marks=pytest.mark.slow)])
def test_a_nan_stays_in_its_row(method: str) -> None:
    config = CONFIGS["deepseek_v3"]
    layer = Layer(config, torch.float32)
    x = layer.draw(4, HIDDEN).float()
    x[2] = torch.nan
    routed = added(kernel_class(method), config, layer.weights(torch.float32), layer.norm_of(torch.float32), x)
    assert bool(((routed.experts >= 0) & (routed.experts < config.num_all)).all())
    assert all(len(set(row)) == config.num_slots for row in routed.experts.tolist())
    assert x.isnan().any(1).tolist() == [False, False, True, False]


CPU, BF16 = torch.device("cpu"), torch.bfloat16
PLAIN = dataclasses.replace(SMALL, num_experts=5, intermediate_size=64, renormalize=True)
GPT_OSS = dataclasses.replace(CONFIGS["gpt_oss"], num_experts=5, intermediate_size=96)
SHARED = dataclasses.replace(CONFIGS["qwen2_moe"], num_experts=4, intermediate_size=64, shared_intermediate_size=128)


def quantized_class(method: str) -> type[RoutedKernel]:
    """Likewise over quantised weights."""
    if method == "rows":
        return row_kernel("triton.rows")
    tiles = ExpertTiling(16, 32, 64, 4, 2, swapped=True, group_m=2)
    if method == "dequantize":
        return type("Dequantizing", (DequantizingKernel,), {"name": "dequantize", "inner": tiled(tiles, None)})
    tilings = {"tiles": tiles, "wide": dataclasses.replace(tiles, block_n=64, block_k=128)}
    return tiled(None, {**tilings, "whole": dataclasses.replace(tiles, whole=True)}[method])


def check_form(form: str, config: ExpertsConfig, tokens: int, method: str, dtype: torch.dtype = BF16, hidden: int = 96) -> None:
    layer = Layer(config, dtype, seed=tokens, hidden=hidden)
    weights, kernel = layer.quantized(form), quantized_class(method)
    assert kernel.supports(spec_of(config, weights)), kernel.supports(spec_of(config, weights)).brief
    x = layer.draw(tokens, hidden)
    residual = x.to(dtype)
    added(kernel, config, weights, layer.norm_of(dtype), residual)
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
        residual = x.to(BF16)
        added(quantized_class(method), PLAIN, weights, layer.norm_of(BF16), residual)
        assert (residual.double() - layer.reference(x)).norm() / layer.reference(x).norm() < 1.5e-2, method


def test_a_kind_of_quantised_layers_has_kernels_that_read_them() -> None:
    layer = Layer(PLAIN, BF16, hidden=96)
    kind = fused_layer(PLAIN, layer.quantized("fp8 blocks"), layer.norm_of(BF16)).kind
    assert "torch.grouped_mm" not in kind.kernels
    assert {"triton.rows", "dequantize+torch.grouped_mm"} <= set(kind.kernels)
    assert kind.describe().startswith("fp8 32x32: triton.rows from 1, triton.tiles16")
    for count in (1, 64, 4096):
        assert kind.kernel_for(count).runs(count)


@pytest.mark.parametrize("form", ["", "mxfp4"])
def test_the_contracts_call_gives_what_the_wider_one_does(form: str) -> None:
    """As a third party's program would call Headway's kernel: without what the router counts."""
    layer = Layer(GPT_OSS, BF16, hidden=96)
    weights, x = layer.quantized(form) if form else layer.weights(BF16), layer.draw(5, 96).to(BF16)
    kernel = (quantized_class("tiles") if form else kernel_class("tiles"))(spec_of(GPT_OSS, weights))
    routed = Router(GPT_OSS, CPU).tiles(x, layer.norm_of(BF16), weights)
    wide, plain = x.clone(), x.clone()
    kernel.add(routed, kernel.prepare(weights), wide)
    kernel.apply(routed.x, routed.experts, routed.weights, kernel.prepare(weights), plain)
    assert torch.equal(wide, plain)
