"""Keys, queues, clocks and the end of a server: a server with small limits of its own for each."""

from __future__ import annotations

import itertools
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import httpx
import openai
import pytest
from openai import OpenAI

from headway import LLM
from headway.core.contract.errors import ConfigError
from headway.server import launch, protocol
from headway.server.options import ServerOptions, is_local
from server_thread import Running, raw, running

LONG = {"prompt": [3], "max_tokens": 200, "ignore_eos": True}
TEXT = "/v1/completions"


def test_api_key_is_required_if_set(llm: LLM) -> None:
    with running(llm, ServerOptions(api_key="secret")) as served, httpx.Client(base_url=served.url) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Basic secret"}):
            answer = http.get("/v1/models", headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert http.get("/docs").status_code == 401
        assert [http.get(path).status_code for path in ("/health", "/metrics")] == [200, 200]
        with pytest.raises(openai.AuthenticationError):
            OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0).models.list()
        assert OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0).models.list().data


def test_refusals_before_the_routes_are_counted_too(llm: LLM) -> None:
    options = ServerOptions(api_key="secret", max_connections=3, allowed_hosts=("127.0.0.1",))
    with running(llm, options) as served, httpx.Client(base_url=served.url, timeout=10) as http:
        refused = http.get("/v1/models")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert http.get("/v1/models", headers={"host": "elsewhere"}).status_code == 421
        with served.connect() as sock:
            sock.sendall(b"nonsense\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 400")
        with served.connect(), served.connect(), served.connect() as surplus:
            surplus.sendall(raw("GET", "/health"))
            assert surplus.recv(100).startswith(b"HTTP/1.1 503")
        found = dict(
            re.findall(r"^headway:requests_refused_total{.*status=\"(\d+)\"} (\S+)", http.get("/metrics").text, re.MULTILINE)
        )
        assert found == dict.fromkeys(("400", "401", "421", "503"), "1.0")


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e300, -1.0])
@pytest.mark.parametrize("name", ["request_timeout", "read_timeout", "write_timeout", "step_timeout", "shutdown_timeout"])
def test_a_time_that_no_clock_can_wait_for_is_refused(name: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: needs seconds"):
        ServerOptions(**{name: seconds})


def test_full_queue_answers_429_with_retry_after(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(llm, ServerOptions(max_queue=2)) as served, httpx.Client(base_url=served.url) as http:
        gate = threading.Event()
        step = llm.engine.step
        monkeypatch.setattr(llm.engine, "step", lambda: (gate.wait(10), step())[1])
        threads = [threading.Thread(target=http.post, args=(TEXT,), kwargs={"json": {"prompt": "a"}}) for _ in range(2)]
        for thread in threads:
            thread.start()
        while served.service.num_queued < 2:
            time.sleep(0.002)
        refused = http.post(TEXT, json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        gate.set()
        for thread in threads:
            thread.join()
        assert http.post(TEXT, json={"prompt": "a"}).status_code == 200


@pytest.mark.slow
def test_a_wall_clock_that_jumps_by_hours_moves_no_deadline_and_no_figure(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, real, jumps = llm.engine.step, time.time, itertools.cycle((0.0, 3e4, -5e4, 7e3, -1e4))
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.005), step())[1])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * (real() + next(jumps))))
    began = time.monotonic()
    with running(llm, ServerOptions(request_timeout=20.0)) as served, httpx.Client(base_url=served.url, timeout=60) as http:
        for streamed in (False, True, False):
            found = http.post(TEXT, json={**LONG, "max_tokens": 20, "stream": streamed})
            assert found.status_code == 200
            assert '"finish_reason":"length"' in found.text
        took, page = time.monotonic() - began, http.get("/metrics").text
        figures = {name: float(value) for name, value in re.findall(r"^(vllm:\w+)\{[^}]*\} (\S+)$", page, re.MULTILINE)}
        assert min(figures.values()) >= 0
        seconds = {name: value for name, value in figures.items() if name.endswith("_seconds_sum")}
        assert len(seconds) > 5
        assert max(seconds.values()) <= took
        assert seconds["vllm:e2e_request_latency_seconds_sum"] > 0.1
    with running(llm, ServerOptions(request_timeout=0.2)) as served, httpx.Client(base_url=served.url, timeout=60) as http:
        began = time.monotonic()
        assert http.post(TEXT, json=LONG).status_code == 504
        assert 0.2 <= time.monotonic() - began < 10


@pytest.mark.slow
def test_many_streams_that_nobody_reads_are_given_up_and_disturb_nobody(llm: LLM) -> None:
    with running(llm, ServerOptions(write_timeout=0.5)) as served:
        asked = {**LONG, "stream": True, "logprobs": 20, "n": 8, "max_tokens": 250}  # some 4 MB, more than a socket takes
        body = httpx.Request("POST", "http://x", json=asked).content
        connections, socks = served.server.server_state.connections, [served.connect() for _ in range(20)]
        try:
            for sock in socks:
                sock.sendall(raw("POST", TEXT, body))
            unread = [0]
            began = time.monotonic()
            while connections or not unread[-1]:
                assert time.monotonic() - began < 60
                kept = [each.transport.get_write_buffer_size() for each in list(connections)]  # type: ignore[union-attr]
                unread.append(max(*unread, *kept, 0))
                time.sleep(0.01)
            assert httpx.post(f"{served.url}{TEXT}", json={**LONG, "max_tokens": 3}, timeout=30).status_code == 200
        finally:
            for sock in socks:
                sock.close()
        assert unread[-1] < 2**20


def test_shutdown_lets_running_requests_end(llm: LLM) -> None:
    texts: list[str] = []
    with running(llm, ServerOptions(shutdown_timeout=20)) as served:
        ask = threading.Thread(target=lambda: texts.append(httpx.post(f"{served.url}{TEXT}", json=LONG, timeout=20).text))
        ask.start()
        while not served.llm.num_running:
            time.sleep(0.001)
        served.server.should_exit = True
        ask.join()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")
    assert '"completion_tokens":200' in texts[0]


def test_shutdown_drops_idle_connections_and_unread_answers(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER", 0.2)
    with running(llm, ServerOptions(shutdown_timeout=20)) as served:
        idle, half, unread = (served.connect() for _ in range(3))
        for sock in (idle, unread):
            sock.sendall(raw("GET", "/health"))
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        last = unread.getsockname()
        (answered,) = (each for each in served.server.server_state.connections if each.client == last)  # type: ignore[union-attr]
        answered.loop.call_soon_threadsafe(answered.transport.write, bytes(32 * 2**20))  # type: ignore[union-attr]
        half.sendall(raw("POST", TEXT).replace(b"content-length: 0", b"content-length: 50") + b'{"prompt"')
        while not served.server.server_state.tasks:
            time.sleep(0.002)
        began = time.monotonic()
        served.server.should_exit = True
        refused = half.recv(4096)
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"shutting down" in refused
        assert idle.recv(100) == b""
        half.close()
        while served.server.server_state.connections:
            time.sleep(0.01)
        assert time.monotonic() - began < 5
        unread.close()
        idle.close()


def stopped_under(served: Running, body: dict[str, object], has_come: Callable[[], object]) -> httpx.Response:
    """The answer to a request under which the server is told to stop, as soon as the request has come."""
    found: list[httpx.Response] = []
    ask = threading.Thread(target=lambda: found.append(httpx.post(f"{served.url}{TEXT}", json=body, timeout=30)))
    ask.start()
    while not has_come():
        time.sleep(0.001)
    served.server.should_exit = True
    ask.join()
    return found[0]


def test_shutdown_aborts_requests_after_the_timeout(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.05), step())[1])
    with running(llm, ServerOptions(shutdown_timeout=0.1)) as served:
        answer = stopped_under(served, LONG, lambda: served.llm.num_running)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
    said = [record.getMessage() for record in caplog.records]
    assert "shutting down: waiting up to 0.1 s for running requests: 1" in said
    assert "shutting down: aborting requests still running after 0.1 s (--shutdown-timeout): 1" in said


@pytest.mark.parametrize("stream", [False, True])
def test_shutdown_refuses_those_who_wait_for_a_paused_server(llm: LLM, stream: bool) -> None:
    began = time.monotonic()
    with running(llm, ServerOptions(shutdown_timeout=20, operator_paths=True)) as served:
        assert httpx.post(f"{served.url}/pause", params={"mode": "wait"}).status_code == 200
        answer = stopped_under(served, {**LONG, "stream": stream}, lambda: served.service.num_queued)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"] == "the server is shutting down"
    assert time.monotonic() - began < 15


def test_second_sigterm_ends_the_process_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []
    monkeypatch.setattr(launch.signal, "raise_signal", raised.append)
    before = signal.getsignal(signal.SIGTERM)
    with running(llm) as served:
        server = launch.Server(served.llm, ServerOptions())
        try:
            server.handle_exit(signal.SIGTERM, None)
            assert (server.should_exit, raised) == (True, [])
            server.handle_exit(signal.SIGTERM, None)
            assert (raised, signal.getsignal(signal.SIGTERM)) == ([signal.SIGTERM], signal.SIG_DFL)
        finally:
            signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_requests_that_uvicorn_cancels_log_no_traceback(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """As it does with requests that go on after the second Ctrl-C."""

    def ask(stream: bool) -> None:
        with suppress(httpx.HTTPError):
            httpx.post(f"{served.url}{TEXT}", json={**LONG, "n": 64, "stream": stream}, timeout=4)

    with running(llm) as served:
        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        while served.llm.num_unfinished_requests < 2:
            time.sleep(0.001)
        for task in list(served.server.server_state.tasks):
            task.get_loop().call_soon_threadsafe(task.cancel)
        served.wait_idle(2)  # 12,800 tokens take longer
        served.server.should_exit = True
        for thread in threads:
            thread.join()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_health_answers_503_for_a_dead_engine(llm: LLM) -> None:
    with running(llm) as served, httpx.Client(base_url=served.url) as http:
        served.llm.shutdown()
        for answer in (http.get("/health"), http.post(TEXT, json={"prompt": "a"}), http.get("/metrics")):
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable_error")


def test_only_loopback_addresses_are_local() -> None:
    assert [is_local(host) for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9")] == [True] * 4
    assert [is_local(host) for host in ("0.0.0.0", "::", "192.168.0.7", "example.org")] == [False] * 4


@pytest.mark.parametrize(("connection", "mib", "status"), [("keep-alive", 32, 413), ("close", 32, 413), ("close", 4, 401)])
def test_a_client_that_still_sends_hears_why_it_is_refused(llm: LLM, connection: str, mib: int, status: int) -> None:
    """With a body that is too long, and, as a proxy sends it, without a key."""
    size = mib * 2**20
    options = ServerOptions(api_key="secret" if status == 401 else None)
    with running(llm, options) as served, served.connect() as sock:
        sock.sendall(raw("POST", TEXT, connection=connection).replace(b"content-length: 0", b"content-length: %d" % size))
        time.sleep(0.1)  # the answer is there before the body
        sock.sendall(bytes(size))
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert (b'"code":"body_too_large"}}' in answer) == (status == 413)
