"""Starts the tests of the state kernels under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_interpreter import passed_in_the_interpreter

pytest.importorskip("triton")
FILES = (Path(__file__).with_name("test_interpreted_states.py"),)


@pytest.mark.slow
def test_state_kernels_are_right_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(*FILES) > 12


@pytest.mark.slow
@pytest.mark.soak
def test_the_rare_cases_of_state_kernels_are_right_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(*FILES, marks="slow") > 12
