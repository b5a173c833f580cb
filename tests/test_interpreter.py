"""Starts the tests of kernels that need Triton's interpreter, which also cuts work for CUDA C++ that the host runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triton_interpreter import passed_in_the_interpreter

pytest.importorskip("triton")
KERNELS = [
    "backends/hopper/test_decode_interpreted.py",
    "backends/states/test_interpreted.py",
    "backends/triton/test_chunks.py backends/triton/test_guarded.py backends/triton/test_interpreted.py",
    "backends/triton/test_rules_interpreted.py",
    "kernels/all_reduce/test_interpreted.py",
    "kernels/experts/test_interpreted.py",
    "kernels/linear/test_interpreted.py kernels/linear/test_quantized_interpreted.py",
    "kernels/linear/test_ranked_interpreted.py",
    "kernels/lora/test_interpreted.py",
    "kernels/sampling/test_sampling.py",
]
RARE_ONLY, NEVER_RARE = "kernels/linear/test_ranked_interpreted.py", "kernels/all_reduce/test_interpreted.py"


def files(names: str) -> list[Path]:
    return [Path(__file__).parent / name for name in names.split()]


@pytest.mark.parametrize(
    ("names", "only"),
    [
        ("backends/triton/test_interpreted.py", "test_matches_float64 and gqa"),
        (KERNELS[6], "test_every_step_equals_the_plain_one and (head_dim or blocks)"),
    ],
)
def test_a_few_kernels_are_right_in_the_interpreter(names: str, only: str) -> None:
    assert passed_in_the_interpreter(*files(names), only=only) > 1


@pytest.mark.slow
@pytest.mark.parametrize("names", [names for names in KERNELS if names != RARE_ONLY])
def test_kernels_are_right_in_the_interpreter(names: str) -> None:
    assert passed_in_the_interpreter(*files(names)) > 1


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("names", [names for names in KERNELS if names != NEVER_RARE])
def test_the_rare_cases_are_right_in_the_interpreter(names: str) -> None:
    assert passed_in_the_interpreter(*files(names), marks="slow") > 1


AVAILABILITY = (
    "from headway.registry import create_registry; print(create_registry(load_entry_points=False).availability('triton'))"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("triton", "words"),
    [
        (None, "no: device: needs a CUDA GPU, got none (TRITON_INTERPRET=1"),
        ("raise ImportError('no triton here')\n", "no triton here"),
    ],
)
def test_without_interpreter_or_triton_the_reason_says_what_helps(tmp_path: Path, triton: str | None, words: str) -> None:
    if triton is not None:
        (tmp_path / "triton.py").write_text(triton)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", AVAILABILITY], env=environment, capture_output=True, text=True, check=True)
    assert words in done.stdout
    assert triton is None or "pip install 'headway[triton]'" in done.stdout
