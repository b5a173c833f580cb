"""Several requests of one connection, and bytes behind them that are none: whole answers in order."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from io import BytesIO
from typing import Any

import pytest

from headway import LLM
from headway.server.options import ServerOptions
from server_thread import Running, raw, running

TEXT = "/v1/completions"
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
