"""Starts the tests of our all-reduce under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_interpreter import passed_in_the_interpreter

pytest.importorskip("triton")


@pytest.mark.slow
def test_the_sum_is_right_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(Path(__file__).with_name("test_interpreted.py")) == 2
