"""The support matrix is made from the kit's result files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.core.contract.errors import ConfigError
from headway.core.system.provenance import Origin
from headway.testing.kit.report import CellResult, CheckReport, machine_of, read_check
from support_matrix import BEGIN, END, render, replace_in

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = sorted(ROOT.glob("bench/results/*/check-*.json"))


def cell(status: str, check: str = "answer", about: str = "-", **axes: object) -> CellResult:
    reason = "" if status == "passed" else "because"
    return CellResult(cell=f"{check}:{about}", check=check, status=status, reason=reason, block_size=16, **axes)


def test_a_value_is_right_wrong_or_refused() -> None:
    cells = [cell("passed", phase="decode"), cell("passed", phase="decode"), cell("failed", phase="extend")]
    cells += [cell("passed", "refuse", "phase", phase="prefill")]
    machine = machine_of(torch.device("cpu"))
    report = CheckReport(
        target="x", subject="x", origin=Origin(version="1", commit="abc"), date="2026", quick=False, machine=machine, cells=cells
    )
    text = render([report])
    assert "| `x` | ✗ | ⚠ 1/1 | ✓ 2 | – | – | – |" in text
    assert "with Headway 1 at commit abc." in text


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(ConfigError, match="a document with one"):
        replace_in("nothing", "matrix")
    assert replace_in(f"a {BEGIN} b {END} c", "new") == f"a {BEGIN}\n\nnew\n\n{END} c"


def test_the_matrix_in_the_docs_is_that_of_the_result_files() -> None:
    text = (ROOT / "docs" / "backends.md").read_text()
    assert RESULTS
    assert text == replace_in(text, render(map(read_check, RESULTS))), (
        f"run: python docs/_tools/support_matrix.py {' '.join(map(str, RESULTS))} --docs docs/backends.md"
    )


def test_no_built_in_is_blamed() -> None:
    assert not [failed for path in RESULTS for failed in read_check(path).failed]
