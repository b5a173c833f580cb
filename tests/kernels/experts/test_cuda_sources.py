"""Quantised experts in CUDA C++, as far as no GPU is needed: what is taken, cuts, and that sources compile."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from expert_layers import CONFIGS, FORMS, Layer
from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.weights import QuantizedWeight
from headway.kernels.experts.builtin import GROUPED_TILE_ROWS, SKINNY_TILE_ROWS
from headway.kernels.experts.cuda_grouped_gemm import GroupedVariant, cuda_grouped_gemm, grouped_variant, suits
from headway.kernels.experts.cuda_rows import ExpertVariant, cuda_rows, expert_variant
from headway.kernels.experts.weights import spec_of
from headway.kernels.linear.cuda_products import ArrangedWeight, computes
from headway.kernels.runtime.nvrtc.compiler import find_compiler
from host_experts import PUBLISHED, described
from quantized_weights import float8, int4

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
        (int4(torch.randn(64, 256), 256, zeros=True), 32, "zeros: needs of groups that are shorter than a row"),
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
