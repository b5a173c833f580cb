"""What every request passes before anything else looks at it: the API key."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Final

from headway.server.errors import ApiError
from headway.server.page_routes import ASSETS

App = Callable[[Any, Any, Any], Awaitable[None]]

OPEN_PATHS: Final = frozenset(("/health", "/ping", "/metrics", *ASSETS))
"""What needs no key: probes and scrapers carry none, and the page's files tell nothing; what the page shows needs it."""


class Gate:
    """ASGI middleware."""

    def __init__(self, app: App, api_key: str | None) -> None:
        """api_key: None lets everybody in."""
        self._app = app
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if self._key is None or scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope["headers"]):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "the header Authorization: Bearer KEY has no valid key", code="invalid_api_key")
        await error.response()(scope, receive, send)

    def _knows(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        assert self._key is not None
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"
