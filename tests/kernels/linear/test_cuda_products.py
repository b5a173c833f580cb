"""Products in CUDA C++, as far as no GPU is needed: what they take, how a weight is arranged, cuts, and that sources compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from absent_gpu import blocks_that_fit
from headway.core.contract.weights import Int4Weight, QuantizedWeight, WeightFormat
from headway.kernels.linear import cuda_products
from headway.kernels.linear.choice import BUILTIN, rule, spec_of
from headway.kernels.linear.cuda_products import W8A8Kernel, arranged, computes
from headway.kernels.linear.cuda_variant import (
    CudaTilingRule,
    CudaVariant,
    Float8Variant,
    few_rows_tiling,
    fitted,
    float8_tiling,
    float8_tiling_narrow,
    most_rows_of,
    shared_rows_tiling,
)
from headway.kernels.linear.forms import WeightBytes, weight_bytes
from headway.kernels.runtime.nvrtc.compiler import find_compiler
from quantized_weights import FORMS, float8, int4, int8

pytest.importorskip("triton")

BF16, FP16 = torch.bfloat16, torch.float16
CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHARED_BYTES, MULTIPROCESSORS = 227 * 1024, 132
"""Of a block of threads, and of an H200."""
READ = list(FORMS)


def weight_of(form: str, rows: int = 64, columns: int = 512) -> QuantizedWeight:
    return FORMS[form](torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)))


def variant_of(weight: QuantizedWeight, rows: int, gated: bool = False, heads: bool = False) -> CudaVariant:
    """As a launch makes it, with all that a product may have before and after it."""
    described, rule = weight_bytes(weight), few_rows_tiling if rows <= 16 else shared_rows_tiling
    assert described is not None
    scale_dtype = {"int4": FP16, "mxfp4": torch.uint8}.get(weight.kind, torch.float32)
    out, columns = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    tiling = rule(described, rows, out, gated, MULTIPROCESSORS)
    shape = described, scale_dtype, False, tiling, max(8 if tiling.splits else 1, most_rows_of(rows)), columns, out
    norm = None if tiling.splits else BF16
    turned = (out // 32 - 2, 1, 32) if heads and not tiling.splits else None
    activation = "silu" if gated else None
    return CudaVariant(BF16, *shape, norm, gated, activation, not gated, True, turned, torch.float32 if turned else None)


def shape_of(form: str, rows: int, columns: int) -> QuantizedWeight:
    """A weight without elements."""
    return WeightFormat.of(weight_of(form)).sample(rows, columns)  # type: ignore[return-value]


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_taken_or_refused_with_a_reason(form: str) -> None:
    assert computes(BF16, weight_of(form))
    assert not computes(torch.float32, weight_of(form))
    assert bool(computes(FP16, weight_of(form))) == (form != "mxfp4")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: weight_of("fp8 rows", rows=48), "shape: needs multiples of 32 x 128, got 48 x 512"),
        (lambda: weight_of("fp8 rows", columns=448), "shape: needs multiples of 32 x 128, got 64 x 448"),
        (lambda: float8(torch.randn(64, 512), (32, 32)), "scales: needs blocks of multiples of 16 rows and 64 columns"),
        (lambda: float8(torch.randn(64, 512), (8, 128)), "scales: needs blocks of multiples of 16 rows and 64 columns"),
        (lambda: int4(torch.randn(64, 512), 512, zeros=True), "zeros: needs of groups that are shorter than a row"),
    ],
)
def test_a_refusal_says_what_was_needed(make: Callable[[], QuantizedWeight], reason: str) -> None:
    assert reason in str(computes(BF16, make()))


def test_scales_of_neighbouring_rows_lie_side_by_side() -> None:
    weight = weight_of("int4 of 64 with zeros")
    assert isinstance(weight, Int4Weight)
    read = arranged(weight)
    for row, group in product((0, 5, 63), (0, 7)):
        assert read.scales[group, row] == weight.scales[row, group]
        assert read.zeros[group, row] == weight.zeros[row, group]


def test_one_scale_for_all_becomes_one_for_each_row() -> None:
    weight = float8(torch.randn(64, 512), (64, 512))
    read = arranged(weight)
    assert computes(BF16, weight)
    assert read.described.scale_rows == 1
    assert torch.equal(read.scales, weight.scales.view(-1).expand(64))


def test_one_group_a_row_is_multiplied_at_the_end_in_float32() -> None:
    weight = int4(torch.randn(64, 512), 512)
    read = arranged(weight)
    assert computes(BF16, weight)
    assert read.scales.dtype == torch.float32
    assert torch.equal(read.scales, weight.scales.view(-1).float())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 33, 64, 65, 200, 512])
@pytest.mark.parametrize("form", READ)
def test_cuts_fit_into_shared_memory_and_share_the_work(form: str, rows: int) -> None:
    for (out, columns), gated in product([(4096, 4096), (28672, 4096), (4096, 14336), (1024, 2048)], (False, True)):
        variant = variant_of(shape_of(form, out, columns), rows, gated)
        assert variant.shared_bytes <= SHARED_BYTES, variant
        assert variant.needed_bytes <= variant.shared_bytes
        if variant.tiling.alone:  # two of one launch do not fit on a multiprocessor, one does beside half of what others may take
            assert 2 * (variant.shared_bytes + 1024) > 228 * 1024
            assert variant.needed_bytes > 112 * 1024 or variant.shared_bytes + 112 * 1024 + 1024 <= 228 * 1024
        assert variant.tiling.stages >= 2
        assert not gated or variant.tiling.splits or variant.tiling.tiles % 2 == 0


def test_one_row_takes_sixteens_alone_where_pairs_are_uneven() -> None:
    tilings = {out: few_rows_tiling(weight_bytes(weight_of("fp8 rows", 16)), 1, out, False, 132) for out in (5120, 6144, 8192)}  # type: ignore[arg-type]
    assert {out: (tiling.tiles, tiling.kept) for out, tiling in tilings.items()} == {
        5120: (1, True),
        6144: (1, True),
        8192: (2, False),
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("capability", "room"), [("A100", 166_912), ("L40S", 101_376)])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
@pytest.mark.parametrize("form", READ)
def test_few_rows_fit_gpus_with_less_shared_memory(form: str, rows: int, capability: str, room: int) -> None:
    for (out, columns), gated in product([(4096, 4096), (28672, 4096), (4096, 14336)], (False, True)):
        variant = variant_of(shape_of(form, out, columns), rows, gated)
        tiling = fitted(variant.tiling, variant.weight, variant.most_rows, room)
        assert replace(variant, tiling=tiling).needed_bytes <= room, capability
        assert tiling.stages >= 2
        assert fitted(variant.tiling, variant.weight, variant.most_rows, SHARED_BYTES) == variant.tiling


@pytest.mark.slow
@pytest.mark.sampled(4, then="soak")
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("form", READ)
def test_sources_compile(form: str, rows: int, caplog: pytest.LogCaptureFixture) -> None:
    compiler, support = find_compiler()
    assert compiler is not None, str(support)
    caplog.set_level("INFO", "headway")
    for gated, heads in ((True, False), (False, True)):
        variant = variant_of(weight_of(form, 256, 1024), rows, gated, heads)
        compiled = variant.source.compile("sm_90a", compiler)
        assert compiled.startswith(b"\x7fELF")
        if variant.tiling.splits:  # few_rows has one block on a multiprocessor
            assert blocks_that_fit(compiled, variant.threads) >= int(variant.constants["RESIDENT"]), variant
    assert "serialized" not in caplog.text, "each product would wait for the one before it"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
def test_few_rows_compile_for_other_generations(arch: str) -> None:
    compiler, support = find_compiler()
    assert compiler is not None, str(support)
    assert variant_of(weight_of("int4 of 128", 256, 1024), 8, heads=True).source.compile(arch, compiler).startswith(b"\x7fELF")


BF16, CPU = torch.bfloat16, torch.device("cpu")
FLOAT8_SHARED_BYTES, RESERVED, MULTIPROCESSOR_BYTES, MULTIPROCESSORS = 227 * 1024, 2048, 228 * 1024, 132
"""Of a block of threads, of what each has besides, and of an H200."""
RULES = float8_tiling, float8_tiling_narrow
SHAPES = (28672, 4096), (4096, 14336), (6144, 4096), (5120, 5120), (1536, 768), (576, 7168), (64, 128)


def float8_variant(blocks: bool, rows: int, shape: tuple[int, int], gated: bool, tiling: CudaTilingRule) -> Float8Variant:
    """As a launch makes it, with all that a product may have before and after it. shape: of the weight."""
    out, columns = shape[0] // (2 if gated else 1), shape[1]
    span, high = (128, 128) if blocks and columns > 128 else (columns, 1)
    weight = WeightBytes("fp8", columns, 0, columns // span, span, high, False, 128)
    given = (
        weight,
        torch.float32,
        False,
        tiling(weight, rows, out, gated, MULTIPROCESSORS),
        max(8, most_rows_of(rows)),
        columns,
        out,
    )
    activation = "silu" if gated else None
    return Float8Variant(BF16, *given, BF16 if gated else None, gated, activation, not gated, True, None, None)


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 32, 33, 64, 65, 128, 130, 256])
@pytest.mark.parametrize("tiling", RULES)
def test_cuts_fit_into_a_multiprocessor_and_share_the_work(tiling: CudaTilingRule, rows: int) -> None:
    for shape, gated, blocks in product(SHAPES, (False, True), (False, True)):
        variant = float8_variant(blocks, rows, shape, gated, tiling)
        resident = int(variant.constants["RESIDENT"])
        assert variant.shared_bytes + RESERVED // 2 <= FLOAT8_SHARED_BYTES, variant
        assert resident * (variant.needed_bytes + RESERVED) <= MULTIPROCESSOR_BYTES, variant
        assert variant.tiling.stages >= 2
        assert variant.tile_rows <= 256, "a box of a tensor map has no more rows"
        clusters = -(-variant.out_features // variant.tile_rows) * -(-rows // variant.most_rows)
        assert variant.tiling.splits == 1 or clusters * variant.tiling.splits <= resident * MULTIPROCESSORS
        assert variant.tiling.alone == (clusters * variant.tiling.splits <= MULTIPROCESSORS) or rows in (65, 130), (
            "of whole powers of two"
        )


def test_large_weights_keep_every_multiprocessor_copying() -> None:
    """In flight in each: more than the memory delivers within its latency of 1.2 us, 32 KB a microsecond."""
    for (shape, gated), rows in product(zip(SHAPES[:2], (True, False), strict=True), (16, 32, 64, 128)):
        variant = float8_variant(False, rows, shape, gated, float8_tiling)
        blocks = -(-variant.out_features // variant.tile_rows) * variant.tiling.splits
        each = min(int(variant.constants["RESIDENT"]), blocks / MULTIPROCESSORS)
        weight = variant.tile_rows * (2 if gated else 1) * 128
        assert blocks >= 0.8 * MULTIPROCESSORS
        assert each * variant.tiling.stages * weight >= 44 * 1024, (variant.tiling, each)


@pytest.mark.slow
@pytest.mark.sampled(3, then="soak")
@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("blocks", [True, False])
def test_float8_sources_compile(blocks: bool, rows: int, caplog: pytest.LogCaptureFixture) -> None:
    compiler, support = find_compiler()
    assert compiler is not None, str(support)
    caplog.set_level("INFO", "headway")
    for gated, tiling in ((True, float8_tiling), (False, float8_tiling_narrow)):
        variant = float8_variant(blocks, rows, SHAPES[1], gated, tiling)
        compiled = variant.source.compile("sm_90a", compiler)
        assert blocks_that_fit(compiled, variant.threads) >= int(variant.constants["RESIDENT"]), variant
    assert "serialized" not in caplog.text, "each product would wait for the one before it"


def refusal(weight: QuantizedWeight, dtype: torch.dtype = BF16) -> str:
    return str(W8A8Kernel.supports(spec_of(weight, dtype, GPU)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: int8(torch.randn(64, 256)), "weight format: needs fp8, got int8"),
        (lambda: float8(torch.randn(48, 256)), "shape: needs multiples of 32 x 128, got 48 x 256"),
        (lambda: float8(torch.randn(64, 192)), "shape: needs multiples of 32 x 128, got 64 x 192"),
        (lambda: float8(torch.randn(64, 256), (32, 128)), "scales: needs one a row, one, or blocks of 128 x 128, got 32 x 128"),
    ],
)
def test_a_refusal_of_w8a8_says_what_was_needed(make: Callable[[], QuantizedWeight], reason: str) -> None:
    assert reason in refusal(make())


def test_it_takes_part_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [float8(torch.randn(64, 256), block) for block in (None, (64, 256), (128, 128))]
    assert "compute capability: needs 9.0, whose matrix units it multiplies by, got none" in refusal(weights[0])
    assert "dtype: needs bfloat16 or float16" in refusal(weights[0], torch.float32)
    monkeypatch.setattr(cuda_products, "capability", lambda _: (9, 0))
    for weight in weights:
        assert refusal(weight) == refusal(weight, torch.float16) == "yes"
    kernel = W8A8Kernel(spec_of(weights[0], BF16, CPU))
    assert kernel.runs(256)
    assert not kernel.runs(512)
    names = [each.name for each in BUILTIN]
    assert not any(rule(rows, names) == kernel.name for rows in (1, 16, 64, 256)), "nothing has measured it"
