"""Quantised experts in CUDA C++, as far as no GPU is needed: what is taken, cuts, and that sources compile."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from expert_layers import CONFIGS, FORMS, Layer
from headway.kernels.experts.cuda_rows import LOTS, ExpertVariant, computes_experts, expert_variant
from headway.kernels.linear.cuda_products import ArrangedWeight, computes
from headway.kernels.linear.forms import QuantizedWeight
from headway.kernels.runtime.nvrtc.compiler import find_compiler
from host_experts import PUBLISHED, described
from quantized_weights import float8, int4

BF16 = torch.bfloat16
SHARED_BYTES, MULTIPROCESSORS = 227 * 1024, 132
"""Of a block of threads, and of an H200."""
EVERYDAY = ("fp8 blocks", "qwen3"), ("mxfp4", "gpt_oss")


def variants(form: str, shape: str) -> list[ExpertVariant]:
    """Both products in every lot, as launches make them."""
    config, hidden = PUBLISHED[shape]
    found = []
    for lot, first in product((1, *LOTS), (True, False)):
        weight, scales = described(form, hidden if first else config.intermediate_size)
        codes = torch.empty(config.num_all * (config.up_size if first else hidden), 1, dtype=torch.uint8, device="meta")
        read = ArrangedWeight(weight, codes, torch.empty(1, dtype=scales, device="meta"))
        found.append(expert_variant(config, read, BF16, lot, first, config.biases, MULTIPROCESSORS))
    return found


@pytest.mark.parametrize("shape", PUBLISHED)
@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 rows", "mxfp4", "int4"])
def test_cuts_fit_into_shared_memory_and_leave_few_warps_idle(form: str, shape: str) -> None:
    for variant in variants(form, shape):
        cut, slices = variant.each.cut, -(-variant.each.weight.row // 64)
        assert variant.shared_bytes <= SHARED_BYTES, variant
        assert cut.stages >= 2
        assert -(-slices // cut.warps) * cut.warps <= max(2, 1.34 * slices)
        assert not variant.each.gated or cut.tiles % 2 == 0


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        pair if pair in EVERYDAY else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in product(("fp8 blocks", "fp8 rows", "mxfp4", "int4"), PUBLISHED)
        if pair != ("fp8 blocks", "rank")
    ],
)
def test_sources_compile(form: str, shape: str) -> None:
    compiler, support = find_compiler()
    assert compiler is not None, str(support)
    for variant in variants(form, shape):
        assert variant.source.compile("sm_90", compiler).startswith(b"\x7fELF")


def test_another_generation_has_the_kernel_too() -> None:
    compiler, support = find_compiler()
    assert compiler is not None, str(support)
    for variant in variants("int4", "qwen3")[2:4]:
        assert variant.source.compile("sm_80", compiler).startswith(b"\x7fELF")


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
    told = str(computes_experts(layer.config, layer.weights(BF16), torch.device("cpu")))
    assert "device: needs a GPU of compute capability 8.0 or newer, got cpu" in told
    assert "weights: needs quantised ones, got plain ones" in told
