"""`headway serve` under many clients at once, some of whom go away: its memory stays as it is."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from sandbox import save_tiny_model
from server_clients import ask_all, work


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
