"""Requests that a foreign web page makes a browser send: by a name of the page's own, or with a body that needs no permission."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from headway import LLM
from headway.core.contract.errors import ConfigError
from headway.server.options import ServerOptions
from server_thread import Running, raw, running

TEXT = "/v1/completions"
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
