"""Starts the tests of the adapters' kernels under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_interpreter import passed_in_the_interpreter

pytest.importorskip("triton")
FILE = Path(__file__).with_name("test_interpreted.py")


@pytest.mark.slow
def test_kernels_are_right_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(FILE) >= 6


@pytest.mark.slow
def test_the_rare_cases_are_right_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(FILE, marks="slow") >= 6
