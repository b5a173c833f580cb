"""Runs test files in a child process with Triton's interpreter, which must be enabled before triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
"""Devices of tests that run on a GPU, and on the CPU only in the interpreter."""


def passed_in_the_interpreter(*files: Path, marks: str = "not slow", only: str = "") -> int:
    """Run those tests of the files that `marks` (pytest's -m) and `only` (its -k) select; returns how many passed.

    None may fail or be skipped.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", f"not gpu and ({marks})", "-k", only]
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout
    counts = re.search(r"(\d+) passed", done.stdout)
    assert counts is not None, done.stdout
    return int(counts[1])
