"""Crowds of connections, pipelines, slow clients and foreign pages: everybody is answered, and nothing of them is left."""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPResponse
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import connection_crowd as crowd
from headway import LLM
from headway.core.contract.errors import ConfigError
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


GARBAGE = b"\x00\x01 this is no HTTP\r\n\r\n"


@pytest.fixture(scope="module")
def pipelined(llm: LLM) -> Iterator[Running]:
    with running(llm, ServerOptions(read_timeout=0.3)) as found:
        yield found


def ask(tokens: int, stream: bool = True, **more: object) -> bytes:
    body = {"prompt": [3], "max_tokens": tokens, "ignore_eos": True, "stream": stream, **more}
    return raw("POST", TEXT, json.dumps(body).encode())


def answers_to(served: Running, *parts: bytes, pause: float = 0.0, sends_on: bool = True) -> list[tuple[int, bytes]]:
    """The statuses and bodies of all answers of a connection on which these bytes are sent, until the server closes it.

    sends_on: False: the client closes its sending side behind them.
    """
    with served.connect() as sock:
        for part in parts:
            sock.sendall(part)
            time.sleep(pause)
        if not sends_on:
            sock.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: sock.recv(65536), b""))
    return list(parsed(received))


def parsed(received: bytes) -> Iterator[tuple[int, bytes]]:
    file = BytesIO(received)
    file.close = lambda: None  # type: ignore[method-assign]  # which HTTPResponse does after each answer

    class Connection:
        def makefile(self, *_: Any) -> BytesIO:
            return file

    while file.tell() < len(received):
        answer = HTTPResponse(Connection())  # type: ignore[arg-type]
        answer.begin()
        yield answer.status, answer.read()


def tokens_of(body: bytes) -> int:
    """Number of tokens of a stream that ended as streams do."""
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return sum(len(json.loads(each[6:])["choices"][0].get("token_ids", ())) for each in events[:-2])


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("wish", ["h2c", "websocket", "TLS/1.0"])
def test_a_request_that_would_rather_speak_another_protocol_keeps_its_body(
    pipelined: Running, wish: str, parts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Java's HTTP client asks for HTTP/2 in every request; a server that does not speak it answers in HTTP/1.1."""
    body = json.dumps({"prompt": [3], "max_tokens": 4, "ignore_eos": True}).encode()
    wished = raw(
        "POST", TEXT, body, connection="Upgrade, HTTP2-Settings", upgrade=wish, http2_settings="AAMAAABkAAQAoAAAAAIAAAAA"
    )
    chunked = wished.replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked")
    chunked = chunked.replace(body, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    last = raw("GET", "/health", connection="close")
    sent = wished + chunked + ask(2, return_token_ids=True) + last
    size = -(-len(sent) // parts)
    found = answers_to(pipelined, *(sent[start : start + size] for start in range(0, len(sent), size)), pause=0.02)
    assert [status for status, _ in found] == [200] * 4
    assert [json.loads(text)["usage"]["completion_tokens"] for _, text in found[:2]] == [4, 4]
    assert tokens_of(found[2][1]) == 2
    assert not caplog.records


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_pipelined_requests_get_whole_answers_in_order(pipelined: Running, pause: float) -> None:
    streams = [ask(tokens, return_token_ids=True) for tokens in (100, 7, 30)]
    last = raw("GET", "/nowhere", connection="close")
    found = answers_to(pipelined, *streams, raw("GET", "/version"), last, pause=pause)
    assert [status for status, _ in found] == [200, 200, 200, 200, 404]
    assert [tokens_of(body) for _, body in found[:3]] == [100, 7, 30]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pause", [0.0, 0.02])
@pytest.mark.parametrize("stream", [False, True])
def test_bytes_that_are_no_http_never_enter_an_answer(
    pipelined: Running, stream: bool, pause: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        asked = ask(150, stream=stream, return_token_ids=True), ask(9, return_token_ids=True)
        found = answers_to(pipelined, *asked, GARBAGE, b"and more", pause=pause)
    assert [status for status, _ in found] == [200, 200, 400]
    assert tokens_of(found[1][1]) == 9
    assert (tokens_of(found[0][1]) if stream else json.loads(found[0][1])["usage"]["completion_tokens"]) == 150
    assert json.loads(found[2][1])["error"]["type"] == "invalid_request_error"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_half_a_request_behind_an_answer_ends_after_the_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.01), step())[1])
    with running(llm, ServerOptions(read_timeout=0.1)) as served:
        found = answers_to(served, ask(60, return_token_ids=True), b"GET /v1/models HT")
    assert [status for status, _ in found] == [200, 408]
    assert tokens_of(found[0][1]) == 60


@pytest.mark.parametrize("bad", [b"zz\r\n{}", b"5\r\n{}\r\nxx"])
def test_a_broken_chunk_is_answered_in_its_turn(pipelined: Running, bad: bytes) -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    assert [status for status, _ in answers_to(pipelined, head + bad)] == [400]
    assert [status for status, _ in answers_to(pipelined, ask(40), head + bad)] == [200, 400]


def test_more_requests_at_once_than_may_wait_are_refused_after_their_answers(pipelined: Running) -> None:
    found = answers_to(pipelined, ask(20) + raw("GET", "/version") * 500)
    assert [status for status, _ in found] == [200] * 65 + [429]


HEADS = {
    "a path": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
    "one header": (b"GET /version HTTP/1.1\r\nhost: x\r\na: " + b"b" * 70_000 + b"\r\n\r\n", 431),
    "many headers": (b"GET /version HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 12_000 + b"\r\n", 431),
    "a path and a header": (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\na: " + b"b" * 40_000 + b"\r\n\r\n", 431),
    "trailers": (
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
        + b"a: b\r\n" * 12_000
        + b"\r\n",
        431,
    ),
    "less": (b"GET /version HTTP/1.1\r\nconnection: close\r\na: " + b"b" * 60_000 + b"\r\n\r\n", 200),
}


@pytest.mark.parametrize(("head", "status"), HEADS.values(), ids=HEADS)
def test_64_kib_of_path_and_headers_are_the_limit_whatever_the_packets(pipelined: Running, head: bytes, status: int) -> None:
    for size in (len(head), 30_000, 1_000):
        parts = [head[start : start + size] for start in range(0, len(head), size)]
        with pipelined.connect() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for part in parts:
                sock.sendall(part)
            received = b"".join(iter(lambda: sock.recv(65536), b""))
        assert next(parsed(received))[0] == status, size


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answers(served: Running, stream: bool) -> None:
    """As `nc -N` does, and shutdown(SHUT_WR)."""
    whole = ask(40, stream=stream, return_token_ids=True)
    for sent in ([whole], [whole.replace(b"HTTP/1.1", b"HTTP/1.0")], [ask(5), raw("GET", "/version"), whole]):
        found = answers_to(served, *sent, sends_on=False)
        assert [status for status, _ in found] == [200] * len(sent)
        assert (tokens_of(found[-1][1]) if stream else json.loads(found[-1][1])["usage"]["completion_tokens"]) == 40


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        ([ask(3)[:-1]], [400]),
        ([raw("GET", "/version"), ask(3)[:-1]], [200, 400]),
        ([ask(50), ask(3)[:-1]], [200, 400]),
        ([ask(50), ask(3)[:30]], [200]),
        ([ask(3)[:30]], []),
        ([b""], []),
        ([ask(50), GARBAGE], [200, 400]),
        ([raw("GET", "/nosuch"), raw("POST", TEXT, b"{")], [404, 400]),
    ],
)
def test_what_breaks_off_is_no_request(served: Running, sent: list[bytes], statuses: list[int]) -> None:
    assert [status for status, _ in answers_to(served, *sent, sends_on=False)] == statuses


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [0.0, 0.1])
def test_a_client_that_leaves_after_its_request_ends_it(
    served: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool, waits: float
) -> None:
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.03), step())[1])
    with served.connect() as sock:
        sock.sendall(ask(240, stream=stream))
        sock.shutdown(socket.SHUT_WR)
        time.sleep(waits)
    began = time.monotonic()
    served.wait_idle()
    assert time.monotonic() - began < 4, "240 steps take more than seven seconds"


BODY = b'{"prompt": "a", "max_tokens": 1}'


@pytest.fixture(scope="module")
def named(llm: LLM) -> Iterator[Running]:
    with running(llm, ServerOptions(allowed_hosts=("127.0.0.1", "::1", "*.Example.org"))) as found:
        yield found


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("[::1]:9", 200),
        ("[::1]", 200),
        ("a.b.EXAMPLE.org", 200),
        ("example.org", 421),
        ("evilexample.org", 421),
        ("127.0.0.1.evil.net", 421),
        ("", 421),
    ],
)
def test_a_host_that_is_not_allowed_is_refused(named: Running, host: str, status: int) -> None:
    for path in ("/v1/models", "/", "/metrics"):
        answer = httpx.get(f"{named.url}{path}", headers={"host": host})
        assert answer.status_code == status, path
    if status == 421:
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    assert httpx.get(f"{named.url}/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["", "*", "a b", "localhost:80", "http://localhost", "*.", "a,b"])
def test_a_pattern_that_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        ServerOptions(allowed_hosts=(host,))


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"]
)
def test_a_body_that_is_not_declared_to_be_json_is_refused_without_a_key(served: Running, llm: LLM, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    for path in (TEXT, "/v1/chat/completions", "/tokenize", "/start_profile"):
        answer = httpx.post(f"{served.url}{path}", content=BODY, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "not_json")
        assert "needs application/json" in answer.json()["error"]["message"]
    with running(llm, ServerOptions(api_key="secret")) as keyed:  # a page does not know the key
        headers["authorization"] = "Bearer secret"
        assert httpx.post(f"{keyed.url}{TEXT}", content=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_a_body_that_is_declared_to_be_json_is_read(served: Running, kind: str) -> None:
    assert httpx.post(f"{served.url}{TEXT}", content=BODY, headers={"content-type": kind}).status_code == 200


def test_a_page_cannot_post_without_a_body_either(served: Running) -> None:
    assert httpx.post(f"{served.url}/start_profile").status_code == 404  # as from a command line: there is no --profile-dir
    assert httpx.post(f"{served.url}/start_profile", headers={"origin": "https://example.org"}).status_code == 415
    with served.connect() as sock:
        sock.sendall(raw("POST", TEXT, content_type="text/plain").replace(b"content-length: 0", b"transfer-encoding: chunked"))
        assert sock.recv(100).startswith(b"HTTP/1.1 415")


PAGE, OTHER = "http://localhost:3000", "https://evil.example.org"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def test_scripts_of_a_page_that_is_allowed_may_ask(llm: LLM) -> None:
    key = {"authorization": "Bearer secret", "content-type": "application/json"}
    with running(llm, ServerOptions(api_key="secret", allowed_origins=(PAGE,))) as keyed:
        url = f"{keyed.url}{TEXT}"
        leave = httpx.options(url, headers={"origin": PAGE, **ASKS})  # a browser asks for leave without the key
        assert leave.status_code == 200
        assert leave.headers["access-control-allow-origin"] == PAGE
        assert "POST" in leave.headers["access-control-allow-methods"]
        assert leave.headers["access-control-allow-headers"] == "authorization,content-type"
        for body in (BODY, BODY[:-1] + b', "stream": true}', b"{"):  # an error, too, is read by the page
            answer = httpx.post(url, content=body, headers={"origin": PAGE, **key})
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.status_code == (400 if body == b"{" else 200)
        refused = httpx.post(url, content=BODY, headers={"origin": PAGE, "content-type": "application/json"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        assert httpx.options(url, headers={"origin": OTHER, **ASKS}).status_code == 400
        assert "access-control-allow-origin" not in httpx.post(url, content=BODY, headers={"origin": OTHER, **key}).headers


def test_no_page_is_allowed_where_none_is_named(served: Running) -> None:
    headers = {"origin": PAGE, "content-type": "application/json"}
    assert "access-control-allow-origin" not in httpx.post(f"{served.url}{TEXT}", content=BODY, headers=headers).headers
    assert "access-control-allow-origin" not in httpx.options(f"{served.url}{TEXT}", headers={"origin": PAGE, **ASKS}).headers


def test_every_page_is_allowed_by_a_star(llm: LLM) -> None:
    with running(llm, ServerOptions(allowed_origins=("*",))) as open_to_all:
        answer = httpx.get(f"{open_to_all.url}/v1/models", headers={"origin": OTHER})
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["", "localhost:3000", "https://", "https://a/path", "https://*.example.org", "null"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        ServerOptions(allowed_origins=(origin,))
