"""The way `w8a8`, as far as no GPU is needed: what it takes, cuts, and that its sources compile."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from cubin_registers import blocks_that_fit
from headway.kernels.linear import quantized_ways
from headway.kernels.linear.cuda_variant import CudaCutRule, Float8Variant, float8_cut, float8_cut_narrow, most_rows_of
from headway.kernels.linear.forms import QuantizedWeight, WeightBytes
from headway.kernels.linear.linear import Linear
from headway.kernels.linear.quantized_choice import FLOAT8, rule
from headway.kernels.linear.quantized_ways import QuantizedWays
from headway.kernels.runtime.nvrtc.compiler import find_compiler
from quantized_weights import float8, int8

BF16, CPU = torch.bfloat16, torch.device("cpu")
SHARED_BYTES, RESERVED, MULTIPROCESSOR_BYTES, MULTIPROCESSORS = 227 * 1024, 2048, 228 * 1024, 132
"""Of a block of threads, of what each has besides, and of an H200."""
RULES = float8_cut, float8_cut_narrow
SHAPES = (28672, 4096), (4096, 14336), (6144, 4096), (5120, 5120), (1536, 768), (576, 7168), (64, 128)


def variant_of(blocks: bool, rows: int, shape: tuple[int, int], gated: bool, cut: CudaCutRule) -> Float8Variant:
    """As a launch makes it, with all that a product may have before and after it. shape: of the weight."""
    out, columns = shape[0] // (2 if gated else 1), shape[1]
    span, high = (128, 128) if blocks and columns > 128 else (columns, 1)
    weight = WeightBytes("fp8", columns, 0, columns // span, span, high, False, 128)
    given = weight, torch.float32, False, cut(weight, rows, out, gated, MULTIPROCESSORS), max(8, most_rows_of(rows)), columns, out
    activation = "silu" if gated else None
    return Float8Variant(BF16, *given, BF16 if gated else None, gated, activation, not gated, True, None, None)


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 32, 33, 64, 65, 128, 130, 256])
@pytest.mark.parametrize("cut", RULES)
def test_cuts_fit_into_a_multiprocessor_and_share_the_work(cut: CudaCutRule, rows: int) -> None:
    for shape, gated, blocks in product(SHAPES, (False, True), (False, True)):
        variant = variant_of(blocks, rows, shape, gated, cut)
        resident = int(variant.constants["RESIDENT"])
        assert variant.shared_bytes + RESERVED // 2 <= SHARED_BYTES, variant
        assert resident * (variant.needed_bytes + RESERVED) <= MULTIPROCESSOR_BYTES, variant
        assert variant.cut.stages >= 2
        assert variant.tile_rows <= 256, "a box of a tensor map has no more rows"
        clusters = -(-variant.out_features // variant.tile_rows) * -(-rows // variant.most_rows)
        assert variant.cut.splits == 1 or clusters * variant.cut.splits <= resident * MULTIPROCESSORS
        assert variant.cut.alone == (clusters * variant.cut.splits <= MULTIPROCESSORS) or rows in (65, 130), (
            "of whole powers of two"
        )


def test_large_weights_keep_every_multiprocessor_copying() -> None:
    """In flight in each: more than the memory delivers within its latency of 1.2 us, 32 KB a microsecond."""
    for (shape, gated), rows in product(zip(SHAPES[:2], (True, False), strict=True), (16, 32, 64, 128)):
        variant = variant_of(False, rows, shape, gated, float8_cut)
        blocks = -(-variant.out_features // variant.tile_rows) * variant.cut.splits
        each = min(int(variant.constants["RESIDENT"]), blocks / MULTIPROCESSORS)
        weight = variant.tile_rows * (2 if gated else 1) * 128
        assert blocks >= 0.8 * MULTIPROCESSORS
        assert each * variant.cut.stages * weight >= 44 * 1024, (variant.cut, each)


@pytest.mark.parametrize("rows", [16, 128, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (8, 32, 64))])
@pytest.mark.parametrize("blocks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sources_compile(blocks: bool, rows: int, caplog: pytest.LogCaptureFixture) -> None:
    compiler, support = find_compiler()
    assert compiler is not None, str(support)
    caplog.set_level("INFO", "headway")
    for gated, cut in ((True, float8_cut), (False, float8_cut_narrow)):
        variant = variant_of(blocks, rows, SHAPES[1], gated, cut)
        compiled = variant.source.compile("sm_90a", compiler)
        assert blocks_that_fit(compiled, variant.threads) >= int(variant.constants["RESIDENT"]), variant
    assert "serialized" not in caplog.text, "each product would wait for the one before it"


def refusal(weight: QuantizedWeight, dtype: torch.dtype = BF16) -> str:
    return str(QuantizedWays(CPU).ways[FLOAT8].takes(dtype, weight))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: int8(torch.randn(64, 256)), "form: needs floats of 8 bits, got int8"),
        (lambda: float8(torch.randn(48, 256)), "shape: needs multiples of 32 x 128, got 48 x 256"),
        (lambda: float8(torch.randn(64, 192)), "shape: needs multiples of 32 x 128, got 64 x 192"),
        (lambda: float8(torch.randn(64, 256), (32, 128)), "scales: needs one a row, one, or blocks of 128 x 128, got 32 x 128"),
    ],
)
def test_a_refusal_says_what_was_needed(make: Callable[[], QuantizedWeight], reason: str) -> None:
    assert reason in refusal(make())


def test_it_takes_part_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [float8(torch.randn(64, 256), block) for block in (None, (64, 256), (128, 128))]
    assert "compute capability: needs 9.0, whose matrix units it multiplies by, got none" in refusal(weights[0])
    assert "dtype: needs bfloat16 or float16" in refusal(weights[0], torch.float32)
    monkeypatch.setattr(quantized_ways, "capability", lambda _: (9, 0))
    for weight in weights:
        assert refusal(weight) == refusal(weight, torch.float16) == "yes"
    kind = QuantizedWays(CPU).kind(Linear(weights[0], dtype=BF16, kept=True), BF16)
    assert kind is not None
    assert FLOAT8 in kind.able(256)
    assert FLOAT8 not in kind.able(257)
    assert not any(rule(rows, [*kind.ways]).startswith(FLOAT8) for rows in (1, 16, 64, 256)), "nothing has measured it"
