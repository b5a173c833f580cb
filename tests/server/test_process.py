"""`headway serve` as a process: with a stderr that nobody reads, until it is told to stop twice."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from sandbox import save_tiny_model

STDERR = {"full": "2>/dev/full", "a pipe that nobody reads": "2> >(exec true)"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), positions=8192)


@pytest.mark.slow
@pytest.mark.parametrize("stderr", STDERR.values(), ids=STDERR)
def test_server_starts_without_a_stderr_and_ends_at_the_second_sigterm(folder: Path, stderr: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = f"--port {port} --kv-cache-memory 8MiB --no-autotune --shutdown-timeout 60 --log-requests"
    command = f"exec {sys.executable} -m headway serve {folder} {options} {stderr}"
    process = subprocess.Popen(["bash", "-c", command], env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdin=subprocess.DEVNULL)
    try:
        ends = time.monotonic() + 60
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            while True:
                assert process.poll() is None, process.returncode
                assert time.monotonic() < ends
                try:
                    assert http.get("/health").status_code == 200
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            body = {"prompt": [3], "max_tokens": 8000, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                first = next(answer.iter_lines())
                assert json.loads(first.removeprefix("data: "))["choices"]
                process.send_signal(signal.SIGTERM)
                time.sleep(0.5)
                assert process.poll() is None  # the stream goes on
                process.send_signal(signal.SIGTERM)
                assert process.wait(2) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
