"""Starts the tests of the kernels under Triton's interpreter; what is said where they cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triton_interpreter import passed_in_the_interpreter

pytest.importorskip("triton")
AVAILABILITY = (
    "from headway.registry import create_registry; print(create_registry(load_entry_points=False).availability('triton'))"
)
FILES = tuple(Path(__file__).with_name(name) for name in ("test_interpreted.py", "test_chunks.py", "test_guarded.py"))


def test_a_few_kernels_are_right_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(FILES[0], only="(test_matches_float64 and gqa) or (test_int8_cache and plain)") > 6


@pytest.mark.slow
def test_kernels_are_right_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(*FILES) > 50


@pytest.mark.slow
@pytest.mark.soak
def test_the_rare_cases_are_right_in_the_interpreter() -> None:
    assert passed_in_the_interpreter(*FILES, marks="slow") > 80


@pytest.mark.slow
def test_without_interpreter_and_gpu_the_reason_is_given() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", AVAILABILITY], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no: device: needs a CUDA GPU, got none (TRITON_INTERPRET=1"), done.stdout


@pytest.mark.slow
def test_without_triton_the_reason_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", AVAILABILITY], env=environment, capture_output=True, text=True, check=True)
    assert "no triton here" in done.stdout
    assert "pip install 'headway[triton]'" in done.stdout
