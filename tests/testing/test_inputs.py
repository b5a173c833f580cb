"""What no backend can refuse: names of cells with inputs, how they are dealt, and what the numbers of each regime are."""

from __future__ import annotations

import pytest
import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cells import KV_HEADS, PHASES, SCALES, SCORES, WORKS, CheckCell
from headway.core.oracle.inputs import Numbers, deal, possible, steps_of
from headway.core.oracle.oracle import attend
from headway.core.oracle.steps import first_far


@pytest.mark.parametrize(
    "cell",
    [
        CheckCell("answer", "decode", "nhd"),
        CheckCell("answer", "decode", "nhd", kv_heads=8, scores="low", work="many"),
        CheckCell("refuse", "extend", "hnd", about="dtype", scale="large"),
    ],
    ids=str,
)
def test_a_cells_name_says_every_input_that_is_not_plain(cell: CheckCell) -> None:
    assert CheckCell.parse(str(cell)) == cell
    assert ("=" in str(cell)) == (cell.scale != "odd" or cell.kv_heads != 2)


@pytest.mark.parametrize("odd", ["work=never", "kv_heads=0", "kv_heads=many", "colour=red", "work"])
def test_an_unknown_input_is_refused(odd: str) -> None:
    with pytest.raises(ConfigError, match="a cell's name as"):
        CheckCell.parse(f"{CheckCell('answer')}:{odd}")


def test_every_value_of_an_input_is_dealt_in_every_phase_that_has_it() -> None:
    dims, dtypes = (64, 80, 128), ("float32", "bfloat16")
    plain = [CheckCell("answer", phase, "nhd", head_dim=dim, dtype=dtype) for phase in PHASES for dim in dims for dtype in dtypes]
    dealt = deal(plain * 3)
    assert [(cell.phase, cell.head_dim, cell.dtype) for cell in dealt] == [
        (cell.phase, cell.head_dim, cell.dtype) for cell in plain * 3
    ]
    assert all(map(possible, dealt))
    for phase in PHASES:
        mine = [cell for cell in dealt if cell.phase == phase]
        assert {cell.scale for cell in mine} == set(SCALES)
        assert {cell.scores for cell in mine} == set(SCORES)
        assert {cell.work for cell in mine} == {work for work in WORKS if steps_of(work, phase, 16)}
        assert {cell.kv_heads for cell in mine} >= set(KV_HEADS[:4])


RANGES = {"normal": (-12, 12), "high": (190, 210), "low": (-210, -190), "equal": (0, 0)}


@pytest.mark.parametrize("scale", [0.03, 1.0, 4.0])
@pytest.mark.parametrize("scores", RANGES)
def test_the_scores_of_a_regime_are_where_it_says_whatever_the_scale(scores: str, scale: float) -> None:
    lowest, highest = RANGES[scores]
    spec = AttentionSpec(4, 2, 64, scale, torch.float32, torch.device("cpu"))
    numbers = Numbers(spec, scores, torch.Generator().manual_seed(3))
    q = numbers.queries(5, 4, 64)
    k, _ = numbers.rows(torch.arange(40))
    found = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * scale
    assert float(found.min()) >= lowest
    assert float(found.max()) <= highest


def test_far_blocks_have_numbers_beyond_16_bits_where_addresses_cost_nothing() -> None:
    usual = AttentionSpec(8, 2, 64, 0.1, torch.float32, torch.device("cpu"))
    assert first_far(usual, 16) == 1 << 15
    assert first_far(usual, 256) == 1 << 15
    wide = AttentionSpec(64, 32, 256, 0.1, torch.float32, torch.device("cpu"))
    assert 1 << 15 <= first_far(wide, 256) * 256 < 1 << 23  # of slots alone


def test_some_rows_of_an_fp8_cache_are_beyond_its_range() -> None:
    kv_dtype = {"kv_dtype": torch.float8_e4m3fn, "k_scale": 0.02, "v_scale": 0.05}
    spec = AttentionSpec(4, 2, 64, 0.1, torch.float32, torch.device("cpu"), **kv_dtype)
    k, v = Numbers(spec, "normal", torch.Generator().manual_seed(1)).rows(torch.arange(40))
    for rows, scale in ((k, 0.02), (v, 0.05)):
        beyond = (rows.abs() > 448 * scale).any(-1).any(-1)
        assert 0 < int(beyond.sum()) < len(rows) / 2


def test_one_dominant_key_has_the_answer_for_itself() -> None:
    spec = AttentionSpec(2, 1, 64, 0.1, torch.float32, torch.device("cpu"))
    numbers = Numbers(spec, "dominant", torch.Generator().manual_seed(1))
    q, (k, v) = numbers.queries(1, 2, 64), numbers.rows(torch.arange(50))
    out, _ = attend(spec, q, k.double(), v.double(), 49)
    assert float((out - v[7].double()).abs().max()) < 1e-6
