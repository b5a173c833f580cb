"""`headway serve` as a process, and what a server leaves behind when it has ended or its clients have gone."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from weakref import ref

import httpx
import psutil
import pytest

from headway import LLM
from sandbox import save_tiny_model
from server_clients import ask_all, work
from server_thread import Running, running

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
                lines = answer.iter_lines()  # an iterator that nobody holds closes the connection
                assert json.loads(next(lines).removeprefix("data: "))["choices"]
                process.send_signal(signal.SIGTERM)
                time.sleep(0.5)
                assert process.poll() is None  # the stream goes on
                process.send_signal(signal.SIGTERM)
                assert process.wait(2) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_stopped_server_frees_the_engine(tiny_model_folder: Path) -> None:
    llm = LLM(str(tiny_model_folder), kv_cache_memory="1MiB", num_threads=1)
    with running(llm) as served:
        assert httpx.get(f"{served.url}/v1/models", timeout=30).status_code == 200
    engine = ref(llm.engine)
    del llm, served
    gc.collect()
    assert engine() is None


@pytest.mark.slow
def test_forms_whose_clients_have_left_delay_nobody(everyday: Running) -> None:
    pytest.importorskip("llguidance")
    rules = "\n".join(f'r{number} ::= "x" r{number + 1} | "y"' for number in range(4000))  # seconds of a trial each
    for number in range(6):
        grammar = f'root ::= r{number}\n{rules}\nr4000 ::= "a"'
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{everyday.url}/v1/completions", json=asking(grammar=grammar), timeout=0.2)
    for wanted in (asking(regex="[ab]{3}"), asking(choice=[f"answer {number}" for number in range(1000)])):
        began = time.monotonic()
        assert httpx.post(f"{everyday.url}/v1/completions", json=wanted, timeout=30).status_code == 200
        assert time.monotonic() - began < 5
    everyday.wait_idle()


def asking(**form: object) -> dict[str, object]:
    return {"prompt": "a", "max_tokens": 4, "structured_outputs": form}


@pytest.mark.slow
@pytest.mark.soak
def test_serve_command_keeps_its_memory_and_stops_on_a_signal(tmp_path: Path) -> None:
    """HEADWAY_SOAK_SECONDS=300 is the long form."""
    seconds = float(os.environ.get("HEADWAY_SOAK_SECONDS", "40"))
    folder = save_tiny_model(tmp_path / "model", chat=True)
    options = ("--port", "0", "--num-threads", "1", "--kv-cache-memory", "8MiB", "--no-autotune")
    command = [sys.executable, "-m", "headway", "serve", str(folder), *options]
    log = (tmp_path / "log").open("w+")
    with subprocess.Popen(command, stderr=log, env={**os.environ, "COLUMNS": "300"}) as process:
        try:
            ends = time.monotonic() + 120
            while not (url := re.search(r"listening on (http://127\.0\.0\.1:\d+)", (tmp_path / "log").read_text())):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < ends
                time.sleep(0.1)
            server, sizes, rounds = psutil.Process(process.pid), [], 0
            ends = time.monotonic() + seconds
            while time.monotonic() < ends or rounds < 6:
                asyncio.run(ask_all(url[1], *work(300, rounds), rounds))
                rounds += 1
                sizes.append(sum(each.memory_info().rss for each in (server, *server.children())) / 2**20)
            half = len(sizes) // 2
            print(f"{rounds} rounds of 300 requests; MiB after each: {[round(size) for size in sizes]}")
            assert max(sizes[half:]) < max(sizes[:half]) * (1.02 if seconds >= 300 else 1.06), sizes
            page = httpx.get(f"{url[1]}/metrics").text
            for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                assert re.search(rf"vllm:{gauge}\{{.*\}} 0.0", page), gauge
            process.send_signal(signal.SIGTERM)
            process.wait(20)
        finally:
            process.kill()
            log.close()
