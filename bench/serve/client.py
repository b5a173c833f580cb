"""HTTP client with little overhead per token, so that the measured times are the server's: one connection per request, with
httptools."""

from __future__ import annotations

import asyncio
import signal
import ssl
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import httptools
import orjson

from headway.core.contract.errors import ConfigError
from headway.core.system.json_text import parse_json
from headway.machine.process import handle_sigint, interrupt_command

T = TypeVar("T")


@dataclass
class ServerAnswer:
    """Answer to one request. Times are from time.perf_counter."""

    sent: float
    status: int = 0
    error: str = ""
    """Error if the request failed; else empty."""
    token_times: list[float] = field(default_factory=list)
    """Arrival time of each event with a part of the text."""
    ended: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Token ids, if the server returns them."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Number of output tokens, from the server's usage or else the number of events."""
    cached_tokens: int = 0


class RequestSender(Protocol):
    """Client interface that a run needs."""

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> ServerAnswer:
        """Send a request and return the answer."""


class _Reader(asyncio.Protocol):
    """Records the arrival times of an answer's parts, which are parsed when it is complete."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self._request = head + body
        self._parser = httptools.HttpResponseParser(self)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parts: list[tuple[float, bytes]] = []
        self.sent = self.ended = 0.0
        self.status = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"no HTTP: {error}"))

    def on_body(self, body: bytes) -> None:
        self.parts.append((self._now, body))

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.ended = self._now
        self._end(None)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("the connection ended before the answer"))

    def _end(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Client:
    """Client for one server."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        """timeout: seconds per request. :raises ConfigError: if the URL is invalid."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
            url.encode("ascii")
        except ValueError as error:  # invalid address, port beyond 65535, or invalid characters
            raise ConfigError("--url", "a URL such as http://127.0.0.1:8000", repr(url), str(error)) from None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError("--url", "a URL such as http://127.0.0.1:8000", repr(url))
        self._host = host
        self._tls = parts.scheme == "https"
        self._port = port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._timeout = timeout

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> ServerAnswer:
        """Send a request, a GET without a body. Errors are recorded in the answer."""
        content = b"" if body is None else orjson.dumps(body)
        lines = [f"{'GET' if body is None else 'POST'} {self._base}{path} HTTP/1.1", f"host: {self._host}:{self._port}"]
        lines += [f"content-length: {len(content)}", "content-type: application/json", "connection: close"]
        lines += [f"authorization: Bearer {self._key}"] if self._key else []
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        began, reader = time.perf_counter(), None
        try:
            async with asyncio.timeout(self._timeout):
                context = ssl.create_default_context() if self._tls else None
                loop = asyncio.get_running_loop()
                _, reader = await loop.create_connection(lambda: _Reader(head, content), self._host, self._port, ssl=context)
                await reader.done
        except TimeoutError:
            return ServerAnswer(began, error=f"no answer in {self._timeout:g} s", ended=time.perf_counter())
        except OSError as error:
            return ServerAnswer(began, error=f"{type(error).__name__}: {error}", ended=time.perf_counter())
        return understood(reader)

    @staticmethod
    def run(work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that uses a client, on the fastest available event loop."""
        factory: Callable[[], asyncio.AbstractEventLoop] | None = None
        with suppress(ImportError):  # Windows has no uvloop
            import uvloop

            factory = uvloop.new_event_loop
        # asyncio turns Ctrl-C into a cancellation only if Python's own handler is installed
        with (
            handle_sigint(signal.default_int_handler, instead_of=interrupt_command),
            asyncio.Runner(loop_factory=factory) as runner,
        ):
            return runner.run(work)

    async def model(self) -> str:
        """Return the first model name that the server lists. :raises ConfigError: if the server does not answer or lists none."""
        answer = await self.ask("/v1/models")
        try:
            return str(parse_json(answer.text, "/v1/models")["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            got = answer.error or f"status {answer.status}"
            raise ConfigError("--url", "a server with /v1/models", got, "start one with headway serve") from None


def understood(reader: Any) -> ServerAnswer:
    """Return the answer parsed from the parts that `reader` has received."""
    answer = ServerAnswer(reader.sent, reader.status, ended=reader.ended)
    whole = b"".join(part for _, part in reader.parts)
    if reader.status != 200 or not whole.startswith(b"data:"):
        answer.text = whole.decode("utf-8", "replace")
        answer.error = "" if reader.status == 200 else f"status {reader.status}: {_message(answer.text)[:200]}"
        return answer
    texts: list[str] = []
    rest = b""
    for at, part in reader.parts:
        *events, rest = (rest + part).split(b"\n\n")
        for each in events:
            if each.startswith(b"data: {"):
                _take(answer, parse_json(each[6:], "stream", any_number=True), at, texts)
    answer.text = "".join(texts)
    answer.output_tokens = answer.output_tokens or len(answer.token_times)
    if not answer.token_times and not answer.error:
        answer.error = "a stream without a token"
    return answer


def _message(text: str) -> str:
    """Return the message of an error in OpenAI's format, or else the whole text."""
    try:
        return str(parse_json(text, "answer")["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text


def _take(answer: ServerAnswer, event: dict[str, Any], at: float, texts: list[str]) -> None:
    if event.get("error"):
        answer.error = str(event["error"].get("message", "an error in the stream"))
    used = event.get("usage")
    if used:
        answer.prompt_tokens = used["prompt_tokens"]
        answer.output_tokens = used["completion_tokens"]
        answer.cached_tokens = (used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices", ()):
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content") or delta.get("reasoning_content")
        answer.token_ids += choice.get("token_ids") or ()
        is_token = bool(text) or (text == "" and "role" not in (delta or ()) and not choice.get("prompt_token_ids"))
        if is_token:  # a chunk with only the role is not a token; a token with empty text is one
            answer.token_times.append(at)
            texts.append(text or "")
