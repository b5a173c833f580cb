"""Runs the kernel tests under Triton's interpreter, which must be on before triton is imported: hence a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
AVAILABILITY = (
    "from headway.registry import create_registry; print(create_registry(load_entry_points=False).availability('triton'))"
)
FOLDER = Path(__file__).parent
INTERPRETED = ("test_interpreted.py", "test_chunks.py")


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(FOLDER / name) for name in INTERPRETED)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=environment, cwd=FOLDER.parents[2], capture_output=True, text=True, check=False)


def test_kernels_are_right_in_the_interpreter() -> None:
    done = run(TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counts = re.search(r"(\d+) passed", done.stdout)
    assert counts is not None, done.stdout
    assert int(counts[1]) > 100, done.stdout
    assert "skipped" not in done.stdout, done.stdout


def test_without_interpreter_and_gpu_the_reason_is_given() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", AVAILABILITY], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no: device: needs a CUDA GPU, got none (TRITON_INTERPRET=1"), done.stdout


def test_without_triton_the_reason_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", AVAILABILITY], env=environment, capture_output=True, text=True, check=True)
    assert "no triton here" in done.stdout
    assert "pip install 'headway[triton]'" in done.stdout
