"""expert_rows.cu and expert_lots.cu beside float64, run by the host: forms, ends of rows and tiles, lots, orders of threads."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from expert_layers import FORMS, Layer
from headway.core.contract.experts import ExpertsConfig
from headway.kernels.experts.cuda_grouped_gemm import expert_grouped_tiling
from headway.kernels.experts.cuda_rows import ExpertTilingRule
from headway.kernels.linear.cuda_variant import CudaTiling
from headway.models.checkpoints.formats.rounding import float4, float8, int4, int8
from host_experts import CLAMPED, PLAIN, SHAPES, Add, check, routed_of
from host_kernels import add_experts, add_lots


def rows_of(lot: int, order: int = 0) -> Add:
    return partial(add_experts, lot=lot, blocks=3, order=order)


def lots_of(lot: int, order: int = 0, rule: ExpertTilingRule = expert_grouped_tiling, blocks: int = 3) -> Add:
    return partial(add_lots, lot=lot, blocks=blocks, order=order, rule=rule)


def tiling(tiles: int, warps: int, stages: int = 2) -> ExpertTilingRule:
    """A cut that no rule chooses for work so small. Two stages have both sides wait for each other."""
    return lambda *_: CudaTiling(tiles, warps, stages)


@pytest.mark.parametrize(
    ("add", "tokens"), [(rows_of(8), 11), (lots_of(8), 11), pytest.param(lots_of(32), 30, marks=pytest.mark.slow)]
)
def test_clamped_experts_with_biases_and_part_of_a_slice(monkeypatch: pytest.MonkeyPatch, add: Add, tokens: int) -> None:
    check(monkeypatch, add, "mxfp4", CLAMPED, 160, tokens)


@pytest.mark.slow
@pytest.mark.sampled(5, then="soak")
@pytest.mark.parametrize(
    ("add", "tokens"),
    [(rows_of(8), 1), (rows_of(16), 20), (lots_of(8), 1), (lots_of(16), 20), (lots_of(32), 40), (lots_of(64), 64)],
)
@pytest.mark.parametrize("form", SHAPES)
def test_every_form(monkeypatch: pytest.MonkeyPatch, form: str, add: Add, tokens: int) -> None:
    check(monkeypatch, add, form, *SHAPES[form], tokens)


@pytest.mark.slow
@pytest.mark.sampled(3, then="soak")
@pytest.mark.parametrize(
    ("add", "tokens"),
    [(rows_of(16), 33), (rows_of(8), 64), (lots_of(8), 17), (lots_of(16), 33), (lots_of(32), 64), (lots_of(64), 100)],
)
def test_experts_of_several_lots_and_of_no_tokens(monkeypatch: pytest.MonkeyPatch, add: Add, tokens: int) -> None:
    check(monkeypatch, add, "mxfp4", CLAMPED, 160, tokens, alike=True)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "order"), [("fp8 rows", 1), ("mxfp4", 2)])
def test_threads_in_another_order(monkeypatch: pytest.MonkeyPatch, form: str, order: int) -> None:
    check(monkeypatch, rows_of(8, order), form, *SHAPES[form], 12)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("lot", [16, 32])
@pytest.mark.parametrize("form", ["fp8 blocks", "mxfp4", "int4, zeros"])
def test_threads_in_any_order_of_short_rings(monkeypatch: pytest.MonkeyPatch, form: str, lot: int, order: int) -> None:
    config, hidden = SHAPES[form]
    check(monkeypatch, lots_of(lot, order, tiling(1, 4), blocks=2), form, config, 2 * hidden, 20)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("tiles", "warps", "lot"), [(2, 4, 8), (4, 2, 16), (1, 8, 32), (2, 4, 64)])
def test_tiles_that_reach_beyond_an_expert(monkeypatch: pytest.MonkeyPatch, tiles: int, warps: int, lot: int) -> None:
    config = dataclasses.replace(CLAMPED, intermediate_size=224)
    for form in ("mxfp4", "fp8 rows"):
        check(monkeypatch, lots_of(lot, rule=tiling(tiles, warps)), form, config, 176 if form == "fp8 rows" else 160, 40)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(
    ("form", "config"),
    [
        ("fp8 rows", dataclasses.replace(PLAIN, gated=False)),
        ("int8", dataclasses.replace(PLAIN, shared_intermediate_size=192)),
        ("int4", dataclasses.replace(PLAIN, gated=False)),
    ],
)
@pytest.mark.parametrize(("add", "tokens"), [(rows_of(8), 9), (lots_of(8), 9), (lots_of(32), 33)])
def test_ungated_and_shared_experts_in_float16(
    monkeypatch: pytest.MonkeyPatch, form: str, config: ExpertsConfig, add: Add, tokens: int
) -> None:
    check(monkeypatch, add, form, config, 192 if form == "int4" else 176, tokens, dtype=torch.float16)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("lot", [8, 32])
@pytest.mark.parametrize(
    ("first", "second"),
    [(lambda weight: int4(weight, 128), float8), (int8, lambda weight: int4(weight, 64)), (float8, float4), (float4, int8)],
    ids=["int4 of 128, fp8", "int8, int4 of 64", "fp8, mxfp4", "mxfp4, int8"],
)
def test_products_of_two_forms(monkeypatch: pytest.MonkeyPatch, first: object, second: object, lot: int) -> None:
    config = dataclasses.replace(PLAIN, intermediate_size=192)
    monkeypatch.setitem(FORMS, "two", lambda weight, rows: (first if rows == config.up_size else second)(weight))  # type: ignore[operator]
    check(monkeypatch, lots_of(lot), "two", config, 256, 21)


@pytest.mark.slow
@pytest.mark.parametrize("lot", [8, 32])
def test_a_tokens_bits_depend_on_neither_the_others_nor_the_blocks(lot: int) -> None:
    layer = Layer(CLAMPED, torch.bfloat16, hidden=160)
    weights, x = layer.quantized("mxfp4"), layer.draw(40, 160)
    routing = layer.routing(x)

    def computed(rows: slice, blocks: int, order: int) -> Tensor:
        y = x[rows].to(torch.bfloat16)
        routed = routed_of(layer, x[rows], routing.experts[rows], routing.weights[rows])
        lots_of(lot, order, blocks=blocks)(y, routed, weights, CLAMPED)
        return y

    whole = computed(slice(0, 40), 3, 0)
    assert torch.equal(computed(slice(0, 40), 5, 2), whole)
    assert torch.equal(computed(slice(7, 24), 2, 1), whole[7:24])
