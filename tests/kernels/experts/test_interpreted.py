"""The kernels of experts against the plain way in float64 under Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from expert_layers import CONFIGS, HIDDEN, SMALL, UNGATED, Layer
from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.experts.plain import route, sort_by_expert

CPU = torch.device("cpu")
UNEVEN = dataclasses.replace(SMALL, intermediate_size=24, num_experts=5, top_k=2, renormalize=True)


def way_of(method: str, config: ExpertsConfig, router: object) -> object:
    """A method of few and large programs, which the interpreter runs one after the other."""
    from headway.kernels.experts.methods import ExpertTiling, RowCut, RowMethod, TileMethod

    if method == "rows":
        return RowMethod(config, router, CPU, RowCut(gate_rows=16, down_rows=16, down_chunk=32))
    swapped = ExpertTiling(16, 64, 32, 4, 2, swapped=True, group_m=2)
    tilings = {"tiles": ExpertTiling(16, 32, 64, 4, 2), "swapped": swapped}
    tilings |= {"whole": ExpertTiling(16, 32, 64, 4, 2, whole=True), "whole.swapped": dataclasses.replace(swapped, whole=True)}
    return TileMethod(tilings[method], config, router, CPU)


def check(config: ExpertsConfig, num_tokens: int, method: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    from headway.kernels.experts.route_kernels import Router

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
    from headway.kernels.experts.fused import FusedExperts

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
    from headway.kernels.experts.route_kernels import Router

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
    from headway.kernels.experts.route_kernels import Router

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
