"""Many clients of a server's process, most of whom leave in some way: no answer is another's, and every block comes back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import client_load
from sandbox import save_tiny_model


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_clients_who_leave_in_every_way_leave_nothing_behind(tmp_path: Path) -> None:
    """`python tests/support/servers/client_load.py MODEL --clients 500 --device cuda` does the same on a GPU."""
    model = save_tiny_model(tmp_path / "model")
    command = [sys.executable, client_load.__file__, str(model), "--clients", "60", "--requests", "12", "--device", "cpu"]
    options = ("--kv-cache-memory", "192KiB", "--num-threads", "1", "--no-autotune")  # 48 blocks: sequences push each other out
    done = subprocess.run(
        [*command, "--", *options], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=800
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    line = r"60 clients: 720 requests, (\d+) aborted, 0 wrong answers, 0 blocks left, 0 tracebacks, [\d.]+ s\n"
    found = re.fullmatch(line, done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) > 200
