"""Starts the tests of the fused operations under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_interpreter import passed_in_the_interpreter

pytest.importorskip("triton")
NAMES = ("test_interpreted.py", "test_latent_interpreted.py", "test_quantized_interpreted.py", "test_ranked_interpreted.py")
FILES = tuple(map(Path(__file__).with_name, NAMES))


def test_a_few_kernels_are_right_in_the_interpreter() -> None:
    few = "test_every_step_equals_the_plain_one and (head_dim or blocks)"
    assert passed_in_the_interpreter(*FILES[::2], only=few) > 1


@pytest.mark.slow
def test_kernels_are_right_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(*FILES) > 12


@pytest.mark.slow
@pytest.mark.soak
def test_the_rare_cases_are_right_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(*FILES, marks="slow") > 30
