"""Runs the kernel tests under Triton's interpreter, which must be on before triton is imported: hence a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
INTERPRETED = Path(__file__).parent / "test_interpreted.py"


def test_kernels_are_right_in_the_interpreter() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    done = subprocess.run(command, env=environment, cwd=INTERPRETED.parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counts = re.search(r"(\d+) passed", done.stdout)
    assert counts is not None, done.stdout
    assert int(counts[1]) > 30, done.stdout
    assert "skipped" not in done.stdout, done.stdout
