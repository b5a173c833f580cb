"""Quantised experts in CUDA C++ without a GPU: what is taken, cuts, that sources compile, and what the host computes by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

import quantized_weights
from expert_layers import CONFIGS, FORMS, Layer
from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.weights import QuantizedWeight
from headway.kernels.experts.builtin import GROUPED_TILE_ROWS, SKINNY_TILE_ROWS
from headway.kernels.experts.cuda_grouped_gemm import (
    GroupedVariant,
    cuda_grouped_gemm,
    expert_grouped_tiling,
    grouped_variant,
    suits,
)
from headway.kernels.experts.cuda_rows import ExpertTilingRule, ExpertVariant, cuda_rows, expert_variant
from headway.kernels.experts.weights import spec_of
from headway.kernels.linear.cuda_products import ArrangedWeight, computes
from headway.kernels.linear.cuda_variant import CudaTiling
from headway.kernels.runtime.nvrtc.compiler import find_compiler
from headway.models.checkpoints.formats.rounding import float4, float8, int4, int8
from host_experts import CLAMPED, PLAIN, PUBLISHED, SHAPES, Add, check, described, routed_of
from host_kernels import add_experts, add_lots

pytest.importorskip("triton")

BF16 = torch.bfloat16
SHARED_BYTES, MULTIPROCESSORS = 227 * 1024, 132
"""Of a block of threads, and of an H200."""


def variants(form: str, shape: str) -> list[ExpertVariant]:
    """Both products in every lot, as launches make them."""
    config, hidden = PUBLISHED[shape]
    found = []
    for lot, first in product((1, *SKINNY_TILE_ROWS), (True, False)):
        weight, scales = described(form, hidden if first else config.intermediate_size)
        codes = torch.empty(config.num_all * (config.up_size if first else hidden), 1, dtype=torch.uint8, device="meta")
        read = ArrangedWeight(weight, codes, torch.empty(1, dtype=scales, device="meta"))
        found.append(expert_variant(config, read, BF16, lot, first, config.biases, MULTIPROCESSORS))
    return found


@pytest.mark.parametrize("shape", PUBLISHED)
@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 rows", "mxfp4", "int4"])
def test_cuts_fit_into_shared_memory_and_leave_few_warps_idle(form: str, shape: str) -> None:
    for variant in variants(form, shape):
        tiling, slices = variant.each.tiling, -(-variant.each.weight.row // 64)
        assert variant.shared_bytes <= SHARED_BYTES, variant
        assert tiling.stages >= 2
        assert -(-slices // tiling.warps) * tiling.warps <= max(2, 1.34 * slices)
        assert not variant.each.gated or tiling.tiles % 2 == 0


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_end_within_a_slice_are_taken(form: str) -> None:
    weight = FORMS[form](torch.randn(96, 352 if form != "fp8 blocks" else 96), 48)
    assert bool(computes(BF16, weight, 48)) == (form != "fp8 blocks"), "whose blocks of 32 columns are shorter than a slice"
    assert not computes(BF16, weight), "products that are no experts have whole slices"


@pytest.mark.parametrize(
    ("weight", "rows", "reason"),
    [
        (float8(torch.randn(80, 256)), 40, "shape: needs experts of multiples of 16 rows of 16 bytes, got 40 x 256"),
        (float8(torch.randn(64, 256), (8, 128)), 32, "scales: needs blocks of multiples of 16 rows and 64 columns"),
        (quantized_weights.int4(torch.randn(64, 256), 256, zeros=True), 32, "zeros: needs of groups that are shorter than a row"),
    ],
)
def test_a_refusal_says_what_was_needed(weight: QuantizedWeight, rows: int, reason: str) -> None:
    assert reason in str(computes(BF16, weight, rows))


def test_plain_experts_and_a_cpu_are_refused_with_a_reason() -> None:
    layer = Layer(CONFIGS["gpt_oss"], BF16)
    told = str(cuda_rows(8).supports(spec_of(layer.config, layer.weights(BF16))))
    assert "device: needs cuda, got cpu" in told
    assert "weight format: needs fp8 or int4 or int8 or mxfp4, got plain" in told


MULTIPROCESSOR_BYTES, MULTIPROCESSORS = 228 * 1024, 132
"""Of a multiprocessor, and of an H200."""


def lot_variants(form: str, shape: str) -> list[GroupedVariant]:
    """Both products in every lot, as launches make them."""
    config, hidden = PUBLISHED[shape]
    after, _ = described(form, config.intermediate_size)
    found = []
    for lot, first in product(GROUPED_TILE_ROWS, (True, False)):
        weight, scales = described(form, hidden if first else config.intermediate_size)
        codes = torch.empty(config.num_all * (config.up_size if first else hidden), 1, dtype=torch.uint8, device="meta")
        read = ArrangedWeight(weight, codes, torch.empty(1, dtype=scales, device="meta"))
        following = after if first else None
        found.append(grouped_variant(config, read, BF16, lot, following, config.biases, MULTIPROCESSORS))
    return found


@pytest.mark.parametrize("shape", PUBLISHED)
@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 rows", "mxfp4", "int4"])
def test_cuts_fit_beside_one_another_and_boxes_end_with_an_expert(form: str, shape: str) -> None:
    for variant in lot_variants(form, shape):
        each = variant.of.each
        table = 4 * (variant.of.max_tiles + 1)
        assert (
            each.tiling.per_multiprocessor * (variant.shared_bytes + 16 * each.tiling.stages + table + 1024)
            <= MULTIPROCESSOR_BYTES
        ), variant
        assert each.tiling.stages >= 2
        assert each.most_rows <= 16 or each.tiling.warps % 4 == 0, "four warps multiply together"
        assert each.out_features % variant.box == 0
        assert variant.outputs % variant.box == 0


Variants = list[ExpertVariant] | list[GroupedVariant]


def compile_all(found: Variants, caplog: pytest.LogCaptureFixture) -> None:
    compiler, support = find_compiler()
    assert compiler is not None, str(support)
    caplog.set_level("INFO", "headway")
    for variant in found:
        assert variant.source.compile("sm_90a", compiler).startswith(b"\x7fELF")
    assert "serialized" not in caplog.text, "each product would wait for the one before it"


@pytest.mark.slow
def test_another_generation_has_the_kernel_too() -> None:
    compiler, support = find_compiler()
    assert compiler is not None, str(support)
    for variant in variants("int4", "qwen3")[2:4]:
        assert variant.source.compile("sm_80", compiler).startswith(b"\x7fELF")


def test_some_sources_compile(caplog: pytest.LogCaptureFixture) -> None:
    compile_all(variants("mxfp4", "gpt_oss")[:2], caplog)
    compile_all(lot_variants("fp8 blocks", "qwen3")[:1], caplog)


@pytest.mark.slow
@pytest.mark.sampled(4, then="soak")
@pytest.mark.parametrize("made", [variants, lot_variants])
@pytest.mark.parametrize("shape", PUBLISHED)
@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 rows", "mxfp4", "int4"])
def test_sources_compile(form: str, shape: str, made: Callable[..., Variants], caplog: pytest.LogCaptureFixture) -> None:
    if (form, shape) != ("fp8 blocks", "rank"):  # whose rows end within a block
        compile_all(made(form, shape), caplog)


@pytest.mark.parametrize(
    ("shape", "tokens", "lots"),
    [
        ("gpt_oss", 1, [8]),
        ("gpt_oss", 16, [8, 16]),
        ("gpt_oss", 64, [8, 16, 32, 64]),
        ("gpt_oss", 256, [8, 16, 32, 64]),
        ("qwen3", 16, [8]),
        ("qwen3", 64, [8, 16, 32]),
        ("qwen3", 257, []),
    ],
)
def test_lots_are_offered_where_experts_fill_them(shape: str, tokens: int, lots: list[int]) -> None:
    assert [lot for lot in GROUPED_TILE_ROWS if suits(lot, tokens, PUBLISHED[shape][0])] == lots


def test_what_cannot_be_computed_is_refused_with_a_reason() -> None:
    config = ExpertsConfig(64, 30, 32)
    told = str(cuda_grouped_gemm(8).supports(spec_of(config, Layer(config, BF16, hidden=32).quantized("mxfp4"))))
    assert "device: needs cuda, got cpu" in told
    assert "experts of a token: needs up to 24, got 30" in told


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
