"""Middleware before the routes: request ids, checks of hosts, keys and content types, and the queue limit."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.requests import Request

from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import HeadwayError
from headway.core.system.text import harmless, shown
from headway.hosting.host import EngineDeadError
from headway.server.errors import ApiError
from headway.server.options import ServerOptions

HEADER: Final = "x-request-id"
_NAME: Final = HEADER.encode()
_LONGEST: Final = 256  # Maximum characters of an id, which is part of every chunk of a stream

App = Callable[[Any, Any, Any], Awaitable[None]]


def request_name(request: Request, given: str | None = None) -> str:
    """Return the client's part of an answer's id: X-Request-Id, else `given`, else "". Raises the same errors as `check_id`."""
    header = request.headers.get(HEADER)
    check_id("the header X-Request-Id", header, None)
    check_id("request_id", given, "request_id")
    return header or given or ""


def check_id(what: str, name: str | None, field: str | None) -> None:
    """Check a client's id. field: field of the body that contains the id. :raises ApiError: if the id is too long or has invalid
    characters."""
    if name and not (len(name) <= _LONGEST and name.isascii() and name.isprintable()):
        raise ApiError(400, f"{what}: needs at most {_LONGEST} printable characters of ASCII, got {name[:60]!r}", field)


class RequestIdMiddleware:
    """ASGI middleware that assigns a new id to each request without an id, and returns the request's id in a response header."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = next((value for key, value in scope["headers"] if key == _NAME and value), b"")
        if not name:
            name = uuid4().hex.encode()
            others = [(key, value) for key, value in scope["headers"] if key != _NAME]
            scope = {**scope, "headers": [*others, (_NAME, name)]}

        async def send_started(message: Any) -> None:
            if message["type"] == "http.response.start" and len(name) <= _LONGEST:  # `request_name` rejects a longer one
                message = {**message, "headers": [*message.get("headers", ()), (_NAME, name)]}
            await send(message)

        await self._app(scope, receive, send_started)


class RecordMiddleware:
    """ASGI middleware that writes a record of the last steps before the answer of a request with the header X-Headway-Record, and
    returns the file's name, or the reason why there is none, in the same header."""

    def __init__(self, app: App, record: Callable[[], Awaitable[Path]]) -> None:
        self._app = app
        self._record = record

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_recorded(message: Any) -> None:
            if message["type"] == "http.response.start":
                try:
                    name = (await self._record()).name
                except (HeadwayError, EngineDeadError) as error:
                    name = f"none: {harmless(str(error))}"
                header = _RECORD, name.encode("ascii", "backslashreplace")
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        asked = scope["type"] == "http" and _header(scope, _RECORD) not in ("", "0")
        await self._app(scope, receive, send_recorded if asked else send)


_RECORD: Final = b"x-headway-record"
_LONGEST_RETRY: Final = 60
_MOST_SHOWN: Final = 10  # Maximum number of models that an error lists
_LONGEST_SHOWN: Final = 60  # Maximum characters of each name


class Admission:
    """Names of a server's model, and its queue. Only for the server's event loop."""

    def __init__(self, names: Sequence[str], options: ServerOptions) -> None:
        self.names = list(names)
        self.options = options
        self.adapters: dict[str, LoRARequest] = {}
        """Name that requests use as their model -> adapter."""
        self.num_queued = 0
        """Number of requests that have no first token yet or, if they do not stream, no answer."""
        self._seconds = 1.0  # moving average of the seconds from arrival to end of requests

    def check_model(self, name: str | None) -> None:
        """Check the model that a request names. :raises ApiError: if this server does not have the model."""
        if name is not None and name not in self.names and name not in self.adapters:
            known = [*self.names, *self.adapters]
            listed = [each if len(each) <= _LONGEST_SHOWN else f"{each[:_LONGEST_SHOWN]}..." for each in known[:_MOST_SHOWN]]
            listed += [f"{len(known) - _MOST_SHOWN} more"] * (len(known) > _MOST_SHOWN)
            message = f"model: this server has {', '.join(listed)}, not {shown(name)}"
            raise ApiError(404, message, "model", "model_not_found")

    def adapter_of(self, name: str | None) -> LoRARequest | None:
        """Return the adapter that a request names as its model, or None for the base model. Raises the same errors as
        `check_model`."""
        self.check_model(name)
        return None if name is None or name in self.names else self.adapters[name]

    def check_operator(self) -> None:
        """Check that operator paths are enabled. :raises ApiError: if operator paths are disabled."""
        if not self.options.operator_paths:
            raise ApiError(404, "this server lets nobody do that; start it with --operator-paths, and with an API key")

    def check_room(self) -> None:
        """Check that one more request may wait. :raises ApiError: if the queue is full."""
        if self.num_queued >= self.options.max_queue:
            retry = min(max(round(self._seconds), 1), _LONGEST_RETRY)
            message = f"{self.num_queued} requests wait already (max_queue={self.options.max_queue}); try again in {retry} s"
            raise ApiError(429, message, code="queue_full", retry_after=retry)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Count a request as queued during the context. Raises the same errors as `check_room`."""
        self.check_room()
        self.num_queued += 1
        try:
            yield
        finally:
            self.num_queued -= 1

    def took(self, seconds: float) -> None:
        """Add the seconds of a request to the moving average."""
        self._seconds += 0.1 * (seconds - self._seconds)


Check = Callable[[Any], ApiError | None]
"""Function (ASGI scope) -> error response for the request, or None to accept the request."""


def guard(app: FastAPI, options: ServerOptions, open_paths: Collection[str], counts: Counter[str]) -> None:
    """Add the middleware for these options to an application. open_paths: paths that do not need a key. counts: status -> number
    of rejections."""
    check = check_json if options.api_key is None else key_check(options.api_key, open_paths)
    app.add_middleware(GuardMiddleware, check=check, counts=counts)
    if options.allowed_origins:  # before the key check: preflight requests do not have a key
        app.add_middleware(CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    if options.allowed_hosts:
        app.add_middleware(GuardMiddleware, check=host_check(options.allowed_hosts), counts=counts)
    if options.enable_request_id_headers:
        app.add_middleware(RequestIdMiddleware)


class GuardMiddleware:
    """ASGI middleware that rejects requests that fail a check, before anything else handles them."""

    def __init__(self, app: App, check: Check, counts: Counter[str]) -> None:
        """counts: status -> number of rejections, shown by `/metrics`."""
        self._app = app
        self._check = check
        self._counts = counts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        error = self._check(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        self._counts[str(error.status)] += 1
        await error.response(scope["path"])(scope, receive, send)


def key_check(api_key: str, open_paths: Collection[str]) -> Check:
    """Return the check for the API key in OpenAI's or Anthropic's header. open_paths: paths that do not need a key."""
    key = api_key.encode()

    def knows(name: bytes, value: bytes) -> bool:
        scheme, _, given = value.partition(b" ")
        if name == b"authorization":
            return hmac.compare_digest(given.strip(), key) and scheme.lower() == b"bearer"
        return name == b"x-api-key" and hmac.compare_digest(value.strip(), key)

    def check(scope: Any) -> ApiError | None:
        if scope["path"] in open_paths or any(knows(name, value) for name, value in scope["headers"]):
            return None
        message = "the header Authorization: Bearer KEY (or x-api-key: KEY) has no valid key"
        error = ApiError(401, message, code="invalid_api_key")
        error.headers["www-authenticate"] = "Bearer"
        return error

    return check


PROBES: Final = frozenset(("/health", "/ping"))
"""Paths of probes. Probes use an IP address as host and get no data, so any host is allowed and probes never wait."""


def host_check(allowed: Collection[str]) -> Check:
    """Return a check of the Host header, against DNS rebinding. allowed: names without ports, or "*.example.org"."""
    names = frozenset((f"[{name}]" if ":" in name and name[0] != "[" else name).lower() for name in allowed)
    ends = tuple(name[1:] for name in names if name.startswith("*."))

    def check(scope: Any) -> ApiError | None:
        given = _header(scope, b"host").lower()
        name, colon, port = given.rpartition(":")
        host = name if colon and port.isdecimal() else given
        if scope["path"] in PROBES or host in names or (ends and host.endswith(ends)):
            return None
        return ApiError(421, f"the header Host: needs one of --allowed-hosts, got {host[:100]!r}", code="host_not_allowed")

    return check


FILES: Final = "/v1/files"
AUDIO: Final = "/v1/audio/"
"""Prefix of paths whose bodies are forms."""


def check_json(scope: Any) -> ApiError | None:
    """Check that a body is declared as JSON, for servers without an API key.

    Browsers let any page post text and forms to any address, including this machine's. They send JSON to another host only if
    that host allows it, which this server does only for pages in `allowed_origins`.
    """
    if scope["method"] != "POST" or _is_json(scope):
        return None
    got = _header(scope, b"content-type")[:100]
    message = f"the header Content-Type: needs application/json, since this server asks for no key, got {got or None!r}"
    return ApiError(415, message, code="not_json")


def _is_json(scope: Any) -> bool:
    """Return whether a request declares a JSON body, or has neither a body nor an Origin header."""
    kind = _header(scope, b"content-type").partition(";")[0].strip().lower()
    if kind == "multipart/form-data" and scope["path"].startswith((FILES, AUDIO)):
        return not _header(scope, b"origin")  # browsers name the page that posts a form
    if kind:
        return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    has_body = _header(scope, b"content-length") not in ("", "0") or bool(_header(scope, b"transfer-encoding"))
    return not has_body and not _header(scope, b"origin")


def _header(scope: Any, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
