"""The readable reference split as a split-KV kernel splits: parts of the table walked apart and merged are the whole walk."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise, permutations

import pytest
import torch

from backend_cases import SPECS, spec
from headway.core.contract.layout import NHD, write_rows
from headway.core.oracle.cases import make_case, parse_case, reference
from online_softmax import merge, walk

BLOCK_SIZE = 8


@pytest.mark.parametrize("name", ["gqa 2", "window", "softcap", "alibi"])
@pytest.mark.parametrize("cuts", [(1,), (2, 4), (1, 2, 3, 4, 5)], ids=str)
def test_merged_parts_are_the_whole_in_any_order(name: str, cuts: tuple[int, ...]) -> None:
    case = make_case(parse_case("1q3s45"), SPECS[name], NHD, BLOCK_SIZE, write_rows, poison=float("nan"))
    blocks = case.metadata.block_table_cpu[0].tolist()
    bounds = [0, *cuts, len(blocks)]
    parts = [walk(case.q, blocks[first:last], 45, first, case.cache, case.spec) for first, last in pairwise(bounds)]
    expected = reference(case)
    for order in list(permutations(parts))[:6]:
        _, total, weighted = reduce(merge, order)
        assert torch.allclose((weighted / total).transpose(0, 1).double(), expected, atol=1e-5)


def test_a_part_that_sees_no_key_changes_nothing() -> None:
    """With a window the first blocks are hidden from every query: their state is m = -inf, and merging it makes no NaN."""
    case = make_case(parse_case("1q1s45"), spec(sliding_window=5), NHD, BLOCK_SIZE, write_rows)
    blocks = case.metadata.block_table_cpu[0].tolist()
    hidden = walk(case.q, blocks[:2], 45, 0, case.cache, case.spec)
    seen = walk(case.q, blocks[2:], 45, 2, case.cache, case.spec)
    assert hidden[0].isneginf().all()
    for merged, alone in zip(merge(hidden, seen), seen, strict=True):
        assert torch.equal(merged, alone)
