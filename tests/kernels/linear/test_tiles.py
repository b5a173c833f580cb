"""How products are cut into tiles: numbers only, no kernel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

try:
    from headway.kernels.linear.tile_kernels import ProductTiling, invariant_tiling, swapped_tiling_for, tiling_for
except RuntimeError as error:  # pragma: no cover - an old GPU driver
    pytest.skip(str(error), allow_module_level=True)

H200 = 132


@pytest.mark.parametrize(
    ("rows", "shape", "tiling"),
    [
        (17, (4096, 1024), ProductTiling(32, 1, 128, 5)),
        (64, (3072, 1024), ProductTiling(32, 1, 128, 5)),
        (64, (1024, 2048), ProductTiling(32, 4, 64, 5)),
        (64, (1024, 3072), ProductTiling(32, 3, 64, 5)),
        (128, (4096, 1024), ProductTiling(64, 1, 128, 3)),
        (128, (1024, 3072), ProductTiling(32, 2, 64, 5)),
        (64, (4000, 1024), ProductTiling(32, 1, 128, 5)),
        (64, (4010, 1024), None),
        (64, (4096, 1000), None),
    ],
)
def test_the_cuts_that_were_measured(rows: int, shape: tuple[int, int], tiling: ProductTiling | None) -> None:
    assert tiling_for(rows, *shape, H200) == tiling


@given(st.integers(1, 128), st.integers(1, 200), st.integers(1, 100), st.integers(1, 200))
def test_tiles_cover_the_product_exactly(rows: int, n: int, k: int, multiprocessors: int) -> None:
    tiling = tiling_for(rows, 16 * n, 32 * k, multiprocessors)
    if tiling is not None:
        assert 16 * n % tiling.block_n == 0
        assert 32 * k % (tiling.splits * tiling.block_k) == 0


@pytest.mark.parametrize(
    ("rows", "shape", "tiling"),
    [
        (16, (5120, 2880), (3, 240)),
        (9, (2880, 4096), (4, 180)),
        (16, (4096, 4096), (2, 128)),
        (16, (8192, 2048), (1, 128)),
        (17, (5120, 2880), None),
        (16, (5130, 2880), None),
        (16, (5120, 2890), None),
    ],
)
def test_tiles_of_the_weights_rows_fill_the_gpu(rows: int, shape: tuple[int, int], tiling: tuple[int, int] | None) -> None:
    found = swapped_tiling_for(rows, *shape, H200)
    assert (found and (found.splits, shape[0] // found.block_n * found.splits)) == tiling


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000), st.booleans(), st.integers(1, 200))
def test_segments_depend_on_the_weight_alone(rows: int, out: int, columns: int, gated: bool, multiprocessors: int) -> None:
    one, many = (invariant_tiling(count, out, columns, gated, multiprocessors, 100_000) for count in (1, rows))
    assert one.segments == many.segments
    assert many.splits in (1, many.segments)
    assert many.segments == 1 or columns % (many.segments * many.block_k) == 0
    assert many.stages * 2 * many.block_k * (many.block_m + many.block_n * (2 if gated else 1)) <= 100_000 or many.stages == 2
