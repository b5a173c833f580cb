"""Names of cells that no kit has: a mistake of whoever typed them, not a finding about the backend."""

from __future__ import annotations

import pytest

from headway.core.contract.errors import HeadwayError
from headway.testing.cells import CheckCell
from headway.testing.checking import Wanted, check

PLAIN = CheckCell("answer", "decode", layout="nhd", block_size=8, head_dim=32, group=2)


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ("answer", "a check out of claims, process, serves"),
        ("decode", "a cell's name as `headway check` prints it"),
        ("nhd", "a layout out of nhd, hnd"),
        ("own", "a cell's name"),
        ("float32", "a cell's name"),
        ("none", "a cell's name"),
    ],
)
@pytest.mark.parametrize("in_process", [True, False])
def test_a_cell_that_cannot_be_is_no_finding(axis: str, words: str, in_process: bool) -> None:
    name = str(PLAIN)
    assert f":{axis}:" in f":{name}:"
    mistyped = ":".join("nosuch" if part == axis else part for part in name.split(":"))
    with pytest.raises(HeadwayError, match=f"--cell: needs {words}.*nosuch"):
        check(Wanted(target="sdpa.math", cell=mistyped, in_process=in_process))
