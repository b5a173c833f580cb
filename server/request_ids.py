"""Ids of answers that clients and proxies choose, by the header X-Request-Id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final
from uuid import uuid4

from starlette.requests import Request

from headway.server.errors import ApiError

HEADER: Final = "x-request-id"
_NAME: Final = HEADER.encode()
_LONGEST: Final = 256
"""Characters of an id, which stands in every chunk of a stream."""

App = Callable[[Any, Any, Any], Awaitable[None]]


def request_name(request: Request, given: str | None = None) -> str:
    """What an answer's id is made of: the header X-Request-Id, else what the body gives; "": neither has any.

    :raises ApiError: a text that is too long, or holds what a header cannot carry.
    """
    header = request.headers.get(HEADER)
    check_id("the header X-Request-Id", header, None)
    check_id("request_id", given, "request_id")
    return header or given or ""


def check_id(what: str, name: str | None, field: str | None) -> None:
    """Check an id that a client gives its request. field: of the body, for programs.

    :raises ApiError: a text that is too long, or holds what a header cannot carry.
    """
    if name and not (len(name) <= _LONGEST and name.isascii() and name.isprintable()):
        raise ApiError(400, f"{what}: needs at most {_LONGEST} printable characters of ASCII, got {name[:60]!r}", field)


class RequestIdMiddleware:
    """ASGI middleware that gives each request an id, unless it brings one, and writes it into the headers of the answer."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on a request with an id, and its answer with the same."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = next((value for key, value in scope["headers"] if key == _NAME and value), b"")
        if not name:
            name = uuid4().hex.encode()
            others = [(key, value) for key, value in scope["headers"] if key != _NAME]
            scope = {**scope, "headers": [*others, (_NAME, name)]}

        async def told(message: Any) -> None:
            if message["type"] == "http.response.start" and len(name) <= _LONGEST:  # `request_name` refuses a longer one
                message = {**message, "headers": [*message.get("headers", ()), (_NAME, name)]}
            await send(message)

        await self._app(scope, receive, told)
