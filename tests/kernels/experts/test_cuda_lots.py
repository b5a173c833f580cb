"""Quantised experts by lots that share x, as far as no GPU is needed: cuts, refusals, and that sources compile."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.experts.cuda_lots import LOTS, LotsVariant, computes_lots, lots_variant, suits
from headway.kernels.linear.cuda_products import ArrangedWeight
from headway.kernels.runtime.nvrtc.compiler import find_compiler
from host_experts import PUBLISHED, described

BF16 = torch.bfloat16
SHARED_BYTES, MULTIPROCESSORS = 228 * 1024, 132
"""Of a multiprocessor, and of an H200."""
EVERYDAY = ("fp8 blocks", "qwen3"), ("mxfp4", "gpt_oss")


def variants(form: str, shape: str) -> list[LotsVariant]:
    """Both products in every lot, as launches make them."""
    config, hidden = PUBLISHED[shape]
    after, _ = described(form, config.intermediate_size)
    found = []
    for lot, first in product(LOTS, (True, False)):
        weight, scales = described(form, hidden if first else config.intermediate_size)
        codes = torch.empty(config.num_all * (config.up_size if first else hidden), 1, dtype=torch.uint8, device="meta")
        read = ArrangedWeight(weight, codes, torch.empty(1, dtype=scales, device="meta"))
        following = after if first else None
        found.append(lots_variant(config, read, BF16, lot, following, config.biases, MULTIPROCESSORS))
    return found


@pytest.mark.parametrize("shape", PUBLISHED)
@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 rows", "mxfp4", "int4"])
def test_cuts_fit_beside_one_another_and_boxes_end_with_an_expert(form: str, shape: str) -> None:
    for variant in variants(form, shape):
        each = variant.of.each
        table = 4 * (variant.of.most_lots + 1)
        assert each.cut.per_multiprocessor * (variant.shared_bytes + 16 * each.cut.stages + table + 1024) <= SHARED_BYTES, variant
        assert each.cut.stages >= 2
        assert each.most_rows <= 16 or each.cut.warps % 4 == 0, "four warps multiply together"
        assert each.out_features % variant.box == 0
        assert variant.outputs % variant.box == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("form", "shape"),
    [
        pair if pair in EVERYDAY else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in product(("fp8 blocks", "fp8 rows", "mxfp4", "int4"), PUBLISHED)
        if pair != ("fp8 blocks", "rank")
    ],
)
def test_sources_compile(form: str, shape: str, caplog: pytest.LogCaptureFixture) -> None:
    compiler, support = find_compiler()
    assert compiler is not None, str(support)
    caplog.set_level("INFO", "headway")
    for variant in variants(form, shape):
        assert variant.source.compile("sm_90a", compiler).startswith(b"\x7fELF")
    assert "serialized" not in caplog.text, "each product would wait for the one before it"


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
    assert [lot for lot in LOTS if suits(lot, tokens, PUBLISHED[shape][0])] == lots


def test_what_cannot_be_computed_is_refused_with_a_reason() -> None:
    told = str(computes_lots(ExpertsConfig(64, 30, 768), torch.device("cpu")))
    assert "device: needs a GPU of compute capability 9.0, got cpu" in told
    assert "experts of a token: needs up to 24, got 30" in told
