"""Names of cells that no kit has: a mistake of whoever typed them, not a finding about the backend."""

from __future__ import annotations

import pytest

from headway.core.contract.errors import HeadwayError
from headway.core.oracle.cells import CheckCell
from headway.testing.kit.checking import Wanted, check
from headway.testing.kit.kit import Kit

PLAIN = CheckCell("answer", "decode", layout="nhd", block_size=8, head_dim=32, group=2)


def mistyped(axis: str) -> str:
    name = str(PLAIN)
    assert f":{axis}:" in f":{name}:"
    return ":".join("nosuch" if part == axis else part for part in name.split(":"))


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
def test_a_cell_that_cannot_be_is_no_finding(axis: str, words: str) -> None:
    with pytest.raises(HeadwayError, match=f"--cell: needs {words}.*nosuch"):
        check(Wanted(target="sdpa.math", cell=mistyped(axis), in_process=True))


@pytest.mark.slow
def test_nor_is_one_in_a_process_of_its_own() -> None:
    with pytest.raises(HeadwayError, match="--cell: needs a layout out of nhd, hnd.*nosuch"):
        check(Wanted(target="sdpa.math", cell=mistyped("nhd")))


def test_of_one_cell_no_others_are_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which layers a backend accepts takes a second to find out."""
    monkeypatch.setattr(Kit, "cells", lambda *_: pytest.fail("all cells are listed"))
    report = check(Wanted(target="sdpa.math", cell=str(PLAIN), in_process=True))
    assert [(cell.cell, cell.status) for cell in report.cells] == [(str(PLAIN), "passed")]
