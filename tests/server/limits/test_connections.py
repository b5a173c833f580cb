"""Crowds of connections, and clients that take their time: everybody is answered, and nothing of them is left."""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import connection_crowd as crowd
from headway import LLM
from headway.server.launch import most_connections
from headway.server.options import ServerOptions
from server_thread import Running, raw, running

TEXT = "/v1/completions"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.01)


def crowded(served: Running, count: int, idle: int) -> dict[str, Any]:
    """What became of a crowd, after which the server has to be as it was."""
    before = open_files()
    command = [sys.executable, crowd.__file__, *map(str, (served.server.port, count, idle))]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=280).stdout)
    served.wait_idle(30)
    wait_until(lambda: not served.server.server_state.connections and open_files() <= before, 10)
    assert not served.server.server_state.tasks
    return found


@pytest.mark.parametrize(
    "count", [300, pytest.param(3_000, marks=pytest.mark.slow), pytest.param(10_000, marks=(pytest.mark.slow, pytest.mark.soak))]
)
def test_crowd_of_requests_is_answered_and_nothing_is_left(llm: LLM, count: int) -> None:
    count = min(count, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 1000)  # the clients are a process of their own
    with running(llm, ServerOptions(max_connections=2 * count, max_queue=max(count // 4, 100))) as served:
        crowded(served, 50, 5)
        gc.collect()
        memory = psutil.Process().memory_info().rss
        found = crowded(served, count, count // 10)
        assert found["statuses"].keys() <= {"200", "429"}, found["statuses"]
        assert sum(found["statuses"].values()) == count - count // 10
        assert (found["statuses"]["200"] >= count // 4, found["odd"]) == (True, 0)
        if count > 1000:
            again = crowded(served, count, count // 10)
            first = psutil.Process().memory_info().rss - memory
            assert again["odd"] == 0
            health = sorted(found["health"])
            told = f"{len(health)} probes of health, half within {health[len(health) // 2]:.4f} s, the slowest {health[-1]:.2f} s"
            print(found["statuses"], again["statuses"], told, f"{first / 2**20:.0f} MiB")
        assert max(found["health"]) < (2 if count <= 1000 else 10)
        assert httpx.get(f"{served.url}/health").status_code == 200


def test_surplus_connections_are_answered_503_and_not_reset(llm: LLM) -> None:
    with running(llm, ServerOptions(max_connections=40)) as served:
        found = crowded(served, 120, 30)
        assert found["statuses"].keys() <= {"200", "503"}
        assert (found["statuses"]["503"] >= 40, found["odd"]) == (True, 0)


def test_file_descriptors_are_kept_for_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.server.launch.most_connections", lambda: 10)
    with running(llm, ServerOptions(max_connections=1000)) as served:
        socks = [served.connect() for _ in range(10)]
        wait_until(lambda: len(served.server.server_state.connections) == 10, 5)
        with served.connect() as surplus, suppress(ConnectionResetError):
            assert surplus.recv(1) == b""
        for sock in socks:
            sock.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < most_connections() < soft <= hard
    used = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 40, used + 40))
    assert 15 <= most_connections() <= 25, "a system that allows few files still lets several clients in"


@pytest.fixture(scope="module")
def impatient(llm: LLM) -> Iterator[Running]:
    with running(llm, ServerOptions(read_timeout=0.15)) as found:
        yield found


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
DRIPS = {
    "a head": (b"", HEAD),
    "a body": (raw("POST", TEXT).replace(b"content-length: 0", b"content-length: 5000"), b" " * 500),
    "a body that nobody wants": (raw("GET", "/health").replace(b"content-length: 0", b"content-length: 5000"), b" " * 500),
    "a body of a path that is not there": (raw("POST", "/x").replace(b"content-length: 0", b"content-length: 5000"), b" " * 500),
    "empty lines after an answer": (raw("GET", "/health"), b"\r\n" * 250),
}


@pytest.mark.parametrize(("first", "drip"), DRIPS.values(), ids=DRIPS)
def test_slow_sender_is_closed(impatient: Running, first: bytes, drip: bytes) -> None:
    with impatient.connect() as sock:
        sock.sendall(first)
        sock.setblocking(False)
        started, closed = time.monotonic(), False
        for byte in drip:
            try:
                sock.send(bytes((byte,)))
                closed = sock.recv(65536) == b""
            except BlockingIOError:
                pass
            except OSError:
                closed = True
            if closed:
                break
            time.sleep(0.02)
        assert closed
        assert time.monotonic() - started < 5


def test_pipelining_client_that_never_reads_is_closed(llm: LLM) -> None:
    """A request behind one whose answer is not read does not give its client more time."""
    asked = {"prompt": [3], "max_tokens": 240, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 20}
    request = raw("POST", TEXT, json.dumps(asked).encode())
    with running(llm, ServerOptions(write_timeout=0.5)) as served, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", served.server.port))
        connections = served.server.server_state.connections
        wait_until(lambda: len(connections) == 1, 5)
        for each in connections:  # else the system would take all of the answer
            each.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # type: ignore[union-attr]
        sock.sendall(request)
        wait_until(lambda: any(each.flow.write_paused for each in connections), 20)
        sock.sendall(request)
        wait_until(lambda: not connections, 10)
