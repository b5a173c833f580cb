"""Starts the tests of the sampling kernels under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_interpreter import passed_in_the_interpreter

pytest.importorskip("triton")
FILES = tuple(Path(__file__).with_name(name) for name in ("test_draw.py", "test_part.py", "test_top_k_top_p.py"))


@pytest.mark.slow
def test_kernels_are_right_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(*FILES) > 6


@pytest.mark.slow
@pytest.mark.soak
def test_the_rare_cases_are_right_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(*FILES, marks="slow") > 15
